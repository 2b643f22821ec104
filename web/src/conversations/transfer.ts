import type { ToolCall } from "../api/types";
import { type Attachment, type Conversation, type Message, type Overrides, type Parameters, newConversation, newId } from "./model";

const FORMAT = "paceline-conversations";
const VERSION = 1;
const MOST_MESSAGES = 200_000;
const ROLES = new Set(["user", "assistant", "tool"]);
const DATA_URL = /^data:(image\/(?:png|jpeg|gif|webp|bmp)|audio\/[\w.+-]+);base64,[A-Za-z0-9+/]*={0,2}$/;

export interface Exported {
  conversation: Conversation;
  messages: readonly Message[];
}

/** Return conversations as the text of a file. */
export function exportText(conversations: readonly Exported[]): string {
  return `${JSON.stringify({ format: FORMAT, version: VERSION, exported_at: new Date().toISOString(), conversations }, null, 1)}\n`;
}

/**
 * Return the conversations of a file, with new ids, so that an import adds and never replaces. Throws with a sentence that
 * names the place of the error in the file; then nothing is imported.
 */
export function parseImport(text: string): Exported[] {
  let file: unknown;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is no JSON.");
  }
  const outer = asObject(file, "the file");
  if (outer["format"] !== FORMAT) throw new Error(`This is no export of conversations: "format" is not "${FORMAT}".`);
  if (outer["version"] !== VERSION) {
    throw new Error(`This export has version ${JSON.stringify(outer["version"])}; this page reads version ${VERSION}.`);
  }
  const list = asList(outer["conversations"], "conversations");
  let left = MOST_MESSAGES;
  return list.map((one, index) => {
    const exported = parseConversation(one, `conversations[${index}]`);
    left -= exported.messages.length;
    if (left < 0) throw new Error(`This file has more than ${MOST_MESSAGES} messages.`);
    return exported;
  });
}

function parseConversation(value: unknown, place: string): Exported {
  const outer = asObject(value, place);
  const facts = asObject(outer["conversation"], `${place}.conversation`);
  const list = asList(outer["messages"], `${place}.messages`);
  const conversation = parseFacts(facts, `${place}.conversation`);
  const ids = new Map<string, string>();
  const raw = list.map((one, index) => {
    const message = asObject(one, `${place}.messages[${index}]`);
    const id = asText(message["id"], `${place}.messages[${index}].id`);
    if (ids.has(id)) throw new Error(`${place}.messages[${index}].id: there are two messages with this id.`);
    ids.set(id, newId());
    return message;
  });
  const messages = raw.map((one, index) => parseMessage(one, `${place}.messages[${index}]`, ids, conversation.id));
  checkTree(messages, place);
  conversation.chosen = parseChosen(facts["chosen"], ids);
  return { conversation, messages };
}

function parseFacts(facts: Record<string, unknown>, place: string): Conversation {
  const fresh = newConversation();
  const text = (name: string): string => (facts[name] === undefined ? "" : asText(facts[name], `${place}.${name}`));
  const parameters = facts["parameters"] === undefined ? {} : asObject(facts["parameters"], `${place}.parameters`);
  return {
    ...fresh,
    title: text("title").slice(0, 200),
    model: text("model"),
    system: text("system"),
    schema: text("schema"),
    tools: text("tools"),
    parameters: parameters as Parameters,
    createdAt: asTime(facts["createdAt"], fresh.createdAt),
    ...(facts["isPinned"] === true && { isPinned: true }),
    updatedAt: asTime(facts["updatedAt"], fresh.updatedAt),
  };
}

function parseMessage(
  raw: Record<string, unknown>,
  place: string,
  ids: ReadonlyMap<string, string>,
  conversation: string,
): Message {
  const role = asText(raw["role"], `${place}.role`);
  if (!ROLES.has(role)) throw new Error(`${place}.role: "${role}" is none of user, assistant and tool.`);
  const parent = raw["parent"] ?? null;
  const known = parent === null ? null : ids.get(asText(parent, `${place}.parent`));
  if (known === undefined) throw new Error(`${place}.parent: there is no message with this id.`);
  const state = raw["state"] === "failed" ? "failed" : raw["state"] === "done" ? "done" : "stopped";
  const message: Message = {
    id: ids.get(raw["id"] as string) as string,
    conversation,
    parent: known,
    role: role as Message["role"],
    content: asText(raw["content"] ?? "", `${place}.content`),
    createdAt: asTime(raw["createdAt"], 0),
    state,
  };
  for (const name of ["reasoning", "toolCallId", "model", "error", "errorCode", "finishReason"] as const) {
    if (raw[name] !== undefined) message[name] = asText(raw[name], `${place}.${name}`);
  }
  if (raw["attachments"] !== undefined) message.attachments = parseAttachments(raw["attachments"], `${place}.attachments`);
  if (raw["toolCalls"] !== undefined) message.toolCalls = parseCalls(raw["toolCalls"], `${place}.toolCalls`);
  if (raw["notes"] !== undefined) {
    message.notes = asList(raw["notes"], `${place}.notes`).map((one) => asText(one, `${place}.notes`));
  }
  if (raw["overrides"] !== undefined) message.overrides = parseOverrides(raw["overrides"], `${place}.overrides`);
  if (raw["contextSince"] !== undefined) message.contextSince = asTime(raw["contextSince"], 0);
  addCounts(message, raw);
  return message;
}

