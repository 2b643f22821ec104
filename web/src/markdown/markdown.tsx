import type { Token, Tokens } from "marked";
import { Component, type ComponentChildren, type VNode } from "preact";
import { memo } from "../ui/memo";
import { CodeBlock } from "./code_block";
import { decodeEntities } from "./entities";
import { Formula } from "./formula";
import type { FormulaToken } from "./formulas";
import { lexed } from "./lexer";
import { safeAddress } from "./links";

const MOST_DEPTH = 24; // of nested quotes and lists; deeper text is shown as source

/**
 * Markdown as elements. HTML in it is shown as text, links lead to the web or are text, and images are named, not loaded: text
 * of a model cannot run, load or send anything. isGrowing: more of it is being generated.
 */
export const Markdown = memo(function Markdown({ text, isGrowing = false }: { text: string; isGrowing?: boolean }): VNode {
  const tokens = lexed(text);
  const links = Object.values((tokens as { links?: Record<string, { href: string }> }).links ?? {})
    .map((one) => one.href)
    .join(" ");
  return (
    <div class="markdown">
      {tokens.map((token, index) => (
        <Block key={index} token={token} links={links} isGrowing={isGrowing && index === tokens.length - 1} />
      ))}
    </div>
  );
});

interface BlockProps {
  token: Token;
  links: string;
  isGrowing: boolean;
}

/**
 * One block. It is drawn again only if its source changes, so that a text that grows costs its last block. links: the
 * addresses of `[x]: address`, which may come later.
 */
class Block extends Component<BlockProps> {
  override shouldComponentUpdate(next: BlockProps): boolean {
    const { token, links, isGrowing } = this.props;
    const isSame = token.raw === next.token.raw && token.type === next.token.type && links === next.links;
    return !isSame || isGrowing !== next.isGrowing;
  }

  override render(): ComponentChildren {
    return block(this.props.token, 0, this.props.isGrowing);
  }
}

function block(token: Token, depth: number, isGrowing: boolean): ComponentChildren {
  if (depth > MOST_DEPTH) return <p class="plain">{token.raw.trimEnd()}</p>;
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return heading(token as Tokens.Heading);
    case "paragraph":
      return <p dir="auto">{inlines(token as Tokens.Paragraph)}</p>;
    case "text":
      return inlines(token as Tokens.Text);
    case "code":
      return <CodeBlock code={(token as Tokens.Code).text} language={(token as Tokens.Code).lang ?? ""} isGrowing={isGrowing} />;
    case "blockquote":
      return <blockquote>{blocks((token as Tokens.Blockquote).tokens, depth + 1, isGrowing)}</blockquote>;
    case "list":
      return list(token as Tokens.List, depth + 1, isGrowing);
    case "table":
      return table(token as Tokens.Table);
    case "hr":
      return <hr />;
    case "formula":
      return <Formula token={token as FormulaToken} />;
    default: // HTML, and whatever else there may be
      return <p class="plain">{token.raw.trimEnd()}</p>;
  }
}

function blocks(tokens: readonly Token[], depth: number, isGrowing: boolean): ComponentChildren {
  return tokens.map((token, at) => block(token, depth, isGrowing && at === tokens.length - 1));
}

function heading(token: Tokens.Heading): VNode {
  const children = inlines(token);
  // The page has the first two levels itself.
  if (token.depth === 1) return <h3 dir="auto">{children}</h3>;
  if (token.depth === 2) return <h4 dir="auto">{children}</h4>;
  return token.depth === 3 ? <h5 dir="auto">{children}</h5> : <h6 dir="auto">{children}</h6>;
}

function list(token: Tokens.List, depth: number, isGrowing: boolean): VNode {
  const items = token.items.map((item, at) => (
    <li class={item.task ? "task" : ""}>
      {item.task && <input type="checkbox" checked={Boolean(item.checked)} disabled aria-label="task" />}
      {blocks(item.tokens.filter((one) => one.type !== "checkbox"), depth, isGrowing && at === token.items.length - 1)}
    </li>
  ));
  if (!token.ordered) return <ul dir="auto">{items}</ul>;
  return <ol dir="auto" start={typeof token.start === "number" ? token.start : 1}>{items}</ol>;
}

function table(token: Tokens.Table): VNode {
  const cell = (one: Tokens.TableCell, at: number, tag: "td" | "th"): VNode => {
    const align = token.align[at];
    const Tag = tag;
    return <Tag dir="auto" class={align ? `align-${align}` : ""}>{inlines(one)}</Tag>;
  };
  return (
    <div class="table" tabIndex={0} role="region" aria-label="Table">
      <table>
        <thead>
          <tr>{token.header.map((one, at) => cell(one, at, "th"))}</tr>
        </thead>
        <tbody>
          {token.rows.map((row) => (
            <tr>{row.map((one, at) => cell(one, at, "td"))}</tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function inlines(token: { tokens?: Token[]; text: string }): ComponentChildren {
  return token.tokens ? token.tokens.map(inline) : decodeEntities(token.text);
}

function inline(token: Token): ComponentChildren {
  switch (token.type) {
    case "text":
      return inlines(token as Tokens.Text);
    case "escape":
      return (token as Tokens.Escape).text;
    case "strong":
      return <strong>{inlines(token as Tokens.Strong)}</strong>;
    case "em":
      return <em>{inlines(token as Tokens.Em)}</em>;
    case "del":
      return <del>{inlines(token as Tokens.Del)}</del>;
    case "codespan":
      return <code>{(token as Tokens.Codespan).text}</code>;
    case "br":
      return <br />;
    case "formula":
      return <Formula token={token as FormulaToken} />;
    case "link":
      return link(token as Tokens.Link, inlines(token as Tokens.Link));
    case "image":
      return link(token as Tokens.Image, `🖼 ${(token as Tokens.Image).text || "image"}`);
    default:
      return token.raw;
  }
}

function link(token: { href: string; raw: string }, children: ComponentChildren): ComponentChildren {
  const address = safeAddress(decodeEntities(token.href));
  if (address === null) return token.raw;
  return (
    <a href={address} target="_blank" rel="noopener noreferrer nofollow" title={address}>
      {children}
    </a>
  );
}
