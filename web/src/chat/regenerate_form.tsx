import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { messageOf } from "../api/errors";
import type { App } from "../app";
import type { Overrides, Parameters } from "../conversations/model";
import { parseParameter } from "../conversations/parameters";
import type { OpenConversation } from "../conversations/store";
import { focusComposer } from "./text_area";

const COUNTS = [1, 2, 3, 4];

interface Props {
  app: App;
  opened: OpenConversation;
  parent: string;
  onDone: () => void;
}

/** Other settings for further replies to a message: the model, the temperature, and the number of samples. */
export function RegenerateForm({ app, opened, parent, onDone }: Props): VNode {
  const facts = opened.facts.value;
  const names = (app.server.page.value?.models ?? []).flatMap((entry) => [entry.id, ...entry.adapters]);
  const entry = app.server.entry(facts.model);
  const isListed = names.includes(facts.model);
  const isMissing = facts.model !== "" && !isListed && !entry?.aliases.includes(facts.model);
  const current = isListed || isMissing || !entry ? facts.model : entry.id;
  const [model, setModel] = useState(current);
  const field = app.server.model(facts.model).value?.parameters.find((one) => one.name === "temperature");
  const [temperature, setTemperature] = useState(String(facts.parameters["temperature"] ?? ""));
  const [count, setCount] = useState(1);
  const [problem, setProblem] = useState<string | null>(null);
  const first = useRef<HTMLSelectElement>(null);
  useEffect(() => first.current?.focus(), []);
  const submit = (event: Event): void => {
    event.preventDefault();
    try {
      const value = field ? parseParameter(field, temperature) : null;
      const parameters: Record<string, Parameters[string]> = {};
      if (value !== null) parameters["temperature"] = value;
      const overrides: Overrides = { parameters, ...(names.length > 1 && { model }) };
      onDone();
      focusComposer();
      void app.store.reply(opened, parent, overrides, count);
    } catch (error) {
      setProblem(messageOf(error));
    }
  };
  return (
    <form
      class="regenerate"
      aria-label="Retry with other settings"
      onSubmit={submit}
      onKeyDown={(event) => {
        if (event.key !== "Escape") return;
        event.preventDefault();
        onDone();
        focusComposer();
      }}
    >
      {names.length > 1 && (
        <label class="field">
          <span>Model</span>
          <select value={model} onChange={(event) => setModel(event.currentTarget.value)}>
            {isMissing && <option value={facts.model}>{facts.model} (not on this server)</option>}
            {names.map((name) => (
              <option value={name}>{name}</option>
            ))}
          </select>
        </label>
      )}
      <label class="field">
        <span>Samples</span>
        <select ref={first} value={count} onChange={(event) => setCount(Number(event.currentTarget.value))}>
          {COUNTS.map((one) => (
            <option value={one}>{one}</option>
          ))}
        </select>
      </label>
      {field && (
        <label class="field">
          <span>Temperature</span>
          <input
            type="text"
            inputMode="decimal"
            size={6}
            value={temperature}
            placeholder={field.default == null ? "" : String(field.default)}
            aria-invalid={problem !== null}
            onInput={(event) => setTemperature(event.currentTarget.value)}
          />
        </label>
      )}
      <button type="submit" class="button primary">
        {count > 1 ? `Write ${count} replies` : "Regenerate"}
      </button>
      {problem && (
        <p class="problem" role="alert">
          {problem}
        </p>
      )}
    </form>
  );
}
