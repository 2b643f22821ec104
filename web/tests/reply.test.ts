import { describe, expect, it } from "vitest";
import { ApiError } from "../src/api/errors";
import { askForKey, keyQuestion } from "../src/api/key";
import type { Resumed } from "../src/api/resumable";
import type { Begun } from "../src/conversations/chat_body";
import type { Message } from "../src/conversations/model";
import { Reply, type ReplyHost, type Transport } from "../src/conversations/reply";

const event = (body: object): string => `data: ${JSON.stringify(body)}\n\n`;
const text = (content: string, tokens = 1): string =>
  event({ choices: [{ delta: { content } }], usage: { prompt_tokens: 5, completion_tokens: tokens } });
const thought = (reasoning_content: string): string => event({ choices: [{ delta: { reasoning_content } }] });
const end = event({ choices: [{ delta: {}, finish_reason: "stop" }] });
const DONE = "data: [DONE]\n\n";

/** A response with these parts; an Error breaks the connection there, null leaves it open. */
function response(...parts: Array<string | Error | null>): Response {
  const rest = [...parts];
  const body = new ReadableStream<Uint8Array>({
    pull(controller) {
      const part = rest.shift();
      if (part === null) return new Promise(() => undefined);
      if (part === undefined) controller.close();
      else if (part instanceof Error) controller.error(part);
      else controller.enqueue(new TextEncoder().encode(part));
      return undefined;
    },
  });
  return new Response(body);
}

class Server implements Transport {
  bodies: unknown[] = [];
  ids: string[] = [];
  resumed: Array<[string, number]> = [];
  ended: string[] = [];
  waits: number[] = [];

  constructor(
    private readonly starts: Array<Response | Error>,
    private readonly resumes: Array<Resumed | Error> = [],
  ) {}

  async start(body: unknown, id: string): Promise<Response> {
    this.bodies.push(body);
    this.ids.push(id);
    const next = this.starts.shift();
    if (!next) throw new Error("nothing more was expected");
    if (next instanceof Error) throw next;
    return next;
  }

  async resume(id: string, offset: number): Promise<Resumed> {
    this.resumed.push([id, offset]);
    const next = this.resumes.shift();
    if (!next) throw new Error("nothing more was expected");
    if (next instanceof Error) throw next;
    return next;
  }

  async end(id: string): Promise<void> {
    this.ended.push(id);
  }

  async wait(ms: number): Promise<void> {
    this.waits.push(ms);
  }
}

const fresh = (more: Partial<Message> = {}): Message => ({
  id: "m", conversation: "c", parent: "p", role: "assistant", content: "", createdAt: 1, state: "streaming", ...more,
}); // prettier-ignore

async function run(server: Server, message = fresh(), continues = true): Promise<{ last: Message; states: Message[]; reply: Reply }> {
  const states: Message[] = [];
  const host: ReplyHost = {
    body: (begun?: Begun) => ({ begun }),
    canContinue: () => continues,
    changed: (now) => states.push(now),
  };
  const reply = new Reply(message, host, server);
  await reply.run();
  return { last: states.at(-1) as Message, states, reply };
}

const gone: Resumed = { kind: "gone" };
const away: Resumed = { kind: "unreachable", error: new ApiError("away", 0) };
const stream = (...parts: Array<string | Error>): Resumed => ({ kind: "stream", response: response(...parts) });

