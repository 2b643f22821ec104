import { signal } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { messageOf } from "../api/errors";
import type { App } from "../app";
import type { Attachment } from "../conversations/model";
import type { OpenConversation } from "../conversations/store";
import { Icon } from "../ui/icon";
import { attachmentsOf, checkKind } from "./attachments";
import { fitHeight } from "./text_area";

interface Draft {
  text: string;
  attachments: readonly Attachment[];
}

const EMPTY: Draft = { text: "", attachments: [] };
const drafts = new Map<string, ReturnType<typeof signal<Draft>>>(); // the typed text of each conversation

function draftOf(id: string): ReturnType<typeof signal<Draft>> {
  let draft = drafts.get(id);
  if (!draft) {
    draft = signal<Draft>(EMPTY);
    drafts.set(id, draft);
  }
  return draft;
}

interface Props {
  app: App;
  opened: OpenConversation;
  onSent: () => void;
}

/** The composer of messages. Enter sends, Shift+Enter begins a line, Escape stops the reply. */
export function Composer({ app, opened, onSent }: Props): VNode {
  const draft = draftOf(opened.id);
  const { text, attachments } = draft.value ?? EMPTY;
  const field = useRef<HTMLTextAreaElement>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const model = app.server.model(opened.facts.value.model).value;
  const path = opened.path.value;
  const last = path[path.length - 1];
  const isBusy = last !== undefined && opened.message(last).value.state === "streaming";

  useEffect(() => {
    setProblem(null);
    if (matchMedia("(pointer: fine)").matches) field.current?.focus();
  }, [opened.id]);
  useEffect(() => {
    if (field.current) fitHeight(field.current);
  }, [text, opened.id]);

  const change = (next: Partial<Draft>): void => {
    draft.value = { ...(draft.peek() ?? EMPTY), ...next };
  };
  const attach = async (files: Iterable<File>): Promise<void> => {
    try {
      const found = await attachmentsOf(files, model);
      change({ attachments: [...(draft.peek() ?? EMPTY).attachments, ...found] });
      setProblem(null);
    } catch (error) {
      setProblem(messageOf(error));
    }
  };
  const send = (): void => {
    if (isBusy || (!text.trim() && !attachments.length)) return;
    try {
      for (const one of attachments) checkKind(one.kind, model); // the model may be another one by now
    } catch (error) {
      return setProblem(messageOf(error));
    }
    setProblem(null);
    draft.value = EMPTY;
    void app.store.send(opened, last ?? null, text, attachments);
    onSent();
  };
  const stop = (): void => {
    if (last !== undefined) app.store.stop(last);
    field.current?.focus();
  };
  const onKey = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape" && isBusy) {
      event.preventDefault();
      stop();
    }
  };
  return (
    <DropZone onFiles={(files) => void attach(files)}>
      <form
        class="composer"
        onSubmit={(event) => {
          event.preventDefault();
          send();
        }}
      >
        {problem && (
          <p class="failure" role="alert">
            {problem}
          </p>
        )}
        {attachments.length > 0 && (
          <Chips attachments={attachments} onRemove={(index) => change({ attachments: attachments.filter((_, at) => at !== index) })} />
        )}
        <textarea
          ref={field}
          rows={1}
          aria-label="Message"
          placeholder="Write a message"
          value={text}
          onInput={(event) => change({ text: event.currentTarget.value })}
          onKeyDown={onKey}
          onPaste={(event) => {
            const files = [...(event.clipboardData?.files ?? [])];
            if (!files.length) return;
            event.preventDefault();
            void attach(files);
          }}
        />
        <div class="composer-actions">
          <AttachButton onFiles={(files) => void attach(files)} />
          <span class="composer-hint" aria-hidden="true">
            Enter sends · Shift+Enter for a line
          </span>
          {isBusy ? (
            <button type="button" class="round stop" aria-label="Stop the reply" title="Stop (Escape)" onClick={stop}>
              <Icon name="stop" />
            </button>
          ) : (
            <button type="submit" class="round" aria-label="Send" title="Send (Enter)" disabled={!text.trim() && !attachments.length}>
              <Icon name="send" />
            </button>
          )}
        </div>
      </form>
    </DropZone>
  );
}

function AttachButton({ onFiles }: { onFiles: (files: File[]) => void }): VNode {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <button type="button" class="icon-button" aria-label="Attach images or audio" title="Attach images or audio" onClick={() => input.current?.click()}>
        <Icon name="clip" />
      </button>
      <input
        ref={input}
        type="file"
        accept="image/*,audio/*"
        multiple
        hidden
        aria-label="Files"
        onChange={(event) => {
          onFiles([...(event.currentTarget.files ?? [])]);
          event.currentTarget.value = "";
        }}
      />
    </>
  );
}

function Chips({ attachments, onRemove }: { attachments: readonly Attachment[]; onRemove: (index: number) => void }): VNode {
  return (
    <ul class="chips">
      {attachments.map((one, index) => (
        <li>
          {one.kind === "image" ? <img src={one.url} alt="" /> : <Icon name="play" />}
          <span>{one.name}</span>
          <button type="button" class="icon-button" aria-label={`Remove ${one.name}`} onClick={() => onRemove(index)}>
            <Icon name="close" />
          </button>
        </li>
      ))}
    </ul>
  );
}

/** Takes files that are dropped anywhere on the page. */
function DropZone({ onFiles, children }: { onFiles: (files: File[]) => void; children: VNode }): VNode {
  const [isOver, setOver] = useState(false);
  const latest = useRef(onFiles);
  latest.current = onFiles;
  useLayoutEffect(() => {
    const over = (event: DragEvent): void => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      setOver(true);
    };
    const leave = (event: DragEvent): void => {
      if (event.relatedTarget === null) setOver(false);
    };
    const drop = (event: DragEvent): void => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      setOver(false);
      latest.current([...event.dataTransfer.files]);
    };
    addEventListener("dragover", over);
    addEventListener("dragleave", leave);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", drop);
    };
  }, []);
  return (
    <div class={`drop-zone${isOver ? " over" : ""}`}>
      {isOver && <p class="drop-hint">Drop images or audio to attach them</p>}
      {children}
    </div>
  );
}
