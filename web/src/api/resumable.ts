import { ApiError } from "./errors";
import { request } from "./http";
import { EventParser, type ServerEvent } from "./sse";

/** Why reading a stream ended before its end. */
export class StreamLost extends Error {
  constructor(readonly reason: string) {
    super(reason);
    this.name = "StreamLost";
  }
}

/** Nothing for so long means that the connection is dead: the server sends a comment every ten seconds. */
const SILENCE_MS = 35_000;

const MOST_END_WAIT_MS = 40_000;

/** Read the events of a response up to `[DONE]`. offset: of its first byte in the stream. Throws `StreamLost` without one. */
export async function* readEvents(
  response: Response,
  offset: number,
  silenceMs = SILENCE_MS,
): AsyncGenerator<ServerEvent[]> {
  const body = response.body;
  if (!body) throw new StreamLost("the response has no body");
  const reader = body.getReader();
  const parser = new EventParser(offset);
  let isWhole = false;
  try {
    for (;;) {
      const { done, value } = await beforeSilence(reader, silenceMs);
      if (done) throw new StreamLost("the connection was closed");
      const events = parser.push(value);
      const last = events.findIndex((event) => event.data === "[DONE]");
      if (last >= 0) {
        isWhole = true;
        if (last > 0) yield events.slice(0, last);
        return;
      }
      if (events.length) yield events;
    }
  } finally {
    // The end of a whole response is at hand; a request that is given up may have failed already.
    (isWhole ? drained(reader) : reader.cancel()).catch(() => undefined);
  }
}

async function drained(reader: ReadableStreamDefaultReader<Uint8Array>): Promise<void> {
  while (!(await reader.read()).done);
}

/** Start the stream of a request. id: under which it can be read again. */
export function startStream(path: string, body: unknown, id: string, abort: AbortSignal): Promise<Response> {
  const headers = { "content-type": "application/json", "x-conversation-id": id };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal: abort });
}

/** The state of a stream: it can be read on; it is gone; the server does not respond. */
export type Resumed = { kind: "stream"; response: Response } | { kind: "gone" } | { kind: "unreachable"; error: ApiError };

// The server's statuses for a missing stream, or a missing part of a stream; other statuses are not about the stream.
const GONE = new Set(["stream_not_found", "offset_lost"]);

/** Read a stream on from a byte. Throws an `ApiError` that is not about the stream, for example about a key. */
export async function resumeStream(id: string, offset: number, abort: AbortSignal): Promise<Resumed> {
  try {
    const path = `v1/stream?conv_id=${encodeURIComponent(id)}&from=${offset}`;
    return { kind: "stream", response: await request(path, { signal: abort }) };
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.isTemporary) return { kind: "unreachable", error };
    if (GONE.has(error.code)) return { kind: "gone" };
    throw error;
  }
}

/**
 * End a stream and its request. While the server cannot be reached it is tried again for a while: a stream without a reader
 * would run to its end.
 */
export async function endStream(id: string): Promise<void> {
  for (let wait = 250; wait < MOST_END_WAIT_MS; wait *= 2) {
    try {
      await request(`v1/stream?conv_id=${encodeURIComponent(id)}`, { method: "DELETE", keepalive: true });
      return;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (!error.isTemporary) return;
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

async function beforeSilence(
  reader: ReadableStreamDefaultReader<Uint8Array>,
  silenceMs: number,
): Promise<ReadableStreamReadResult<Uint8Array>> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const silence = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new StreamLost("nothing came for a while")), silenceMs);
  });
  try {
    return await Promise.race([reader.read(), silence]);
  } catch (error) {
    if (error instanceof StreamLost || (error instanceof DOMException && error.name === "AbortError")) throw error;
    throw new StreamLost("the connection broke");
  } finally {
    clearTimeout(timer);
  }
}
