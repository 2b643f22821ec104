import { describe, expect, it, vi } from "vitest";
import { attachmentsOf, checkKind, textOf } from "../src/chat/attachments";
import type { ModelFacts } from "../src/api/types";

const blind = { id: "m", modalities: ["text"] } as ModelFacts;
const bytes = (...values: number[]): ArrayBuffer => new Uint8Array(values).buffer;

/** A file of jsdom, whose own has no `arrayBuffer`. */
function file(name: string, text: string, type = ""): File {
  const made = new File([text], name, { type });
  return Object.assign(made, { arrayBuffer: async () => new TextEncoder().encode(text).buffer });
}

const read = (...files: File[]): ReturnType<typeof attachmentsOf> => attachmentsOf(files, blind, new AbortController().signal);

const readPdf = vi.hoisted(() => vi.fn());
vi.mock("../src/chat/pdf_text", () => ({ readPdf }));

describe("a PDF", () => {
  const problem = async (): Promise<string | undefined> => (await read(file("a.pdf", "%PDF", "application/pdf"))).problems[0];

  it("has bounds, and is refused with the reason", async () => {
    readPdf.mockResolvedValue(null);
    expect(await problem()).toBe("a.pdf has more than 4,000,000 characters or 5,000 pages.");
    expect(readPdf.mock.calls[0]?.[1]).toEqual({ characters: 4_000_000, pages: 5000 });
    readPdf.mockResolvedValue("");
    expect(await problem()).toMatch(/no text .* pictures, or Chinese/);
    readPdf.mockRejectedValue(Object.assign(new Error("x"), { name: "PasswordException" }));
    expect(await problem()).toMatch(/^a.pdf needs a password/);
  });

  it("is left, with files after it, when the reading is cancelled", async () => {
    const abort = new AbortController();
    readPdf.mockImplementation(async () => {
      abort.abort();
      throw new Error("destroyed");
    });
    const files = [file("a.txt", "a"), file("a.pdf", "%PDF", "application/pdf"), file("b.txt", "b")];
    expect(await attachmentsOf(files, blind, abort.signal)).toEqual({ found: [], problems: [] });
  });
});

describe("files of a message", () => {
  it("are text if they are UTF-8, whatever their type", async () => {
    const files = [file("a.rs", "fn é() {}"), file("b", "[1]", "application/json"), file("c.svg", "<svg/>", "image/svg+xml")];
    expect(await read(...files)).toEqual({
      found: [
        { kind: "text", name: "a.rs", text: "fn é() {}" },
        { kind: "text", name: "b", text: "[1]" },
        { kind: "text", name: "c.svg", text: "<svg/>" },
      ],
      problems: [],
    });
    expect(textOf(bytes(0xef, 0xbb, 0xbf, 0x41))).toBe("A");
  });

  it("are refused by their names if they are none of what a model reads", async () => {
    const { found, problems } = await read(file("a.zip", "P\0K"), file("b.txt", "b"), file("a.txt", " \n"));
    expect(found.map((one) => one.name)).toEqual(["b.txt"]);
    expect(problems).toEqual([expect.stringContaining("a.zip is neither"), expect.stringContaining("a.txt is empty")]);
    expect(textOf(bytes(0xff, 0x41))).toBeNull();
    expect(() => checkKind("text", blind)).not.toThrow();
    expect(() => checkKind("image", blind)).toThrow("takes no images");
  });
});
