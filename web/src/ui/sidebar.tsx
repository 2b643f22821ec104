import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { messageOf } from "../api/errors";
import { apiKey, forgetKey } from "../api/key";
import { type App, showToast } from "../app";
import type { Conversation } from "../conversations/model";
import { exportText, parseImport } from "../conversations/transfer";
import { Icon, type IconName } from "./icon";
import { addressOf, goTo, route } from "./route";
import { saveFile } from "./save_file";
import { nextTheme, theme } from "./theme";

const MOST_LISTED = 300; // more are found by searching

/** The conversations, and the link to the engine view. */
export function Sidebar({ app, onNavigate }: { app: App; onNavigate: () => void }): VNode {
  const [wanted, setWanted] = useState("");
  const list = app.store.list.value.filter((one) => one.title.toLowerCase().includes(wanted.toLowerCase().trim()));
  const now = route.value;
  return (
    <nav class="sidebar" aria-label="Conversations and views">
      <div class="brand">
        <span class="mark small" aria-hidden="true">
          <i />
          <i />
          <i />
          <i />
        </span>
        paceline
      </div>
      <a class="nav" href={addressOf({ view: "new" })} aria-current={now.view === "new" ? "page" : undefined} onClick={onNavigate}>
        <Icon name="plus" /> New conversation
      </a>
      <a class="nav" href={addressOf({ view: "engine" })} aria-current={now.view === "engine" ? "page" : undefined} onClick={onNavigate}>
        <Icon name="engine" /> Engine
      </a>
      <label class="search">
        <Icon name="search" />
        <span class="off-screen">Search conversations</span>
        <input type="search" placeholder="Search" value={wanted} onInput={(event) => setWanted(event.currentTarget.value)} />
      </label>
      <div class="conversations">
        {list.length === 0 && <p class="note">{wanted ? "No conversation has this in its title." : "Conversations stay in this browser."}</p>}
        {grouped(list.slice(0, MOST_LISTED)).map(([name, some]) => (
          <section aria-label={name}>
            <h2>{name}</h2>
            <ul>
              {some.map((one) => (
                <Entry key={one.id} app={app} conversation={one} isOpen={now.view === "chat" && now.id === one.id} onNavigate={onNavigate} />
              ))}
            </ul>
          </section>
        ))}
      </div>
      <Footer app={app} />
    </nav>
  );
}

interface EntryProps {
  app: App;
  conversation: Conversation;
  isOpen: boolean;
  onNavigate: () => void;
}

function Entry({ app, conversation, isOpen, onNavigate }: EntryProps): VNode {
  const [isNaming, setNaming] = useState(false);
  const title = conversation.title || "Untitled";
  const item = useRef<HTMLLIElement>(null);
  const isRefocused = useRef(false);
  useEffect(() => {
    if (!isNaming && isRefocused.current) item.current?.querySelector<HTMLElement>("[title=Rename]")?.focus();
    isRefocused.current = false;
  }, [isNaming]);
  const remove = async (): Promise<void> => {
    const neighbour = item.current?.nextElementSibling ?? item.current?.previousElementSibling;
    const undo = await app.store.delete(conversation.id);
    showToast(`“${title}” was deleted.`, {
      label: "Undo",
      run: () => void undo().then(() => isOpen && goTo({ view: "chat", id: conversation.id })),
    });
    (neighbour?.querySelector("a") ?? document.querySelector<HTMLElement>(".sidebar .nav"))?.focus();
    if (isOpen) goTo({ view: "new" });
  };
  const rename = (name: string, byKey: boolean): void => {
    isRefocused.current = byKey;
    setNaming(false);
    if (name.trim()) void app.store.rename(conversation.id, name.trim().slice(0, 200));
  };
  if (isNaming) return <li class="entry" ref={item}><NameField title={title} onDone={rename} /></li>;
  const isBusy = app.store.busy.value.has(conversation.id);
  return (
    <li class={`entry${isOpen ? " open" : ""}`} ref={item}>
      <a href={addressOf({ view: "chat", id: conversation.id })} aria-current={isOpen ? "page" : undefined} title={title} onClick={onNavigate}>
        {isBusy && <span class="pulse" role="img" aria-label="A reply is being generated" />}
        <span>{title}</span>
      </a>
      <span class="entry-actions">
        <button
          type="button"
          class="icon-button"
          aria-label={`Pin ${title}`}
          title={conversation.isPinned ? "Unpin" : "Pin"}
          aria-pressed={Boolean(conversation.isPinned)}
          onClick={() => void app.store.pin(conversation.id, !conversation.isPinned)}
        >
          <Icon name="pin" />
        </button>
        <button type="button" class="icon-button" aria-label={`Rename ${title}`} title="Rename" onClick={() => setNaming(true)}>
          <Icon name="edit" />
        </button>
        <button type="button" class="icon-button" aria-label={`Delete ${title}`} title="Delete" onClick={() => void remove()}>
          <Icon name="trash" />
        </button>
      </span>
    </li>
  );
}

