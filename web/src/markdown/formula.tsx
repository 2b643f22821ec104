import { signal } from "@preact/signals";
import { type ComponentChildren, type VNode, h } from "preact";
import { useEffect, useMemo } from "preact/hooks";
import type { FormulaToken } from "./formulas";

/** A node of Temml's tree: an element, a fragment without a type, or a text. */
interface MathNode {
  type?: string;
  text?: string;
  attributes?: Record<string, string>;
  classes?: string[];
  style?: Record<string, string>;
  children?: MathNode[];
}

type Typesetter = (source: string, isBlock: boolean) => MathNode;

const ELEMENTS = new Set(
  "math mfrac mi mn mo mover mpadded mphantom mprescripts mroot mrow ms mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover mmultiscripts menclose none".split(" "),
);
const ATTRIBUTES = new Set(
  "accent accentunder columnalign columnlines columnspan columnspacing depth display displaystyle fence form height largeop linebreak linethickness lspace mathvariant maxsize minsize movablelimits notation rowlines rowspacing rowspan rspace scriptlevel separator stretchy symmetric voffset width".split(" "),
);

const typesetter = signal<Typesetter | null>(null);
let loading: Promise<void> | null = null;

/** Load the library that sets formulas, once; a page without formulas does without it. */
export function loadTypesetter(): Promise<void> {
  loading ??= import("temml").then(
    ({ default: temml }) => {
      const options = { throwOnError: true, strict: false, trust: false, maxSize: [30, 500] as [number, number], maxExpand: 500 };
      typesetter.value = (source, isBlock) => temml.__renderToMathMLTree(source, { ...options, displayMode: isBlock }) as MathNode;
    },
    () => {
      loading = null; // the server is away: the next formula tries again
    },
  );
  return loading;
}

/** A formula as MathML. Until the library is there, and if the source is no valid TeX, its source is shown. */
export function Formula({ token }: { token: FormulaToken }): VNode {
  const set = typesetter.value;
  useEffect(() => {
    if (!set) void loadTypesetter();
  }, [set]);
  const shown = useMemo(() => {
    try {
      return set && element(set(token.text, token.isBlock));
    } catch {
      return null;
    }
  }, [set, token.text, token.isBlock]);
  const kind = token.isBlock ? "formula block" : "formula";
  if (!shown) return <code class={kind}>{token.raw.trim()}</code>;
  return token.isBlock ? (
    <span class={kind} tabIndex={0} role="group" aria-label="Formula">
      {shown}
    </span>
  ) : (
    <span class={kind}>{shown}</span>
  );
}

/** Return a node as an element, if it is one of MathML; of other nodes, their children. Attributes that could load are left out. */
function element(node: MathNode): ComponentChildren {
  if (node.text !== undefined) return node.text;
  const children = (node.children ?? []).map(element);
  if (!node.type || !ELEMENTS.has(node.type)) return children;
  const attributes = Object.entries(node.attributes ?? {}).filter(([name]) => ATTRIBUTES.has(name));
  const style = Object.entries(node.style ?? {}).filter(([, value]) => !/[\\(;]/.test(value)); // no url()
  const setStyle = (made: MathMLElement | null): void => void (made?.style && Object.assign(made.style, Object.fromEntries(style)));
  return h(node.type, { ...Object.fromEntries(attributes), class: (node.classes ?? []).join(" ") || undefined, ref: setStyle }, children);
}
