import { expect, it } from "vitest";
import { keyOf } from "../src/ui/keys";

const press = (key: string, more: Partial<KeyboardEvent> = {}): string =>
  keyOf({ key, ctrlKey: false, metaKey: false, shiftKey: false, altKey: false, target: document.body, ...more });

it("keys without Ctrl are for fields if one has the focus", () => {
  const field = document.createElement("textarea");
  expect([press("?"), press("?", { target: field }), press("/", { altKey: true })]).toEqual(["?", "", ""]);
  expect(press("K", { ctrlKey: true, target: field })).toBe("ctrl+k");
  expect(press("o", { metaKey: true, shiftKey: true })).toBe("ctrl+shift+o");
});
