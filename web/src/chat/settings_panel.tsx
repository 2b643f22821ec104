import type { ComponentChildren, VNode } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import { messageOf } from "../api/errors";
import type { ParameterField } from "../api/types";
import type { App } from "../app";
import type { Parameters, ParameterValue } from "../conversations/model";
import { parseJson, parseParameter, shownDefault, shownParameter } from "../conversations/parameters";
import { DEFAULT, type Settings, deletePreset, hasSettings, presets, savePreset, settingsOf } from "../conversations/presets";
import type { OpenConversation } from "../conversations/store";
import { Icon } from "../ui/icon";

const FIRST = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "reasoning_budget_tokens", "seed"]; // shown at once
const MOST_FIRST = 6;

interface Props {
  app: App;
  opened: OpenConversation;
  onClose: () => void;
}

/** A conversation's settings: system message, parameters, schema, tools. The server decides empty fields. */
export function SettingsPanel({ app, opened, onClose }: Props): VNode {
  const facts = opened.facts.value;
  const model = app.server.model(facts.model).value;
  const head = useRef<HTMLHeadingElement>(null);
  useEffect(() => head.current?.focus(), []);
  const set = (name: string, value: ParameterValue | null): void => {
    const { [name]: _, ...others } = opened.facts.peek().parameters;
    app.store.update(opened, { parameters: value === null ? others : { ...others, [name]: value } });
  };
  const numSet = Object.keys(facts.parameters).length;
  const fields = (model?.parameters ?? []).filter((one) => one.name !== "json_schema");
  const first = FIRST.flatMap((name) => fields.filter((one) => one.name === name)).slice(0, MOST_FIRST);
  const others = fields.filter((one) => !first.includes(one));
  const numSetIn = (some: readonly ParameterField[]): number => some.filter((one) => one.name in facts.parameters).length;
  const input = (field: ParameterField): VNode => (
    <ParameterInput key={field.name} field={field} shown={shownParameter(facts.parameters, field)} onChange={(value) => set(field.name, value)} />
  );
  return (
    <aside class="settings" aria-label="Settings of this conversation" onKeyDown={(event) => event.key === "Escape" && (event.preventDefault(), onClose())}>
      <header>
        <h2 ref={head} tabIndex={-1}>
          Settings
        </h2>
        <button type="button" class="icon-button" aria-label="Close the settings" onClick={onClose}>
          <Icon name="close" />
        </button>
      </header>
      <Presets app={app} opened={opened} />
      <TextField
        label="System message"
        help={model && !model.chat.system ? "The chat template of this model has no place for one." : "What the model is told before the conversation."}
        value={facts.system}
        onChange={(system) => app.store.update(opened, { system })}
      />
      {first.map(input)}
      {others.length > 0 && (
        <Group name="All parameters" isOpen={numSetIn(others) > 0} numSet={numSetIn(others)}>
          {groupsOf(others).map(([group, some]) => (
            <Group name={group} isOpen={numSetIn(some) > 0} numSet={numSetIn(some)}>
              {some.map(input)}
            </Group>
          ))}
        </Group>
      )}
      {model && <OtherParameters parameters={facts.parameters} known={model.parameters} onDrop={(name) => set(name, null)} />}
      {!model && <p class="note">The parameters of the model are shown when it is loaded.</p>}
      <Group name="Structured output" isOpen={facts.schema !== ""} numSet={facts.schema ? 1 : 0}>
        <TextField
          label="JSON schema"
          help="Replies are JSON that conforms to it."
          placeholder={'{"type": "object", "properties": …}'}
          value={facts.schema}
          check={(text) => parseJson(text, "object")}
          isCode
          onChange={(schema) => app.store.update(opened, { schema })}
        />
      </Group>
      <Group name="Tools" isOpen={facts.tools !== ""} numSet={facts.tools ? 1 : 0}>
        <TextField
          label="Tools"
          help={
            model && !model.chat.tools
              ? "The chat template of this model knows no tools."
              : "A list of functions as in OpenAI's API. What the model calls is shown, and you send back the result."
          }
          placeholder={'[{"type": "function", "function": {"name": …}}]'}
          value={facts.tools}
          check={(text) => parseJson(text, "list")}
          isCode
          onChange={(tools) => app.store.update(opened, { tools })}
        />
      </Group>
      {numSet > 0 && (
        <button type="button" class="button" onClick={() => app.store.update(opened, { parameters: {} })}>
          Back to the server's defaults
        </button>
      )}
    </aside>
  );
}

