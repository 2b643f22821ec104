import type { Message } from "../conversations/model";
import { shownCount, shownRate } from "../ui/shown";

/** Return the cost of a reply, as short texts with their explanations. */
export function costsOf(message: Message): Array<{ text: string; help: string; isCached?: boolean }> {
  const { usage, timings } = message;
  if (!usage) return [];
  const costs = [];
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  costs.push({
    text: `${shownCount(usage.completion_tokens)} tokens`,
    help: "Tokens of the reply, thinking included",
  });
  const rate = timings?.predicted_per_second ?? 0;
  if (rate > 0) costs.push({ text: `${shownRate(rate)} tokens/s`, help: "While it was generated" });
  costs.push({ text: `prompt ${shownCount(usage.prompt_tokens)}`, help: "Tokens of the conversation before the reply" });
  const temperature = message.overrides?.parameters?.["temperature"];
  if (temperature !== undefined) costs.push({ text: `temperature ${temperature}`, help: "Of this reply alone" });
  if (cached > 0) {
    const from = usage.prompt_tokens_details?.cached_from;
    costs.push({
      text: `${shownCount(cached)} cached`,
      help: `So many tokens of the prompt were in the KV cache already${from ? ` (${from})` : ""}, and were not computed again`,
      isCached: true,
    });
  }
  return costs;
}
