import { useSignalEffect } from "@preact/signals";
import type { VNode } from "preact";
import { useRef, useState } from "preact/hooks";
import type { App } from "../app";
import type { OpenConversation } from "../conversations/store";
import { announce } from "../ui/announce";
import { Icon } from "../ui/icon";
import { goTo } from "../ui/route";
import { ActiveSettings } from "./active_settings";
import { Composer } from "./composer";
import { MessageList } from "./message_list";
import { failureText } from "./message_view";
import { ModelSelect } from "./model_select";
import { SettingsPanel } from "./settings_panel";
import { StatusLine } from "./status_line";
import { focusComposer } from "./text_area";
import { Welcome } from "./welcome";

const MOST_SAID = 600; // characters of a reply that a screen reader reads by itself

interface Props {
  app: App;
  opened: OpenConversation;
  menu: VNode;
}

/** A conversation: its messages, the composer of the next message, and its settings. */
export function ChatView({ app, opened, menu }: Props): VNode {
  const [hasSettings, setSettings] = useState(false);
  const settingsButton = useRef<HTMLButtonElement>(null);
  useAnnouncedReplies(app, opened);
  const isEmpty = opened.path.value.length === 0;
  const onSent = (): void => goTo({ view: "chat", id: opened.id }, { replace: isEmpty });
  const sendPrompt = (text: string): void => {
    void app.store.send(opened, null, text, []);
    focusComposer();
    onSent();
  };
  const closeSettings = (): void => {
    setSettings(false);
    settingsButton.current?.focus();
  };
  return (
    <div class={`chat${hasSettings ? " with-settings" : ""}`}>
      <div class="chat-column">
        <header class="bar">
          {menu}
          <h1>{opened.facts.value.title || "New conversation"}</h1>
          <ModelSelect app={app} opened={opened} />
          <button
            ref={settingsButton}
            type="button"
            class="icon-button"
            aria-label="Settings of this conversation"
            title="Settings"
            aria-expanded={hasSettings}
            onClick={() => setSettings(!hasSettings)}
          >
            <Icon name="sliders" />
          </button>
        </header>
        {isEmpty ? <Welcome app={app} opened={opened} onPrompt={sendPrompt} /> : <MessageList key={opened.id} app={app} opened={opened} />}
        <ServerNotice app={app} opened={opened} />
        <ActiveSettings app={app} opened={opened} onOpen={() => setSettings(true)} />
        <Composer app={app} opened={opened} onSent={onSent} />
        <StatusLine key={`status ${opened.id}`} app={app} opened={opened} />
      </div>
      {hasSettings && <SettingsPanel key={opened.id} app={app} opened={opened} onClose={closeSettings} />}
    </div>
  );
}

/** Says why no reply can be expected just now. */
function ServerNotice({ app, opened }: { app: App; opened: OpenConversation }): VNode | null {
  const failure = app.server.failure.value;
  const entry = app.server.entry(opened.facts.value.model);
  if (failure !== null) {
    return (
      <p class="notice" role="status">
        {failure}{" "}
        <button type="button" class="link" onClick={() => void app.server.refresh()}>
          Try again
        </button>
      </p>
    );
  }
  if (entry?.state === "loading") {
    return (
      <p class="notice" role="status">
        {entry.id} is loading, {Math.round(100 * entry.progress)} %. Messages wait for it.
      </p>
    );
  }
  if (entry?.state === "failed") {
    return (
      <p class="notice failed" role="status">
        {entry.id} could not be loaded: {entry.error}
      </p>
    );
  }
  return null;
}

/** Have a screen reader announce that a reply has begun, and its text once it is whole. */
function useAnnouncedReplies(app: App, opened: OpenConversation): void {
  const running = useRef(new Set<string>());
  useSignalEffect(() => {
    const path = new Set(opened.path.value);
    const now = new Set([...app.store.replies.value.keys()].filter((id) => path.has(id)));
    for (const id of now) if (!running.current.has(id)) announce("The reply is being generated.");
    for (const id of running.current) if (!now.has(id) && opened.has(id)) announce(spoken(opened, id));
    if (running.current.size && !now.size) void app.server.know(opened.facts.peek().model);
    running.current = now;
  });
}

function spoken(opened: OpenConversation, id: string): string {
  const message = opened.message(id).peek();
  if (message.state === "failed") return `The reply failed: ${failureText(message)}`;
  const text = message.content.length > MOST_SAID ? `${message.content.slice(0, MOST_SAID)}… and more` : message.content;
  const calls = message.toolCalls?.map((call) => `It calls ${call.name}.`).join(" ") ?? "";
  return `${message.state === "stopped" ? "Stopped" : "Reply"}: ${text} ${calls}`;
}
