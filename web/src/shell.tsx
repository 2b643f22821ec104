import { effect } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { type App, toast } from "./app";
import { ChatView } from "./chat/chat_view";
import { DEFAULT, presets } from "./conversations/presets";
import type { OpenConversation } from "./conversations/store";
import { EngineView } from "./engine/engine_view";
import { Announcer } from "./ui/announce";
import { ConfirmDialog } from "./ui/dialog";
import { Icon } from "./ui/icon";
import { KeyDialog } from "./ui/key_dialog";
import { goTo, route } from "./ui/route";
import { Sidebar } from "./ui/sidebar";

/** The page: the sidebar, the open view, and the layers above both. */
export function Shell({ app }: { app: App }): VNode {
  const [hasSidebar, setSidebar] = useState(false);
  const menuButton = useRef<HTMLButtonElement>(null);
  const close = (event?: Event): void => {
    if (!hasSidebar) return;
    event?.preventDefault(); // Escape stops a reply otherwise
    setSidebar(false);
    menuButton.current?.focus();
  };
  const menu = (
    <button
      ref={menuButton}
      type="button"
      class="icon-button menu"
      aria-label="Conversations"
      aria-expanded={hasSidebar}
      onClick={() => setSidebar(!hasSidebar)}
    >
      <Icon name="menu" />
    </button>
  );
  return (
    <div class={`shell${hasSidebar ? " sidebar-open" : ""}`} onKeyDown={(event) => event.key === "Escape" && close(event)}>
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
      <ConfirmDialog />
    </div>
  );
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
  const text = toast.value ?? app.store.failure.value;
  if (text === null) return null;
  return (
    <div class="toast" role="status">
      <span>{text}</span>
      <button
        type="button"
        class="icon-button"
        aria-label="Dismiss"
        onClick={() => {
          toast.value = null;
          app.store.failure.value = null;
        }}
      >
        <Icon name="close" />
      </button>
    </div>
  );
}
