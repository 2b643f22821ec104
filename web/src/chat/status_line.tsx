import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { messageOf } from "../api/errors";
import { jsonPost, requestJson } from "../api/http";
import { type App, showToast } from "../app";
import { chatBody, fileText } from "../conversations/chat_body";
import { contextUse, cutFor, sentPart } from "../conversations/context";
import { type Message, newId } from "../conversations/model";
import type { OpenConversation } from "../conversations/store";
import { goTo } from "../ui/route";
import { shownCount } from "../ui/shown";
import { focusComposer } from "./text_area";

const WARN_SHARE = 0.8;
const FULL_SHARE = 0.95;
const SUMMARY_TOKENS = 1000;
const SUMMARY_REQUEST =
  "Summarise our conversation so far in at most 300 words, for somebody who goes on with it: facts, decisions, names, code that matters, and open questions. Write the summary alone.";
const STEP_MS = 500;

interface Props {
  app: App;
  opened: OpenConversation;
}

/** The state of the context under the composer, and the pace of a running reply. */
export function StatusLine({ app, opened }: Props): VNode | null {
  const [isOpen, setOpen] = useState(false);
  const button = useRef<HTMLButtonElement>(null);
  const numContext = app.server.model(opened.facts.value.model).value?.n_ctx;
  const path = messagesOf(opened);
  const use = contextUse(path, numFixed(opened));
  const last = path.at(-1);
  const running = last?.state === "streaming" ? last.id : null;
  if (numContext === undefined) return <div class="status-line" />;
  const share = Math.min(1, use.tokens / numContext);
  const text = `${use.isExact ? "" : "about "}${shownCount(use.tokens)} / ${shownCount(numContext)} tokens`;
  const close = (): void => {
    setOpen(false);
    button.current?.focus();
  };
  return (
    <div
      class="status-line"
      onKeyDown={(event) => {
        if (event.key !== "Escape" || !isOpen) return;
        event.preventDefault();
        close();
      }}
    >
      <button
        ref={button}
        type="button"
        class={`context${share >= WARN_SHARE ? " nearly-full" : ""}`}
        aria-expanded={isOpen}
        aria-label={`Context: ${text}`}
        title="What the tokens are"
        onClick={() => setOpen(!isOpen)}
      >
        <Ring share={share} />
        {text}
      </button>
      {running && <Pace opened={opened} id={running} />}
      {!running && share >= FULL_SHARE && <FullActions app={app} opened={opened} />}
      {isOpen && <Breakdown app={app} opened={opened} numContext={numContext} onClose={close} />}
    </div>
  );
}

function numFixed(opened: OpenConversation): number {
  const { system, tools } = opened.facts.value;
  return system.length + tools.length;
}

function messagesOf(opened: OpenConversation): Message[] {
  return opened.path.value.filter((id) => opened.has(id)).map((id) => opened.message(id).value);
}

function Ring({ share }: { share: number }): VNode {
  return (
    <svg class="ring" viewBox="0 0 20 20" aria-hidden="true">
      <circle cx="10" cy="10" r="7.5" />
      {share > 0 && <circle class="share" cx="10" cy="10" r="7.5" pathLength={100} stroke-dasharray={`${100 * share} 100`} />}
    </svg>
  );
}

/** The pace of a reply while it is written, read twice a second. */
function Pace({ opened, id }: { opened: OpenConversation; id: string }): VNode {
  const [text, setText] = useState("");
  useEffect(() => {
    let first: { tokens: number; at: number } | null = null;
    const step = (): void => {
      if (!opened.has(id)) return;
      const message = opened.message(id).peek();
      const tokens = message.usage?.completion_tokens ?? 0;
      const at = Date.now();
      if (tokens && !first) first = { tokens, at };
      setText(paceText(tokens, first ? (tokens - first.tokens) / Math.max(1, at - first.at) : 0, at - message.createdAt));
    };
    step();
    const timer = setInterval(step, STEP_MS);
    return () => clearInterval(timer);
  }, [opened, id]);
  return <span class="pace">{text}</span>;
}

