import type { VNode } from "preact";
import type { ParameterField } from "../api/types";
import type { App } from "../app";
import type { Conversation } from "../conversations/model";
import { parseJson } from "../conversations/parameters";
import type { OpenConversation } from "../conversations/store";
import { Icon } from "../ui/icon";

interface Active {
  label: string;
  value: string;
  /** The conversation without it. */
  without: Partial<Conversation>;
}

/** Return what a conversation sets in place of the server's defaults. */
export function activeSettings(facts: Conversation, fields: readonly ParameterField[]): Active[] {
  const active: Active[] = [];
  if (facts.system.trim()) active.push({ label: "System message", value: facts.system.trim(), without: { system: "" } });
  if (facts.schema.trim()) active.push({ label: "JSON schema", value: "", without: { schema: "" } });
  if (facts.tools.trim()) active.push({ label: "Tools", value: String(numTools(facts.tools)), without: { tools: "" } });
  for (const [name, value] of Object.entries(facts.parameters)) {
    const { [name]: _, ...parameters } = facts.parameters;
    const label = fields.find((field) => field.name === name)?.label ?? name;
    active.push({ label, value: typeof value === "object" ? JSON.stringify(value) : String(value), without: { parameters } });
  }
  return active;
}

function numTools(text: string): number {
  try {
    return (parseJson(text, "list") as unknown[] | undefined)?.length ?? 0;
  } catch {
    return 0;
  }
}

/** Chips above the composer for all that changes the replies. */
export function ActiveSettings(props: { app: App; opened: OpenConversation; onOpen: () => void }): VNode | null {
  const { app, opened, onOpen } = props;
  const facts = opened.facts.value;
  const active = activeSettings(facts, app.server.model(facts.model).value?.parameters ?? []);
  if (!active.length) return null;
  return (
    <ul class="active-settings" aria-label="Settings in use">
      {active.map(({ label, value, without }) => (
        <li key={label}>
          <button type="button" class="chip" title="Open the settings" onClick={onOpen}>
            {label}
            {value && <span>{value}</span>}
          </button>
          <button type="button" class="icon-button" aria-label={`Reset ${label}`} onClick={() => app.store.update(opened, without)}>
            <Icon name="close" />
          </button>
        </li>
      ))}
    </ul>
  );
}
