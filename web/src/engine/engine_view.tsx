import type { VNode } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { App } from "../app";
import { EngineFeed, type FeedStatus } from "./feed";
import { Figures, Latency, MemoryPanel, Queue, Requests, Slots } from "./panels";
import { TimelineView } from "./timeline_view";
import { TreeView } from "./tree_view";

/** The engine at work. The events are read as long as the view is open and the tab is visible. */
export function EngineView({ app, menu }: { app: App; menu: VNode }): VNode {
  const [chosen, setChosen] = useState("");
  const page = app.server.page.value;
  const models = page?.models ?? [];
  const model = chosen || (page?.is_router ? (page.default_model ?? "") : "");
  const feed = useMemo(() => new EngineFeed(model), [model]);
  const [focused, setFocused] = useState<number | null>(null);
  const receivedMs = useRef(0);
  useFeed(feed, page !== null);
  const state = feed.state.value;
  useMemo(() => {
    receivedMs.current = performance.now();
  }, [state]);
  return (
    <div class="engine">
      <header class="bar">
        {menu}
        <h1>Engine</h1>
        <Status status={feed.status.value} />
        {models.length > 1 ? (
          <select class="model-select" aria-label="Model" value={model} onChange={(event) => setChosen(event.currentTarget.value)}>
            {models.map((one) => (
              <option value={one.id}>{one.state === "loaded" ? one.id : `${one.id} (${one.state})`}</option>
            ))}
          </select>
        ) : (
          <span class="model-name">{state.model ?? models[0]?.id ?? ""}</span>
        )}
      </header>
      <div class="engine-content" tabIndex={0} role="region" aria-label="What the engine does">
        <Figures state={state} />
        <TimelineView state={state} receivedMs={receivedMs.current} />
        <div class="grid">
          <Slots state={state} focused={focused} onFocus={setFocused} />
          <TreeView state={state} focused={focused} onFocus={setFocused} />
          <Latency title="Inter-token latency" histogram={state.histograms?.["itl_s"]} target={(state.config?.itl_target_ms ?? 0) / 1000 || null} />
          <Latency title="Time to first token" histogram={state.histograms?.["ttft_s"]} />
          <Queue state={state} />
          <MemoryPanel state={state} />
          <Requests state={state} />
        </div>
      </div>
    </div>
  );
}

/** Read a feed while the view is open and the tab is seen. */
function useFeed(feed: EngineFeed, isKnown: boolean): void {
  useEffect(() => {
    if (!isKnown) return undefined; // which models there are
    const follow = (): void => (document.visibilityState === "visible" ? feed.open() : feed.close());
    follow();
    document.addEventListener("visibilitychange", follow);
    return () => {
      document.removeEventListener("visibilitychange", follow);
      feed.close();
    };
  }, [feed, isKnown]);
}

function Status({ status }: { status: FeedStatus }): VNode {
  const text = status.kind === "live" ? "live" : status.kind === "connecting" ? "Connecting…" : status.message;
  return (
    <span class={`feed ${status.kind}`} role="status">
      <i aria-hidden="true" />
      {text}
    </span>
  );
}
