import type { VNode } from "preact";
import { useState } from "preact/hooks";
import type { ToolCall } from "../api/types";
import type { App } from "../app";
import type { Message } from "../conversations/model";
import type { OpenConversation } from "../conversations/store";
import { CodeBlock } from "../markdown/code_block";
import { Icon } from "../ui/icon";

interface Props {
  app: App;
  opened: OpenConversation;
  message: Message;
  calls: readonly ToolCall[];
  isLast: boolean;
}

/** The tools that a reply calls; a person plays the tools, and sends back their results. */
export function ToolCalls({ app, opened, message, calls, isLast }: Props): VNode {
  const [results, setResults] = useState<Record<string, string>>({});
  const isAnswerable = isLast && message.state === "done";
  const send = (event: Event): void => {
    event.preventDefault();
    void app.store.sendResults(opened, message.id, new Map(calls.map((call) => [call.id, results[call.id] ?? ""])));
  };
  return (
    <form class="tool-calls" onSubmit={send}>
      {calls.map((call) => (
        <div class="tool-call" key={call.id}>
          <p>
            <Icon name="tool" /> calls <code>{call.name}</code>
          </p>
          <CodeBlock code={pretty(call.arguments)} language="json" />
          {isAnswerable && (
            <label class="field">
              <span>Result of {call.name}</span>
              <textarea
                rows={2}
                value={results[call.id] ?? ""}
                onInput={(event) => setResults({ ...results, [call.id]: event.currentTarget.value })}
              />
            </label>
          )}
        </div>
      ))}
      {isAnswerable && (
        <button type="submit" class="button primary">
          Send {calls.length > 1 ? "the results" : "the result"}
        </button>
      )}
    </form>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is still being written, or was cut off
  }
}
