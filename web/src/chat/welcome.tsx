import { apiKey } from "../api/key";
import type { VNode } from "preact";
import { urlOf } from "../api/http";
import type { ModelFacts } from "../api/types";
import type { App } from "../app";
import type { OpenConversation } from "../conversations/store";
import { CodeBlock } from "../markdown/code_block";
import { CopyButton } from "../ui/copy_button";

const DEMO = "paceline-demo";
const REAL_MODEL = "paceline serve -m hf:ggml-org/gemma-3-1b-it-GGUF:Q4_K_M";

interface Card {
  title: string;
  prompt: string;
}

const GENERAL: readonly Card[] = [
  { title: "Explain", prompt: "Explain to a child of ten how a bicycle stays upright." },
  { title: "Write", prompt: "Write a polite e-mail that moves our meeting from Tuesday to Thursday." },
  { title: "Compare", prompt: "Make a table of the four largest planets with their diameter, day and number of moons." },
  { title: "Plan", prompt: "Plan a week of simple dinners for two, with a shopping list." },
];

const CODE: readonly Card[] = [
  { title: "Write a function", prompt: "Write a Python function that parses a duration such as 1h30m into seconds, with tests." },
  { title: "Make a page", prompt: "Write one HTML file with a clock that shows hours, minutes and seconds." },
  { title: "Explain", prompt: "Explain this regular expression step by step: ^(?:[a-z0-9]+(?:-[a-z0-9]+)*)$" },
  { title: "Find the fault", prompt: "What is wrong here?\n\ndef mean(values=[]):\n    return sum(values) / len(values)" },
];

const DEMO_CARDS: readonly Card[] = [
  { title: "A story", prompt: "Tell me a story about a fox." },
  { title: "A sum", prompt: "What is 17 plus 25?" },
  { title: "A list", prompt: "Count from 1 to 9." },
  { title: "Another story", prompt: "Tell me a story about an owl and a drum." },
];

/** Return four prompts that suit a model. */
export function cardsFor(id: string, model: Pick<ModelFacts, "name" | "modalities"> | null): readonly Card[] {
  if (id === DEMO) return DEMO_CARDS;
  return /cod(?:e|er|ing)|starcoder|devstral/i.test(`${id} ${model?.name ?? ""}`) ? CODE : GENERAL;
}

interface Props {
  app: App;
  opened: OpenConversation;
  onPrompt: (text: string) => void;
}

/** An empty conversation: the model, prompts to begin with, and the way to use it from code. */
export function Welcome({ app, opened, onPrompt }: Props): VNode {
  const entry = app.server.entry(opened.facts.value.model);
  const model = app.server.model(opened.facts.value.model).value;
  const isDemo = entry?.id === DEMO;
  return (
    <div class="welcome">
      <div class="mark" aria-hidden="true">
        <i />
        <i />
        <i />
        <i />
      </div>
      <p class="welcome-title">{entry ? `Talk to ${model?.name || entry.id}` : "Talk to the model"}</p>
      {model && (
        <p class="muted">
          {model.n_ctx.toLocaleString("en-US")} tokens of context · {model.num_slots} slots
          {model.modalities.includes("image") && " · sees images"}
          {model.modalities.includes("audio") && " · hears audio"}
        </p>
      )}
      <p class="muted">paceline runs the model on this server, and computes the requests of all its users together.</p>
      {isDemo && <DemoNote />}
      <ul class="cards">
        {cardsFor(entry?.id ?? "", model).map((card) => (
          <li key={card.title}>
            <button type="button" onClick={() => onPrompt(card.prompt)}>
              <strong>{card.title}</strong>
              <span>{card.prompt}</span>
            </button>
          </li>
        ))}
      </ul>
      <FromCode app={app} model={opened.facts.value.model || entry?.id || ""} />
    </div>
  );
}

function DemoNote(): VNode {
  return (
    <div class="demo-note">
      <p>
        This model of four million parameters comes with paceline for a first try. It tells little stories, does small sums and calls
        tools. It knows nothing of the world. For a model that does:
      </p>
      <p class="command">
        <code>{REAL_MODEL}</code>
        <CopyButton text={() => REAL_MODEL} label="Copy the command" />
      </p>
    </div>
  );
}

/** Return programs in Python and for curl that talk to a model. A key is read from the environment. */
export function programsFor(base: string, model: string, hasKey: boolean): { python: string; curl: string } {
  const python = `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${base}", api_key=${hasKey ? 'os.environ["PACELINE_API_KEY"]' : '"none"'})
stream = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=[{"role": "user", "content": "Hello!"}],
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)`;
  const quoted = JSON.stringify(model).replaceAll("'", "'\\''"); // within quotes of a shell
  const key = hasKey ? ' -H "Authorization: Bearer $PACELINE_API_KEY"' : "";
  const curl = `curl ${base}/chat/completions${key} -H "Content-Type: application/json" -d '{
  "model": ${quoted}, "messages": [{"role": "user", "content": "Hello!"}]
}'`;
  return { python, curl };
}

function FromCode({ app, model }: { app: App; model: string }): VNode {
  const page = app.server.page.value;
  const base = urlOf("v1");
  const { python, curl } = programsFor(base, model, apiKey() !== "");
  const agent = `paceline launch opencode --url ${urlOf("")}`;
  return (
    <details class="from-code">
      <summary>Use it from code</summary>
      <p>
        The base URL for clients of OpenAI's API is <code>{base}</code>
        <CopyButton text={() => base} label="Copy the base URL" />
        {page?.links["docs"] && (
          <>
            {" "}
            <a href={urlOf(page.links["docs"])} target="_blank" rel="noopener">
              All routes
            </a>
          </>
        )}
      </p>
      <CodeBlock code={python} language="python" />
      <CodeBlock code={curl} language="bash" />
      <p>Coding agents (claude, codex, opencode, qwen, aider) in a terminal:</p>
      <CodeBlock code={agent} language="bash" />
    </details>
  );
}
