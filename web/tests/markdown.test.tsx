import { render } from "preact";
import { beforeAll, describe, expect, it, vi } from "vitest";
import { fileName, previewOf } from "../src/markdown/code_block";
import { loadTypesetter } from "../src/markdown/formula";
import { safeAddress } from "../src/markdown/links";
import { Markdown } from "../src/markdown/markdown";

function shown(text: string): HTMLElement {
  const root = document.createElement("div");
  document.body.append(root);
  render(<Markdown text={text} />, root);
  return root;
}

const ALLOWED = new Set(
  "div p a strong em del code pre span br hr ul ol li input blockquote h3 h4 h5 h6 table thead tbody tr th td button svg path".split(" "),
);
const ATTRIBUTES = new Set(
  "class href target rel title type disabled checked aria-label aria-hidden aria-pressed aria-expanded focusable tabindex role start viewBox d dir".split(" "),
);

/** Assert that there is nothing that could run, load or send anything. */
function expectHarmless(root: HTMLElement): void {
  for (const element of root.querySelectorAll("*")) {
    expect(ALLOWED).toContain(element.localName);
    for (const { name, value } of element.attributes) {
      expect(ATTRIBUTES).toContain(name);
      if (name === "href") expect(value).toMatch(/^(https?:|mailto:)/);
    }
    if (element.localName === "path") expect(element.closest("svg.icon")).not.toBeNull();
  }
}

const HOSTILE = [
  "<script>alert(1)</script>",
  "<img src=x onerror=alert(1)>",
  "<svg onload=alert(1)><script>alert(1)</script></svg>",
  "text <b onmouseover=alert(1)>bold</b> <iframe src='javascript:alert(1)'></iframe>",
  "<a href='javascript:alert(1)'>x</a>",
  "[x](javascript:alert(1))",
  "[x](JaVaScRiPt:alert(1))",
  "[x](java\tscript:alert(1))",
  "[x](&#106;avascript:alert(1))",
  "[x](javascript&colon;alert(1))",
  "[x](data:text/html,<script>alert(1)</script>)",
  "[x](vbscript:alert(1))",
  "[x](file:///etc/passwd)",
  "[x](//example.org/relative)",
  "[x](#/chat/000000000000000000000000)",
  "[x](v1/models)",
  "<javascript:alert(1)>",
  "[x][y]\n\n[y]: javascript:alert(1)",
  "![x](http://example.org/pixel.png)",
  "![x](javascript:alert(1))",
  "![x](data:image/svg+xml,<svg onload=alert(1)>)",
  "![x][y]\n\n[y]: http://example.org/pixel.png 'title'",
  '[x](http://example.org/ "onmouseover=alert(1)")',
  '[x](http://example.org/"onmouseover="alert(1))',
  "```<img src=x onerror=alert(1)>\ncode\n```",
  "```html\n<script>alert(1)</script>\n```",
  "```js\n</code></pre><script>alert(1)</script>\n```",
  "`<img src=x onerror=alert(1)>`",
  "| a | <img src=x onerror=alert(1)> |\n|---|---|\n| [x](javascript:alert(1)) | <script>alert(1)</script> |",
  "- [ ] <input onfocus=alert(1) autofocus>",
  "<style>body{background:url(http://example.org/x)}</style>",
  "<form action=http://example.org><button>x</button></form>",
  "<math><mi xlink:href='javascript:alert(1)'>x</mi></math>",
  "<!-- --><details open ontoggle=alert(1)>",
  "&lt;script&gt;alert(1)&lt;/script&gt;",
  "http://example.org/<script>alert(1)</script>",
  "**<img src=x onerror=alert(1)>**",
  "# <svg/onload=alert(1)>",
  "> <object data=javascript:alert(1)>",
];

