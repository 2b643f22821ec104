import type { MarkedOptions, Tokens } from "marked";

const MOST_CHARACTERS = 4000; // of a formula; the search for its end stops there

/** A formula. text: TeX without its delimiters. */
export interface FormulaToken extends Tokens.Generic {
  type: "formula";
  raw: string;
  text: string;
  isBlock: boolean;
}

// A dollar sign is also money and a shell variable: no space follows the first, none precedes the last, and no word follows it.
const INLINE =
  /^(?:\$\$((?:[^$\\]|\\[^])+?)\$\$|\$(?![\s$])((?:[^$\\\n]|\\.)+?)(?<!\s)\$(?![\w$])|\\\(([^]+?)\\\)|\\\[([^]+?)\\\])/;
const INLINE_START = /(?<![\w\\$])\$(?=\S)|(?<!\\)\\[([]/;
const BLOCK = /^ {0,3}(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n+|$)/;
const BLOCK_START = /\n {0,3}(?:\$\$|\\\[)/;

/**
 * Marked's options for formulas: on lines of their own between `$$` or `\[` and `\]`, and in a text between `$`, `$$`, `\(` and
 * `\)`, or `\[` and `\]`. Markdown takes no character of them.
 */
export const FORMULAS: NonNullable<MarkedOptions["extensions"]> = {
  renderers: {},
  childTokens: {},
  block: [(src) => formula(BLOCK, src, true)],
  startBlock: [
    (src) => {
      const end = src.indexOf("\n\n"); // of the paragraph, which a formula interrupts
      const at = (end < 0 ? src : src.slice(0, end)).search(BLOCK_START);
      return at < 0 ? undefined : at + 1;
    },
  ],
  inline: [(src) => formula(INLINE, src, false)],
  startInline: [
    (src) => {
      const at = src.search(INLINE_START);
      return at < 0 ? undefined : at;
    },
  ],
};

function formula(pattern: RegExp, src: string, isBlock: boolean): FormulaToken | undefined {
  const found = pattern.exec(src.slice(0, MOST_CHARACTERS));
  const text = found?.slice(1).find((part) => part !== undefined)?.trim();
  if (!found || !text || (!isBlock && /\n[ \t]*\n/.test(text))) return undefined;
  return { type: "formula", raw: found[0], text, isBlock: isBlock || /^(?:\$\$|\\\[)/.test(found[0]) };
}
