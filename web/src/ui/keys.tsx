import type { VNode } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { Dialog } from "./dialog";

const KEYS: ReadonlyArray<readonly [string, string]> = [
  ["Ctrl K", "Find conversations and commands"],
  ["Ctrl Shift O", "New conversation"],
  ["Ctrl B", "Show or hide the conversations"],
  ["/", "Write a message"],
  ["Enter", "Send; while a reply runs, after it"],
  ["Shift Enter", "Begin a line"],
  ["↑", "Edit the last message, if the composer is empty"],
  ["Escape", "Stop the reply, or close what is open"],
  ["?", "These keys"],
];

/** Call functions by keys: `ctrl+` is also Cmd; keys without it work outside of fields alone. */
export function useKeys(actions: Readonly<Record<string, () => void>>): void {
  const latest = useRef(actions);
  latest.current = actions;
  useEffect(() => {
    const onKey = (event: KeyboardEvent): void => {
      const action = latest.current[keyOf(event)];
      if (!action || event.defaultPrevented || document.querySelector("dialog[open]")) return;
      event.preventDefault();
      action();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
}

/** Return the name of a pressed key; empty if a field takes it. */
export function keyOf(event: Pick<KeyboardEvent, "key" | "ctrlKey" | "metaKey" | "shiftKey" | "altKey" | "target">): string {
  if (event.altKey) return "";
  if (event.ctrlKey || event.metaKey) return `ctrl+${event.shiftKey ? "shift+" : ""}${event.key.toLowerCase()}`;
  const inField = event.target instanceof Element && event.target.closest("input, textarea, select, [contenteditable]");
  return inField ? "" : event.key;
}

export function KeysDialog({ onClose }: { onClose: () => void }): VNode {
  return (
    <Dialog label="Keys" onClose={onClose}>
      <h2>Keys</h2>
      <dl class="keys">
        {KEYS.map(([keys, about]) => (
          <div key={keys}>
            <dt>
              {keys.split(" ").map((key) => (
                <kbd>{key}</kbd>
              ))}
            </dt>
            <dd>{about}</dd>
          </div>
        ))}
      </dl>
      <div class="dialog-actions">
        <button type="button" class="button" autofocus onClick={onClose}>
          Close
        </button>
      </div>
    </Dialog>
  );
}
