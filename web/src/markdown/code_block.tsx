import { signal } from "@preact/signals";
import type { VNode } from "preact";
import { useRef, useState } from "preact/hooks";
import { urlOf } from "../api/http";
import { CopyButton } from "../ui/copy_button";
import { Icon, type IconName } from "../ui/icon";
import { saveFile } from "../ui/save_file";
import { highlighted } from "./highlight";

const MOST_LINES = 40; // of a block that is shown whole; style/code.css has the height of a folded block

const SUFFIXES: Record<string, string> = {
  bash: "sh", "c#": "cs", "c++": "cpp", csharp: "cs", javascript: "js", markdown: "md", plaintext: "txt", python: "py", ruby: "rb",
  rust: "rs", shell: "sh", text: "txt", typescript: "ts", yaml: "yml",
}; // prettier-ignore

/** Languages that are their own suffix. Other names could make a file that a system runs when it is opened. */
const KNOWN_SUFFIXES = new Set(
  "c cc cpp cs css csv dart diff ex go h hpp html ini java jl json jsx kt less lua md ml patch php pl py r rb rs scala scss sh sql svg swift tex toml ts tsx txt vue xml yaml yml zig".split(" "),
);

const HAS_SCRIPT = /<script|\son[a-z]+\s*=|javascript:/i;

const wraps = signal(false); // of all blocks, as a reader who wants it for one wants it for the next

interface Props {
  code: string;
  language: string;
  /** Whether more of it is being generated: it is shown whole and not previewed. */
  isGrowing?: boolean;
}

/** A block of code with its actions. A long block is folded when it is done. */
export function CodeBlock({ code, language, isGrowing = false }: Props): VNode {
  const [isOpen, setOpen] = useState(false);
  const [isPreviewed, setPreviewed] = useState(false);
  const [run, setRun] = useState<string | null>(null); // the page whose scripts a person has let run
  const name = /^[\w+#.-]{1,30}/.exec(language)?.[0] ?? "";
  const page = isGrowing ? null : previewOf(code, name.toLowerCase());
  const numLines = code.split("\n").length;
  const isLong = !isGrowing && numLines > MOST_LINES;
  const isShown = page === null || !isPreviewed;
  return (
    <div class={`code${isLong && !isOpen ? " folded" : ""}${wraps.value ? " wrapped" : ""}`}>
      <div class="code-head">
        <span>{name || "text"}</span>
        {page !== null && (
          <button type="button" class="link" aria-pressed={isPreviewed} onClick={() => (setPreviewed(!isPreviewed), setRun(null))}>
            {isPreviewed ? "Code" : "Preview"}
          </button>
        )}
        <CodeAction icon="wrap" label="Wrap long lines" isOn={wraps.value} onClick={() => (wraps.value = !wraps.value)} />
        <CodeAction icon="import" label="Download code" onClick={() => saveFile(fileName(name), code)} />
        <CopyButton text={() => code} label="Copy code" />
      </div>
      {isShown ? (
        <pre tabIndex={0} dir="ltr" aria-label={`Code, ${name || "text"}`}>
          <code>{highlighted(code, name.toLowerCase())}</code>
        </pre>
      ) : (
        <Preview key={`${run === page} ${page}`} page={page} isRun={run === page} />
      )}
      {!isShown && run !== page && HAS_SCRIPT.test(page) && (
        <p class="code-scripts">
          <button type="button" class="button" onClick={() => setRun(page)}>
            Run scripts
          </button>
          Scripts are off. They cannot read your conversations, but can take over the keyboard, and send other hosts what the model wrote.
        </p>
      )}
      {isLong && isShown && (
        <button type="button" class="code-more" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
          {isOpen ? "Show fewer lines" : `Show all ${numLines.toLocaleString("en-US")} lines`}
        </button>
      )}
    </div>
  );
}

function CodeAction(props: { icon: IconName; label: string; isOn?: boolean; onClick: () => void }): VNode {
  return (
    <button
      type="button"
      class="icon-button"
      title={props.label}
      aria-label={props.label}
      {...(props.isOn !== undefined && { "aria-pressed": props.isOn })}
      onClick={props.onClick}
    >
      <Icon name={props.icon} />
    </button>
  );
}

/** A page of a model, in a frame without the origin of this page. isRun: with its scripts. */
function Preview({ page, isRun }: { page: string; isRun: boolean }): VNode {
  const isSent = useRef(false); // a page that is written loads once more
  const onLoad = (event: Event & { currentTarget: HTMLIFrameElement }): void => {
    if (isSent.current) return;
    isSent.current = true;
    event.currentTarget.contentWindow?.postMessage({ page, isRun }, "*");
  };
  return <iframe class="preview" title="Preview" sandbox="allow-scripts" src={urlOf("preview.html")} onLoad={onLoad} />;
}

/** Return the page that shows a code; null: it is nothing to look at. */
export function previewOf(code: string, language: string): string | null {
  const begin = code.trimStart().slice(0, 500).toLowerCase();
  if (language === "svg" || (/^(?:xml|html|)$/.test(language) && /^(?:<\?xml[^>]*>\s*)?<svg[\s>]/.test(begin))) {
    return `<!doctype html><meta charset="utf-8"><style>body{margin:0}svg{display:block;margin:auto;max-width:100%;height:auto}</style>${code}`;
  }
  if (language === "html" || (!language && /^<(?:!doctype html|html[\s>])/.test(begin))) return code;
  return null;
}

/** Return the name of a file with a block's code. */
export function fileName(language: string): string {
  const name = language.toLowerCase();
  const suffix = (Object.hasOwn(SUFFIXES, name) && SUFFIXES[name]) || (KNOWN_SUFFIXES.has(name) ? name : "txt");
  return `code.${suffix}`;
}
