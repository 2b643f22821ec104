import "fake-indexeddb/auto";
import { openDB } from "idb";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { ApiError } from "../src/api/errors";
import { ConversationDatabase } from "../src/conversations/database";
import type { Transport } from "../src/conversations/reply";
import { ConversationStore, type OpenConversation } from "../src/conversations/store";
import { TabChannel } from "../src/conversations/tabs";
import { exportText, parseImport } from "../src/conversations/transfer";

const event = (content: string): string =>
  `data: ${JSON.stringify({ choices: [{ delta: { content }, finish_reason: null }] })}\n\n`;

/** A server that sends back the last message, and keeps its requests. */
class Echo implements Transport {
  bodies: Array<Record<string, any>> = [];

  async start(body: unknown): Promise<Response> {
    this.bodies.push(body as Record<string, any>);
    const last = (body as any).messages.at(-1);
    return new Response((`${event(`re: ${JSON.stringify(last.content)}`)}data: [DONE]\n\n`));
  }

  async resume(): Promise<{ kind: "stream"; response: Response }> {
    return { kind: "stream", response: new Response((`${event("rest")}data: [DONE]\n\n`)) };
  }

  async end(): Promise<void> {}
  async wait(): Promise<void> {}
}

let count = 0;
let database: ConversationDatabase;
let server: Echo;
let store: ConversationStore;
let stores: ConversationStore[] = [];

beforeEach(async () => {
  database = await ConversationDatabase.open(`test-${count++}`);
  server = new Echo();
  stores = [];
  store = newStore();
});

afterEach(async () => {
  await Promise.all(stores.map((one) => one.close()));
  database.close();
});

/** A further tab. */
function newStore(): ConversationStore {
  const made = new ConversationStore(database, server, new TabChannel(`test-${count}`));
  stores.push(made);
  return made;
}

const contents = (opened: { path: { peek(): readonly string[] }; message(id: string): { peek(): { content: string } } }): string[] =>
  opened.path.peek().map((id) => opened.message(id).peek().content);

/** A server whose streams grow until they are aborted. */
class Endless extends Echo {
  override async start(_body: unknown, _id?: string, abort?: AbortSignal): Promise<Response> {
    return new Response(
      new ReadableStream<Uint8Array>({
        start(controller) {
          const timer = setInterval(() => controller.enqueue(new TextEncoder().encode(event("more "))), 2);
          abort?.addEventListener("abort", () => {
            clearInterval(timer);
            controller.error(new DOMException("aborted", "AbortError"));
          });
        },
      }),
    );
  }
}

