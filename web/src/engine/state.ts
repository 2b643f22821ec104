import type { EngineEvent, Mark, Members, Tick } from "./types";

const KEPT_S = 70; // of ticks and marks: a little more than the timeline shows
const MOST_TICKS = 8000;

/** The state of the engine, from its events. */
export interface EngineState extends Partial<Members> {
  now_s: number;
  ticks: readonly Tick[];
  marks: readonly Mark[];
  /** Why there will be no more events; null: there may be. */
  end: string | null;
}

export const NOTHING: EngineState = { now_s: 0, ticks: [], marks: [], end: null };

/** Return the state after an event. Pure: a snapshot drops the earlier state, an update replaces and appends. */
export function reduce(state: EngineState, name: string, event: EngineEvent): EngineState {
  switch (name) {
    case "snapshot":
      return { ...NOTHING, ...members(event), ticks: event.ticks ?? [], marks: event.marks ?? [] };
    case "update": {
      const since = event.now_s - KEPT_S;
      return {
        ...state,
        ...members(event),
        ticks: event.ticks ? kept([...state.ticks, ...event.ticks], since) : state.ticks,
        marks: event.marks ? kept([...state.marks, ...event.marks], since) : state.marks,
      };
    }
    case "end":
      return { ...state, end: event.reason ?? "" };
    default:
      return state; // of a later version
  }
}

function members(event: EngineEvent): Partial<EngineState> & { now_s: number } {
  const { ticks: _ticks, marks: _marks, reason: _reason, unix_s: _unix, ...rest } = event;
  return rest;
}

function kept<T extends { t: number }>(all: T[], since: number): T[] {
  let first = Math.max(0, all.length - MOST_TICKS);
  while (first < all.length && (all[first] as T).t < since) first++;
  return first ? all.slice(first) : all;
}
