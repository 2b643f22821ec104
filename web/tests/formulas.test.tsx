import { render } from "preact";
import { describe, expect, it, vi } from "vitest";
import { Markdown } from "../src/markdown/markdown";

vi.mock("temml", () => new Promise(() => undefined)); // it never loads: formulas stay as they are written

function source(text: string): string {
  const root = document.createElement("div");
  render(<Markdown text={text} />, root);
  return [...root.querySelectorAll("code.formula")].map((one) => one.textContent).join(" | ");
}

describe("formulas", () => {
  it.each([
    ["$x_{i}^{*} y_{j}^{*}$"],
    ["\\(a_1*b_1 + a_2*b_2\\)"],
    ["$$\\sum_{i} *a_i* _b_$$"],
    ["\\[a_{1} * b * c_{2}\\]"],
    ["\\[\na\n- b\n= c\n\n+ d\n\\]"],
    ["$$\na &= b \\\\[4pt]\n&= c\n$$"],
    ["$a < b & c$"],
  ])("keep each character before they are set: %s", (text) => {
    expect(source(text)).toBe(text);
    if (!text.includes("\n")) expect(source(`Before ${text} after`)).toBe(text);
  });

  it("interrupt a paragraph and stand in lists and tables", () => {
    expect(source("The sum:\n\\[\na*b\n\\]\nis $c*d$.")).toBe("\\[\na*b\n\\] | $c*d$");
    expect(source("- $a_1*b_1*c$\n- **x** $d_1$\n\n| a |\n|---|\n| $e_1*f_1*g$ |")).toBe("$a_1*b_1*c$ | $d_1$ | $e_1*f_1*g$");
  });

  it.each(["It costs $5 and $10.", "From $5-$10, or US$7 and $8 each", "$HOME/bin:$PATH", "`$a$`", "```\n$a$\n```", "\\$a\\$", "$ a $", "a \\\\(b) c"])(
    "are no amounts, variables or code: %s",
    (text) => expect(source(text)).toBe(""),
  );
});
