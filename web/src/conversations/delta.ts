import type { ChatEvent, ToolCall, ToolCallDelta } from "../api/types";
import type { Message } from "./model";

/** Return a reply with an event's additions. tokens: generated before this stream, if the reply is continued. */
export function withEvent(message: Message, event: ChatEvent, tokens = 0): Message {
  const next = { ...message };
  if (event.model) next.model = event.model;
  const choice = event.choices?.[0];
  if (choice?.delta?.content) next.content += choice.delta.content;
  if (choice?.delta?.reasoning_content) next.reasoning = (next.reasoning ?? "") + choice.delta.reasoning_content;
  if (choice?.delta?.tool_calls) next.toolCalls = withCalls(next.toolCalls ?? [], choice.delta.tool_calls);
  if (choice?.finish_reason) next.finishReason = choice.finish_reason;
  if (event.usage) {
    const { prompt_tokens, completion_tokens } = event.usage;
    const { prompt_tokens_details: details } = event.usage;
    const prompt = Math.max(0, prompt_tokens - tokens);
    const cached = details?.cached_tokens;
    next.usage = {
      ...event.usage,
      prompt_tokens: prompt,
      completion_tokens: completion_tokens + tokens,
      ...(cached !== undefined && { prompt_tokens_details: { ...details, cached_tokens: Math.min(cached, prompt) } }),
    };
  }
  if (event.timings) next.timings = event.timings;
  for (const warning of event.warnings ?? []) next.notes = withNote(next.notes, warning);
  return next;
}

/** Return notes with another note, if it is not among them already. */
export function withNote(notes: readonly string[] | undefined, note: string): string[] {
  const before = notes ?? [];
  return before.includes(note) ? [...before] : [...before, note];
}

/** Return a reply in its state before the first event: a restart keeps its place and its notes. */
export function emptied(message: Message): Message {
  const { conversation, createdAt, generation, id, numStreams, overrides, notes, parent, role, state } = message;
  const kept = { ...(notes && { notes }), ...(numStreams && { numStreams }), ...(overrides && { overrides }), ...(generation && { generation }) };
  return { id, conversation, parent, role, state, createdAt, content: "", ...kept };
}

function withCalls(calls: readonly ToolCall[], deltas: readonly ToolCallDelta[]): ToolCall[] {
  const next = [...calls];
  for (const delta of deltas) {
    const at = delta.index ?? next.length;
    const call = next[at] ?? { id: "", name: "", arguments: "" };
    next[at] = {
      id: delta.id ?? call.id,
      name: call.name + (delta.function?.name ?? ""),
      arguments: call.arguments + (delta.function?.arguments ?? ""),
    };
  }
  return next;
}
