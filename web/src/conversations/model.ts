import type { Timings, ToolCall, Usage } from "../api/types";

export type Role = "user" | "assistant" | "tool";

/** streaming: a reply that is being generated, here or in another tab. stopped: by a person. */
export type MessageState = "done" | "streaming" | "stopped" | "failed";

/** An image or a sound of a message. url: a data URL. */
export interface Attachment {
  kind: "image" | "audio";
  name: string;
  url: string;
}

/** Where the stream of a reply can be read on. offset: bytes whose events are in the message already. */
export interface StreamPosition {
  id: string;
  offset: number;
}

export interface Message {
  id: string;
  conversation: string;
  parent: string | null;
  role: Role;
  content: string;
  createdAt: number;
  state: MessageState;
  reasoning?: string;
  attachments?: Attachment[];
  toolCalls?: ToolCall[];
  /** Of a message of the role tool: the call whose result it is. */
  toolCallId?: string;
  model?: string;
  error?: string;
  /** What a reader has to know about how the reply came about: interruptions, warnings of the server. */
  notes?: string[];
  stream?: StreamPosition;
  usage?: Usage;
  timings?: Timings;
  finishReason?: string;
}

/** Parameters of requests by the names of the API; what is absent is up to the server. */
export type Parameters = Record<string, ParameterValue>;

export type ParameterValue = number | string | boolean | readonly unknown[] | { readonly [name: string]: unknown };

export interface Conversation {
  id: string;
  title: string;
  createdAt: number;
  updatedAt: number;
  /** Empty: the server's only one, or its first. */
  model: string;
  system: string;
  parameters: Parameters;
  /** JSON of a schema that replies conform to; empty: none. */
  schema: string;
  /** JSON of a list of tools that the model may call; empty: none. */
  tools: string;
  /** Which of a message's successors is shown: by the parent's id, "" for the first message. */
  chosen: Record<string, string>;
}

/** Return a new id, also where the page is not in a secure context. */
export function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Return an empty conversation. */
export function newConversation(model = ""): Conversation {
  const now = Date.now();
  return {
    id: newId(),
    title: "",
    createdAt: now,
    updatedAt: now,
    model,
    system: "",
    parameters: {},
    schema: "",
    tools: "",
    chosen: {},
  };
}

/** Return the name of a conversation: its title, or how its first message begins. */
export function titleOf(text: string): string {
  const line = text.trim().split("\n", 1)[0] ?? "";
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}
