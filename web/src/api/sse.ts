/** One server-sent event. end: the number of bytes up to its end, from where the parser was started. */
export interface ServerEvent {
  name: string;
  data: string;
  end: number;
}

const LF = 10;
const CR = 13;

/**
 * Cuts the bytes of a stream into events, however they are split up on their way. It counts bytes, so that a stream can be
 * read on from the end of the last whole event.
 */
export class EventParser {
  #rest = new Uint8Array(0);
  #name = "";
  #data: string[] = [];
  #consumed: number;
  readonly #decoder = new TextDecoder();

  /** offset: the number of bytes of the stream before the pushed bytes. */
  constructor(offset = 0) {
    this.#consumed = offset;
  }

  /** Take in bytes and return the events that they complete. */
  push(bytes: Uint8Array): ServerEvent[] {
    const buffer = joined(this.#rest, bytes);
    const events: ServerEvent[] = [];
    let start = 0;
    for (let end = lineEnd(buffer, start); end >= 0; end = lineEnd(buffer, start)) {
      const next = buffer[end] === CR && buffer[end + 1] === LF ? end + 2 : end + 1;
      this.#consumed += next - start;
      const event = this.#line(this.#decoder.decode(buffer.subarray(start, end)));
      if (event) events.push(event);
      start = next;
    }
    this.#rest = buffer.slice(start);
    return events;
  }

  #line(line: string): ServerEvent | null {
    if (line === "") return this.#dispatch();
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#name = value;
    return null;
  }

  #dispatch(): ServerEvent | null {
    const event = { name: this.#name || "message", data: this.#data.join("\n"), end: this.#consumed };
    const isEmpty = this.#data.length === 0;
    this.#name = "";
    this.#data = [];
    return isEmpty ? null : event;
  }
}

function joined(first: Uint8Array, second: Uint8Array): Uint8Array {
  if (first.length === 0) return second;
  const all = new Uint8Array(first.length + second.length);
  all.set(first);
  all.set(second, first.length);
  return all;
}

/** Return the end of the line that begins at `start`; -1: not yet. A CR at the very end waits for a LF that may follow. */
function lineEnd(buffer: Uint8Array, start: number): number {
  for (let at = start; at < buffer.length; at++) {
    if (buffer[at] === LF) return at;
    if (buffer[at] === CR) return at + 1 < buffer.length ? at : -1;
  }
  return -1;
}
