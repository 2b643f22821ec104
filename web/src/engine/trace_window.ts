/** The part of a trace that is shown, in seconds. */
export interface TraceWindow {
  from: number;
  to: number;
}

const SHORTEST_S = 0.002;

/** Return the whole of a trace. */
export function wholeTrace(endS: number): TraceWindow {
  return { from: 0, to: Math.max(endS, SHORTEST_S) };
}

/** Return a window zoomed by a factor (above 1: less is shown) around a moment, within the trace. */
export function zoomed(window: TraceWindow, factor: number, around: number, endS: number): TraceWindow {
  const span = Math.min(Math.max((window.to - window.from) / factor, SHORTEST_S), Math.max(endS, SHORTEST_S));
  const share = (around - window.from) / (window.to - window.from);
  return within(around - share * span, span, endS);
}

/** Return a window moved by a share of its width, within the trace. */
export function moved(window: TraceWindow, share: number, endS: number): TraceWindow {
  const span = window.to - window.from;
  return within(window.from + share * span, span, endS);
}

/** Return a window of the same span around a moment, within the trace. */
export function centred(window: TraceWindow, moment: number, endS: number): TraceWindow {
  const span = window.to - window.from;
  return within(moment - span / 2, span, endS);
}

function within(from: number, span: number, endS: number): TraceWindow {
  const start = Math.max(0, Math.min(from, Math.max(endS, SHORTEST_S) - span));
  return { from: start, to: start + span };
}