describe("ConversationStore", () => {
  it("leaves nothing of a conversation that is deleted while its reply grows, here or in another tab", async () => {
    server = new Endless();
    const [writing, other] = [newStore(), newStore()];
    for (const deleting of [writing, other]) {
      const opened = writing.create();
      const sending = writing.send(opened, null, "go on", []);
      while (!(await database.messages(opened.id)).some((one) => one.content.length > 20)) await new Promise((r) => setTimeout(r, 5));
      await deleting.delete(opened.id);
      await sending;
      await new Promise((resolve) => setTimeout(resolve, 600)); // longer than between two writes
      await writing.flush();
      expect(await database.messages(opened.id)).toEqual([]);
      expect(await database.conversation(opened.id)).toBeUndefined();
      expect(writing.replies.peek().size).toBe(0);
    }
  });

  const until = async (condition: () => unknown): Promise<void> => {
    while (!(await condition())) await new Promise((resolve) => setTimeout(resolve, 5));
  };

  /** A conversation with a message and its reply, in two tabs. */
  const inTwoTabs = async (): Promise<[OpenConversation, ConversationStore, OpenConversation]> => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    await store.flush();
    const other = newStore();
    await other.load();
    return [opened, other, (await other.open(opened.id)) as OpenConversation];
  };

  it("leaves a conversation that another tab has deleted", async () => {
    const [opened, other, theirs] = await inTwoTabs();
    await other.delete(theirs.id);
    await until(() => opened.isDeleted.peek());
    expect(opened.path.peek()).toEqual([]);
    store.update(opened, { system: "still typing" });
    await store.send(opened, null, "too late", []);
    await store.reply(opened, theirs.id);
    await store.flush();
    expect(await database.conversation(opened.id)).toBeUndefined();
    expect(await database.messages(opened.id)).toEqual([]);
    expect(store.list.peek()).toEqual([]);
  });

  it("removes a branch that another tab has deleted, with what follows it here", async () => {
    const [opened, other, theirs] = await inTwoTabs();
    const [first, reply] = opened.path.peek() as [string, string];
    await store.send(opened, reply, "behind it", []);
    await store.flush();
    await other.deleteBranch(theirs, reply);
    await until(() => opened.path.peek().length === 1);
    await until(async () => (await database.messages(opened.id)).length === 1);
    expect(contents(opened)).toEqual(["one"]);
    expect((await database.messages(opened.id)).map((one) => one.id)).toEqual([first]);
    expect(parseImport(exportText(await store.everything()))).toHaveLength(1);
  });

  it("keeps the branch that a tab shows when another adds one, and takes over titles and settings", async () => {
    const [opened, other, theirs] = await inTwoTabs();
    await store.send(opened, null, "a branch", []);
    await until(() => theirs.tree.size === 4);
    expect(contents(theirs)).toEqual(["one", 're: "one"']);
    expect(contents(opened)).toEqual(["a branch", 're: "a branch"']);
    other.update(theirs, { title: "renamed" });
    await until(() => opened.facts.peek().title === "renamed");
    store.update(opened, { system: "s" });
    await until(() => theirs.facts.peek().system === "s");
    expect(await database.conversation(opened.id)).toMatchObject({ title: "renamed", system: "s" });
    expect(contents(theirs)[0]).toBe("one");
  });

  it("puts a reply that is tried again in the place of the failed one, unless something follows it", async () => {
    const opened = store.create();
    const start = server.start.bind(server);
    server.start = async () => Promise.reject(new ApiError("no", 400, "context_length_exceeded"));
    await store.send(opened, null, "one", []);
    const [first, failed] = opened.path.peek() as [string, string];
    expect(opened.message(failed).peek()).toMatchObject({ state: "failed", errorCode: "context_length_exceeded" });
    await store.retry(opened, failed);
    expect(opened.tree.siblings(opened.path.peek()[1] as string)).toHaveLength(1);
    await store.send(opened, opened.path.peek()[1] as string, "behind it", []);
    server.start = start;
    await store.retry(opened, opened.path.peek()[1] as string);
    expect(contents(opened)).toEqual(["one", 're: "one"']);
    expect(opened.tree.siblings(opened.path.peek()[1] as string)).toHaveLength(2);
    await store.flush();
    expect((await database.messages(opened.id)).map((one) => one.id)).not.toContain(failed);
    expect(opened.has(first)).toBe(true);
  });

  it("adds a branch beside a failed reply that has text, which can be continued again", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    const written = (await store.rewrite(opened, opened.path.peek()[1] as string, "my own text")) as string;
    const start = server.start.bind(server);
    server.start = async () => Promise.reject(new ApiError("away", 0, "unreachable"));
    await store.continueReply(opened, written);
    expect(opened.message(written).peek()).toMatchObject({ state: "failed", errorCode: "unreachable", content: "my own text" });
    server.start = start;
    await store.retry(opened, written);
    expect(opened.tree.siblings(written)).toHaveLength(3);
    await store.flush();
    expect((await database.message(written))?.content).toBe("my own text");
    await store.continueReply(opened, written);
    expect(opened.message(written).peek()).toMatchObject({ state: "done", content: 'my own textre: "my own text"' });
    expect(opened.message(written).peek().errorCode).toBeUndefined();
  });

  it("continues a reply once, however often it is asked to", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    const id = opened.path.peek()[1] as string;
    opened.put({ ...opened.message(id).peek(), state: "stopped", content: "begun " });
    await Promise.all([store.continueReply(opened, id), store.continueReply(opened, id)]);
    expect(server.bodies).toHaveLength(2);
  });

  /** Messages of other tabs to a tab that sleeps; each is taken when it wakes up. */
  const sleeping = async (id: string): Promise<[OpenConversation, () => Promise<void>, Array<{ kind: string }>]> => {
    const channel = new TabChannel(`test-${count}`);
    const other = new ConversationStore(database, server, channel);
    stores.push(other);
    await other.load();
    const opened = (await other.open(id)) as OpenConversation;
    const take = channel.onMessage;
    const waiting: Parameters<typeof take>[0][] = [];
    channel.onMessage = (message) => void waiting.push(message);
    const wake = async (): Promise<void> => {
      for (const message of waiting.splice(0)) take(message);
      await other.flush();
    };
    return [opened, wake, waiting];
  };

  it("keeps a conversation that was taken back when a tab hears of its deletion late", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    await store.flush();
    const [, wake, waiting] = await sleeping(opened.id);
    for (const _ of [1, 2]) await (await store.delete(opened.id))();
    await until(() => waiting.filter((one) => one.kind === "list").length === 2);
    await wake();
    expect(await database.messages(opened.id)).toHaveLength(2);
    expect(await database.conversation(opened.id)).toMatchObject({ title: "one", generation: 2 });
  });

  it("keeps a branch that was taken back when a tab hears of its deletion late", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    await store.flush();
    const [theirs, wake, waiting] = await sleeping(opened.id);
    const reply = opened.path.peek()[1] as string;
    await (await store.deleteBranch(opened, reply))();
    await until(() => waiting.some((one) => one.kind === "message"));
    await wake();
    expect(await database.messages(opened.id)).toHaveLength(2);
    expect(contents(theirs)).toEqual(contents(opened));
    await store.deleteBranch(opened, reply);
    await until(() => waiting.some((one) => one.kind === "removed"));
    await wake();
    expect(theirs.path.peek()).toHaveLength(1);
  });

  it("takes back the deleted branch alone, and not what was deleted after it", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    await store.send(opened, null, "two", []);
    const [one, two] = opened.tree.siblings(opened.path.peek()[0] as string) as [string, string];
    const undo = await store.deleteBranch(opened, two);
    await store.deleteBranch(opened, one);
    await undo();
    expect(opened.all().map((message) => message.content)).toEqual(["two", 're: "two"']);
  });

  it("takes back messages of the same time in their order, and none whose parent is gone", async () => {
    const messages = Array.from({ length: 12 }, (_, at) => ({
      id: String(at), parent: at ? String(at - 1) : null, role: at % 2 ? "assistant" : "user", content: `m${at}`, state: "done",
    })); // prettier-ignore
    const file = { format: "paceline-conversations", version: 1, conversations: [{ conversation: { title: "x" }, messages }] };
    const [imported] = parseImport(JSON.stringify(file));
    await store.add([imported as NonNullable<typeof imported>]);
    const opened = (await store.open(imported?.conversation.id ?? "")) as OpenConversation;
    const path = opened.path.peek();
    await (await store.deleteBranch(opened, path[1] as string))();
    expect(opened.path.peek()).toEqual(path);
    const undo = await store.deleteBranch(opened, path[5] as string);
    await store.deleteBranch(opened, path[1] as string);
    await undo();
    expect(opened.path.peek()).toEqual(path.slice(0, 1));
  });

  it("continues a reply that was stopped, with a new limit and the counts of both parts", async () => {
    const opened = store.create();
    store.update(opened, { parameters: { max_tokens: 10 } });
    await store.send(opened, null, "one", []);
    const id = opened.path.peek()[1] as string;
    opened.put({ ...opened.message(id).peek(), state: "stopped", content: "begun ", usage: { prompt_tokens: 4, completion_tokens: 9 } });
    const usage = { choices: [], usage: { prompt_tokens: 13, completion_tokens: 2, prompt_tokens_details: { cached_tokens: 12 } } };
    server.start = async (body) => {
      server.bodies.push(body as Record<string, any>);
      return new Response(`${event("and ended")}data: ${JSON.stringify(usage)}\n\ndata: [DONE]\n\n`);
    };
    await store.continueReply(opened, id);
    expect(server.bodies.at(-1)).toMatchObject({ continue_final_message: true, max_tokens: 10 });
    expect(server.bodies.at(-1)?.["messages"].at(-1)).toEqual({ role: "assistant", content: "begun " });
    expect(opened.message(id).peek()).toMatchObject({
      state: "done", content: "begun and ended", numStreams: 2,
      usage: { prompt_tokens: 4, completion_tokens: 11, prompt_tokens_details: { cached_tokens: 4 } },
    }); // prettier-ignore
    store.update(opened, { schema: "{}" });
    await store.continueReply(opened, id); // a schema begins at the first character
    expect(server.bodies).toHaveLength(2);
  });

  it("keeps a text that a person wrote beside a reply, and lets the model continue it", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    const written = (await store.rewrite(opened, opened.path.peek()[1] as string, "I say")) as string;
    expect(contents(opened)).toEqual(["one", "I say"]);
    expect(opened.tree.siblings(written)).toHaveLength(2);
    expect(server.bodies).toHaveLength(1);
    expect(opened.message(written).peek().notes).toEqual(["You wrote this text."]);
    await store.continueReply(opened, written);
    expect(opened.message(written).peek().notes).toEqual(["You wrote the beginning of this text."]);
    expect(server.bodies.at(-1)?.["messages"].at(-1)).toMatchObject({ role: "assistant", content: "I say" });
    expect(contents(opened)[1]).toMatch(/^I say./);
  });

  it("writes several samples with other settings, which a retry keeps", async () => {
    const opened = store.create("m");
    store.update(opened, { parameters: { temperature: 0, seed: 7, top_k: 5 } });
    await store.send(opened, null, "one", []);
    await store.reply(opened, opened.path.peek()[0] as string, { model: "n", parameters: { temperature: 2 } }, 3);
    const sent = server.bodies.slice(1);
    expect(sent.map((body) => [body["model"], body["temperature"], body["top_k"], body["seed"]])).toEqual([7, 8, 9].map((seed) => ["n", 2, 5, seed]));
    const last = opened.path.peek()[1] as string;
    expect(opened.tree.siblings(last)).toHaveLength(4);
    await store.retry(opened, last);
    expect(server.bodies.at(-1)).toMatchObject({ model: "n", temperature: 2, seed: 9 });
    expect(opened.facts.peek()).toMatchObject({ model: "m", parameters: { temperature: 0 } });
  });

  it("sends no message before the one that begins the context, until all are sent again", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    await store.send(opened, opened.path.peek().at(-1) ?? null, "two", []);
    const second = opened.path.peek()[2] as string;
    store.beginContext(opened, second, true);
    await store.send(opened, opened.path.peek().at(-1) ?? null, "three", []);
    const sent = (): string[] => server.bodies.at(-1)?.["messages"].map((one: { content: string }) => one.content);
    expect(sent()).toEqual(["two", 're: "two"', "three"]);
    expect(contents(opened)).toHaveLength(6);
    await store.flush();
    expect((await database.message(second))?.contextSince).toBeGreaterThan(0);
    expect(parseImport(exportText(await store.everything()))[0]?.messages.filter((one) => one.contextSince)).toHaveLength(1);
    store.beginContext(opened, second, false);
    await store.reply(opened, opened.path.peek()[4] as string);
    expect(sent()).toHaveLength(5);
  });

  it("forks a conversation as its summary, which the model is sent in place of the messages", async () => {
    const opened = store.create("m");
    store.update(opened, { system: "s" });
    await store.send(opened, null, "one", []);
    const forked = await store.forkWithSummary(opened, " They said one. ");
    await store.send(forked, forked.path.peek().at(-1) ?? null, "two", []);
    expect(server.bodies.at(-1)).toMatchObject({ model: "m" });
    const sent = server.bodies.at(-1)?.["messages"];
    expect(sent.map((one: { role: string }) => one.role)).toEqual(["system", "user", "assistant", "user"]);
    expect(sent[1].content).toMatch(/summary of our conversation so far:\n\nThey said one\.$/);
    expect(contents(opened)).toEqual(["one", 're: "one"']);
    await store.flush();
    expect((await database.conversations()).map((one) => one.title)).toContain("one (summary)");
  });

  it("stops a reply that another tab generates", async () => {
    server = new Endless();
    const [writing, other] = [newStore(), newStore()];
    const opened = writing.create();
    const sending = writing.send(opened, null, "go on", []);
    await until(async () => (await database.messages(opened.id)).some((one) => one.content.length > 20));
    other.stop(opened.path.peek().at(-1) as string);
    await sending;
    expect(opened.message(opened.path.peek().at(-1) as string).peek().state).toBe("stopped");
  });

  it("goes on with a reply once the server takes the key again", async () => {
    const opened = store.create();
    await store.send(opened, null, "x", []);
    await store.flush();
    const id = opened.path.peek().at(-1) as string;
    await database.saveMessage({ ...opened.message(id).peek(), content: "begun, ", state: "streaming", stream: { id: "s", offset: 9 } });
    const resume = server.resume.bind(server);
    server.resume = async () => Promise.reject(new ApiError("no such key", 401, "invalid_api_key"));
    const again = newStore();
    await again.load();
    const read = (await again.open(opened.id)) as OpenConversation;
    await until(() => read.message(id).peek().state === "failed");
    expect(read.message(id).peek()).toMatchObject({ error: "no such key", stream: { id: "s", offset: 9 } });
    await again.flush();
    const later = newStore();
    await later.load();
    const unasked = (await later.open(opened.id)) as OpenConversation;
    await new Promise((resolve) => setTimeout(resolve, 20));
    expect(unasked.message(id).peek().state).toBe("failed"); // it is not asked for again by itself
    server.resume = resume;
    await again.goOn(read, id);
    expect(read.message(id).peek()).toMatchObject({ content: "begun, rest", state: "done" });
    expect(read.message(id).peek().error).toBeUndefined();
  });

  it("exports a message whose parent was lost as the first of a conversation", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    await store.flush();
    await database.deleteMessages([opened.path.peek()[0] as string]);
    const [imported] = parseImport(exportText(await newStore().everything()));
    expect(imported?.messages.map((one) => one.parent)).toEqual([null]);
  });

  it("saves a conversation as it grows, and reads it again", async () => {
    const opened = store.create();
    await store.send(opened, null, "hello\nthere", []);
    await store.send(opened, opened.path.peek().at(-1) ?? null, "more", []);
    await store.flush();
    const again = newStore();
    await again.load();
    expect(again.list.peek().map((one) => one.title)).toEqual(["hello"]);
    const read = await again.open(opened.id);
    expect(read && contents(read)).toEqual(["hello\nthere", 're: "hello\\nthere"', "more", 're: "more"']);
  });

  it("saves nothing of a conversation without messages", async () => {
    const opened = store.create("m");
    store.update(opened, { system: "s" });
    expect(await database.conversations()).toEqual([]);
    await store.send(opened, null, "x", []);
    expect(server.bodies[0]).toMatchObject({ model: "m", stream: true, messages: [{ role: "system", content: "s" }, { role: "user" }] });
  });

  it("edits a message as a branch, and sends that branch alone", async () => {
    const opened = store.create();
    await store.send(opened, null, "first", []);
    await store.send(opened, null, "second", []);
    expect(contents(opened)).toEqual(["second", 're: "second"']);
    expect(server.bodies[1]?.["messages"]).toHaveLength(1);
    const first = opened.tree.siblings(opened.path.peek()[0] as string)[0] as string;
    store.choose(opened, first);
    expect(contents(opened)).toEqual(["first", 're: "first"']);
    await store.flush();
    const saved = await database.conversation(opened.id);
    expect(saved?.chosen[""]).toBe(first);
  });

  it("forks a path into a conversation of its own", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    const forked = await store.fork(opened, opened.path.peek()[0] as string);
    expect(contents(forked)).toEqual(["one"]);
    await store.send(forked, forked.path.peek()[0] ?? null, "two", []);
    expect(contents(opened)).toHaveLength(2);
    expect((await database.conversations()).length).toBe(2);
  });

  it("sends images, sounds, earlier thinking and tool results as the API takes them", async () => {
    const opened = store.create();
    store.update(opened, { tools: '[{"type": "function"}]', schema: '{"type": "object"}', parameters: { temperature: 0 } });
    await store.send(opened, null, "look", [
      { kind: "image", name: "a.png", url: "data:image/png;base64,AAAA" },
      { kind: "audio", name: "a.wav", url: "data:audio/wav;base64,BBBB" },
    ]);
    expect(server.bodies[0]).toMatchObject({
      temperature: 0,
      tools: [{ type: "function" }],
      response_format: { type: "json_schema", json_schema: { schema: { type: "object" } } },
      messages: [
        {
          content: [
            { type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } },
            { type: "input_audio", input_audio: { data: "BBBB", format: "wav" } },
            { type: "text", text: "look" },
          ],
        },
      ],
    });
    const reply = opened.path.peek().at(-1) as string;
    opened.put({ ...opened.message(reply).peek(), reasoning: "hm", toolCalls: [{ id: "c", name: "f", arguments: "{}" }] });
    await store.sendResults(opened, reply, new Map([["c", "rain"]]));
    expect(server.bodies[1]?.["messages"].slice(1)).toMatchObject([
      { role: "assistant", reasoning_content: "hm", tool_calls: [{ id: "c", function: { name: "f" } }] },
      { role: "tool", tool_call_id: "c", content: "rain" },
    ]);
  });

  it("sends the texts of files before the message, and as parts only beside images", async () => {
    const opened = store.create();
    const file = { kind: "text", name: 'a "b".py', text: "x = 1\n\n", tokens: 3 } as const;
    await store.send(opened, null, "look", [file]);
    const text = '<file name="a \\"b\\".py">\nx = 1\n</file>\n\nlook';
    expect(server.bodies.at(-1)?.["messages"]).toEqual([{ role: "user", content: text }]);
    await store.send(opened, null, "look", [file, { kind: "image", name: "a.png", url: "data:image/png;base64,AAAA" }]);
    expect(server.bodies.at(-1)?.["messages"][0].content).toEqual([
      { type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } },
      { type: "text", text },
    ]);
  });

  it("goes on with a reply that was being generated when the page was left", async () => {
    const opened = store.create();
    await store.send(opened, null, "x", []);
    const id = opened.path.peek().at(-1) as string;
    await database.saveMessage({ ...opened.message(id).peek(), content: "begun, ", state: "streaming", stream: { id: "s", offset: 9 } });
    const again = newStore();
    await again.load();
    const read = await again.open(opened.id);
    while (again.busy.value.size || read?.message(id).peek().state === "streaming") await new Promise((resolve) => setTimeout(resolve, 5));
    expect(read?.message(id).peek()).toMatchObject({ content: "begun, rest", state: "done" });
  });

  it("shows another tab's messages as they are saved", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    await store.flush();
    const other = newStore();
    await other.load();
    const theirs = await other.open(opened.id);
    await store.send(opened, opened.path.peek().at(-1) ?? null, "two", []);
    await store.flush();
    while ((theirs?.path.peek().length ?? 0) < 4) await new Promise((resolve) => setTimeout(resolve, 5));
    expect(theirs && contents(theirs).slice(2)).toEqual(["two", 're: "two"']);
    expect(other.list.peek()).toHaveLength(1);
  });

  it("deletes a branch and a conversation for good", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    await store.deleteBranch(opened, opened.path.peek()[1] as string);
    expect(contents(opened)).toEqual(["one"]);
    expect(await database.messages(opened.id)).toHaveLength(1);
    await store.delete(opened.id);
    expect(await database.messages(opened.id)).toEqual([]);
    expect(store.list.peek()).toEqual([]);
  });

  it("takes back a deleted branch and a deleted conversation, here and in other tabs", async () => {
    const [opened, other, theirs] = await inTwoTabs();
    await store.send(opened, null, "a branch", []);
    const [first] = opened.path.peek() as [string];
    await until(() => theirs.tree.size === 4);
    const undo = await store.deleteBranch(opened, first);
    await until(() => theirs.tree.size === 2);
    await undo();
    expect(contents(opened)).toEqual(["a branch", 're: "a branch"']);
    await until(() => theirs.tree.size === 4);
    expect(await database.messages(opened.id)).toHaveLength(4);
    const undoAll = await store.delete(opened.id);
    await until(() => theirs.isDeleted.peek());
    await until(() => other.list.peek().length === 0);
    await undoAll();
    const again = (await store.open(opened.id)) as OpenConversation;
    expect(contents(again)).toEqual(["a branch", 're: "a branch"']);
    await until(() => other.list.peek().length === 1);
  });

  it("finds lines of messages by a text in any case, and shows their branch", async () => {
    const opened = store.create();
    await store.send(opened, null, "one\nThe quick brown Fox", []);
    await store.send(opened, null, `${"x".repeat(60)} fox`, []);
    await store.flush();
    const found = await store.search("fox");
    expect(found.map((one) => one.line)).toContain("The quick brown Fox");
    expect(found.map((one) => one.line)).toContain(`…${"x".repeat(29)} fox`);
    expect(found.every((one) => one.conversation === opened.id && one.title === "one")).toBe(true);
    const hit = found.find((one) => one.line === "The quick brown Fox");
    await store.reveal(hit as (typeof found)[0]);
    expect(contents(opened)[0]).toContain("quick");
    expect(await store.search("no such text")).toEqual([]);
  });

  it("keeps pins", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    await store.pin(opened.id, true);
    await store.flush();
    expect((await database.conversation(opened.id))?.isPinned).toBe(true);
    expect(parseImport(exportText(await store.everything()))[0]?.conversation.isPinned).toBe(true);
  });

  it("imports all conversations of a file or none", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    const [good] = parseImport(exportText(await store.everything()));
    const bad = { ...good, conversation: { ...good?.conversation, id: () => undefined } };
    await expect(store.add([good, bad] as unknown as Parameters<typeof store.add>[0])).rejects.toThrow();
    expect(await database.conversations()).toHaveLength(1);
    expect(store.list.peek()).toHaveLength(1);
  });

  it("closes the database for a newer version of the page", async () => {
    const onOutdated = vi.fn();
    await ConversationDatabase.open("upgraded", onOutdated);
    const newer = await openDB("upgraded", 2); // waits as long as the older version is open
    expect(onOutdated).toHaveBeenCalledTimes(1);
    newer.close();
  });

  it("exports everything and imports it beside what there is", async () => {
    const opened = store.create();
    await store.send(opened, null, "one", []);
    await store.add(parseImport(exportText(await store.everything())));
    expect(store.list.peek()).toHaveLength(2);
    expect(await database.conversations()).toHaveLength(2);
  });
});
