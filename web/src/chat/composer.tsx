import { type Signal, effect, signal } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { messageOf } from "../api/errors";
import type { ModelFacts } from "../api/types";
import type { App } from "../app";
import { fileText } from "../conversations/chat_body";
import type { Attachment, Message, TextAttachment } from "../conversations/model";
import type { OpenConversation } from "../conversations/store";
import { Icon } from "../ui/icon";
import { attachmentsOf, checkKind } from "./attachments";
import { shownCount } from "../ui/shown";
import { countTokens } from "./status_line";
import { editLast, fitHeight } from "./text_area";

const LONG_PASTE = 4000; // characters of a pasted text that becomes a file
const PASTED = "pasted";
const pastedName = (number: number): string => `${PASTED}${number > 1 ? `-${number}` : ""}.txt`;

/** The message of a conversation that is not sent yet, also while the conversation is not shown. */
interface Draft {
  text: string;
  attachments: readonly Attachment[];
  /** Files that are being read, each with its end. */
  readings: readonly AbortController[];
  /** Whether it is sent once the running reply has ended and all files are read. */
  isQueued: boolean;
  problem: string | null;
}

const EMPTY: Draft = { text: "", attachments: [], readings: [], isQueued: false, problem: null };
const drafts = new Map<string, Signal<Draft>>();

function draftOf(opened: OpenConversation): Signal<Draft> {
  let draft = drafts.get(opened.id);
  if (!draft) {
    draft = signal<Draft>({ ...EMPTY, text: storedText(opened) });
    drafts.set(opened.id, draft);
  }
  return draft;
}

/** Return the name of a draft in the tab's storage; conversations that are not saved share one, as their ids change on reload. */
function storedName(opened: OpenConversation): string {
  return `paceline-draft:${opened.tree.size ? opened.id : "new"}`;
}

function storedText(opened: OpenConversation): string {
  try {
    return sessionStorage.getItem(storedName(opened)) ?? "";
  } catch {
    return "";
  }
}

function storeText(opened: OpenConversation, text: string): void {
  try {
    if (text) sessionStorage.setItem(storedName(opened), text);
    else sessionStorage.removeItem(storedName(opened));
  } catch {
    // Storage is blocked or full: the draft lasts as long as the page.
  }
}

function changeDraft(opened: OpenConversation, next: Partial<Draft>): void {
  const draft = draftOf(opened);
  draft.value = { ...draft.peek(), ...next };
  if (next.text !== undefined) storeText(opened, next.text);
}

/** The state of the last message that is shown; null: there is none. */
function lastState(opened: OpenConversation): Message["state"] | null {
  const last = opened.path.value.at(-1);
  return last === undefined ? null : opened.message(last).value.state;
}

/** Send the draft of a conversation now; return whether it was sent. */
function sendDraft(app: App, opened: OpenConversation): boolean {
  const { text, attachments } = draftOf(opened).peek();
  if (!text.trim() && !attachments.length) return false;
  try {
    const model = app.server.model(opened.facts.peek().model).peek(); // it may be another one since they were attached
    for (const one of attachments) checkKind(one.kind, model);
  } catch (error) {
    changeDraft(opened, { problem: messageOf(error) });
    return false;
  }
  changeDraft(opened, EMPTY);
  void app.store.send(opened, opened.path.peek().at(-1) ?? null, text, attachments);
  return true;
}

/** Send the draft once nothing is in its way, whether the conversation is shown or not. A failed reply keeps it as a draft. */
function queueDraft(app: App, opened: OpenConversation): void {
  if (draftOf(opened).peek().isQueued) return;
  changeDraft(opened, { isQueued: true });
  const end = effect(() => {
    const { isQueued, readings } = draftOf(opened).value;
    const state = opened.isDeleted.value ? null : lastState(opened);
    if (isQueued && (state === "streaming" || readings.length)) return;
    queueMicrotask(() => {
      end();
      if (!draftOf(opened).peek().isQueued) return;
      changeDraft(opened, { isQueued: false });
      if (state !== "failed" && !opened.isDeleted.peek()) sendDraft(app, opened);
    });
  });
}

