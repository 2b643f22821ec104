import type { Message } from "./model";

const CHARACTERS_PER_TOKEN = 3.5; // until a reply has shown the count of this conversation
const KEPT_SHARE = 0.5; // of the context, after the oldest turns were dropped

/** The tokens of a conversation. isExact: counted by the server, else estimated. */
export interface ContextUse {
  tokens: number;
  isExact: boolean;
}

/** Return the messages that are sent, or were at a time: all from the last message on that begins the context. */
export function sentPart(path: readonly Message[], at = Infinity): readonly Message[] {
  return path.slice(Math.max(0, path.findLastIndex(({ contextSince = Infinity }) => contextSince < at)));
}

/** Return the number of tokens of a path with its last reply. numFixed: characters of system message and tools, to estimate. */
export function contextUse(path: readonly Message[], numFixed = 0): ContextUse {
  const sent = sentPart(path);
  const at = sent.findLastIndex((message) => message.usage !== undefined);
  const usage = sent[at]?.usage;
  const isExact = usage !== undefined && (sent[at] as Message).createdAt > (sent[0]?.contextSince ?? 0);
  const uncounted = isExact ? sent.slice(at + 1) : sent;
  const rest = uncounted.reduce((sum, message) => sum + charactersOf(message), isExact ? 0 : numFixed);
  const hasMedia = uncounted.some((message) => message.attachments?.some((one) => one.kind !== "text"));
  const counted = isExact ? usage.prompt_tokens + usage.completion_tokens : 0;
  return { tokens: counted + Math.ceil(rest / charactersPerToken(path)), isExact: rest === 0 && !hasMedia };
}

/** Return the message to begin with, so that a path takes half of the context; null: no turn can be dropped. */
export function cutFor(path: readonly Message[], numContext: number): string | null {
  const sent = sentPart(path);
  const perToken = charactersPerToken(path);
  let left = numContext * KEPT_SHARE * perToken;
  let found: string | null = null;
  for (let at = sent.length - 1; at > 0; at--) {
    const message = sent[at] as Message;
    left -= charactersOf(message);
    if (left < 0 && found !== null) break;
    if (message.role === "user") found = message.id; // the last turn is kept, however long it is
  }
  return found;
}

function charactersPerToken(path: readonly Message[]): number {
  const at = path.findLastIndex((message) => message.usage !== undefined);
  const reply = path[at];
  if (!reply?.usage) return CHARACTERS_PER_TOKEN;
  const characters = sentPart(path.slice(0, at + 1), reply.createdAt).reduce((sum, message) => sum + charactersOf(message), 0);
  const perToken = characters / (reply.usage.prompt_tokens + reply.usage.completion_tokens);
  return Math.min(8, Math.max(1, perToken)); // images and a change of the context distort it
}

function charactersOf(message: Message): number {
  const calls = message.toolCalls?.reduce((sum, call) => sum + call.name.length + call.arguments.length, 0) ?? 0;
  const files = message.attachments?.reduce((sum, one) => sum + (one.kind === "text" ? one.text.length : 0), 0) ?? 0;
  return message.content.length + calls + files;
}
