import { describe, expect, it } from "vitest";
import type { ParameterField } from "../src/api/types";
import { parseJson, parseParameter, shownDefault, shownParameter } from "../src/conversations/parameters";

const field = (more: Partial<ParameterField>): ParameterField => ({
  name: "x", label: "X", group: "Sampling", type: "number", default: null, minimum: null, maximum: null, step: null, choices: null, help: "", ...more,
}); // prettier-ignore

describe("parameters", () => {
  it("are taken within their bounds, and what is outside is refused, not clamped", () => {
    const one = field({ minimum: 0, maximum: 2 });
    expect(parseParameter(one, " 0,5 ")).toBe(0.5);
    expect(parseParameter(one, "")).toBeNull();
    expect(() => parseParameter(one, "2.1")).toThrow("The most is 2.");
    expect(() => parseParameter(one, "-1")).toThrow("The least is 0.");
    expect(() => parseParameter(one, "warm")).toThrow("no number");
    expect(() => parseParameter(field({ type: "integer" }), "1.5")).toThrow("whole number");
  });

  it("of other types are what was typed", () => {
    expect(parseParameter(field({ type: "texts" }), "a\n b\n\n")).toEqual(["a", " b"]);
    expect(parseParameter(field({ type: "boolean" }), "false")).toBe(false);
    expect(parseParameter(field({ type: "json" }), '{"a": 1}')).toEqual({ a: 1 });
    expect(() => parseParameter(field({ type: "json" }), "{")).toThrow("no JSON");
    expect(parseParameter(field({ type: "text" }), "low")).toBe("low");
  });

  it("and defaults are shown as people read them", () => {
    expect(shownDefault(field({ default: 0.05000000074505806 }))).toBe("0.05");
    expect(shownDefault(field({ type: "boolean", default: false }))).toBe("off");
    expect(shownDefault(field({ default: null }))).toBe("");
    expect(shownDefault(field({ type: "texts", default: [] }))).toBe("");
    expect(shownParameter({ x: ["a", "b"] }, field({ type: "texts" }))).toBe("a\nb");
    expect(shownParameter({}, field({}))).toBe("");
  });

  it("of JSON have the kind that is needed", () => {
    expect(parseJson(" ", "list")).toBeUndefined();
    expect(() => parseJson("[]", "object")).toThrow("An object is needed");
    expect(() => parseJson("{}", "list")).toThrow("A list is needed");
  });
});
