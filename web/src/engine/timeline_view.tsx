import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Icon } from "../ui/icon";
import type { EngineState } from "./state";
import { type Column, type TimelineInput, type TimelineLayout, tokensOf } from "./timeline";
import { type Frame, GUTTER, type Palette, frameOf, laneAt, paint } from "./timeline_paint";

const WINDOWS_S = [5, 15, 60];
const REPAINT_MS = 100;
const COLOURS = ["ink", "muted", "line", "band", "prefill", "decode", "draft", "embed", "mark", "late"] as const;

const ENDS = [["ink", "ended"], ["muted", "cancelled"], ["mark", "preempted"], ["late", "failed"]] as const; // dots in the lanes

interface Props {
  state: EngineState;
  /** Milliseconds of the page's clock at which the state came. */
  receivedMs: number;
}

/** The last ticks, as they happen: the request in each slot, its work, and the duration of a tick against its target. */
export function TimelineView({ state, receivedMs }: Props): VNode {
  const [windowS, setWindow] = useState(15);
  const [pausedAt, setPaused] = useState<number | null>(null);
  const now = (): number => state.now_s + (performance.now() - receivedMs) / 1000;
  const frozen = useRef<EngineState | null>(null);
  const pause = (): void => {
    frozen.current = pausedAt === null ? state : null;
    setPaused(pausedAt === null ? now() : null);
  };
  const shown = frozen.current ?? state;
  const input = (): TimelineInput => {
    const to = pausedAt ?? (state.now_s ? now() : windowS);
    return {
      ticks: shown.ticks,
      marks: shown.marks,
      numSlots: shown.config?.num_slots ?? 1,
      targetMs: shown.config?.itl_target_ms ?? null,
      from: to - windowS,
      to,
    };
  };
  return (
    <section class="panel timeline" aria-labelledby="timeline-title">
      <header>
        <h2 id="timeline-title">Ticks</h2>
        <Legend hasDrafts={shown.config?.speculation ?? false} />
        <div class="segments" role="group" aria-label="Time that is shown">
          {WINDOWS_S.map((one) => (
            <button type="button" aria-pressed={one === windowS} onClick={() => setWindow(one)}>
              {one} s
            </button>
          ))}
        </div>
        <button type="button" class="icon-button" aria-label={pausedAt === null ? "Pause the timeline" : "Go on"} title={pausedAt === null ? "Pause" : "Go on"} onClick={pause}>
          <Icon name={pausedAt === null ? "pause" : "play"} />
        </button>
      </header>
      <TimelineCanvas input={input} isLive={pausedAt === null} numSlots={shown.config?.num_slots ?? 1} summary={summaryOf(shown, windowS)} />
    </section>
  );
}

function Legend({ hasDrafts }: { hasDrafts: boolean }): VNode {
  const names = hasDrafts ? ["prefill", "decode", "draft"] : ["prefill", "decode"];
  return (
    <span class="legend">
      {names.map((name) => (
        <span>
          <i class={`swatch ${name}`} />
          {name === "draft" ? "drafts" : name}
        </span>
      ))}
      <span>
        <i class="swatch embed" />
        embedding
      </span>
      <span>
        <i class="swatch dashed" />
        target
      </span>
      {ENDS.map(([colour, name]) => (
        <span key={name}>
          <i class={`swatch dot colour-${colour}`} />
          {name}
        </span>
      ))}
    </span>
  );
}

function summaryOf(state: EngineState, windowS: number): string {
  const since = state.now_s - windowS;
  const ticks = state.ticks.filter((tick) => tick.t >= since);
  const num = ticks.reduce((sum, tick) => sum + tick.n, 0);
  const longest = ticks.reduce((most, tick) => Math.max(most, tick.longest_ms ?? tick.ms), 0);
  const tokens = ticks.reduce((sum, tick) => sum + tokensOf(tick).fresh, 0);
  return `Timeline of ${windowS} seconds: ${num} ticks, the longest ${longest.toFixed(0)} ms, ${tokens} new tokens.`;
}

interface CanvasProps {
  input: () => TimelineInput;
  isLive: boolean;
  numSlots: number;
  summary: string;
}

