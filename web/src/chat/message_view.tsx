import { useComputed } from "@preact/signals";
import type { ComponentChildren, VNode } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { ModelEntry } from "../api/types";
import { type App, showToast } from "../app";
import type { Attachment, Message, TextAttachment } from "../conversations/model";
import type { Phase, Reply } from "../conversations/reply";
import type { OpenConversation } from "../conversations/store";
import { CodeBlock } from "../markdown/code_block";
import { Markdown } from "../markdown/markdown";
import { CopyButton } from "../ui/copy_button";
import { Icon, type IconName } from "../ui/icon";
import { memo } from "../ui/memo";
import { goTo } from "../ui/route";
import { canContinue } from "../conversations/chat_body";
import { MessageEditor } from "./message_editor";
import { shownCount } from "../ui/shown";
import { costsOf } from "./numbers";
import { focusComposer } from "./text_area";
import { RegenerateForm } from "./regenerate_form";
import { FullActions } from "./status_line";
import { ToolCalls } from "./tool_calls";

const EDIT = "Edit, as a new branch"; // also finds the button

interface Props {
  app: App;
  opened: OpenConversation;
  id: string;
  /** Whether no message follows. */
  isLast: boolean;
}

/** One message with its actions. Drawn again only when it changes itself. */
export const MessageView = memo(function MessageView({ app, opened, id, isLast }: Props): VNode | null {
  const [isEditing, setEditing] = useState(false);
  const article = useRef<HTMLElement>(null);
  const wasEditing = useRef(false);
  useEffect(() => {
    if (wasEditing.current && !isEditing) article.current?.querySelector<HTMLElement>(`[aria-label="${EDIT}"]`)?.focus();
    wasEditing.current = isEditing;
  }, [isEditing]);
  // Computed, so that a reply that begins or ends draws itself again, and not all messages.
  const reply = useComputed(() => app.store.replies.value.get(id)).value;
  const hasSchema = useComputed(() => opened.facts.value.schema !== "").value;
  if (!opened.has(id)) return null;
  const message = opened.message(id).value;
  if (message.role === "tool") return <ToolResult message={message} name={toolName(opened, message)} />;
  const isUser = message.role === "user";
  const edit = (content: string, attachments: readonly Attachment[]): void => {
    setEditing(false);
    void (isUser ? app.store.send(opened, message.parent, content, attachments) : app.store.rewrite(opened, id, content));
    focusComposer();
  };
  const rewriteAndContinue = async (content: string): Promise<void> => {
    setEditing(false);
    focusComposer();
    const written = await app.store.rewrite(opened, id, content);
    if (written !== null) await app.store.continueReply(opened, written);
  };
  const isFree = canContinue(opened.facts.peek(), { ...message, content: message.content || " " });
  return (
    <article ref={article} class={`message ${message.role}`} aria-label={isUser ? "Your message" : "Reply"} data-state={message.state}>
      {message.contextSince !== undefined && (
        <p class="cut" role="note">
          Earlier messages are not sent to the model.{" "}
          <button type="button" class="link" onClick={() => app.store.beginContext(opened, id, false)}>
            Send them again
          </button>
        </p>
      )}
      {isEditing ? (
        <MessageEditor message={message} onSend={edit} onContinue={!isUser && isFree ? (content) => void rewriteAndContinue(content) : null} onCancel={() => setEditing(false)} />
      ) : (
        <div class="message-body">{isUser ? <UserBody message={message} /> : <ReplyBody {...{ app, opened, message, isLast, reply, hasSchema }} />}</div>
      )}
      {!isEditing && <Actions {...{ app, opened, message }} onEdit={isUser || message.content ? () => setEditing(true) : null} />}
    </article>
  );
});

function UserBody({ message }: { message: Message }): VNode {
  return (
    <>
      {message.attachments && <Attachments attachments={message.attachments} />}
      {message.content && <div class="user-text" dir="auto">{message.content}</div>}
    </>
  );
}

const MOST_SHOWN = 20_000; // characters of a file

function FileText({ file }: { file: TextAttachment }): VNode {
  const [isOpen, setOpen] = useState(false);
  return (
    <details class="file" open={isOpen} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <Icon name="file" />
        <span>{file.name}</span>
        {file.tokens !== undefined && <span class="muted">{shownCount(file.tokens)} tokens</span>}
      </summary>
      {isOpen && (
        <pre tabIndex={0} dir="auto">
          {file.text.slice(0, MOST_SHOWN)}
          {file.text.length > MOST_SHOWN && "\n…"}
        </pre>
      )}
    </details>
  );
}

/** Images, sounds and files, with their names. */
export function Attachments({ attachments }: { attachments: readonly Attachment[] }): VNode {
  return (
    <div class="attachments">
      {attachments.map((one) =>
        one.kind === "text" ? (
          <FileText file={one} />
        ) : one.kind === "image" ? (
          <img src={one.url} alt={one.name} loading="lazy" />
        ) : (
          <audio src={one.url} controls aria-label={one.name} />
        ),
      )}
    </div>
  );
}

