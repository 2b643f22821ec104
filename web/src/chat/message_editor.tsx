import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Attachment, Message } from "../conversations/model";
import { Attachments } from "./message_view";
import { fitHeight } from "./text_area";

interface Props {
  message: Message;
  onSend: (content: string, attachments: readonly Attachment[]) => void;
  /** Of a reply: saves the text and lets the model continue it; null: it cannot. */
  onContinue?: ((content: string) => void) | null;
  onCancel: () => void;
}

/** A message that is written anew, as a branch beside the old one. */
export function MessageEditor({ message, onSend, onContinue, onCancel }: Props): VNode {
  const [content, setContent] = useState(message.content);
  const field = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    field.current?.focus();
    field.current?.setSelectionRange(message.content.length, message.content.length);
    if (field.current) fitHeight(field.current);
  }, []);
  const isReply = message.role === "assistant"; // Enter begins a line in it: replies are longer
  const attachments = message.attachments ?? [];
  const send = (): void => {
    if (content.trim() || attachments.length) onSend(content, attachments);
  };
  const onKey = (event: KeyboardEvent): void => {
    if (event.key === "Escape") onCancel();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && (!isReply || event.ctrlKey || event.metaKey)) send();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const onInput = (event: { currentTarget: HTMLTextAreaElement }): void => {
    setContent(event.currentTarget.value);
    fitHeight(event.currentTarget);
  };
  return (
    <div class="message-editor">
      {attachments.length > 0 && <Attachments attachments={attachments} />}
      <textarea ref={field} aria-label={isReply ? "Reply" : "Message"} value={content} rows={1} onInput={onInput} onKeyDown={onKey} />
      <div class="dialog-actions">
        <button type="button" class="button" onClick={onCancel}>
          Cancel
        </button>
        {onContinue && (
          <button type="button" class="button" onClick={() => content.trim() && onContinue(content)}>
            Save and continue
          </button>
        )}
        <button type="button" class="button primary" onClick={send}>
          {isReply ? "Save as a branch" : "Send as a branch"}
        </button>
      </div>
    </div>
  );
}