describe("Markdown of a model", () => {
  it.each(HOSTILE)("cannot run or load anything: %s", (text) => {
    const alerted = vi.fn();
    vi.stubGlobal("alert", alerted);
    const root = shown(text);
    expectHarmless(root);
    for (const element of root.querySelectorAll<HTMLElement>("*")) element.dispatchEvent(new Event("mouseover"));
    expect(alerted).not.toHaveBeenCalled();
    vi.unstubAllGlobals();
  });

  it("shows HTML as the text that it is", () => {
    expect(shown("a <b>bold</b> <script>alert(1)</script>").textContent).toBe("a <b>bold</b> <script>alert(1)</script>");
  });

  it("shows what people expect", () => {
    const root = shown(
      "# One\n\nA **b** *c* ~~d~~ `e<f` &amp; &#8364; [g](https://example.org/h?i=1&j=2)\n\n1. x\n2. y\n   - z\n\n> q\n\n" +
        "| l | r |\n|:--|--:|\n| 1 | 2 |\n\n```python\ndef f():\n    return 1\n```\n\n---\n- [x] done\n",
    );
    expectHarmless(root);
    expect(root.querySelector("h3")?.textContent).toBe("One");
    expect(root.querySelector("p")?.textContent).toBe("A b c d e<f & € g");
    expect(root.querySelector("a")?.getAttribute("href")).toBe("https://example.org/h?i=1&j=2");
    expect(root.querySelector("a")?.rel).toContain("noopener");
    expect(root.querySelectorAll("ol > li")).toHaveLength(2);
    expect(root.querySelector("ol ul li")?.textContent).toBe("z");
    expect(root.querySelector("blockquote")?.textContent).toBe("q");
    expect(root.querySelector("td.align-right")?.textContent).toBe("2");
    expect(root.querySelector("pre .hljs-keyword")?.textContent).toBe("def");
    expect(root.querySelector("pre")?.textContent).toBe("def f():\n    return 1");
    expect(root.querySelector("hr")).not.toBeNull();
    expect(root.querySelector("input")?.checked).toBe(true);
  });

  it("has the direction of its own text in each block", () => {
    const root = shown("שלום עולם\n\nHello\n\n- שלום\n\n| שלום |\n|---|\n| a |\n\n# שלום\n\n```\nx\n```");
    const directed = [...root.querySelectorAll("[dir]")].map((one) => `${one.localName} ${one.getAttribute("dir")}`);
    expect(directed).toEqual(["p auto", "p auto", "ul auto", "th auto", "td auto", "h3 auto", "pre ltr"]);
  });

  it("names an image and links to it, and loads nothing", () => {
    const root = shown("![a cat](https://example.org/cat.png)");
    expect(root.querySelector("img")).toBeNull();
    expect(root.querySelector("a")?.textContent).toContain("a cat");
  });

  it("draws a text that grows as it would be drawn whole", () => {
    const text = "# T\n\nsome *text* and\n\n```js\nlet a = 1;\n```\n\n- a\n- b\n\n[x][1]\n\n[1]: https://example.org/\n";
    const root = document.createElement("div");
    for (let end = 1; end <= text.length; end++) render(<Markdown text={text.slice(0, end)} />, root);
    expect(root.innerHTML).toBe(shown(text).innerHTML);
  });

  it("keeps the element of a block that did not change", () => {
    const root = document.createElement("div");
    render(<Markdown text={"first\n\nsec"} />, root);
    const first = root.querySelector("p");
    render(<Markdown text={"first\n\nsecond"} />, root);
    expect(root.querySelector("p")).toBe(first);
    expect(root.textContent).toBe("firstsecond");
  });

  it.each([
    ["quotes", "> ".repeat(20_000)],
    ["lists", `${"- ".repeat(20_000)}a`],
    ["numbers", "1. ".repeat(20_000)],
    ["underscores", "_a".repeat(50_000)],
    ["mail", `${"a.".repeat(50_000)}@`],
    ["brackets", "[".repeat(50_000)],
    ["stars", "a**b".repeat(25_000)],
    ["dollars", "$a".repeat(50_000)],
    ["beginnings of formulas", "\\(".repeat(50_000)],
    ["lines that begin formulas", "a\n\\[\n$$\n\n".repeat(10_000)],
    ["a table", `${"|a".repeat(5_000)}\n${"|-".repeat(5_000)}\n`],
    ["levels", Array.from({ length: 300 }, (_, at) => `${"> ".repeat(at)}a`).join("\n")],
  ])("takes %s in a time that does not grow with the square of their number", (_, text) => {
    const began = performance.now();
    const root = shown(text);
    expect(performance.now() - began).toBeLessThan(8000); // far less on a machine of its own; the square would take minutes
    expect(root.textContent?.length).toBeGreaterThan(0);
  });
});