/** Return the pace of a reply in words. perMs: tokens a millisecond, 0 if not known yet. */
export function paceText(tokens: number, perMs: number, elapsedMs: number): string {
  const seconds = Math.max(0, Math.floor(elapsedMs / 1000));
  const clock = `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
  const rate = perMs > 0 ? `${(1000 * perMs).toFixed(1)} tok/s, ` : "";
  return tokens ? `${rate}${shownCount(tokens)} ${tokens === 1 ? "token" : "tokens"}, ${clock}` : clock;
}

/** The ways out of a full context. */
export function FullActions({ app, opened }: Props): VNode {
  const [abort, setAbort] = useState<AbortController | null>(null);
  const numContext = app.server.model(opened.facts.value.model).value?.n_ctx ?? 0;
  const path = messagesOf(opened);
  const cut = numContext ? cutFor(path, numContext) : null;
  useEffect(() => () => abort?.abort(), [abort]); // a summary does not take a person away from another view
  const drop = async (): Promise<void> => {
    if (cut === null) return;
    app.store.beginContext(opened, cut, true);
    const last = path.at(-1);
    focusComposer();
    if (last?.state === "failed") await app.store.retry(opened, last.id);
  };
  const summarise = async (): Promise<void> => {
    const made = new AbortController();
    setAbort(made);
    try {
      const forked = await app.store.forkWithSummary(opened, await summaryOf(opened, path, numContext, made.signal));
      goTo({ view: "chat", id: forked.id });
    } catch (error) {
      if (!made.signal.aborted) showToast(`No summary was written. ${messageOf(error)}`);
    } finally {
      setAbort(null);
    }
  };
  if (abort) {
    return (
      <span class="full-actions" role="status">
        Writing a summary…
        <button type="button" class="link" onClick={() => abort.abort()}>
          Cancel
        </button>
      </span>
    );
  }
  return (
    <span class="full-actions">
      {cut !== null && (
        <button type="button" class="button" title="Earlier messages stay in the conversation, and are not sent any more" onClick={() => void drop()}>
          Drop the oldest turns
        </button>
      )}
      <button type="button" class="button" title="A new conversation that begins with a summary of this one" onClick={() => void summarise()}>
        Fork with a summary
      </button>
    </span>
  );
}

/** Return the model's summary of a conversation, of its newest turns if it is too long. */
export async function summaryOf(opened: OpenConversation, path: readonly Message[], numContext: number, abort: AbortSignal): Promise<string> {
  const whole = sentPart(path.slice(0, path.findLastIndex((message) => message.state !== "failed") + 1));
  const isLong = contextUse(whole).tokens + SUMMARY_TOKENS > 0.9 * numContext;
  const from = isLong ? whole.findIndex((message) => message.id === cutFor(whole, numContext)) : 0;
  const { schema: _, tools: __, ...facts } = opened.facts.peek();
  const asked: Message = {
    id: newId(), conversation: facts.id, parent: null, role: "user", content: SUMMARY_REQUEST, createdAt: 0, state: "done",
  }; // prettier-ignore
  const kept = whole.slice(Math.max(0, from));
  const messages = kept.at(-1)?.role === "user" ? kept.slice(0, -1) : kept; // templates want turns
  if (!messages.length) throw new Error("There is no reply yet to summarise.");
  const { stream_options: ___, return_progress: ____, ...body } = chatBody({ ...facts, schema: "", tools: "", parameters: {} }, [...messages, asked]);
  // Without thinking, which could take all tokens of the limit.
  const request = { ...body, stream: false, max_tokens: SUMMARY_TOKENS, reasoning_effort: "none" };
  const response = await requestJson<SummaryReply>("v1/chat/completions", { ...jsonPost(request), signal: abort });
  const [choice] = response.choices ?? [];
  const text = choice?.message?.content?.trim();
  if (!text) throw new Error("The model wrote nothing.");
  if (choice?.finish_reason === "length") throw new Error(`The model did not end it within ${SUMMARY_TOKENS} tokens.`);
  return text;
}

interface SummaryReply {
  choices?: Array<{ message?: { content?: string | null }; finish_reason?: string | null }>;
}

/** What the tokens of the context are, counted by the server. */
function Breakdown({ app, opened, numContext, onClose }: Props & { numContext: number; onClose: () => void }): VNode {
  const [counts, setCounts] = useState<ReadonlyMap<string, number> | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const path = messagesOf(opened);
  const { tokens } = contextUse(path, numFixed(opened));
  const last = path.findLast((message) => message.usage !== undefined);
  useEffect(() => {
    const abort = new AbortController();
    countParts(opened, path, abort.signal).then(setCounts, (error: unknown) => abort.signal.aborted || setProblem(messageOf(error)));
    return () => abort.abort();
  }, [path.map((one) => `${one.id} ${one.state} ${one.contextSince}`).join(), opened.facts.value.system]);
  const known = [...(counts?.values() ?? [])].reduce((sum, count) => sum + count, 0);
  const rows = counts && [...counts, ["Template, thinking, tools, images", Math.max(0, tokens - known)] as const].filter(([, count]) => count > 0);
  const isCut = sentPart(path).length < path.length;
  const cached = last?.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  return (
    <section class="breakdown" aria-label="What the tokens are">
      <table>
        <tbody>
          {rows?.map(([name, count]) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              <td>{shownCount(count)}</td>
            </tr>
          ))}
          <tr>
            <th scope="row">Free</th>
            <td>{shownCount(Math.max(0, numContext - tokens))}</td>
          </tr>
        </tbody>
      </table>
      {!counts && <p class="note">{problem ?? "Counting…"}</p>}
      {cached > 0 && <p class="note">{shownCount(cached)} tokens of the last prompt were cached, and not computed again.</p>}
      {isCut && <p class="note">The oldest turns were dropped, and are not sent.</p>}
      <div class="breakdown-actions">
        {path.length > 1 && <FullActions app={app} opened={opened} />}
        <button type="button" class="button" onClick={onClose}>
          Close
        </button>
      </div>
    </section>
  );
}

/** Return the number of tokens of a text. */
export async function countTokens(content: string, model: string, abort?: AbortSignal): Promise<number> {
  const body = { content, parse_special: false, ...(model && { model }) };
  const { tokens } = await requestJson<{ tokens: unknown[] }>("tokenize", { ...jsonPost(body), ...(abort && { signal: abort }) });
  return tokens.length;
}

async function countParts(opened: OpenConversation, path: readonly Message[], abort: AbortSignal): Promise<Map<string, number>> {
  const { system, model } = opened.facts.peek();
  const sent = sentPart(path);
  const texts = (role: Message["role"]): string => sent.filter((one) => one.role === role).map((one) => one.content).join("\n");
  const parts: Array<[string, string]> = [
    ["System message", system.trim()],
    ["Your messages", texts("user")],
    ["Files", sent.flatMap((one) => (one.attachments ?? []).filter((file) => file.kind === "text").map(fileText)).join("\n")],
    ["Replies", texts("assistant")],
    ["Results of tools", texts("tool")],
  ];
  const counted = parts.filter(([, text]) => text).map(async ([name, content]): Promise<[string, number]> => {
    return [name, await countTokens(content, model, abort)];
  });
  return new Map(await Promise.all(counted));
}