interface Props {
  app: App;
  opened: OpenConversation;
  onSent: () => void;
}

/** The composer of messages. Enter sends, or while a reply runs, after it; Shift+Enter begins a line. */
export function Composer({ app, opened, onSent }: Props): VNode {
  const draft = draftOf(opened);
  const { text, attachments, readings, isQueued, problem } = draft.value;
  const field = useRef<HTMLTextAreaElement>(null);
  const model = app.server.model(opened.facts.value.model).value;
  const last = opened.path.value.at(-1);
  const isBusy = lastState(opened) === "streaming";

  useEffect(() => {
    if (matchMedia("(pointer: fine)").matches) field.current?.focus();
  }, [opened.id]);
  useEffect(() => {
    if (field.current) fitHeight(field.current);
  }, [text, opened.id]);

  const change = (next: Partial<Draft>): void => changeDraft(opened, next);
  const attach = async (files: Iterable<File>): Promise<void> => {
    const abort = new AbortController();
    change({ readings: [...draft.peek().readings, abort], problem: null });
    const { found, problems } = await attachmentsOf(files, model, abort.signal);
    add(found);
    change({
      readings: draft.peek().readings.filter((one) => one !== abort),
      ...(problems.length > 0 && { problem: problems.join(" "), isQueued: false }),
    });
  };
  const cancelReading = (): void => {
    for (const abort of readings) abort.abort();
    change({ readings: [], isQueued: false });
    field.current?.focus();
  };
  const add = (found: readonly Attachment[]): void => {
    change({ attachments: [...draft.peek().attachments, ...found] });
    for (const one of found) if (one.kind === "text") void count(one);
  };
  const count = async (file: TextAttachment): Promise<void> => {
    const tokens = await countTokens(fileText(file), opened.facts.peek().model).catch(() => undefined);
    if (tokens === undefined) return; // the chip stays without a count
    const now = draft.peek().attachments;
    if (now.includes(file)) change({ attachments: now.map((one) => (one === file ? { ...file, tokens } : one)) });
  };
  const pasteAsFile = (pasted: string): void => {
    const names = new Set(draft.peek().attachments.map((one) => one.name));
    let number = 1;
    while (names.has(pastedName(number))) number++;
    add([{ kind: "text", name: pastedName(number), text: pasted }]);
  };
  const intoMessage = (file: TextAttachment): void => {
    const { text, attachments } = draft.peek();
    change({ text: text + file.text, attachments: attachments.filter((one) => one !== file) });
    field.current?.focus();
  };
  const send = (): void => {
    const { text, attachments, readings } = draft.peek(); // an earlier event may have sent what is shown
    if (!text.trim() && !attachments.length) return;
    if (isBusy) queueDraft(app, opened);
    else if (!readings.length && sendDraft(app, opened)) onSent(); // else the files are still to come
  };
  const stop = (): void => {
    for (const id of last === undefined ? [] : opened.tree.siblings(last)) {
      if (opened.message(id).peek().state === "streaming") app.store.stop(id); // all samples
    }
    field.current?.focus();
  };
  const latestEscape = useRef<() => void>(stop);
  latestEscape.current = isQueued ? () => change({ isQueued: false }) : stop;
  useEffect(() => {
    if (!isBusy && !isQueued) return undefined;
    const onEscape = (event: KeyboardEvent): void => {
      if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
      latestEscape.current();
    };
    document.addEventListener("keydown", onEscape);
    return () => document.removeEventListener("keydown", onEscape);
  }, [isBusy, isQueued]);
  const onKey = (event: KeyboardEvent): void => {
    if (event.key === "ArrowUp" && !text && !isBusy) {
      event.preventDefault();
      editLast();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
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
        {readings.length > 0 && (
          <p class="note" role="status">
            Reading the files…{" "}
            <button type="button" class="link" onClick={cancelReading}>
              Cancel
            </button>
          </p>
        )}
        {attachments.length > 0 && (
          <Chips
            attachments={attachments}
            numContext={model?.n_ctx ?? Infinity}
            onRemove={(index) => change({ attachments: attachments.filter((_, at) => at !== index) })}
            onUnpack={intoMessage}
          />
        )}
        <textarea
          ref={field}
          rows={1}
          aria-label="Message"
          placeholder="Write a message"
          dir="auto"
          value={text}
          onInput={(event) => change({ text: event.currentTarget.value })}
          onKeyDown={onKey}
          onPaste={(event) => {
            const files = [...(event.clipboardData?.files ?? [])];
            const pasted = event.clipboardData?.getData("text/plain") ?? "";
            // Cells of a spreadsheet come as text and as a picture; a copied file may come with its name.
            const isText = pasted.trim() !== "" && !files.some((file) => pasted.includes(file.name));
            if (isText ? pasted.length < LONG_PASTE : !files.length) return;
            event.preventDefault();
            if (!isText) void attach(files);
            else pasteAsFile(pasted);
          }}
        />
        <div class="composer-actions">
          <AttachButton model={model} onFiles={(files) => void attach(files)} />
          {isQueued ? (
            <span class="composer-hint" role="status">
              Sent after this reply · Escape to wait
            </span>
          ) : (
            <span class="composer-hint" aria-hidden="true">
              {isBusy ? "Enter sends after this reply · Escape stops it" : "Enter sends · Shift+Enter for a line"}
            </span>
          )}
          {/* Keys: a click on Stop would submit the form if its button became the other one meanwhile. */}
          {isBusy ? (
            <button key="stop" type="button" class="round stop" aria-label="Stop the reply" title="Stop (Escape)" onClick={stop}>
              <Icon name="stop" />
            </button>
          ) : (
            <button key="send" type="submit" class="round" aria-label="Send" title="Send (Enter)" disabled={!text.trim() && !attachments.length}>
              <Icon name="send" />
            </button>
          )}
        </div>
      </form>
    </DropZone>
  );
}

function AttachButton({ model, onFiles }: { model: ModelFacts | null; onFiles: (files: File[]) => void }): VNode {
  const input = useRef<HTMLInputElement>(null);
  const kinds = ["text", "PDF", ...(model?.modalities ?? []).filter((kind) => kind !== "text").map((kind) => (kind === "image" ? "images" : kind))];
  const label = `Attach files: ${kinds.join(", ")}`;
  return (
    <>
      <button type="button" class="icon-button" aria-label={label} title={label} onClick={() => input.current?.click()}>
        <Icon name="clip" />
      </button>
      <input
        ref={input}
        type="file"
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

interface ChipsProps {
  attachments: readonly Attachment[];
  numContext: number;
  onRemove: (index: number) => void;
  /** Puts the text of a pasted file into the message. */
  onUnpack: (file: TextAttachment) => void;
}

function Chips({ attachments, numContext, onRemove, onUnpack }: ChipsProps): VNode {
  return (
    <ul class="chips">
      {attachments.map((one, index) => (
        <li>
          {one.kind === "image" ? <img src={one.url} alt="" /> : <Icon name={one.kind === "text" ? "file" : "play"} />}
          <span>{one.name}</span>
          {one.kind === "text" && one.tokens !== undefined && (
            <span class={one.tokens > numContext ? "too-long" : "muted"}>
              {shownCount(one.tokens)} tokens{one.tokens > numContext && ", more than the context"}
            </span>
          )}
          {one.kind === "text" && one.name.startsWith(PASTED) && (
            <button type="button" class="icon-button" aria-label={`Put ${one.name} into the message`} title="Put it into the message" onClick={() => onUnpack(one)}>
              <Icon name="edit" />
            </button>
          )}
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
      {isOver && <p class="drop-hint">Drop files to attach them</p>}
      {children}
    </div>
  );
}