interface ReplyProps extends Omit<Props, "id"> {
  message: Message;
  reply: Reply | undefined;
  hasSchema: boolean;
}

function ReplyBody({ app, opened, message, isLast, reply, hasSchema }: ReplyProps): VNode {
  const isStreaming = message.state === "streaming";
  const isThinking = isStreaming && Boolean(message.reasoning) && !message.content && !message.toolCalls?.length;
  return (
    <>
      {message.reasoning && <Thinking text={message.reasoning} isNow={isThinking} tokens={message.usage?.completion_tokens_details?.reasoning_tokens} />}
      {message.content && <ReplyText text={message.content} isJson={hasSchema && !isStreaming} isGrowing={isStreaming} />}
      {message.toolCalls && <ToolCalls {...{ app, opened, message, isLast }} calls={message.toolCalls} />}
      {isStreaming && <PhaseLine {...{ app, opened }} phase={reply?.phase.value} hasText={Boolean(message.content || message.reasoning)} />}
      <Ending {...{ app, opened, message, isLast }} />
    </>
  );
}

function ReplyText({ text, isJson, isGrowing }: { text: string; isJson: boolean; isGrowing: boolean }): VNode {
  const json = useMemo(() => (isJson ? prettyJson(text) : null), [text, isJson]);
  return json === null ? <Markdown text={text} isGrowing={isGrowing} /> : <CodeBlock code={json} language="json" />;
}

