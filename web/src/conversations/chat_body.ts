import { sentPart as sentMessages } from "./context";
import type { Conversation, MediaAttachment, Message, TextAttachment } from "./model";
import { parseJson } from "./parameters";

const CONSTRAINTS = ["json_schema", "grammar", "regex", "lark", "choice"] as const;

type Part = Record<string, unknown>;

/** The state from which a reply is continued, when its stream is lost. tokens: generated so far. */
export interface Begun {
  content: string;
  reasoning: string;
  tokens: number;
}

/** Return the body of a request for the next message of a path. begun: the reply is continued there. */
export function chatBody(conversation: Conversation, path: readonly Message[], begun?: Begun): Record<string, unknown> {
  const messages = sentMessages(path).filter(isSent).map(sentMessage);
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const body: Record<string, unknown> = {
    ...conversation.parameters,
    messages,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_progress: true,
  };
  if (conversation.model) body["model"] = conversation.model;
  const tools = parseJson(conversation.tools, "list");
  if (tools !== undefined && (tools as unknown[]).length) body["tools"] = tools;
  const schema = parseJson(conversation.schema, "object");
  if (schema !== undefined) {
    body["response_format"] = { type: "json_schema", json_schema: { name: "reply", schema } };
  }
  if (begun) continueIn(body, messages, begun);
  return body;
}

/** Return whether a lost reply can be continued at its end; otherwise it starts again. */
export function canContinue(conversation: Conversation, message: Message): boolean {
  const { parameters, schema } = conversation;
  // A grammar begins at the first character.
  const isConstrained = schema.trim() !== "" || CONSTRAINTS.some((name) => parameters[name] !== undefined);
  return message.content !== "" && !message.toolCalls?.length && !isConstrained;
}

function continueIn(body: Record<string, unknown>, messages: Part[], begun: Begun): void {
  const last: Part = { role: "assistant", content: begun.content };
  if (begun.reasoning) last["reasoning_content"] = begun.reasoning;
  messages.push(last);
  body["continue_final_message"] = true;
  for (const name of ["max_tokens", "max_completion_tokens"]) {
    const most = body[name];
    if (typeof most === "number") body[name] = Math.max(1, most - begun.tokens);
  }
}

function isSent(message: Message): boolean {
  return message.role !== "assistant" || message.content !== "" || Boolean(message.toolCalls?.length);
}

function sentMessage(message: Message): Part {
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.toolCallId ?? "", content: message.content };
  }
  if (message.role === "assistant") return sentReply(message);
  const attachments = message.attachments ?? [];
  if (!attachments.length) return { role: "user", content: message.content };
  const files = attachments.filter((one) => one.kind === "text").map(fileText);
  const text = [...files, ...(message.content ? [message.content] : [])].join("\n\n");
  const media = attachments.filter((one) => one.kind !== "text").map(sentPart);
  if (!media.length) return { role: "user", content: text };
  return { role: "user", content: [...media, ...(text ? [{ type: "text", text }] : [])] };
}

function sentReply(message: Message): Part {
  const sent: Part = { role: "assistant", content: message.content };
  if (message.reasoning) sent["reasoning_content"] = message.reasoning;
  if (message.toolCalls?.length) {
    sent["tool_calls"] = message.toolCalls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return sent;
}

/** Return a file as it stands in a message. */
export function fileText({ name, text }: TextAttachment): string {
  return `<file name=${JSON.stringify(name)}>\n${text.trimEnd()}\n</file>`;
}

function sentPart(attachment: MediaAttachment): Part {
  if (attachment.kind === "image") return { type: "image_url", image_url: { url: attachment.url } };
  const [head = "", data = ""] = attachment.url.split(",", 2);
  return { type: "input_audio", input_audio: { data, format: soundFormat(head) } };
}

function soundFormat(head: string): string {
  if (/mpeg|mp3/.test(head)) return "mp3";
  return /flac/.test(head) ? "flac" : "wav";
}
