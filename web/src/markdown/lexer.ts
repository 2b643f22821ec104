import { Lexer, type Token } from "marked";
import { FORMULAS } from "./formulas";

const MOST_INLINE = 2000; // the parser's time grows with the square of a paragraph's length

/** Marked's lexer, in pieces if a paragraph is so long that it would freeze the page. */
class BoundedLexer extends Lexer {
  override inlineTokens(src: string, tokens: Token[] = []): Token[] {
    for (let rest = src; rest; ) {
      const piece = rest.length > MOST_INLINE ? rest.slice(0, cut(rest)) : rest;
      super.inlineTokens(piece, tokens);
      rest = rest.slice(piece.length);
    }
    return tokens;
  }
}

/** Return the blocks of a text; a text that the parser cannot take (it nests too deep) is a single block of the type `plain`. */
export function lexed(text: string): Token[] {
  try {
    return new BoundedLexer({ gfm: true, breaks: true, extensions: FORMULAS }).lex(text);
  } catch {
    return [{ type: "plain", raw: text, text }];
  }
}

/** Return the place to cut a long paragraph: after its last line, else its last word, that fits. */
function cut(text: string): number {
  const line = text.lastIndexOf("\n", MOST_INLINE - 1);
  if (line > MOST_INLINE / 2) return line + 1;
  const word = text.lastIndexOf(" ", MOST_INLINE - 1);
  return word > MOST_INLINE / 2 ? word + 1 : MOST_INLINE;
}
