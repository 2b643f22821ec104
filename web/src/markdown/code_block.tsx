import type { VNode } from "preact";
import { CopyButton } from "../ui/copy_button";
import { highlighted } from "./highlight";

/** A block of code with its language and a button that copies it. */
export function CodeBlock({ code, language }: { code: string; language: string }): VNode {
  const name = /^[\w+#.-]{1,30}/.exec(language)?.[0] ?? "";
  return (
    <div class="code">
      <div class="code-head">
        <span>{name || "text"}</span>
        <CopyButton text={() => code} label="Copy code" />
      </div>
      <pre tabIndex={0} dir="ltr" aria-label={`Code, ${name || "text"}`}>
        <code>{highlighted(code, name.toLowerCase())}</code>
      </pre>
    </div>
  );
}
