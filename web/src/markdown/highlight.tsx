import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import markdown from "highlight.js/lib/languages/markdown";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { createLowlight } from "lowlight";
import type { ComponentChildren } from "preact";

const MOST_CHARACTERS = 30_000; // beyond, highlighting would take longer than a frame

const lowlight = createLowlight({
  bash, c, cpp, css, diff, go, java, javascript, json, markdown, python, rust, sql, typescript, xml, yaml,
}); // prettier-ignore

interface HighlightNode {
  type: string;
  value?: string;
  properties?: { className?: unknown };
  children?: HighlightNode[];
}

/** Return code as spans with classes, or unchanged if the language is unknown. */
export function highlighted(code: string, language: string): ComponentChildren {
  if (!language || code.length > MOST_CHARACTERS || !lowlight.registered(language)) return code;
  const tree = lowlight.highlight(language, code) as HighlightNode;
  return (tree.children ?? []).map(shown);
}

function shown(node: HighlightNode): ComponentChildren {
  if (node.type === "text") return node.value ?? "";
  const classes = node.properties?.className;
  return <span class={Array.isArray(classes) ? classes.join(" ") : ""}>{(node.children ?? []).map(shown)}</span>;
}
