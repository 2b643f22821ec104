import { describe, expect, it } from "vitest";
import { type Message, newConversation } from "../src/conversations/model";
import { exportText, parseImport } from "../src/conversations/transfer";
import { MessageTree } from "../src/conversations/tree";

const PNG = "data:image/png;base64,AAAA";

function example() {
  const conversation = { ...newConversation("m"), title: "T", system: "S", parameters: { temperature: 0.5, stop: ["x"] } };
  const message = (id: string, parent: string | null, role: Message["role"], more: Partial<Message> = {}): Message => ({
    id, parent, role, conversation: conversation.id, content: id, createdAt: Number(id), state: "done", ...more,
  }); // prettier-ignore
  const messages = [
    message("1", null, "user", {
      attachments: [{ kind: "image", name: "a.png", url: PNG }, { kind: "text", name: "a.py", text: "x = 1", tokens: 4 }],
    }),
    message("2", "1", "assistant", {
      reasoning: "r",
      toolCalls: [{ id: "c", name: "f", arguments: "{}" }],
      usage: { prompt_tokens: 3, completion_tokens: 4, prompt_tokens_details: { cached_tokens: 2 } },
      notes: ["n"],
    }),
    message("3", "2", "tool", { toolCallId: "c" }),
    message("4", "1", "assistant", { state: "streaming", errorCode: "queue_full", overrides: { model: "n", parameters: { seed: 1 } } }),
  ];
  return { conversation: { ...conversation, chosen: { "": "1", "1": "2", "2": "3" } }, messages };
}

function changed(change: (file: any) => void): string {
  const file = JSON.parse(exportText([example()]));
  change(file);
  return JSON.stringify(file);
}

describe("export and import", () => {
  it("give the same conversation back, with new ids", () => {
    const before = example();
    const [after] = parseImport(exportText([before]));
    expect(after?.conversation).toMatchObject({ title: "T", model: "m", system: "S", parameters: before.conversation.parameters });
    expect(after?.conversation.id).not.toBe(before.conversation.id);
    expect(after?.messages.map((one) => one.content)).toEqual(["1", "2", "3", "4"]);
    expect(after?.messages.some((one) => before.messages.some((old) => old.id === one.id))).toBe(false);
    expect(after?.messages[1]).toMatchObject({ reasoning: "r", notes: ["n"], toolCalls: [{ id: "c", name: "f" }] });
    expect(after?.messages[1]?.usage?.prompt_tokens_details?.cached_tokens).toBe(2);
    expect(after?.messages[0]?.attachments).toEqual([
      { kind: "image", name: "a.png", url: PNG },
      { kind: "text", name: "a.py", text: "x = 1", tokens: 4 },
    ]);
    expect(after?.messages[3]).toMatchObject({ errorCode: "queue_full", overrides: { model: "n", parameters: { seed: 1 } } });
  });

  it("keep the branch that was shown, and stop what was being generated", () => {
    const [after] = parseImport(exportText([example()]));
    const tree = new MessageTree(after?.messages ?? [], after?.conversation.chosen);
    const byId = new Map(after?.messages.map((one) => [one.id, one]));
    expect(tree.path().map((id) => byId.get(id)?.content)).toEqual(["1", "2", "3"]);
    expect(after?.messages[3]?.state).toBe("stopped");
  });

  it.each<[string, string | ((file: any) => void), RegExp]>([
    ["no JSON", "{", /no JSON/],
    ["another file", "[]", /the file is no object/],
    ["another format", (file) => (file.format = "x"), /"format" is not/],
    ["a newer version", (file) => (file.version = 2), /version 2/],
    ["no list", (file) => (file.conversations = {}), /conversations is no list/],
    ["a text as a conversation", (file) => (file.conversations[0] = "x"), /conversations\[0\] is no object/],
    ["a number as content", (file) => (file.conversations[0].messages[0].content = 1), /messages\[0\]\.content is no text/],
    ["an unknown role", (file) => (file.conversations[0].messages[0].role = "system"), /"system" is none of/],
    ["an unknown parent", (file) => (file.conversations[0].messages[1].parent = "9"), /messages\[1\]\.parent/],
    ["the same id twice", (file) => (file.conversations[0].messages[1].id = "1"), /two messages with this id/],
    ["a circle", (file) => (file.conversations[0].messages[1].parent = "3"), /circle/],
    ["a remote image", (file) => (file.conversations[0].messages[0].attachments[0].url = "https://example.org/a.png"), /no address/],
    ["a drawing with code", (file) => (file.conversations[0].messages[0].attachments[0].url = "data:image/svg+xml;base64,AAAA"), /no address/],
    ["a script as data", (file) => (file.conversations[0].messages[0].attachments[0].url = "data:text/html;base64,AAAA"), /no address/],
    ["calls that are no list", (file) => (file.conversations[0].messages[1].toolCalls = "x"), /toolCalls is no list/],
    ["parameters that are a list", (file) => (file.conversations[0].conversation.parameters = []), /parameters is no object/],
  ])("refuse %s, and say where", (_, change, message) => {
    expect(() => parseImport(typeof change === "string" ? change : changed(change))).toThrow(message);
  });
});
