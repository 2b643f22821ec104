import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { shownCount, shownSeconds } from "../ui/shown";
import { GUTTER } from "./timeline_paint";
import { TimelineCanvas } from "./timeline_view";
import type { TraceData, TraceRequest } from "./trace_types";
import { type TraceWindow, centred, moved, wholeTrace, zoomed } from "./trace_window";

const STEP = 1.25; // of one turn of the wheel
const RIGHT = 10; // pixels right of the time's area

/** A trace: its timeline, which can be zoomed and moved, and its requests. */
export function TraceView({ trace }: { trace: TraceData }): VNode {
  const [window, setWindow] = useState(() => wholeTrace(trace.end_s));
  const slots = trace.config.num_slots;
  const select = (one: TraceRequest): void => {
    const end = one.ended_at_s ?? trace.end_s;
    const margin = 0.05 * Math.max(end - one.submitted_at_s, 0.01);
    setWindow({ from: Math.max(0, one.submitted_at_s - margin), to: Math.min(Math.max(trace.end_s, end), end + margin) });
  };
  return (
    <main class="trace">
      <header>
        <h1>{trace.title}</h1>
        <p class="muted">{trace.summary}</p>
      </header>
      <section class="panel timeline" aria-label="Timeline">
        <TraceControls trace={trace} window={window} onChange={setWindow} />
        <Gestures trace={trace} window={window} onChange={setWindow}>
          <TimelineCanvas
            isLive={false}
            numSlots={slots}
            summary={`Timeline from ${window.from.toFixed(2)} to ${window.to.toFixed(2)} seconds`}
            input={() => ({
              ticks: trace.ticks,
              marks: trace.marks,
              stays: trace.stays,
              numSlots: slots,
              targetMs: trace.config.itl_target_ms,
              ...window,
              zero: 0,
            })}
          />
        </Gestures>
        <Overview trace={trace} window={window} onChange={setWindow} />
      </section>
      <Requests trace={trace} onSelect={select} />
    </main>
  );
}

interface WindowProps {
  trace: TraceData;
  window: TraceWindow;
  onChange: (window: TraceWindow) => void;
}

function TraceControls({ trace, window, onChange }: WindowProps): VNode {
  const middle = (window.from + window.to) / 2;
  const button = (label: string, next: TraceWindow): VNode => (
    <button type="button" class="button" onClick={() => onChange(next)}>
      {label}
    </button>
  );
  return (
    <div class="trace-controls">
      <span class="legend">
        {["prefill", "decode", "draft", "embed"].map((name) => (
          <span>
            <i class={`swatch ${name}`} />
            {name === "draft" ? "drafts" : name === "embed" ? "embedding" : name}
          </span>
        ))}
      </span>
      <span class="muted push">
        {window.from.toFixed(2)} to {window.to.toFixed(2)} s of {trace.end_s.toFixed(2)} s
      </span>
      {button("−", zoomed(window, 1 / (STEP * STEP), middle, trace.end_s))}
      {button("+", zoomed(window, STEP * STEP, middle, trace.end_s))}
      {button("All", wholeTrace(trace.end_s))}
    </div>
  );
}