/** Presets to choose from, and to keep these settings in. */
function Presets({ app, opened }: Pick<Props, "app" | "opened">): VNode {
  const [name, setName] = useState("");
  const facts = opened.facts.value;
  const all = presets.value;
  const names = Object.keys(all).sort((a, b) => a.localeCompare(b));
  const chosen = names.find((one) => hasSettings(facts, all[one] as Settings)) ?? "";
  const save = (event: Event): void => {
    event.preventDefault();
    savePreset(name, facts);
    setName("");
  };
  return (
    <section class="presets" aria-label="Presets">
      {names.length > 0 && (
        <div class="preset-row">
          <select aria-label="Preset" value={chosen} onChange={({ currentTarget }) => all[currentTarget.value] && app.store.update(opened, settingsOf(all[currentTarget.value] as Settings))}>
            <option value="">no preset</option>
            {names.map((one) => (
              <option value={one}>{one}</option>
            ))}
          </select>
          {chosen && (
            <button type="button" class="icon-button" aria-label={`Delete the preset ${chosen}`} title="Delete the preset" onClick={() => deletePreset(chosen)}>
              <Icon name="trash" />
            </button>
          )}
        </div>
      )}
      <form class="preset-row" onSubmit={save}>
        <input type="text" aria-label="Name of a new preset" placeholder="Name of a new preset" value={name} onInput={(event) => setName(event.currentTarget.value)} />
        <button type="submit" class="button" disabled={!name.trim()}>
          Save
        </button>
      </form>
      <button type="button" class="link" onClick={() => savePreset(DEFAULT, facts)}>
        Use these settings for new conversations
      </button>
    </section>
  );
}

/** Sent parameters without a field here: of a conversation that was imported, or of another model. */
function OtherParameters(props: { parameters: Parameters; known: readonly ParameterField[]; onDrop: (name: string) => void }): VNode | null {
  const names = new Set(props.known.map((one) => one.name));
  const others = Object.entries(props.parameters).filter(([name]) => !names.has(name));
  if (!others.length) return null;
  return (
    <Group name="Others" isOpen numSet={others.length}>
      {others.map(([name, value]) => (
        <div class="parameter wide is-set" key={name}>
          <p>
            {name}: <code>{JSON.stringify(value)}</code>
          </p>
          <p class="help">This model has no such parameter; it is sent all the same.</p>
          <button type="button" class="button" aria-label={`Remove ${name}`} onClick={() => props.onDrop(name)}>
            Remove
          </button>
        </div>
      ))}
    </Group>
  );
}

function groupsOf(fields: readonly ParameterField[]): Array<[string, ParameterField[]]> {
  const groups = new Map<string, ParameterField[]>();
  for (const field of fields) groups.set(field.group, [...(groups.get(field.group) ?? []), field]);
  return [...groups];
}

function Group(props: { name: string; isOpen: boolean; numSet: number; children: ComponentChildren }): VNode {
  return (
    <details class="group" open={props.isOpen}>
      <summary>
        {props.name} {props.numSet > 0 && <span class="badge">{props.numSet} set</span>}
      </summary>
      {props.children}
    </details>
  );
}

interface InputProps {
  field: ParameterField;
  shown: string;
  onChange: (value: ParameterValue | null) => void;
}