describe("Reply", () => {
  it("is sent again when the server invites to, after the time that it names", async () => {
    const busy = (retryAfterMs: number | null): ApiError => new ApiError("too many", 429, "queue_full", "", retryAfterMs);
    const server = new Server([busy(7000), busy(3_600_000), response(text("a"), end, DONE)]);
    expect((await run(server)).last).toMatchObject({ content: "a", state: "done" });
    expect(server.waits).toEqual([7000, 60_000]);
    expect((await run(new Server([busy(null)]))).last).toMatchObject({ state: "failed", errorCode: "queue_full" });
  });

  it("puts text, thinking, calls and counts together", async () => {
    const call = (delta: object): string => event({ choices: [{ delta: { tool_calls: [delta] } }] });
    const server = new Server([
      response(
        thought("hm"), text("a"), text("b", 2),
        call({ index: 0, id: "c1", function: { name: "f", arguments: '{"x"' } }),
        call({ index: 0, function: { arguments: ":1}" } }),
        event({ choices: [{ delta: {}, finish_reason: "tool_calls" }] }),
        event({ choices: [], usage: { prompt_tokens: 5, completion_tokens: 7 }, timings: { predicted_per_second: 9 }, warnings: ["w"] }),
        DONE,
      ),
    ]); // prettier-ignore
    const { last } = await run(server);
    expect(last).toMatchObject({
      content: "ab", reasoning: "hm", state: "done", finishReason: "tool_calls", notes: ["w"],
      toolCalls: [{ id: "c1", name: "f", arguments: '{"x":1}' }], usage: { completion_tokens: 7 },
    }); // prettier-ignore
    expect(last.stream).toBeUndefined();
  });

  it("reads on from the last whole event when the connection breaks", async () => {
    const first = text("one ");
    const server = new Server(
      [response(first, "data: {\"choi", new Error("reset"))],
      [away, away, stream(text("two"), end, DONE)],
    );
    const { last } = await run(server);
    expect(last).toMatchObject({ content: "one two", state: "done" });
    expect(server.resumed.map(([, offset]) => offset)).toEqual([first.length, first.length, first.length]);
    expect(server.waits).toEqual([300, 600]);
    expect(last.notes?.[0]).toMatch(/without a gap/);
  });

  it("takes a stream that ends without its mark for broken", async () => {
    const server = new Server([response(text("one "))], [stream(text("two"), end, DONE)]);
    expect((await run(server)).last.content).toBe("one two");
  });

  it("lets the model continue the text where the server has lost the stream, and counts all tokens", async () => {
    const server = new Server([response(text("one ", 3), new Error("reset")), response(text("two", 2), end, DONE)], [away, gone]);
    const { last } = await run(server);
    expect(server.bodies[1]).toEqual({ begun: { content: "one ", reasoning: "", tokens: 3 } });
    expect(last).toMatchObject({ content: "one two", state: "done" });
    expect(last.usage?.completion_tokens).toBe(5);
    expect(last.notes?.[0]).toMatch(/went on from where it was/);
    expect(new Set(server.ids).size).toBe(2);
  });

  it("starts again what cannot be continued, and says so", async () => {
    const server = new Server([response(thought("hm"), new Error("reset")), response(text("all"), end, DONE)], [gone]);
    const { last } = await run(server, fresh(), false);
    expect(server.bodies[1]).toEqual({ begun: undefined });
    expect(last.content).toBe("all");
    expect(last.reasoning).toBeUndefined();
    expect(last.notes?.[0]).toMatch(/started again/);
  });

  it("goes on elsewhere when the server says that it shuts down, and waits for it to come back", async () => {
    const server = new Server([
      response(text("one "), event({ error: { message: "bye", code: "shutdown" } }), DONE),
      new ApiError("draining", 503, "shutdown"),
      new ApiError("away", 0),
      response(text("two"), end, DONE),
    ]);
    const { last } = await run(server);
    expect(last.content).toBe("one two");
    expect(server.waits).toHaveLength(2);
  });

  it("gives up where the server ends one request after the other, and waits longer each time", async () => {
    const died = (): Response => response(event({ error: { message: "the engine died", code: "engine_died" } }), DONE);
    const server = new Server(Array.from({ length: 9 }, died));
    const { last } = await run(server);
    expect(last).toMatchObject({ state: "failed", error: "the engine died" });
    expect(server.bodies).toHaveLength(6);
    expect(server.waits).toEqual([600, 1200, 2400, 4000]);
  });

  it("does not hurry where connections bring nothing", async () => {
    const empty = (): Resumed => stream();
    const server = new Server([response(text("one "))], [empty(), empty(), empty(), stream(text("two"), end, DONE)]);
    expect((await run(server)).last).toMatchObject({ content: "one two", state: "done" });
    expect(server.waits).toEqual([600, 1200, 2400]);
  });

  it("takes no other error for the word that a stream is gone", async () => {
    const server = new Server([response(text("one "))], [new ApiError("this key is not known", 401, "invalid_api_key")]);
    const { last } = await run(server);
    expect(last).toMatchObject({ content: "one ", state: "failed", error: "this key is not known" });
    expect(server.bodies).toHaveLength(1);
  });

  it("goes on with the reply of a page that was left, and says nothing of it", async () => {
    const server = new Server([], [stream(text("two"), end, DONE)]);
    const { last } = await run(server, fresh({ content: "one ", stream: { id: "web-m.1", offset: 77 } }));
    expect(server.resumed).toEqual([["web-m.1", 77]]);
    expect(last).toMatchObject({ content: "one two", state: "done" });
    expect(last.notes).toBeUndefined();
  });

  it("needs nothing more where only the counts are missing", async () => {
    const server = new Server([response(text("one"), end, new Error("reset"))], [gone]);
    expect((await run(server)).last).toMatchObject({ content: "one", state: "done" });
    expect(server.bodies).toHaveLength(1);
  });

  it("keeps what there is when the stream ends with an error", async () => {
    const server = new Server([response(text("one"), event({ error: { message: "too late", code: "deadline" } }), DONE)]);
    expect((await run(server)).last).toMatchObject({ content: "one", state: "failed", error: "too late" });
  });

  it("fails with the server's words where the request is refused, and at once where the server is not there", async () => {
    const refused = new ApiError("too long", 400, "context_length_exceeded", "messages");
    expect((await run(new Server([refused]))).last).toMatchObject({ state: "failed", error: "too long (messages)" });
    expect((await run(new Server([new ApiError("not there", 0)]))).last).toMatchObject({ state: "failed" });
  });

  it("waits for a model that loads", async () => {
    const server = new Server([new ApiError("Loading model", 503, "loading"), response(text("one"), end, DONE)]);
    expect((await run(server)).last.content).toBe("one");
    expect(server.waits).toEqual([300]);
  });

  it("ends at once when it is stopped, keeps its text, and ends the request", async () => {
    const server = new Server([]);
    let states: Message[] = [];
    server.start = async (_body, _id, abort?: AbortSignal) => {
      const open = response(text("one"), null);
      const reader = open.body?.getReader();
      return new Response(
        new ReadableStream<Uint8Array>({
          async start(controller) {
            const part = await reader?.read();
            if (part?.value) controller.enqueue(part.value);
            abort?.addEventListener("abort", () => controller.error(new DOMException("aborted", "AbortError")));
          },
        }),
      );
    };
    const reply = new Reply(fresh(), { body: () => ({}), canContinue: () => true, changed: (now) => states.push(now) }, server as Transport);
    const running = reply.run();
    while (!states.some((one) => one.content)) await new Promise((resolve) => setTimeout(resolve));
    reply.stop();
    await running;
    expect(states.at(-1)).toMatchObject({ content: "one", state: "stopped" });
    expect(server.ended).toHaveLength(1);
    states = [];
  });

  it("ends a stream of which bytes were lost before it has the text continued", async () => {
    const server = new Server([response(text("one "), new Error("reset")), response(text("two"), end, DONE)], [gone]);
    const { last } = await run(server);
    expect(last).toMatchObject({ content: "one two", state: "done" });
    expect(server.ended).toEqual([server.ids[0]]);
    expect(server.ids[1]).not.toBe(server.ids[0]);
  });

  it("keeps where a stream is while the server says nothing of it, and forgets it where it does", async () => {
    const refused = new ApiError("no such key", 401, "invalid_api_key");
    const first = await run(new Server([], [refused]), fresh({ content: "begun", stream: { id: "s", offset: 7 } }));
    expect(first.last).toMatchObject({ state: "failed", error: "no such key", stream: { id: "s", offset: 7 } });
    const failed = await run(new Server([refused]));
    expect(failed.last.state).toBe("failed");
    expect(failed.last.stream).toBeUndefined();
  });
});

describe("a question for a key", () => {
  it("is over when the request that asks is aborted, and stays while another waits", async () => {
    const [one, other] = [new AbortController(), new AbortController()];
    const asked = askForKey("a key?", one.signal);
    const also = askForKey("a key?", other.signal);
    one.abort();
    await expect(asked).rejects.toMatchObject({ name: "AbortError" });
    expect(keyQuestion.value).toBe("a key?");
    other.abort();
    await expect(also).rejects.toMatchObject({ name: "AbortError" });
    expect(keyQuestion.value).toBeNull();
    expect(() => askForKey("again?", one.signal)).toThrow();
  });
});
