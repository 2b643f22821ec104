import { signal } from "@preact/signals";
import { ApiError, errorOfBody, messageOf } from "../api/errors";
import { type Resumed, StreamLost, endStream, readEvents, resumeStream, startStream } from "../api/resumable";
import type { ServerEvent } from "../api/sse";
import type { ChatEvent } from "../api/types";
import type { Begun } from "./chat_body";
import { emptied, withEvent, withNote } from "./delta";
import type { Message } from "./model";

/** The reason why a reply waits. share: of the prompt that is computed, 0 to 1. */
export type Phase =
  | { kind: "sending" }
  | { kind: "reading"; share: number; total: number }
  | { kind: "writing" }
  | { kind: "reconnecting" }
  | { kind: "loading"; message: string };

/** How a reply reaches the server; tests have another one. */
export interface Transport {
  start(body: unknown, id: string, abort: AbortSignal): Promise<Response>;
  resume(id: string, offset: number, abort: AbortSignal): Promise<Resumed>;
  end(id: string): Promise<void>;
  wait(ms: number, abort: AbortSignal): Promise<void>;
}

/** The source of a reply's bodies, and the receiver of its text. */
export interface ReplyHost {
  /** The body of its request; with `begun` of a request that continues it. */
  body(begun?: Begun): Record<string, unknown>;
  canContinue(message: Message): boolean;
  /** Called with each new state of the message. isFinal: it is the last one. */
  changed(message: Message, isFinal: boolean): void;
}

const FIRST_WAIT_MS = 300;
const MOST_WAIT_MS = 4000;
const MOST_INVITED_MS = 60_000; // until a request that was refused is sent again, whatever the server says
const MOST_FRUITLESS = 5; // requests in a row of which the server says that it ends them, without anything new
// Ends of a stream of a server that goes away: its text goes on elsewhere.
const ENDED_BY_SERVER = new Set(["shutdown", "engine_stopped", "engine_died", "model_unloaded", "offset_lost"]);

const BUSY = "the server is busy. The message is sent again by itself.";
const CONTINUED = "The server lost this stream, as it does when it is restarted. The reply went on from where it was.";
const STARTED_AGAIN = "The server lost this stream, as it does when it is restarted. The reply was started again.";
const RECONNECTED = "The connection was lost for a while. The stream went on without a gap.";

class ServerGone extends Error {
  constructor(readonly reason: Error) {
    super(reason.message);
  }
}

/**
 * One reply while it is generated. Whatever happens to the connection, it goes on: by reading the stream on from the last
 * byte, or, where the server does not have it any more, by letting the model continue the text.
 */
export class Reply {
  readonly phase = signal<Phase>({ kind: "sending" });
  #abort = new AbortController();
  #tokensBefore = 0;
  #tokensEarlier = 0; // of these, the tokens before a person asked to continue: they are not of the request's limit
  #numFruitless = 0; // connections and requests since something new came
  #isAccepted = false; // the server has begun to respond: from then on it is worth to wait for it
  #isStreamKnown = true; // the state of the stream; else it is kept, to go on later

  constructor(
    private message: Message,
    private readonly host: ReplyHost,
    private readonly transport: Transport = HTTP,
  ) {}

  get id(): string {
    return this.message.id;
  }

