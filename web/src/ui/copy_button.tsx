import type { VNode } from "preact";
import { useState } from "preact/hooks";
import { Icon } from "./icon";

/** A button that copies a text, and says that it did. text: called when it is pressed. */
export function CopyButton({ text, label }: { text: () => string; label: string }): VNode {
  const [state, setState] = useState<"" | "copied" | "failed">("");
  const copy = async (): Promise<void> => {
    setState((await copyText(text())) ? "copied" : "failed");
    setTimeout(() => setState(""), 1500);
  };
  const said = state === "copied" ? "Copied" : state === "failed" ? "Could not copy" : label;
  return (
    <button type="button" class="icon-button" title={said} aria-label={said} onClick={() => void copy()}>
      <Icon name={state === "copied" ? "check" : "copy"} />
    </button>
  );
}

/** Copy a text, also if the page is not in a secure context and has no clipboard of its own. */
export async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

function copyBySelection(text: string): boolean {
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "off-screen";
  document.body.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } finally {
    field.remove();
  }
}
