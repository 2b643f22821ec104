import { type TimelineInput, type TimelineLayout, axisTicks, layOut } from "./timeline";

/** Colours by their names, as a canvas takes them. */
export type Palette = Record<"ink" | "muted" | "line" | "band" | "prefill" | "decode" | "draft" | "embed" | "mark" | "late", string>;

export const GUTTER = 54; // pixels left of the time's area
const RIGHT = 10;
const TOP = 8;
const GAP = 14; // between lanes and columns
const COLUMNS = 92; // height of the durations of ticks
const AXIS = 22;

const MARKS = { started: "ink", ended: "ink", cancelled: "muted", preempted: "mark", failed: "late" } as const;

/** The places of parts, in pixels. */
export interface Frame {
  width: number;
  lane: number;
  lanesBottom: number;
  columnsTop: number;
  columnsBottom: number;
  height: number;
}

/** Return the places for so many slots. */
export function frameOf(width: number, numSlots: number): Frame {
  const lane = numSlots <= 8 ? 24 : numSlots <= 16 ? 16 : Math.max(5, Math.floor(256 / numSlots));
  const lanesBottom = TOP + lane * numSlots;
  const columnsTop = lanesBottom + GAP;
  const columnsBottom = columnsTop + COLUMNS;
  return { width: Math.max(60, width - GUTTER - RIGHT), lane, lanesBottom, columnsTop, columnsBottom, height: columnsBottom + AXIS };
}

/** Return the lane at a height; null: there is none. */
export function laneAt(frame: Frame, y: number): number | null {
  return y >= TOP && y < frame.lanesBottom ? Math.floor((y - TOP) / frame.lane) : null;
}

/** Paint a timeline; return its layout, to find the part under a pointer. */
export function paint(context: CanvasRenderingContext2D, input: TimelineInput, frame: Frame, palette: Palette): TimelineLayout {
  const layout = layOut(input, frame.width);
  context.clearRect(0, 0, frame.width + GUTTER + RIGHT, frame.height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  paintGrid(context, input, frame, palette);
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, frame.width, frame.height - AXIS);
  context.clip();
  context.translate(GUTTER, 0);
  paintLanes(context, layout, frame, palette);
  paintColumns(context, layout, frame, palette);
  context.restore();
  paintTarget(context, input.targetMs, layout.scaleMs, frame, palette);
  return layout;
}

function paintGrid(context: CanvasRenderingContext2D, input: TimelineInput, frame: Frame, palette: Palette): void {
  const scale = frame.width / Math.max(1e-6, input.to - input.from);
  context.textAlign = "center";
  const zero = input.zero ?? input.to; // the zero of the axis
  for (const t of axisTicks(input.from - zero, input.to - zero)) {
    const x = GUTTER + (t + zero - input.from) * scale;
    context.fillStyle = palette.line;
    context.fillRect(Math.round(x), TOP, 1, frame.columnsBottom - TOP);
    context.fillStyle = palette.muted;
    if (x > GUTTER + 14) context.fillText(input.zero === undefined && t > -1e-9 ? "now" : `${Number(t.toFixed(3))} s`, Math.min(x, GUTTER + frame.width - 8), frame.columnsBottom + 12);
  }
  context.textAlign = "right";
  for (let slot = 0; slot < input.numSlots; slot++) {
    const y = TOP + slot * frame.lane;
    context.fillStyle = palette.line;
    context.fillRect(GUTTER, y + frame.lane - 1, frame.width, 1);
    context.fillStyle = palette.muted;
    if (frame.lane >= 12) context.fillText(`slot ${slot}`, GUTTER - 7, y + frame.lane / 2);
  }
}

