import { signal } from "@preact/signals";
import { render } from "preact";
import { afterEach, describe, expect, it, vi } from "vitest";
import type { PageFacts } from "../src/api/types";
import type { App } from "../src/app";
import { RegenerateForm } from "../src/chat/regenerate_form";
import { FullActions, summaryOf } from "../src/chat/status_line";
import { type Message, newConversation } from "../src/conversations/model";
import { OpenConversation } from "../src/conversations/store";
import { ServerFacts } from "../src/server_facts";

const message = (id: string, more: Partial<Message> = {}): Message => ({
  id, conversation: "c", parent: null, role: Number(id) % 2 ? "user" : "assistant", content: `m${id}`, createdAt: Number(id), state: "done", ...more,
}); // prettier-ignore

const conversation = (model = "", messages: Message[] = []): OpenConversation => new OpenConversation(newConversation(model), messages);

afterEach(() => vi.unstubAllGlobals());

describe("other settings of a reply", () => {
  const server = new ServerFacts();
  server.model = () => signal(null);
  const entry = { progress: 1, modalities: ["text"], error: null, state: "loaded" } as const;
  server.page.value = {
    default_model: "a",
    models: [{ ...entry, id: "a", aliases: [], adapters: [] }, { ...entry, id: "b", aliases: ["short"], adapters: ["lora"] }],
  } as unknown as PageFacts; // prettier-ignore

  it.each([["", "a"], ["b", "b"], ["short", "b"], ["lora", "lora"], ["gone", "gone"]])("begin with the model %j as %j", (model, shown) => {
    const root = document.createElement("div");
    render(<RegenerateForm app={{ server } as unknown as App} opened={conversation(model)} parent="1" onDone={() => undefined} />, root);
    expect(root.querySelector("select")?.value).toBe(shown);
    render(null, root);
  });

  it("find the model of an adapter", () => {
    expect(server.entry("lora")?.id).toBe("b");
  });
});

describe("a summary", () => {
  const sent: Array<Record<string, any>> = [];
  const answer = (choice: unknown): void => {
    sent.length = 0;
    vi.stubGlobal("fetch", async (_: unknown, init: RequestInit) => {
      sent.push(JSON.parse(String(init.body)));
      return new Response(JSON.stringify({ choices: [choice] }));
    });
  };
  const summary = (path: Message[]): Promise<string> => summaryOf(conversation(), path, 32_768, new AbortController().signal);

  it("has the turns after a failed reply, and leaves out failed replies at the end", async () => {
    answer({ message: { content: " all " }, finish_reason: "stop" });
    const path = [message("1"), message("2", { state: "failed" }), message("3"), message("4"), message("5"), message("6", { state: "failed", content: "" })];
    expect(await summary(path)).toBe("all");
    expect(sent[0]?.["messages"].slice(0, -1).map((one: { content: string }) => one.content)).toEqual(["m1", "m2", "m3", "m4"]);
    expect(sent[0]).toMatchObject({ reasoning_effort: "none", stream: false });
  });

  it("is refused if there is nothing to summarise, or if the model did not end it", async () => {
    answer({ message: { content: "half" }, finish_reason: "length" });
    await expect(summary([message("1"), message("2", { state: "failed", content: "" })])).rejects.toThrow("no reply yet");
    expect(sent).toEqual([]);
    await expect(summary([message("1"), message("2")])).rejects.toThrow("did not end it");
  });

  it("ends with its view", async () => {
    let signalled: AbortSignal | null | undefined;
    vi.stubGlobal("fetch", (_: unknown, init: RequestInit) => {
      signalled = init.signal;
      return new Promise(() => undefined);
    });
    const app = { server: { model: () => signal({ n_ctx: 32_768 }) }, store: {} } as unknown as App;
    const opened = conversation("", [message("1"), message("2", { parent: "1" })]);
    const root = document.createElement("div");
    render(<FullActions app={app} opened={opened} />, root);
    [...root.querySelectorAll("button")].find((one) => one.textContent === "Fork with a summary")?.click();
    await vi.waitFor(() => expect(root.textContent).toContain("Writing a summary"));
    expect(signalled?.aborted).toBe(false);
    render(null, root);
    await vi.waitFor(() => expect(signalled?.aborted).toBe(true));
  });
});
