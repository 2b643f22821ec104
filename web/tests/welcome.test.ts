import { describe, expect, it } from "vitest";
import { cardsFor, programsFor } from "../src/chat/welcome";

const titles = (id: string, name = ""): string[] => cardsFor(id, { name, modalities: ["text"] }).map((card) => card.title);

describe("the prompts of an empty conversation", () => {
  it("suit the model, by its id or the name in its file", () => {
    expect(titles("paceline-demo")).toContain("A story");
    expect(titles("m.gguf", "Qwen2.5 Coder 0.5B")).toContain("Write a function");
    expect(titles("codestral")).toContain("Write a function");
    expect(titles("gemma-3-1b-it")).toContain("Explain");
    for (const id of ["paceline-demo", "x-coder", "gemma"]) expect(new Set(titles(id)).size).toBe(4);
  });
});

it("programs read a key from the environment, and quote the name of a model", () => {
  const { python, curl } = programsFor("http://h/v1", `a"b'c`, true);
  expect(python).toContain('api_key=os.environ["PACELINE_API_KEY"]');
  expect(python).toContain(`model="a\\"b'c"`);
  expect(curl).toContain('-H "Authorization: Bearer $PACELINE_API_KEY"');
  expect(curl).toContain(`"model": "a\\"b'\\''c"`);
  const free = programsFor("http://h/v1", "m", false);
  expect(`${free.python}${free.curl}`).not.toContain("PACELINE_API_KEY");
});
