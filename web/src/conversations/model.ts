import type { Timings, ToolCall, Usage } from "../api/types";

export type Role = "user" | "assistant" | "tool";

/** streaming: a reply that is being generated, here or in another tab. stopped: by a person. */
export type MessageState = "done" | "streaming" | "stopped" | "failed";

/** An image or a sound of a message. url: a data URL. */
export interface MediaAttachment {
  kind: "image" | "audio";
  name: string;
  url: string;
}

/** The text of a file. tokens: counted by the server; absent until it has. */
export interface TextAttachment {
  kind: "text";
  name: string;
  text: string;
  tokens?: number;
}

export type Attachment = MediaAttachment | TextAttachment;

/** The place at which a reply's stream can be read on. offset: bytes of the events that are in the message already. */
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
  /** For a message of the role tool: the call of the result. */
  toolCallId?: string;
  model?: string;
  error?: string;
  /** The server's code of the error, such as `context_length_exceeded`. */
  errorCode?: string;
  /** Notes for a reader about the making of the reply: interruptions, warnings of the server. */
  notes?: string[];
  stream?: StreamPosition;
  /** Number of streams so far: each has its own id. */
  numStreams?: number;
  /** Settings of this reply in place of the conversation's. */
  overrides?: Overrides;
  usage?: Usage;
  timings?: Timings;
  finishReason?: string;
  /** The time since which earlier messages are not sent any more. */
  contextSince?: number;
  /** How often it was deleted and taken back; absent: never. */
  generation?: number;
}

export interface Overrides {
  model?: string;
  parameters?: Parameters;
}

/** Parameters of requests by the names of the API; the server decides absent parameters. */
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
  /** Whether it stands first in the list. */
  isPinned?: boolean;
  /** How often it was deleted and taken back; absent: never. */
  generation?: number;
  /** The shown successor of a message: by the parent's id, "" for the first message. */
  chosen: Record<string, string>;
}

/** Return a new id, also if the page is not in a secure context. */
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