describe("a block of code", () => {
  const long = `${"x = 1\n".repeat(811)}x = 1`;
  const drawn = (text: string, isGrowing: boolean, root: HTMLElement = document.createElement("div")): HTMLElement => {
    document.body.append(root);
    render(<Markdown text={text} isGrowing={isGrowing} />, root);
    return root;
  };

  it.each([
    ["alone", `\`\`\`python\n${long}\n\`\`\``],
    ["in a list", `1. Write:\n   \`\`\`python\n${long.replaceAll(/^/gm, "   ")}\n   \`\`\``],
  ])("grows whole and is folded when it is done, %s", async (_, text) => {
    const root = drawn(text, true);
    expect(root.querySelector(".folded, .code-more")).toBeNull();
    drawn(text, false, root);
    const more = root.querySelector<HTMLButtonElement>(".code.folded .code-more");
    expect(more?.textContent).toBe("Show all 812 lines");
    expect(root.querySelector("pre")?.textContent).toBe(long); // folded by style alone: it can be searched and copied
    more?.click();
    await vi.waitFor(() => expect(root.querySelector(".folded")).toBeNull());
    expect(more?.textContent).toBe("Show fewer lines");
  });

  it("is folded when text follows it, and not if it is short", () => {
    expect(drawn(`\`\`\`\n${long}\n\`\`\`\nand more`, true).querySelector(".folded")).not.toBeNull();
    expect(drawn("```\nx\n```", false).querySelector(".folded, .code-more")).toBeNull();
  });

  it("shows HTML and SVG in a frame without the origin of the page, when asked and done", async () => {
    const text = "```html\n<b>x</b><script>alert(1)</script>\n```";
    expect(drawn(text, true).querySelector("button.link")).toBeNull();
    const root = drawn(text, false);
    expect(root.querySelector("iframe")).toBeNull();
    root.querySelector<HTMLButtonElement>("button.link")?.click();
    await vi.waitFor(() => expect(root.querySelector("iframe")).not.toBeNull());
    expect(root.querySelector("iframe")?.getAttribute("sandbox")).toBe("allow-scripts");
    expect(root.querySelector("iframe")?.src).toMatch(/\/preview\.html$/);
    expect(root.querySelector("pre")).toBeNull();
  });

  it("runs the scripts of a preview only when asked, for each page", async () => {
    const buttons = (): string[] => [...root.querySelectorAll("button:not(.icon-button)")].map((one) => one.textContent ?? "");
    const press = (name: string): void => [...root.querySelectorAll("button")].find((one) => one.textContent === name)?.click();
    const posted = (): unknown => {
      const frame = root.querySelector("iframe") as HTMLIFrameElement;
      const post = vi.spyOn(frame.contentWindow as Window, "postMessage").mockImplementation(() => undefined);
      frame.dispatchEvent(new Event("load"));
      frame.dispatchEvent(new Event("load")); // of the written page
      expect(post).toHaveBeenCalledTimes(1);
      return post.mock.calls[0]?.[0];
    };
    const page = '<b onclick="x()">x</b>';
    const root = drawn(`\`\`\`html\n${page}\n\`\`\``, false);
    press("Preview");
    await vi.waitFor(() => expect(buttons()).toEqual(["Code", "Run scripts"]));
    expect(posted()).toEqual({ page, isRun: false });
    press("Run scripts");
    await vi.waitFor(() => expect(buttons()).toEqual(["Code"]));
    expect(posted()).toEqual({ page, isRun: true });
    drawn(`\`\`\`html\n${page}${page}\n\`\`\``, false, root);
    await vi.waitFor(() => expect(buttons()).toEqual(["Code", "Run scripts"]));
    drawn("```html\n<b>x</b>\n```", false, root);
    await vi.waitFor(() => expect(buttons()).toEqual(["Code"]));
  });

  it("has a preview if it is a page or a drawing", () => {
    expect(previewOf("<b>x</b>", "html")).toBe("<b>x</b>");
    expect(previewOf("<!DOCTYPE html><p>", "")).toBe("<!DOCTYPE html><p>");
    expect(previewOf("<svg/>", "svg")).toContain("<svg/>");
    expect(previewOf('<?xml version="1.0"?>\n<svg width="1"/>', "xml")).toContain("<svg");
    for (const [code, language] of [["<a/>", "xml"], ["<svg>", "python"], ["x", ""]] as const) expect(previewOf(code, language)).toBeNull();
  });

  it("is saved under the suffix of its language", () => {
    expect(["python", "c++", "JSON", "", "../x"].map(fileName)).toEqual(["code.py", "code.cpp", "code.json", "code.txt", "code.txt"]);
    for (const name of ["bat", "hta", "exe", "js.exe", "constructor"]) expect(fileName(name)).toBe("code.txt"); // a click would run it
  });
});