/** A timeline on a canvas, painted ten times a second while it is live, with the part under the pointer in words. */
export function TimelineCanvas({ input, isLive, numSlots, summary }: CanvasProps): VNode {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const painted = useRef<{ layout: TimelineLayout; frame: Frame } | null>(null);
  const latest = useRef(input);
  latest.current = input;
  const [hover, setHover] = useState<{ x: number; y: number; column: Column; lane: number | null } | null>(null);

  const repaint = (): void => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (!element || !context || !box.current) return;
    const width = box.current.clientWidth;
    const frame = frameOf(width, numSlots);
    fit(element, context, width, frame.height);
    painted.current = { layout: paint(context, latest.current(), frame, paletteOf(box.current)), frame };
  };
  useEffect(() => {
    repaint();
    const watcher = new ResizeObserver(repaint);
    if (box.current) watcher.observe(box.current);
    const timer = isLive ? setInterval(repaint, REPAINT_MS) : undefined;
    return () => {
      clearInterval(timer);
      watcher.disconnect();
    };
  }, [isLive, numSlots]);
  useEffect(() => {
    if (!isLive) repaint();
  });

  const onMove = (event: PointerEvent): void => {
    const bounds = canvas.current?.getBoundingClientRect();
    if (!bounds || !painted.current) return;
    const x = event.clientX - bounds.left;
    const y = event.clientY - bounds.top;
    const column = columnAt(painted.current.layout, x - GUTTER);
    setHover(column ? { x, y, column, lane: laneAt(painted.current.frame, y) } : null);
  };
  return (
    <div class="timeline-box" ref={box} onPointerMove={onMove} onPointerLeave={() => setHover(null)}>
      <div class="palette" hidden>
        {COLOURS.map((name) => (
          <i class={`colour-${name}`} data-colour={name} />
        ))}
      </div>
      <canvas ref={canvas} role="img" aria-label={summary} />
      {hover && <Tooltip {...hover} width={box.current?.clientWidth ?? 0} />}
    </div>
  );
}

function fit(element: HTMLCanvasElement, context: CanvasRenderingContext2D, width: number, height: number): void {
  const scale = devicePixelRatio || 1;
  if (element.width !== Math.round(width * scale) || element.height !== Math.round(height * scale)) {
    element.width = Math.round(width * scale);
    element.height = Math.round(height * scale);
    element.style.width = `${width}px`;
    element.style.height = `${height}px`;
  }
  context.setTransform(scale, 0, 0, scale, 0, 0);
}

/** Return the colours of the style sheet, light or dark as they are just now. */
function paletteOf(box: HTMLElement): Palette {
  const found = [...box.querySelectorAll<HTMLElement>("[data-colour]")];
  return Object.fromEntries(found.map((one) => [one.dataset["colour"], getComputedStyle(one).color])) as Palette;
}

function columnAt(layout: TimelineLayout, x: number): Column | null {
  let nearest: Column | null = null;
  let distance = 4; // pixels beside a column that still count
  for (const column of layout.columns) {
    const off = x < column.x ? column.x - x : Math.max(0, x - column.x - column.width);
    if (off <= distance) {
      nearest = column;
      distance = off;
    }
  }
  return nearest;
}

function Tooltip(props: { x: number; y: number; column: Column; lane: number | null; width: number }): VNode {
  const { tick } = props.column;
  const sum = tokensOf(tick);
  const row = props.lane === null ? undefined : tick.rows?.find(([slot]) => slot === props.lane);
  const isRight = props.x > props.width - 230;
  const place = { left: isRight ? "auto" : `${props.x + 14}px`, right: isRight ? `${props.width - props.x + 14}px` : "auto", top: `${props.y + 10}px` };
  return (
    <div class="tooltip" style={place}>
      <strong>
        {tick.n > 1 ? `${tick.n} ticks of ${tick.ms.toFixed(1)} ms` : `${tick.ms.toFixed(1)} ms`}
      </strong>
      <span>{tick.embed ? `embedding: ${tick.embed[0]} texts, ${tick.embed[1]} tokens` : `${sum.prefill} prefill, ${sum.decode} decode${sum.drafts ? `, ${sum.drafts} drafts` : ""} → ${sum.fresh} new`}</span>
      <span>
        {sum.rows} rows{tick.waiting ? `, ${tick.waiting} waiting` : ""}
      </span>
      {row && (
        <span>
          slot {row[0]}, #{row[1]}: {row[3] ? `${row[3]} prefill ` : ""}
          {row[4] ? `${row[4]} decode ` : ""}
          {row[5] ? `${row[5]} drafts` : ""}
        </span>
      )}
    </div>
  );
}
