import { effect } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { type App, toast } from "./app";
import { ChatView } from "./chat/chat_view";
import { DEFAULT, presets } from "./conversations/presets";
import type { OpenConversation } from "./conversations/store";
import { EngineView } from "./engine/engine_view";
import { editLast, focusComposer } from "./chat/text_area";
import { nextTheme } from "./ui/theme";
import { Announcer } from "./ui/announce";
import { Icon } from "./ui/icon";
import { KeyDialog } from "./ui/key_dialog";
import { KeysDialog, useKeys } from "./ui/keys";
import { type Command, Palette, openPalette } from "./ui/palette";
import { goTo, route } from "./ui/route";
import { Sidebar, exportAll } from "./ui/sidebar";

/** The page: the sidebar, the open view, and the layers above both. */
export function Shell({ app }: { app: App }): VNode {
  const [hasSidebar, setSidebar] = useState(false);
  const [isWide, setWide] = useState(true); // of the list beside the view; narrow screens have it above
  const [hasKeys, setKeys] = useState(false);
  const menuButton = useRef<HTMLButtonElement>(null);
  const close = (event?: Event): void => {
    if (!hasSidebar) return;
    event?.preventDefault(); // Escape stops a reply otherwise
    setSidebar(false);
    menuButton.current?.focus();
  };
  const toggleSidebar = (): void => (isNarrow() ? setSidebar(!hasSidebar) : setWide(!isWide));
  const commands: Command[] = [
    { name: "New conversation", keys: "Ctrl+Shift+O", run: () => goTo({ view: "new" }) },
    { name: "Write a message", keys: "/", run: () => (route.peek().view === "engine" && goTo({ view: "new" }), focusComposer()) },
    { name: "Edit the last message", keys: "↑ in an empty message", run: editLast },
    { name: "Settings of this conversation", run: () => clickOn("[aria-label='Settings of this conversation']") },
    { name: "Engine", run: () => goTo({ view: "engine" }) },
    { name: "Show or hide the conversations", keys: "Ctrl+B", run: toggleSidebar },
    { name: "Change the colours", run: nextTheme },
    { name: "Export all conversations", run: () => void exportAll(app) },
    { name: "Keys", keys: "?", run: () => setKeys(true) },
  ];
  useKeys({
    "ctrl+k": openPalette,
    "ctrl+shift+o": () => goTo({ view: "new" }),
    "ctrl+b": toggleSidebar,
    "/": focusComposer,
    "?": () => setKeys(true),
  });
  const menu = (
    <button
      ref={menuButton}
      type="button"
      class="icon-button menu"
      aria-label="Conversations"
      aria-expanded={hasSidebar || (!isNarrow() && isWide)}
      onClick={toggleSidebar}
    >
      <Icon name="menu" />
    </button>
  );
  return (
    <div class={`shell${hasSidebar ? " sidebar-open" : ""}${isWide ? "" : " sidebar-off"}`} onKeyDown={(event) => event.key === "Escape" && close(event)}>
      <a class="skip" href="#main" onClick={skipToMain}>
        Skip to the view
      </a>
      <Sidebar app={app} onNavigate={() => setSidebar(false)} />
      <button type="button" class="shade" aria-label="Close the conversations" tabIndex={-1} onClick={() => close()} />
      <main id="main" tabIndex={-1}>
        <View app={app} menu={menu} />
      </main>
      <Notices app={app} />
      <Announcer />
      <KeyDialog />
      <Palette app={app} commands={commands} />
      {hasKeys && <KeysDialog onClose={() => setKeys(false)} />}
    </div>
  );
}

function isNarrow(): boolean {
  return matchMedia("(max-width: 820px)").matches;
}

function clickOn(selector: string): void {
  document.querySelector<HTMLElement>(selector)?.click();
}

function skipToMain(event: Event): void {
  event.preventDefault(); // the part of the address behind the # names the view
  document.getElementById("main")?.focus();
}

function View({ app, menu }: { app: App; menu: VNode }): VNode | null {
  const now = route.value;
  const [opened, setOpened] = useState<OpenConversation | null>(null);
  const id = now.view === "chat" ? now.id : null;
  useEffect(() => {
    if (now.view === "engine") return undefined;
    if (id === null) {
      setOpened(app.store.create(opened?.facts.peek().model, presets.peek()[DEFAULT]));
      return undefined;
    }
    let isLeft = false;
    void app.store.open(id).then((found) => {
      if (isLeft) return;
      if (found) setOpened(found);
      else goTo({ view: "new" }, { replace: true });
    });
    return () => {
      isLeft = true;
    };
  }, [now.view, id]);
  useEffect(
    () =>
      effect(() => {
        if (!opened?.isDeleted.value) return;
        const at = route.peek();
        if (at.view === "chat" && at.id === opened.id) goTo({ view: "new" }, { replace: true });
      }),
    [opened],
  );
  useEffect(() => {
    document.title = now.view === "engine" ? "Engine · paceline" : `${opened?.facts.peek().title || "Chat"} · paceline`;
  });
  if (now.view === "engine") return <EngineView app={app} menu={menu} />;
  return opened ? <ChatView key={opened.id} app={app} opened={opened} menu={menu} /> : null;
}

function Notices({ app }: { app: App }): VNode | null {
  const { action, text = app.store.failure.value } = toast.value ?? {};
  if (text === null) return null;
  const dismiss = (): void => {
    toast.value = null;
    app.store.failure.value = null;
  };
  return (
    <div class="toast" role="status">
      <span>{text}</span>
      {action && (
        <button type="button" class="button" onClick={() => (dismiss(), action.run())}>
          {action.label}
        </button>
      )}
      <button type="button" class="icon-button" aria-label="Dismiss" onClick={dismiss}>
        <Icon name="close" />
      </button>
    </div>
  );
}
