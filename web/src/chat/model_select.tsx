import type { VNode } from "preact";
import type { App } from "../app";
import type { OpenConversation } from "../conversations/store";

/** Which model a conversation goes on with. A server with one model shows its name. */
export function ModelSelect({ app, opened }: { app: App; opened: OpenConversation }): VNode | null {
  const page = app.server.page.value;
  if (!page) return null;
  const chosen = opened.facts.value.model;
  const entry = app.server.entry(chosen);
  const names = page.models.flatMap((one) => [one.id, ...one.adapters]);
  if (names.length <= 1) {
    return <span class="model-name" title={entry?.state ?? ""}>{entry?.id ?? "no model"}</span>;
  }
  const isKnown = !chosen || names.includes(chosen) || entry?.aliases.includes(chosen);
  return (
    <select
      class="model-select"
      aria-label="Model"
      value={chosen || (page.default_model ?? names[0] ?? "")}
      onChange={(event) => app.store.update(opened, { model: event.currentTarget.value })}
    >
      {!isKnown && <option value={chosen}>{chosen} (not on this server)</option>}
      {page.models.map((one) => (
        <>
          <option value={one.id}>{one.state === "loaded" ? one.id : `${one.id} (${one.state})`}</option>
          {one.adapters.map((adapter) => (
            <option value={adapter}>{`${one.id} + ${adapter}`}</option>
          ))}
        </>
      ))}
    </select>
  );
}
