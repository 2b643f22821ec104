import type { VNode } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { App } from "../app";
import type { OpenConversation } from "../conversations/store";
import { Icon } from "../ui/icon";
import { MessageView } from "./message_view";

const FIRST = 40; // messages that are drawn at once
const MORE = 60; // that are added above whenever the browser has time
const NEAR_PX = 60; // from the end: new text is followed

/** The messages of the shown path. The newest are shown at once; older messages follow while nothing else is to do. */
export function MessageList({ app, opened }: { app: App; opened: OpenConversation }): VNode {
  const path = opened.path.value;
  const [drawn, setDrawn] = useState(FIRST);
  const scroller = useRef<HTMLDivElement>(null);
  const [isAtEnd, setAtEnd] = useState(true);
  const follows = useRef(true);

  useEffect(() => {
    if (drawn >= path.length) return undefined;
    return whenIdle(() => setDrawn(drawn + MORE));
  }, [drawn, path.length]);

  useLayoutEffect(() => {
    const element = scroller.current;
    const content = element?.firstElementChild;
    if (!element || !content) return undefined;
    const toEnd = (): void => {
      if (follows.current) element.scrollTop = element.scrollHeight;
    };
    toEnd();
    const watcher = new ResizeObserver(toEnd);
    watcher.observe(content);
    return () => watcher.disconnect();
  }, []);

  useLayoutEffect(() => {
    const last = path[path.length - 1];
    if (last === undefined || opened.message(last).peek().state !== "streaming") return;
    follows.current = true; // a message was sent
    if (scroller.current) scroller.current.scrollTop = scroller.current.scrollHeight;
  }, [path[path.length - 1]]);

  const onScroll = (): void => {
    const element = scroller.current;
    if (!element) return;
    follows.current = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR_PX;
    setAtEnd(follows.current);
  };
  const toEnd = (): void => scroller.current?.scrollTo({ top: scroller.current.scrollHeight });

  return (
    <div class="messages-frame">
      <div class="messages" ref={scroller} onScroll={onScroll} tabIndex={0} role="region" aria-label="Conversation">
        <div class="messages-content">
          {drawn < path.length && <p class="note">{path.length - drawn} earlier messages are coming…</p>}
          {path.slice(-drawn).map((id, at, shown) => (
            <MessageView key={id} app={app} opened={opened} id={id} isLast={at === shown.length - 1} />
          ))}
        </div>
      </div>
      {!isAtEnd && (
        <button type="button" class="to-end" aria-label="To the newest message" title="To the newest message" onClick={toEnd}>
          <Icon name="bottom" />
        </button>
      )}
    </div>
  );
}

function whenIdle(action: () => void): () => void {
  if (typeof requestIdleCallback === "function") {
    const id = requestIdleCallback(action, { timeout: 500 });
    return () => cancelIdleCallback(id);
  }
  const timer = setTimeout(action, 50);
  return () => clearTimeout(timer);
}
