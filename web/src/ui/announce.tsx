import { signal } from "@preact/signals";
import type { VNode } from "preact";

const said = signal("");

/** Have a screen reader say something once. Streams are announced when they end, not word by word. */
export function announce(text: string): void {
  said.value = "";
  requestAnimationFrame(() => {
    said.value = text;
  });
}

export function Announcer(): VNode {
  return (
    <div class="off-screen" role="status" aria-live="polite">
      {said}
    </div>
  );
}