function addCounts(message: Message, raw: Record<string, unknown>): void {
  const usage = numbersOf(raw["usage"]);
  if (usage) {
    const cached = numbersOf((raw["usage"] as Record<string, unknown>)["prompt_tokens_details"])?.["cached_tokens"];
    message.usage = {
      prompt_tokens: usage["prompt_tokens"] ?? 0,
      completion_tokens: usage["completion_tokens"] ?? 0,
      ...(cached !== undefined && { prompt_tokens_details: { cached_tokens: cached } }),
    };
  }
  const timings = numbersOf(raw["timings"]);
  if (timings) message.timings = timings;
}

function parseAttachments(value: unknown, place: string): Attachment[] {
  return asList(value, place).map((one, index) => {
    const raw = asObject(one, `${place}[${index}]`);
    const kind = raw["kind"];
    const name = asText(raw["name"] ?? "", `${place}[${index}].name`).slice(0, 200);
    if (kind === "text") {
      const tokens = numbersOf(raw)?.["tokens"];
      return { kind, name, text: asText(raw["text"], `${place}[${index}].text`), ...(tokens !== undefined && { tokens }) };
    }
    if (kind !== "image" && kind !== "audio") throw new Error(`${place}[${index}].kind is neither image, audio nor text.`);
    const url = asText(raw["url"], `${place}[${index}].url`);
    if (!DATA_URL.test(url) || !url.startsWith(`data:${kind}/`)) {
      throw new Error(`${place}[${index}].url: only data of an ${kind} is taken, no address.`);
    }
    return { kind, url, name };
  });
}

function parseOverrides(value: unknown, place: string): Overrides {
  const raw = asObject(value, place);
  return {
    ...(raw["model"] !== undefined && { model: asText(raw["model"], `${place}.model`) }),
    ...(raw["parameters"] !== undefined && { parameters: asObject(raw["parameters"], `${place}.parameters`) as Parameters }),
  };
}

function parseCalls(value: unknown, place: string): ToolCall[] {
  return asList(value, place).map((one, index) => {
    const raw = asObject(one, `${place}[${index}]`);
    const text = (name: string): string => asText(raw[name] ?? "", `${place}[${index}].${name}`);
    return { id: text("id"), name: text("name"), arguments: text("arguments") };
  });
}

/** Throw if messages follow each other in a circle: none of them would be reached. */
function checkTree(messages: readonly Message[], place: string): void {
  const children = new Map<string | null, string[]>();
  for (const one of messages) push(children, one.parent, one.id);
  const reached = [...(children.get(null) ?? [])];
  for (let at = 0; at < reached.length; at++) reached.push(...(children.get(reached[at] as string) ?? []));
  if (reached.length < messages.length) throw new Error(`${place}.messages: some follow each other in a circle.`);
}

function parseChosen(value: unknown, ids: ReadonlyMap<string, string>): Record<string, string> {
  const chosen: Record<string, string> = {};
  if (typeof value !== "object" || value === null) return chosen;
  for (const [parent, child] of Object.entries(value)) {
    const from = parent === "" ? "" : ids.get(parent);
    const to = typeof child === "string" ? ids.get(child) : undefined;
    if (from !== undefined && to !== undefined) chosen[from] = to;
  }
  return chosen;
}

function numbersOf(value: unknown): Record<string, number> | undefined {
  if (typeof value !== "object" || value === null) return undefined;
  return Object.fromEntries(
    Object.entries(value).filter((pair): pair is [string, number] => Number.isFinite(pair[1])),
  );
}

function asObject(value: unknown, place: string): Record<string, unknown> {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error(`${place} is no object.`);
  return value as Record<string, unknown>;
}

function asList(value: unknown, place: string): unknown[] {
  if (!Array.isArray(value)) throw new Error(`${place} is no list.`);
  return value;
}

function asText(value: unknown, place: string): string {
  if (typeof value !== "string") throw new Error(`${place} is no text.`);
  return value;
}

function asTime(value: unknown, otherwise: number): number {
  return typeof value === "number" && Number.isFinite(value) && value >= 0 ? value : otherwise;
}

function push<K>(lists: Map<K, string[]>, key: K, value: string): void {
  const list = lists.get(key);
  if (list) list.push(value);
  else lists.set(key, [value]);
}