function ParameterInput({ field, shown, onChange }: InputProps): VNode {
  const [text, setText] = useState(shown);
  const [problem, setProblem] = useState<string | null>(null);
  const id = useId();
  useEffect(() => {
    setText(shown);
    setProblem(null);
  }, [shown]);
  const take = (typed: string): void => {
    setText(typed);
    try {
      onChange(parseParameter(field, typed));
      setProblem(null);
    } catch (error) {
      setProblem(messageOf(error));
    }
  };
  const standard = shownDefault(field);
  const shared = { id, "aria-describedby": `${id}-help`, "aria-invalid": problem !== null };
  return (
    <div class={`parameter${shown ? " is-set" : ""}`}>
      <label for={id}>{field.label}</label>
      <ParameterControl field={field} text={text} standard={standard} shared={shared} onTake={take} />
      <p class="help" id={`${id}-help`}>
        {field.help}
      </p>
      {problem && (
        <p class="problem" role="alert">
          {problem}
        </p>
      )}
    </div>
  );
}

interface ControlProps {
  field: ParameterField;
  text: string;
  standard: string;
  shared: { id: string; "aria-describedby": string; "aria-invalid": boolean };
  onTake: (typed: string) => void;
}

function ParameterControl({ field, text, standard, shared, onTake }: ControlProps): VNode {
  const choices = field.type === "boolean" ? ["true", "false"] : field.choices;
  if (choices) {
    return (
      <select {...shared} value={text} onChange={(event) => onTake(event.currentTarget.value)}>
        <option value="">{standard ? `default: ${standard}` : "default"}</option>
        {choices.map((one) => (
          <option value={one}>{field.type === "boolean" ? (one === "true" ? "on" : "off") : one}</option>
        ))}
      </select>
    );
  }
  if (field.type === "texts" || field.type === "json") {
    const placeholder = field.type === "texts" ? standard || "one a line" : standard || "JSON";
    return (
      <textarea {...shared} rows={2} value={text} placeholder={placeholder} onInput={(event) => onTake(event.currentTarget.value)} />
    );
  }
  const isNumber = field.type === "number" || field.type === "integer";
  return (
    <input
      {...shared}
      type="text"
      inputMode={isNumber ? "decimal" : "text"}
      value={text}
      placeholder={standard || "none"}
      autocomplete="off"
      onInput={(event) => onTake(event.currentTarget.value)}
      onKeyDown={(event) => {
        const step = event.key === "ArrowUp" ? 1 : event.key === "ArrowDown" ? -1 : 0;
        if (!isNumber || !step) return;
        event.preventDefault();
        onTake(stepped(field, text || standard, step));
      }}
    />
  );
}

/** Return a number one step up or down, within its bounds. */
function stepped(field: ParameterField, text: string, direction: 1 | -1): string {
  const step = field.step ?? (field.type === "integer" ? 1 : 0.05);
  const start = Number(text);
  const value = (Number.isFinite(start) ? start : 0) + direction * step;
  const bounded = Math.min(field.maximum ?? Infinity, Math.max(field.minimum ?? -Infinity, value));
  return String(Number(bounded.toFixed(6)));
}

interface TextProps {
  label: string;
  help: string;
  value: string;
  placeholder?: string;
  isCode?: boolean;
  check?: (text: string) => unknown;
  onChange: (value: string) => void;
}

/** A longer text. An invalid text is kept in the field and not taken. */
function TextField({ label, help, value, placeholder = "", isCode = false, check, onChange }: TextProps): VNode {
  const [text, setText] = useState(value);
  const [problem, setProblem] = useState<string | null>(null);
  const id = useId();
  useEffect(() => {
    setText(value);
    setProblem(null);
  }, [value]);
  const take = (typed: string): void => {
    setText(typed);
    try {
      check?.(typed);
      setProblem(null);
      onChange(typed);
    } catch (error) {
      setProblem(messageOf(error));
    }
  };
  return (
    <div class="parameter wide">
      <label for={id}>{label}</label>
      <textarea
        id={id}
        class={isCode ? "code-field" : ""}
        rows={isCode ? 5 : 3}
        value={text}
        placeholder={placeholder}
        spellcheck={!isCode}
        aria-describedby={`${id}-help`}
        aria-invalid={problem !== null}
        onInput={(event) => take(event.currentTarget.value)}
      />
      <p class="help" id={`${id}-help`}>
        {help}
      </p>
      {problem && (
        <p class="problem" role="alert">
          {problem} Until it is valid, the last valid one is used.
        </p>
      )}
    </div>
  );
}