describe("formulas with the library", () => {
  beforeAll(loadTypesetter, 60_000);

  it("are MathML once the library is there, and their source if they are no valid TeX", () => {
    const root = shown("so $x_{i}^{*}$ and\n\n$$\\frac{a}{b}$$\n\nbut $\\frac{a$");
    expect(root.querySelector("math msubsup")?.textContent).toBe("xi∗");
    expect(root.querySelector("math")?.namespaceURI).toBe("http://www.w3.org/1998/Math/MathML");
    expect(root.querySelector(".block math[display=block] mfrac")?.textContent).toBe("ab");
    expect(root.querySelector("code.formula")?.textContent).toBe("$\\frac{a$");
  });

  it.each([
    "$\\href{javascript:alert(1)}{x}$",
    "$\\url{http://example.org}$",
    "$\\includegraphics{http://example.org/pixel.png}$",
    "$\\class{toast}{x} \\id{app}{y} \\style{background:url(http://example.org/x)}{z}$",
    "$\\color{url(http://example.org/x)}{a} \\text{<img src=x onerror=alert(1)>}$",
    "$\\data{onmouseover=alert(1)}{x}$",
    "$\\def\\a{\\a\\a}\\a$",
    "$a \\rule{1e9em}{1e9em}$",
    "$\\vec{a} \\cancel{b} \\boxed{c} \\xrightarrow{d} \\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}$",
  ])("cannot run or load anything: %s", (text) => {
    const root = shown(text);
    for (const element of root.querySelectorAll("*")) {
      expect(["div", "p", "span", "code"].includes(element.localName) || element.namespaceURI?.endsWith("MathML")).toBe(true);
      for (const { name, value } of element.attributes) {
        expect(name).not.toMatch(/^on|href|src|^id$|^data-/);
        expect(value).not.toMatch(/url\(|javascript:/);
      }
    }
    expect(root.textContent?.length).toBeGreaterThan(0);
  });
});

describe("safeAddress", () => {
  it("takes whole addresses of the web and of mail alone", () => {
    expect(safeAddress("https://example.org/a b")).toBeNull();
    expect(safeAddress("https://example.org/a")).toBe("https://example.org/a");
    expect(safeAddress("mailto:a@example.org")).toBe("mailto:a@example.org");
    for (const one of ["javascript:alert(1)", "\u0001javascript:alert(1)", "data:text/html,x", "blob:x", "/path", "", "#x", "?y"]) {
      expect(safeAddress(one)).toBeNull();
    }
  });
});
