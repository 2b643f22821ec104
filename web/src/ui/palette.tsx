import { signal } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { App } from "../app";
import type { FoundLine } from "../conversations/store";
import { Dialog } from "./dialog";
import { goTo } from "./route";

const MOST_TITLES = 8;
const LEAST_SEARCHED = 2; // characters
const isOpen = signal(false);

export interface Command {
  name: string;
  keys?: string;
  run: () => void;
}

interface Entry {
  key: string;
  text: string;
  more: string;
  run: () => void;
}

export function openPalette(): void {
  isOpen.value = true;
}

/** One field for commands, titles and the contents of conversations. */
export function Palette({ app, commands }: { app: App; commands: readonly Command[] }): VNode | null {
  return isOpen.value ? <OpenPalette app={app} commands={commands} /> : null;
}

function OpenPalette({ app, commands }: { app: App; commands: readonly Command[] }): VNode {
  const [text, setText] = useState("");
  const [lines, setLines] = useState<readonly FoundLine[]>([]);
  const [chosen, setChosen] = useState(0);
  const list = useRef<HTMLUListElement>(null);
  const wanted = text.trim().toLowerCase();
  useEffect(() => {
    setChosen(0);
    if (wanted.length < LEAST_SEARCHED) return setLines([]);
    const abort = new AbortController();
    void app.store.search(wanted, abort.signal).then((found) => abort.signal.aborted || setLines(found));
    return () => abort.abort();
  }, [wanted]);
  useEffect(() => list.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" }), [chosen]);
  const titles = app.store.list.value.filter((one) => one.title.toLowerCase().includes(wanted));
  const entries: Entry[] = [
    ...commands.filter((one) => one.name.toLowerCase().includes(wanted)).map((one) => ({ key: one.name, text: one.name, more: one.keys ?? "", run: one.run })),
    ...titles.slice(0, MOST_TITLES).map((one) => ({
      key: one.id, text: one.title || "Untitled", more: "conversation", run: () => goTo({ view: "chat", id: one.id }),
    })),
    ...lines.map((one) => ({ key: one.message, text: one.line, more: one.title, run: () => void app.store.reveal(one).then(() => goTo({ view: "chat", id: one.conversation })) })),
  ]; // prettier-ignore
  const close = (): void => void (isOpen.value = false);
  const run = (entry: Entry | undefined): void => {
    if (!entry) return;
    close();
    setTimeout(entry.run); // after the dialog has given the focus back
  };
  const onKey = (event: KeyboardEvent): void => {
    const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (step) setChosen((chosen + step + entries.length) % Math.max(1, entries.length));
    else if (event.key === "Enter" && !event.isComposing) run(entries[chosen]);
    else return;
    event.preventDefault();
  };
  return (
    <Dialog label="Find conversations and commands" onClose={close}>
      <div class="palette">
        <input
          type="text"
          role="combobox"
          aria-label="Find conversations and commands"
          aria-expanded="true"
          aria-controls="palette-list"
          aria-activedescendant={entries.length ? `palette-${chosen}` : undefined}
          placeholder="Find a conversation, a word in it, or a command"
          autocomplete="off"
          autofocus
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={onKey}
        />
        <ul id="palette-list" role="listbox" aria-label="Found" ref={list}>
          {entries.map((entry, at) => (
            <li key={entry.key} id={`palette-${at}`} role="option" aria-selected={at === chosen} onClick={() => run(entry)}>
              <span>{entry.text}</span>
              <span class="muted">{entry.more}</span>
            </li>
          ))}
        </ul>
        {entries.length === 0 && <p class="note">Nothing has this.</p>}
      </div>
    </Dialog>
  );
}
