import { describe, expect, it } from "vitest";
import { paceText } from "../src/chat/status_line";
import { contextUse, cutFor, sentPart } from "../src/conversations/context";
import type { Message } from "../src/conversations/model";

const usage = (prompt_tokens: number, completion_tokens: number): Pick<Message, "usage"> => ({ usage: { prompt_tokens, completion_tokens } });

/** Messages that take turns, each with 70 characters; changes: by position. */
function path(count: number, changes: Record<number, Partial<Message>> = {}): Message[] {
  return Array.from({ length: count }, (_, at) => ({
    id: String(at), conversation: "c", parent: at ? String(at - 1) : null, role: at % 2 ? "assistant" : "user", content: "x".repeat(70),
    createdAt: at, state: "done", ...changes[at],
  })); // prettier-ignore
}

describe("the tokens of a conversation", () => {
  it("are as the server counted them with the last reply", () => {
    expect(contextUse([])).toEqual({ tokens: 0, isExact: true });
    expect(contextUse(path(4, { 1: usage(10, 5), 3: usage(40, 8) }))).toEqual({ tokens: 48, isExact: true });
  });

  it("are estimated for what no reply has counted", () => {
    expect(contextUse(path(1))).toEqual({ tokens: 20, isExact: false });
    expect(contextUse(path(3, { 1: usage(28, 7) }))).toEqual({ tokens: 35 + 18, isExact: false }); // 4 characters a token
  });

  it("are estimated with the system message and tools until they are counted, and never exact with a picture", () => {
    expect(contextUse(path(1), 35)).toEqual({ tokens: 30, isExact: false });
    expect(contextUse([], 35)).toEqual({ tokens: 10, isExact: false });
    expect(contextUse(path(4, { 3: usage(40, 8) }), 35)).toEqual({ tokens: 48, isExact: true });
    const picture = path(1, { 0: { content: "", attachments: [{ kind: "image", name: "a", url: "data:image/png;base64," }] } });
    expect(contextUse(picture).isExact).toBe(false);
  });

  it("are those of the messages that are sent", () => {
    const cut = path(4, { 1: usage(28, 7), 2: { contextSince: 100 }, 3: usage(63, 7) });
    expect(sentPart(cut).map((message) => message.id)).toEqual(["2", "3"]);
    expect(contextUse(cut)).toEqual({ tokens: 35, isExact: false });
    const later = [...cut, ...path(6, { 5: { createdAt: 200, ...usage(50, 9) } }).slice(4)];
    expect(contextUse(later)).toEqual({ tokens: 59, isExact: true });
  });
});

describe("the message to begin with", () => {
  it("is one of a person, and leaves at most half of the context to the newest turns", () => {
    expect(cutFor(path(9), 160)).toBe("6"); // 80 tokens: 280 characters, and so four messages
    expect(cutFor(path(9), 120)).toBe("6"); // three messages
    expect(cutFor(path(9), 10)).toBe("8"); // the last turn, however long it is
  });

  it("is none if there is a single turn, or all turns fit", () => {
    expect(cutFor(path(2), 10)).toBeNull();
    expect(cutFor(path(5, { 2: { contextSince: 1 } }), 10_000)).toBe("4"); // of the messages that are sent
  });
});

describe("the pace of a reply", () => {
  it("has its rate, tokens and time", () => {
    expect(paceText(214, 0.0123, 17_400)).toBe("12.3 tok/s, 214 tokens, 0:17");
    expect(paceText(1, 0, 61_000)).toBe("1 token, 1:01");
    expect(paceText(0, 0, 900)).toBe("0:00");
  });
});
