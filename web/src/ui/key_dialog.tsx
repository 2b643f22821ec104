import type { VNode } from "preact";
import { useState } from "preact/hooks";
import { dismissKey, giveKey, keyQuestion } from "../api/key";
import { Dialog } from "./dialog";

/** Asks for an API key while a request waits for one. */
export function KeyDialog(): VNode | null {
  const [key, setKey] = useState("");
  const reason = keyQuestion.value;
  if (reason === null) return null;
  const submit = (event: Event): void => {
    event.preventDefault();
    if (!key.trim()) return;
    giveKey(key);
    setKey("");
  };
  return (
    <Dialog label="API key" onClose={dismissKey}>
      <form onSubmit={submit}>
        <h2>API key</h2>
        <p id="key-reason">{reason}</p>
        <label class="field">
          <span>Key</span>
          <input
            type="password"
            name="api-key"
            value={key}
            autocomplete="off"
            autofocus
            aria-describedby="key-reason key-note"
            onInput={(event) => setKey(event.currentTarget.value)}
          />
        </label>
        <p id="key-note" class="note">
          It stays in this tab until the tab is closed.
        </p>
        <div class="dialog-actions">
          <button type="button" class="button" onClick={dismissKey}>
            Cancel
          </button>
          <button type="submit" class="button primary">
            Use this key
          </button>
        </div>
      </form>
    </Dialog>
  );
}