function prettyJson(text: string): string | null {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

function Thinking({ text, isNow, tokens }: { text: string; isNow: boolean; tokens: number | undefined }): VNode {
  const [isOpen, setOpen] = useState(false);
  return (
    <details class="thinking" open={isOpen} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <Icon name="think" />
        <span>{isNow ? "Thinking…" : "Thought"}</span>
        {tokens ? <span class="muted">{shownCount(tokens)} tokens</span> : null}
      </summary>
      {isOpen && <Markdown text={text} />}
    </details>
  );
}

const ASK_MS = 1000; // for the state of a model, while a request may load it

function PhaseLine({ app, opened, phase, hasText }: Pick<Props, "app" | "opened"> & { phase: Phase | undefined; hasText: boolean }): VNode | null {
  const isSending = phase?.kind === "sending" || phase?.kind === "loading";
  useEffect(() => {
    if (!isSending) return undefined;
    const timer = setInterval(() => void app.server.refresh(), ASK_MS);
    return () => clearInterval(timer);
  }, [isSending]);
  const text = phaseText(phase, hasText, app.server.entry(opened.facts.value.model));
  if (text === null) return <span class="caret" aria-hidden="true" />;
  return (
    <p class={`phase ${phase?.kind ?? "elsewhere"}`}>
      <span class="pulse" aria-hidden="true" />
      {text}
    </p>
  );
}

/** Return the reason why a reply waits, in words; null: it does not wait. */
export function phaseText(phase: Phase | undefined, hasText: boolean, model?: ModelEntry): string | null {
  if (!phase) return "Another tab has this reply.";
  if (model?.state === "loading" && (phase.kind === "sending" || phase.kind === "loading")) {
    return `${model.id} is loading, ${Math.round(100 * model.progress)} %`;
  }
  switch (phase.kind) {
    case "sending":
      return hasText ? null : "Waiting for the server…";
    case "reading":
      return `Reading the prompt, ${Math.round(100 * phase.share)} % of ${shownCount(phase.total)} tokens`;
    case "reconnecting":
      return "The connection is lost. Looking for the server…";
    case "loading":
      return `Waiting: ${phase.message}`;
    case "writing":
      return null;
  }
}

/** Return the sentence about the end of a reply that may be continued; null: it ended by itself, or not yet. */
function endingText(message: Message): string | null {
  if (message.state === "stopped") return "Stopped.";
  return message.state === "done" && message.finishReason === "length" ? "The reply ended at the limit of tokens." : null;
}

function Ending({ app, opened, message, isLast }: { app: App; opened: OpenConversation; message: Message; isLast: boolean }): VNode | null {
  const again = message.parent;
  return (
    <>
      {message.notes?.map((note) => (
        <p class="ending" role="note">
          <Icon name="info" /> {note}
        </p>
      ))}
      {endingText(message) !== null && (
        <p class="ending">
          {endingText(message)}{" "}
          {isLast && canContinue(opened.facts.peek(), message) && (
            <button type="button" class="button" onClick={() => (focusComposer(), void app.store.continueReply(opened, message.id))}>
              Continue
            </button>
          )}
        </p>
      )}
      {message.state === "failed" && (
        <div class="failure" role="alert">
          <p>{failureText(message)}</p>
          {message.stream && (
            <button type="button" class="button" onClick={() => void app.store.goOn(opened, message.id)}>
              Go on with it
            </button>
          )}
          {message.errorCode === "context_length_exceeded" && <FullActions app={app} opened={opened} />}
          {message.errorCode === "context_length_exceeded" && (
            <button type="button" class="button" onClick={() => goTo({ view: "new" })}>
              New conversation
            </button>
          )}
          {isLast && !message.stream && canContinue(opened.facts.peek(), message) && (
            <button type="button" class="button" onClick={() => (focusComposer(), void app.store.continueReply(opened, message.id))}>
              Continue
            </button>
          )}
          {again !== null && (
            <button type="button" class="button" onClick={() => (focusComposer(), void app.store.retry(opened, message.id))}>
              Try again
            </button>
          )}
        </div>
      )}
    </>
  );
}

function toolName(opened: OpenConversation, result: Message): string {
  for (let id = result.parent; id !== null && opened.has(id); id = opened.message(id).peek().parent) {
    const found = opened.message(id).peek().toolCalls?.find((call) => call.id === result.toolCallId);
    if (found) return found.name;
  }
  return "a tool";
}

/** Return the reason of a failed reply, and the way out that the page has. */
export function failureText({ error, errorCode }: Message): string {
  switch (errorCode) {
    case "context_length_exceeded":
      return "This conversation is longer than the model can read at once. Drop its oldest turns, or go on from a summary of it.";
    case "no_kv_slot":
      return "The server has no memory left for a conversation of this length. Try again with a shorter one.";
    case "queue_full":
    case "too_many_requests":
    case "too_many_bytes":
      return "The server is busy. Try again in a moment.";
    case "unreachable":
      return "The server cannot be reached. Check that it is running, then try again.";
    default:
      return error ?? "The reply failed.";
  }
}

function ToolResult({ message, name }: { message: Message; name: string }): VNode {
  return (
    <article class="message tool" aria-label={`Result of ${name}`}>
      <details>
        <summary>
          <Icon name="tool" /> <span>Result of {name}</span> <span class="muted">{message.content.slice(0, 80)}</span>
        </summary>
        <pre tabIndex={0}>{message.content}</pre>
      </details>
    </article>
  );
}

interface ActionsProps {
  app: App;
  opened: OpenConversation;
  message: Message;
  onEdit: (() => void) | null;
}

function Actions({ app, opened, message, onEdit }: ActionsProps): VNode | null {
  const [isVarying, setVarying] = useState(false);
  if (message.state === "streaming") return null;
  const fork = async (): Promise<void> => goTo({ view: "chat", id: (await app.store.fork(opened, message.id)).id });
  const remove = async (): Promise<void> => {
    const undo = await app.store.deleteBranch(opened, message.id);
    focusComposer();
    showToast("The message and all that follows it were deleted.", { label: "Undo", run: () => void undo() });
  };
  const parent = message.parent;
  return (
    <footer class="message-actions">
      <Branches {...{ app, opened, message }} />
      {message.role === "assistant" && <Costs app={app} message={message} />}
      <CopyButton text={() => message.content} label="Copy message" />
      {onEdit && <Action icon="edit" label={EDIT} onClick={onEdit} />}
      {message.role === "assistant" && parent !== null && (
        <>
          <Action icon="retry" label="Regenerate, as a new branch" onClick={() => void app.store.reply(opened, parent)} />
          <Action icon="sliders" label="Retry with other settings" isOpen={isVarying} onClick={() => setVarying(!isVarying)} />
        </>
      )}
      <Action icon="fork" label="Fork into a new conversation" onClick={() => void fork()} />
      <Action icon="trash" label="Delete from here on" onClick={() => void remove()} />
      {isVarying && parent !== null && <RegenerateForm {...{ app, opened, parent }} onDone={() => setVarying(false)} />}
    </footer>
  );
}

function Action({ icon, label, isOpen, onClick }: { icon: IconName; label: string; isOpen?: boolean; onClick: () => void }): VNode {
  const expanded = isOpen === undefined ? {} : { "aria-expanded": isOpen };
  return (
    <button type="button" class={`icon-button action-${icon}`} title={label} aria-label={label} {...expanded} onClick={onClick}>
      <Icon name={icon} />
    </button>
  );
}

function Branches({ app, opened, message }: Omit<ActionsProps, "onEdit">): VNode | null {
  const siblings = opened.tree.siblings(message.id);
  const at = siblings.indexOf(message.id);
  if (siblings.length < 2) return null;
  const step = (to: string | undefined, icon: IconName, label: string): VNode => (
    <button
      type="button"
      class="icon-button"
      aria-label={label}
      title={label}
      disabled={to === undefined}
      onClick={() => to !== undefined && app.store.choose(opened, to)}
    >
      <Icon name={icon} />
    </button>
  );
  return (
    <span class="branches" role="group" aria-label={`Branch ${at + 1} of ${siblings.length}`}>
      {step(siblings[at - 1], "left", "Branch before")}
      <span>
        {at + 1}/{siblings.length}
      </span>
      {step(siblings[at + 1], "right", "Next branch")}
    </span>
  );
}

function Costs({ app, message }: { app: App; message: Message }): VNode {
  const hasModels = (app.server.page.value?.models.length ?? 0) > 1;
  const costs: ComponentChildren = costsOf(message).map((cost) => (
    <span class={cost.isCached ? "cached" : ""} title={cost.help}>
      {cost.text}
    </span>
  ));
  return (
    <span class="costs">
      {hasModels && message.model && <span title="The model that wrote the reply">{message.model}</span>}
      {costs}
    </span>
  );
}
