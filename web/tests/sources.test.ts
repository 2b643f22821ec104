import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { expect, it } from "vitest";

const SOURCES = join(import.meta.dirname, "..", "src");
const FORBIDDEN = /\binnerHTML\b|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|\beval\(|new Function|srcdoc/;

it("no source makes elements of a text, or code", () => {
  const files = readdirSync(SOURCES, { recursive: true, encoding: "utf8" }).filter((name) => /\.tsx?$/.test(name));
  expect(files.length).toBeGreaterThan(20);
  for (const name of files) expect(readFileSync(join(SOURCES, name), "utf8"), name).not.toMatch(FORBIDDEN);
});