/** Zooms by the wheel and by + and −, moves by dragging and by the arrow keys. */
function Gestures({ trace, window, onChange, children }: WindowProps & { children: VNode }): VNode {
  const box = useRef<HTMLDivElement>(null);
  const dragged = useRef<number | null>(null);
  const latest = useRef({ window, onChange });
  latest.current = { window, onChange };
  const width = (): number => Math.max(1, (box.current?.clientWidth ?? 1) - GUTTER - RIGHT);
  useEffect(() => {
    const element = box.current;
    const onWheel = (event: WheelEvent): void => {
      event.preventDefault();
      const { window: now, onChange: change } = latest.current;
      const left = element?.getBoundingClientRect().left ?? 0;
      const around = now.from + ((event.clientX - left - GUTTER) / width()) * (now.to - now.from);
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) change(moved(now, event.deltaX / width(), trace.end_s));
      else change(zoomed(now, event.deltaY < 0 ? STEP : 1 / STEP, around, trace.end_s));
    };
    element?.addEventListener("wheel", onWheel, { passive: false });
    return () => element?.removeEventListener("wheel", onWheel);
  }, []);
  const onMove = (event: PointerEvent): void => {
    if (dragged.current === null) return;
    onChange(moved(window, (dragged.current - event.clientX) / width(), trace.end_s));
    dragged.current = event.clientX;
  };
  const onKey = (event: KeyboardEvent): void => {
    const middle = (window.from + window.to) / 2;
    const next = {
      ArrowLeft: () => moved(window, -0.2, trace.end_s),
      ArrowRight: () => moved(window, 0.2, trace.end_s),
      "+": () => zoomed(window, STEP, middle, trace.end_s),
      "-": () => zoomed(window, 1 / STEP, middle, trace.end_s),
      Home: () => wholeTrace(trace.end_s),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    onChange(next());
  };
  return (
    <div
      ref={box}
      class="gestures"
      tabIndex={0}
      role="application"
      aria-label="Timeline: arrow keys move, plus and minus zoom, Home shows all"
      onKeyDown={onKey}
      onPointerDown={(event) => {
        dragged.current = event.clientX;
        event.currentTarget.setPointerCapture(event.pointerId);
      }}
      onPointerMove={onMove}
      onPointerUp={() => {
        dragged.current = null;
      }}
    >
      {children}
    </div>
  );
}

/** The whole trace in one strip, with the part that is shown. A click moves there. */
function Overview({ trace, window, onChange }: WindowProps): VNode {
  const go = (event: PointerEvent & { currentTarget: HTMLElement }): void => {
    const bounds = event.currentTarget.getBoundingClientRect();
    onChange(centred(window, ((event.clientX - bounds.left) / bounds.width) * trace.end_s, trace.end_s));
  };
  const share = (value: number): string => `${(100 * value) / Math.max(trace.end_s, 1e-9)}%`;
  return (
    <div class="overview" aria-hidden="true" onPointerDown={go} onPointerMove={(event) => event.buttons === 1 && go(event)}>
      {trace.stays.slice(0, 2000).map((stay) => (
        <i
          style={{
            left: share(stay.start_s),
            width: share((stay.end_s ?? trace.end_s) - stay.start_s),
            top: `${(100 * stay.slot) / trace.config.num_slots}%`,
            height: `${Math.max(4, 90 / trace.config.num_slots)}%`,
          }}
        />
      ))}
      <b style={{ left: share(window.from), width: share(window.to - window.from) }} />
    </div>
  );
}

function Requests({ trace, onSelect }: { trace: TraceData; onSelect: (one: TraceRequest) => void }): VNode {
  return (
    <section class="panel" aria-label="Requests">
      <header>
        <h2>Requests</h2>
        <span class="muted">{shownCount(trace.requests.length)}</span>
      </header>
      <div class="table" tabIndex={0} role="region" aria-label="Requests">
        <table>
          <thead>
            <tr>
              <th>Request</th>
              <th class="align-right">Submitted</th>
              <th class="align-right">Prompt</th>
              <th class="align-right">Cached</th>
              <th class="align-right">First token after</th>
              <th class="align-right">Generated</th>
              <th class="align-right">Took</th>
              <th>Ended by</th>
            </tr>
          </thead>
          <tbody>
            {trace.requests.map((one) => (
              <tr key={one.key}>
                <td>
                  <button type="button" class="link" title={one.request_id ?? ""} onClick={() => onSelect(one)}>
                    #{one.key}
                  </button>
                </td>
                <td class="align-right">{one.submitted_at_s.toFixed(2)} s</td>
                <td class="align-right">{shownCount(one.prompt_tokens)}</td>
                <td class="align-right">{shownCount(one.cached_tokens)}</td>
                <td class="align-right">{one.ttft_s === null ? "–" : shownSeconds(one.ttft_s)}</td>
                <td class="align-right">{shownCount(one.generated_tokens)}</td>
                <td class="align-right">{one.ended_at_s === null ? "–" : shownSeconds(one.ended_at_s - one.submitted_at_s)}</td>
                <td>{one.reason ?? "still running"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
