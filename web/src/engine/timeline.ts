import type { Mark, Row, Tick } from "./types";

/** The data of a timeline. */
export interface TimelineInput {
  ticks: readonly Tick[];
  marks: readonly Mark[];
  numSlots: number;
  targetMs: number | null;
  /** The request in each slot, if it is known otherwise than by the ticks. end_s: null while it runs. */
  stays?: ReadonlyArray<{ slot: number; key: number; start_s: number; end_s: number | null }>;
  /** The moments at the left and right edge, on the engine's clock. */
  from: number;
  to: number;
  /** The moment that the axis counts from; by default the right edge, which is now. */
  zero?: number;
}

export type Work = "prefill" | "decode" | "draft";

/** A part of a lane. level: 0 to 1, how many tokens. */
export interface Bar {
  lane: number;
  x: number;
  width: number;
  work: Work;
  level: number;
  key: number;
}

/** The duration of a tick, as a column of the lower part. height: in milliseconds. */
export interface Column {
  x: number;
  width: number;
  ms: number;
  isLate: boolean;
  prefill: number;
  decode: number;
  tick: Tick;
}

/** A stretch of a lane in which one request has the slot. */
export interface Run {
  lane: number;
  key: number;
  x: number;
  end: number;
}

export interface TimelineLayout {
  runs: Run[];
  bars: Bar[];
  columns: Column[];
  marks: Array<{ x: number; lane: number; mark: Mark }>;
  /** The most milliseconds that the scale shows. */
  scaleMs: number;
}

const NARROWEST = 1.5; // pixels of a bar
const SCALES_MS = [2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000];

/** Lay out ticks over `width` pixels: lanes are slots, columns are durations of ticks. Pure. */
export function layOut(input: TimelineInput, width: number): TimelineLayout {
  const scale = width / Math.max(1e-6, input.to - input.from);
  const x = (t: number): number => (t - input.from) * scale;
  const shown = input.ticks.filter((tick) => endOf(tick) >= input.from && tick.t <= input.to);
  const bars: Bar[] = [];
  const last = new Map<string, Bar>();
  const columns: Column[] = [];
  for (const tick of shown) {
    const left = x(tick.t);
    const span = Math.max(NARROWEST, x(endOf(tick)) - left - 0.5);
    for (const row of tick.rows ?? []) addBars(bars, last, row, left, span, tick.n);
    addColumn(columns, columnOf(tick, left, span, input.targetMs));
  }
  const runs = input.stays
    ? input.stays
        .filter((stay) => (stay.end_s ?? input.to) >= input.from && stay.start_s <= input.to)
        .map((stay) => ({ lane: stay.slot, key: stay.key, x: x(stay.start_s), end: x(stay.end_s ?? input.to) }))
    : runsOf(bars);
  // Ends are known for longer than ticks: a dot has a bar before it.
  const since = input.stays ? input.from : Math.max(input.from, input.ticks[0]?.t ?? input.to);
  const longest = Math.max(...columns.map((one) => one.ms), SCALES_MS[0] ?? 0) * 1.15;
  return {
    runs,
    bars,
    columns,
    marks: input.marks
      .filter((mark) => mark.t >= since && mark.t <= input.to && mark.slot !== null)
      .map((mark) => ({ x: x(mark.t), lane: mark.slot ?? 0, mark })),
    scaleMs: SCALES_MS.find((one) => one >= longest) ?? longest,
  };
}

/** Return the end of a tick; of merged ticks, of the last. */
export function endOf(tick: Tick): number {
  return tick.end_t ?? tick.t + (tick.n * tick.ms) / 1000;
}

/** Return the tokens that a tick computed, of all tenants. */
export function tokensOf(tick: Tick): { prefill: number; decode: number; drafts: number; fresh: number; rows: number } {
  const sum = { prefill: 0, decode: 0, drafts: 0, fresh: 0, rows: tick.rows?.length ?? 0 };
  for (const [, , , prefill, decode, drafts, fresh] of tick.rows ?? []) {
    sum.prefill += prefill;
    sum.decode += decode;
    sum.drafts += drafts;
    sum.fresh += fresh;
  }
  if (tick.others) {
    sum.rows += tick.others[0];
    sum.prefill += tick.others[1];
    sum.decode += tick.others[2];
    sum.drafts += tick.others[3];
    sum.fresh += tick.others[4];
  }
  return sum;
}

/** Join bars of the same request that follow each other in a lane. */
function runsOf(bars: readonly Bar[]): Run[] {
  const runs: Run[] = [];
  const last = new Map<number, Run>();
  for (const bar of bars) {
    const before = last.get(bar.lane);
    if (before && before.key === bar.key) {
      before.end = Math.max(before.end, bar.x + bar.width);
      continue;
    }
    const run = { lane: bar.lane, key: bar.key, x: bar.x, end: bar.x + bar.width };
    last.set(bar.lane, run);
    runs.push(run);
  }
  return runs;
}

/** Add the bars of a row. A bar that begins in the same pixel as the last only makes it wider. */
function addBars(bars: Bar[], last: Map<string, Bar>, row: Row, x: number, width: number, n: number): void {
  const [lane, key, , prefill, decode, drafts] = row;
  const works: Array<[Work, number, number]> = [
    ["prefill", prefill, 256],
    ["decode", decode, n],
    ["draft", drafts, 8 * n],
  ];
  for (const [work, tokens, most] of works) {
    if (tokens <= 0) continue;
    const level = 0.6 + 0.4 * Math.min(1, tokens / most);
    const before = last.get(`${lane}${work}`);
    if (before && before.key === key && x - before.x < 1) {
      before.width = Math.max(before.width, x + width - before.x);
      before.level = Math.max(before.level, level);
      continue;
    }
    const bar = { lane, x, width, work, level, key };
    last.set(`${lane}${work}`, bar);
    bars.push(bar);
  }
}

/** Add a column; of columns that begin in the same pixel the longest tick is shown. */
function addColumn(columns: Column[], column: Column): void {
  const before = columns[columns.length - 1];
  if (!before || column.x - before.x >= 1) columns.push(column);
  else if (column.ms > before.ms) columns[columns.length - 1] = { ...column, x: before.x };
}

function columnOf(tick: Tick, x: number, width: number, targetMs: number | null): Column {
  const ms = tick.longest_ms ?? tick.ms;
  const { prefill, decode, drafts } = tokensOf(tick);
  return { x, width, ms, isLate: targetMs !== null && ms > targetMs, prefill, decode: decode + drafts, tick };
}

/** Return the moments that a time axis names, so that there are about five. */
export function axisTicks(from: number, to: number): number[] {
  const span = to - from;
  const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600].find((one) => span / one <= 7) ?? span / 5;
  const first = Math.ceil(from / step);
  const found: number[] = [];
  for (let index = first; index * step <= to; index++) found.push(index * step || 0);
  return found;
}