/** onDone: called once; with an empty name, the title stays. byKey: else the field has lost the focus to something else. */
function NameField({ title, onDone }: { title: string; onDone: (name: string, byKey: boolean) => void }): VNode {
  const isDone = useRef(false); // a field that is removed loses the focus, too
  const finish = (name: string, byKey: boolean): void => {
    if (isDone.current) return;
    isDone.current = true;
    onDone(name, byKey);
  };
  return (
    <input
      class="name-field"
      aria-label="Title"
      value={title}
      autofocus
      ref={(element) => element?.focus()}
      onBlur={(event) => finish(event.currentTarget.value, false)}
      onKeyDown={(event) => {
        if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
        event.preventDefault();
        event.stopPropagation(); // Escape closes the sidebar, too
        finish(event.key === "Enter" ? event.currentTarget.value : "", true);
      }}
    />
  );
}

function Footer({ app }: { app: App }): VNode {
  const input = useRef<HTMLInputElement>(null);
  const names = { auto: "Colours of the system", light: "Light colours", dark: "Dark colours" } as const;
  const icons = { auto: "auto", light: "sun", dark: "moon" } as const;
  return (
    <div class="sidebar-footer">
      <Tool icon="import" label="Import conversations" onClick={() => input.current?.click()} />
      <Tool icon="export" label="Export all conversations" onClick={() => void exportAll(app)} />
      {apiKey() && <Tool icon="key" label="Forget the API key" onClick={() => leaveKey(app)} />}
      <Tool icon={icons[theme.value]} label={`${names[theme.value]}; change`} onClick={nextTheme} />
      <span class="version">{app.server.page.value?.version}</span>
      <input
        ref={input}
        type="file"
        accept=".json,application/json"
        hidden
        aria-label="File to import"
        onChange={(event) => {
          const file = event.currentTarget.files?.[0];
          event.currentTarget.value = "";
          if (file) void importFile(app, file);
        }}
      />
    </div>
  );
}

function Tool({ icon, label, onClick }: { icon: IconName; label: string; onClick: () => void }): VNode {
  return (
    <button type="button" class="icon-button" aria-label={label} title={label} onClick={onClick}>
      <Icon name={icon} />
    </button>
  );
}

function leaveKey(app: App): void {
  forgetKey();
  void app.server.refresh();
}

export async function exportAll(app: App): Promise<void> {
  try {
    const text = exportText(await app.store.everything());
    saveFile(`paceline-conversations-${new Date().toISOString().slice(0, 10)}.json`, text, "application/json");
  } catch (error) {
    showToast(`Nothing was exported. ${messageOf(error)}`);
  }
}

async function importFile(app: App, file: File): Promise<void> {
  try {
    const imported = parseImport(await file.text());
    await app.store.add(imported);
    showToast(`${imported.length} ${imported.length === 1 ? "conversation was" : "conversations were"} imported.`);
  } catch (error) {
    showToast(`Nothing was imported. ${messageOf(error)}`);
  }
}

function grouped(list: readonly Conversation[]): Array<[string, Conversation[]]> {
  const today = new Date().setHours(0, 0, 0, 0);
  const groups = new Map<string, Conversation[]>();
  if (list.some((one) => one.isPinned)) groups.set("Pinned", []); // first
  for (const one of list) {
    const age = today - one.updatedAt;
    const name = one.isPinned ? "Pinned" : age <= 0 ? "Today" : age <= 86_400_000 ? "Yesterday" : age <= 6 * 86_400_000 ? "This week" : "Earlier";
    groups.set(name, [...(groups.get(name) ?? []), one]);
  }
  return [...groups];
}