  /** Generate the whole reply, go on with an interrupted reply, or continue the text of one that ended. Never throws. */
  async run(isContinued = false): Promise<void> {
    try {
      if (isContinued) {
        this.#tokensBefore = this.#tokensEarlier = this.message.usage?.completion_tokens ?? 0;
        await this.#start(this.#begun());
      } else await (this.message.stream ? this.#goOn() : this.#start());
      this.#finish({ state: "done" });
    } catch (error) {
      if (this.#abort.signal.aborted) this.#finish({ state: "stopped" });
      else this.#finish({ state: "failed", error: messageOf(error), ...(error instanceof ApiError && { errorCode: error.code }) });
    }
  }

  /** End the reply; its text stays. */
  stop(): void {
    this.#abort.abort();
    if (this.message.stream) void this.transport.end(this.message.stream.id);
  }

  async #start(begun?: Begun): Promise<void> {
    const before = this.message.numStreams ?? Number(/\.(\d+)$/.exec(this.message.stream?.id ?? "")?.[1] ?? 0);
    const id = `web-${this.message.id}.${before + 1}`;
    this.#change({ ...this.message, numStreams: before + 1, stream: { id, offset: 0 } });
    const response = await this.#started(begun, id);
    this.#isAccepted = true;
    await this.#read(response, 0);
  }

  async #started(begun: Begun | undefined, id: string): Promise<Response> {
    const body = this.host.body(begun);
    for (let wait = FIRST_WAIT_MS; ; wait = Math.min(2 * wait, MOST_WAIT_MS)) {
      try {
        return await this.transport.start(body, id, this.#abort.signal);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        const isInvited = error.status === 429 && error.retryAfterMs !== null;
        const isWorthIt = error.code === "loading" || error.status === 503 || isInvited;
        if (!isWorthIt && !(this.#isAccepted && error.isTemporary)) throw error;
        this.phase.value = { kind: "loading", message: error.status === 429 ? BUSY : messageOf(error) };
        await this.transport.wait(Math.max(wait, Math.min(error.retryAfterMs ?? 0, MOST_INVITED_MS)), this.#abort.signal);
      }
    }
  }

  /** isLost: the connection broke under this page; otherwise the page was left. */
  async #goOn(isLost = false): Promise<void> {
    this.#isAccepted = true;
    this.phase.value = { kind: "reconnecting" };
    const position = this.message.stream ?? { id: "", offset: 0 };
    await this.#pause();
    for (let wait = FIRST_WAIT_MS; ; wait = Math.min(2 * wait, MOST_WAIT_MS)) {
      this.#isStreamKnown = false; // an error is of the key or the server, and says nothing of it
      const resumed = await this.transport.resume(position.id, position.offset, this.#abort.signal);
      this.#isStreamKnown = true;
      if (resumed.kind === "gone") return this.#continueText();
      if (resumed.kind === "stream") {
        if (isLost) this.#note(RECONNECTED);
        return this.#read(resumed.response, position.offset);
      }
      await this.transport.wait(wait, this.#abort.signal);
    }
  }

  /** Wait, the longer the more connections have brought nothing. */
  async #pause(): Promise<void> {
    const times = this.#numFruitless++;
    if (times > 0) await this.transport.wait(Math.min(FIRST_WAIT_MS * 2 ** times, MOST_WAIT_MS), this.#abort.signal);
  }

  /** why: how the server has ended the stream; without one it is not there any more. */
  async #continueText(why?: Error): Promise<void> {
    if (this.message.finishReason) return; // all that is missing are counts
    if (this.message.stream) void this.transport.end(this.message.stream.id); // of one that only lost bytes
    if (why) {
      if (this.#numFruitless >= MOST_FRUITLESS) throw why;
      await this.#pause();
    }
    if (this.host.canContinue(this.message)) {
      this.#tokensBefore = this.message.usage?.completion_tokens ?? 0;
      this.#note(CONTINUED);
      return this.#start(this.#begun());
    }
    this.#tokensBefore = this.#tokensEarlier = 0;
    const stream = this.message.stream;
    this.#change({ ...emptied(this.message), ...(stream && { stream }) });
    this.#note(STARTED_AGAIN);
    return this.#start();
  }

  #begun(): Begun {
    return { content: this.message.content, reasoning: this.message.reasoning ?? "", tokens: this.#tokensBefore - this.#tokensEarlier };
  }

  async #read(response: Response, offset: number): Promise<void> {
    try {
      for await (const events of readEvents(response, offset)) this.#take(events);
    } catch (error) {
      if (this.#abort.signal.aborted) throw error;
      if (error instanceof ServerGone) return this.#continueText(error.reason);
      if (!(error instanceof StreamLost)) throw error;
      return this.#goOn(true);
    }
  }

  #take(events: readonly ServerEvent[]): void {
    let next = this.message;
    for (const event of events) {
      const body = JSON.parse(event.data) as ChatEvent;
      if (body.error !== undefined) {
        this.#change(next);
        throw this.#failure(body);
      }
      const before = next;
      next = withEvent(next, body, this.#tokensBefore);
      if (next.content !== before.content || next.reasoning !== before.reasoning) this.#numFruitless = 0;
      this.#show(body);
    }
    const end = events[events.length - 1]?.end ?? 0;
    this.#change({ ...next, stream: { id: next.stream?.id ?? "", offset: end } });
  }

  #failure(event: ChatEvent): Error {
    const error = errorOfBody(event, 200);
    return ENDED_BY_SERVER.has(error.code) ? new ServerGone(error) : error;
  }

  #show(event: ChatEvent): void {
    const progress = event.prompt_progress;
    if (progress) {
      const share = progress.total ? progress.processed / progress.total : 1;
      this.phase.value = { kind: "reading", share, total: progress.total };
    } else if (this.phase.peek().kind !== "writing") {
      this.phase.value = { kind: "writing" };
    }
  }

  #note(note: string): void {
    this.#change({ ...this.message, notes: withNote(this.message.notes, note) });
  }

  #change(message: Message): void {
    this.message = message;
    this.host.changed(message, false);
  }

  #finish(end: Pick<Message, "state" | "error" | "errorCode">): void {
    const { stream, ...rest } = this.message;
    this.message = { ...rest, ...end, ...(!this.#isStreamKnown && end.state === "failed" && stream && { stream }) };
    this.host.changed(this.message, true);
  }
}

const HTTP: Transport = {
  start: (body, id, abort) => startStream("v1/chat/completions", body, id, abort),
  resume: resumeStream,
  end: endStream,
  wait: (ms, abort) =>
    new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, ms);
      abort.addEventListener("abort", () => {
        clearTimeout(timer);
        reject(new DOMException("aborted", "AbortError"));
      });
    }),
};
