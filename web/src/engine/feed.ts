import { signal } from "@preact/signals";
import { ApiError, messageOf } from "../api/errors";
import { request } from "../api/http";
import { EventParser } from "../api/sse";
import { type EngineState, NOTHING, reduce } from "./state";
import type { EngineEvent } from "./types";

export type FeedStatus = { kind: "connecting" } | { kind: "live" } | { kind: "waiting"; message: string } | { kind: "refused"; message: string };

const FIRST_WAIT_MS = 500;
const MOST_WAIT_MS = 5000;

/** The engine's events, read while the view is open and the tab is seen: with it closed, the engine records nothing. */
export class EngineFeed {
  readonly state = signal<EngineState>(NOTHING);
  readonly status = signal<FeedStatus>({ kind: "connecting" });
  #abort: AbortController | null = null;

  /** model: whose engine; empty: the server's default. */
  constructor(private readonly model: string) {}

  /** Read until `close`. Whatever cuts the stream off, it connects again. */
  open(): void {
    if (this.#abort) return;
    this.#abort = new AbortController();
    void this.#run(this.#abort.signal);
  }

  close(): void {
    this.#abort?.abort();
    this.#abort = null;
  }

  async #run(abort: AbortSignal): Promise<void> {
    let wait = FIRST_WAIT_MS;
    while (!abort.aborted) {
      try {
        const response = await request(this.#path(), { signal: abort });
        wait = FIRST_WAIT_MS;
        this.status.value = { kind: "live" };
        await this.#read(response);
        this.status.value = { kind: "waiting", message: endText(this.state.peek().end) };
      } catch (error) {
        if (abort.aborted) return;
        const isFinal = error instanceof ApiError && !error.isTemporary;
        this.status.value = { kind: isFinal ? "refused" : "waiting", message: messageOf(error) };
        if (isFinal) return;
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(2 * wait, MOST_WAIT_MS);
    }
  }

  #path(): string {
    return this.model ? `v1/engine/events?model=${encodeURIComponent(this.model)}` : "v1/engine/events";
  }

  async #read(response: Response): Promise<void> {
    const reader = response.body?.getReader();
    const parser = new EventParser();
    for (;;) {
      const part = await reader?.read();
      if (!part || part.done) return;
      let state = this.state.peek();
      for (const event of parser.push(part.value)) state = reduce(state, event.name, JSON.parse(event.data) as EngineEvent);
      this.state.value = state;
    }
  }
}

function endText(reason: string | null): string {
  switch (reason) {
    case "shutdown":
      return "The server has ended. Waiting for it to come back…";
    case "unloaded":
      return "The model was unloaded. Waiting for it…";
    case "failed":
      return "The engine has failed. Waiting for the server…";
    default:
      return "The connection is lost. Connecting again…";
  }
}