function paintLanes(context: CanvasRenderingContext2D, layout: TimelineLayout, frame: Frame, palette: Palette): void {
  const hasNames = frame.lane >= 22;
  const top = hasNames ? 10 : 2;
  const height = frame.lane - top - 3;
  context.textAlign = "left";
  for (const run of layout.runs) {
    const y = TOP + run.lane * frame.lane;
    context.globalAlpha = 1;
    context.fillStyle = palette.band;
    context.fillRect(run.x, y + top, run.end - run.x, height);
    if (!hasNames || run.end - run.x < 26) continue;
    context.fillStyle = palette.muted;
    context.font = "9.5px system-ui, sans-serif";
    context.fillText(`#${run.key}`, Math.max(run.x, 0) + 1, y + 5.5);
  }
  context.font = "11px system-ui, sans-serif";
  for (const bar of layout.bars) {
    const isDraft = bar.work === "draft";
    context.globalAlpha = bar.level;
    context.fillStyle = palette[bar.work];
    const y = TOP + bar.lane * frame.lane + top;
    context.fillRect(bar.x, isDraft ? y + height - 3 : y, bar.width, isDraft ? 3 : height);
  }
  context.globalAlpha = 1;
  for (const { x, lane, mark } of layout.marks) {
    if (mark.what === "started" || lane * frame.lane + TOP >= frame.lanesBottom) continue;
    const y = TOP + lane * frame.lane + top + height / 2;
    context.fillStyle = palette[MARKS[mark.what]];
    context.beginPath();
    context.arc(x, y, Math.min(3.5, height / 2), 0, 2 * Math.PI);
    context.fill();
  }
}

function paintColumns(context: CanvasRenderingContext2D, layout: TimelineLayout, frame: Frame, palette: Palette): void {
  for (const column of layout.columns) {
    const height = Math.min(1, column.ms / layout.scaleMs) * COLUMNS;
    const all = column.prefill + column.decode;
    // A column is as high as the tick was long, and coloured by the shares of the tokens that it computed.
    const prefill = all ? (height * column.prefill) / all : 0;
    context.globalAlpha = 0.85;
    context.fillStyle = column.tick.embed ? palette.embed : palette.decode;
    context.fillRect(column.x, frame.columnsBottom - height, column.width, height - prefill);
    context.fillStyle = palette.prefill;
    context.fillRect(column.x, frame.columnsBottom - prefill, column.width, prefill);
    if (column.isLate) {
      context.fillStyle = palette.late;
      context.fillRect(column.x, frame.columnsBottom - height - 2, Math.max(2, column.width), 2);
    }
  }
  context.globalAlpha = 1;
}

function paintTarget(
  context: CanvasRenderingContext2D,
  targetMs: number | null,
  scaleMs: number,
  frame: Frame,
  palette: Palette,
): void {
  context.textAlign = "right";
  context.fillStyle = palette.muted;
  context.fillText(`${scaleMs} ms`, GUTTER - 7, frame.columnsTop + 4);
  context.fillText("0", GUTTER - 7, frame.columnsBottom - 4);
  context.fillStyle = palette.line;
  context.fillRect(GUTTER, frame.columnsBottom, frame.width, 1);
  if (targetMs === null) return;
  if (targetMs > scaleMs) { // far above: a scale with it would leave the columns flat
    context.textAlign = "left";
    context.fillStyle = palette.muted;
    context.fillText(`↑ target ${targetMs} ms`, GUTTER + 5, frame.columnsTop + 4);
    return;
  }
  const y = frame.columnsBottom - (targetMs / scaleMs) * COLUMNS;
  context.strokeStyle = palette.ink;
  context.lineWidth = 1;
  context.setLineDash([4, 4]);
  context.beginPath();
  context.moveTo(GUTTER, Math.round(y) + 0.5);
  context.lineTo(GUTTER + frame.width, Math.round(y) + 0.5);
  context.stroke();
  context.setLineDash([]);
  context.fillStyle = palette.ink;
  context.textAlign = "left";
  context.fillText(`target ${targetMs} ms`, GUTTER + 5, y - 8);
}
