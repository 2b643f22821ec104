import { describe, expect, it } from "vitest";
import { attachmentsOf, checkKind, textOf } from "../src/chat/attachments";
import type { ModelFacts } from "../src/api/types";

const blind = { id: "m", modalities: ["text"] } as ModelFacts;
const bytes = (...values: number[]): ArrayBuffer => new Uint8Array(values).buffer;

/** A file of jsdom, whose own has no `arrayBuffer`. */
function file(name: string, text: string, type = ""): File {
  const made = new File([text], name, { type });
  return Object.assign(made, { arrayBuffer: async () => new TextEncoder().encode(text).buffer });
}

describe("files of a message", () => {
  it("are text if they are UTF-8, whatever their type", async () => {
    expect(await attachmentsOf([file("a.rs", "fn é() {}"), file("b", "[1]", "application/json")], blind)).toEqual([
      { kind: "text", name: "a.rs", text: "fn é() {}" },
      { kind: "text", name: "b", text: "[1]" },
    ]);
    expect(textOf(bytes(0xef, 0xbb, 0xbf, 0x41))).toBe("A");
  });

  it("are refused by their names if they are none of what a model reads", async () => {
    await expect(attachmentsOf([file("a.zip", "P\0K")], blind)).rejects.toThrow("a.zip is neither");
    await expect(attachmentsOf([file("a.txt", " \n")], blind)).rejects.toThrow("a.txt is empty");
    expect(textOf(bytes(0xff, 0x41))).toBeNull();
    expect(() => checkKind("text", blind)).not.toThrow();
    expect(() => checkKind("image", blind)).toThrow("takes no images");
  });
});
