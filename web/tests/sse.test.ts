import { describe, expect, it } from "vitest";
import { EventParser } from "../src/api/sse";

const bytes = (text: string): Uint8Array => new TextEncoder().encode(text);

describe("EventParser", () => {
  it("returns the same events however the bytes are split", () => {
    const text = 'event: update\ndata: {"a": "füß"}\n\n: ping\n\ndata: one\ndata: two\r\n\r\ndata:three\n\n';
    const whole = new EventParser().push(bytes(text));
    expect(whole.map((one) => [one.name, one.data])).toEqual([
      ["update", '{"a": "füß"}'],
      ["message", "one\ntwo"],
      ["message", "three"],
    ]);
    for (const size of [1, 2, 3, 7]) {
      const parser = new EventParser();
      const found = [];
      const all = bytes(text);
      for (let at = 0; at < all.length; at += size) found.push(...parser.push(all.slice(at, at + size)));
      expect(found).toEqual(whole);
    }
  });

  it("counts bytes up to the end of each event, from its offset on", () => {
    const first = "data: ü\n\n";
    const events = new EventParser(100).push(bytes(`${first}: ping\n\ndata: x\n\ndata: not whole`));
    expect(events.map((one) => one.end)).toEqual([100 + bytes(first).length, 100 + bytes(first).length + 8 + 9]);
  });

  it("keeps what is not a whole event for the next bytes", () => {
    const parser = new EventParser();
    expect(parser.push(bytes("data: a"))).toEqual([]);
    expect(parser.push(bytes("b\n"))).toEqual([]);
    expect(parser.push(bytes("\n")).map((one) => one.data)).toEqual(["ab"]);
  });

  it("sends no event without data", () => {
    expect(new EventParser().push(bytes("event: end\n\n:\n\nid: 3\n\n"))).toEqual([]);
  });
});
