import { describe, expect, it } from "vitest";
import { binsOf } from "../src/engine/panels";
import { NOTHING, reduce } from "../src/engine/state";
import { axisTicks, endOf, layOut, tokensOf } from "../src/engine/timeline";
import { frameOf, laneAt } from "../src/engine/timeline_paint";
import { centred, moved, wholeTrace, zoomed } from "../src/engine/trace_window";
import { describe as nodeWords } from "../src/engine/tree_view";
import { layOutTree } from "../src/engine/tree_layout";
import type { EngineEvent, Mark, Row, Tick, Tree } from "../src/engine/types";

const tick = (t: number, more: Partial<Tick> = {}): Tick => ({ t, ms: 10, step_ms: 9, n: 1, running: 1, waiting: 0, cells: 0, ...more });
const row = (slot: number, key: number, prefill: number, decode: number, drafts = 0, fresh = decode): Row => [slot, key, 0, prefill, decode, drafts, fresh];

describe("the engine's state", () => {
  const snapshot = { now_s: 100, model: "m", slots: [], ticks: [tick(99)], marks: [] } as unknown as EngineEvent;

  it("appends ticks and marks, and replaces every other member whole", () => {
    let state = reduce(NOTHING, "snapshot", snapshot);
    state = reduce(state, "update", { now_s: 101, ticks: [tick(100)], rates: { generated_per_s: 1, prefill_per_s: 2, ticks_per_s: 3 } });
    expect(state).toMatchObject({ now_s: 101, model: "m", rates: { ticks_per_s: 3 }, slots: [] });
    expect(state.ticks.map((one) => one.t)).toEqual([99, 100]);
    state = reduce(state, "update", { now_s: 102, rates: { generated_per_s: 4, prefill_per_s: 0, ticks_per_s: 0 } });
    expect(state.rates).toEqual({ generated_per_s: 4, prefill_per_s: 0, ticks_per_s: 0 });
    expect(state.ticks).toHaveLength(2);
  });

  it("forgets everything with a snapshot: the engine began anew", () => {
    const state = reduce(reduce(reduce(NOTHING, "snapshot", snapshot), "end", { now_s: 0, reason: "failed" }), "snapshot", { now_s: 5 });
    expect(state).toEqual({ now_s: 5, ticks: [], marks: [], end: null });
  });

  it("keeps a bounded past", () => {
    let state = reduce(NOTHING, "snapshot", snapshot);
    for (let at = 0; at < 200; at++) {
      state = reduce(state, "update", { now_s: 100 + at, ticks: Array.from({ length: 100 }, (_, one) => tick(100 + at + one / 100)) });
    }
    expect(state.ticks.length).toBeLessThanOrEqual(8000);
    expect(state.ticks[0]?.t).toBeGreaterThan(200);
  });

  it("has the reason of an end, and passes over events that it does not know", () => {
    const state = reduce(reduce(NOTHING, "snapshot", snapshot), "end", { now_s: 1, reason: "shutdown" });
    expect(state.end).toBe("shutdown");
    expect(reduce(state, "later", { now_s: 9 })).toBe(state);
  });
});

describe("the timeline", () => {
  const input = { numSlots: 2, targetMs: 50, from: 0, to: 10, marks: [] };

  it("places ticks by their time, rows by their slot and work", () => {
    const { bars, columns } = layOut({ ...input, ticks: [tick(5, { ms: 1000, rows: [row(1, 7, 64, 0), row(0, 8, 0, 1, 3)] })] }, 1000);
    expect(bars.map((bar) => [bar.lane, bar.work, bar.x, bar.key])).toEqual([
      [1, "prefill", 500, 7],
      [0, "decode", 500, 8],
      [0, "draft", 500, 8],
    ]);
    expect(bars[0]?.width).toBeCloseTo(99.5);
    expect(columns).toMatchObject([{ ms: 1000, isLate: true, prefill: 64, decode: 4 }]);
  });

  it("has no dot of an end before the first known tick", () => {
    const marks = [1, 6].map((t) => ({ t, slot: 0, key: t, what: "ended" }) as unknown as Mark);
    expect(layOut({ ...input, ticks: [tick(5)], marks }, 100).marks.map(({ mark }) => mark.t)).toEqual([6]);
    expect(layOut({ ...input, ticks: [], marks, stays: [] }, 100).marks).toHaveLength(2); // of a trace, which knows all
  });

  it("marks as late what took longer than the target, also within merged ticks", () => {
    const late = (more: Partial<Tick>): boolean | undefined => layOut({ ...input, ticks: [tick(1, more)] }, 100).columns[0]?.isLate;
    expect(late({ ms: 49 })).toBe(false);
    expect(late({ ms: 51 })).toBe(true);
    expect(late({ ms: 20, n: 5, longest_ms: 60 })).toBe(true);
    expect(layOut({ ...input, targetMs: null, ticks: [tick(1, { ms: 900 })] }, 100).columns[0]?.isLate).toBe(false);
  });

  it("leaves out what is not in the window", () => {
    const { columns } = layOut({ ...input, from: 5, ticks: [tick(1), tick(4.995), tick(6), tick(11)] }, 100);
    expect(columns.map((one) => one.tick.t)).toEqual([4.995, 6]);
  });

  it("draws thousands of ticks as no more bars than there are pixels", () => {
    const ticks = Array.from({ length: 20_000 }, (_, at) => tick(at / 2000, { ms: 0.5, rows: [row(0, 1, 0, 1)] }));
    const { bars, columns, runs } = layOut({ ...input, ticks }, 800);
    expect(bars.length).toBeLessThanOrEqual(801);
    expect(columns.length).toBeLessThanOrEqual(801);
    expect(runs).toHaveLength(1);
  });

  it("names one stretch for each request in a slot", () => {
    const ticks = [tick(1, { rows: [row(0, 1, 0, 1)] }), tick(2, { rows: [row(0, 1, 0, 1)] }), tick(3, { rows: [row(0, 2, 0, 1)] })];
    expect(layOut({ ...input, ticks }, 1000).runs.map((run) => [run.key, run.x])).toEqual([
      [1, 100],
      [2, 300],
    ]);
  });

  it("counts what other tenants compute, and knows when merged ticks ended", () => {
    expect(tokensOf(tick(0, { rows: [row(0, 1, 5, 0)], others: [2, 10, 3, 1, 3] }))).toEqual({ rows: 3, prefill: 15, decode: 3, drafts: 1, fresh: 3 });
    expect(endOf(tick(1, { n: 4, ms: 500 }))).toBe(3);
    expect(endOf(tick(1, { n: 4, ms: 500, end_t: 9 }))).toBe(9);
  });

  it("shows a request that runs up to the end of the trace", () => {
    const stays = [{ slot: 0, key: 1, start_s: 2, end_s: null }, { slot: 1, key: 2, start_s: 1, end_s: 3 }];
    const { runs } = layOut({ ...input, from: 0, to: 10, stays, ticks: [] }, 100);
    expect(runs.map((run) => [run.x, run.end])).toEqual([[20, 100], [10, 30]]);
  });

  it("has a scale that fits the longest tick, however far the target is", () => {
    expect(layOut({ ...input, targetMs: 100, ticks: [tick(1, { ms: 3 })] }, 100).scaleMs).toBe(5);
    expect(layOut({ ...input, targetMs: null, ticks: [tick(1, { ms: 3 })] }, 100).scaleMs).toBe(5);
    expect(layOut({ ...input, ticks: [tick(1, { ms: 900 })] }, 100).scaleMs).toBe(2000);
  });

  it("has a few round moments on its axis", () => {
    expect(axisTicks(-15, 0)).toEqual([-15, -10, -5, 0]);
    for (const span of [0.004, 0.3, 1, 7, 60, 4000]) expect(axisTicks(0, span).length).toBeLessThanOrEqual(9);
  });

  it("finds the slot under a pointer", () => {
    const frame = frameOf(800, 4);
    expect([laneAt(frame, 9), laneAt(frame, frame.lanesBottom - 1), laneAt(frame, frame.lanesBottom + 1), laneAt(frame, 0)]).toEqual([0, 3, null, null]);
  });
});

describe("the radix tree", () => {
  const node = (id: number, parent: number | null, start: number, end: number): Tree["nodes"][number] => ({
    id, parent, start, end, running: [], cached: 1, on_device: true, on_host: false, has_state: false,
  }); // prettier-ignore
  const tree = (nodes: Tree["nodes"]): Tree => ({ num_nodes: nodes.length, num_tokens: 0, is_complete: true, nodes });

  it("draws what is shared as one block as high as all that goes on from it", () => {
    const boxes = layOutTree(tree([node(1, null, 0, 50), node(2, 1, 50, 100), node(3, 1, 50, 75), node(4, null, 0, 10)]));
    const by = new Map(boxes.map((box) => [box.node.id, box]));
    expect(by.get(1)).toMatchObject({ x: 0, width: 0.5, y: 0 });
    expect(by.get(1)?.height).toBeCloseTo(2 / 3);
    expect(by.get(2)).toMatchObject({ x: 0.5, width: 0.5, y: 0 });
    expect(by.get(3)?.y).toBeCloseTo(1 / 3);
    expect(by.get(4)?.y).toBeCloseTo(2 / 3);
  });

  it("draws a node whose parent was left out, and nothing of an empty tree", () => {
    expect(layOutTree(tree([node(7, 3, 10, 20)]))).toMatchObject([{ x: 0.5, y: 0, height: 1 }]);
    expect(layOutTree(tree([]))).toEqual([]);
  });

  it("joins idle leaves with the same parent if there are many, and no running ones", () => {
    const leaves = Array.from({ length: 100 }, (_, at) => ({ ...node(at + 2, 1, 50, 60 + at), cached: 1, on_device: at < 40, on_host: at >= 40 }));
    const running = { ...node(500, 1, 50, 55), running: [[7, 0]] as Array<[number, number]> };
    const boxes = layOutTree(tree([node(1, null, 0, 50), ...leaves, running]));
    expect(boxes).toHaveLength(4);
    const merged = boxes.flatMap((box) => (box.node.merged ? [box.node] : []));
    expect(merged.map((one) => [one.merged?.count, one.cached, one.on_device])).toEqual([[40, 40, true], [60, 60, false]]);
    expect(merged[1]).toMatchObject({ start: 50, end: 159, merged: { tokens: leaves.slice(40).reduce((sum, one) => sum + one.end - 50, 0) } });
    expect(nodeWords(merged[1] as (typeof merged)[0])).toMatch(/^60 cached prefixes with [\d,]+ tokens · in host memory$/);
    expect(layOutTree(tree([node(1, null, 0, 50), ...leaves.slice(0, 16)]))).toHaveLength(17);
  });

  it("joins idle branches with their leaves where single nodes have few of these", () => {
    // A running node with 20 idle branches of three leaves, one of which each is in host memory.
    const nodes = [{ ...node(1, null, 0, 50), running: [[7, 0]] as Array<[number, number]> }];
    for (let at = 0; at < 20; at++) {
      const id = 10 * (at + 1);
      nodes.push(node(id, 1, 50, 60), node(id + 1, id, 60, 70), node(id + 2, id, 60, 80), { ...node(id + 3, id, 60, 65), on_device: false, on_host: true });
    }
    const boxes = layOutTree(tree(nodes));
    const merged = boxes.filter((box) => box.node.merged).map((box) => box.node);
    expect(boxes.length).toBeLessThan(30);
    const all = (member: "count" | "tokens"): number => merged.reduce((sum, one) => sum + (one.merged?.[member] ?? 0), 0);
    const single = boxes.filter((box) => !box.node.merged && box.node.id !== 1).map((box) => box.node);
    expect(all("tokens") + single.reduce((sum, one) => sum + one.end - one.start, 0)).toBe(20 * 45);
    expect(merged.every((one) => one.running.length === 0)).toBe(true);
    expect(boxes.some((box) => box.node.id === 1 && !box.node.merged)).toBe(true);
  });

  it("places a thousand levels without running out of stack", () => {
    const nodes = Array.from({ length: 4096 }, (_, at) => node(at, at ? at - 1 : null, at, at + 1));
    expect(layOutTree(tree(nodes))).toHaveLength(4096);
  });
});

describe("a histogram", () => {
  it("is shown without the empty bins at its ends", () => {
    const bins = binsOf({ bounds: [1, 2, 3], counts: [0, 4, 0, 1], sum: 0, p50: null, p95: null, p99: null });
    expect(bins.map((bin) => [bin.from, bin.to, bin.count])).toEqual([
      [1, 2, 4],
      [2, 3, 0],
      [3, null, 1],
    ]);
    expect(binsOf({ bounds: [1], counts: [0, 0], sum: 0, p50: null, p95: null, p99: null })).toEqual([]);
  });
});

describe("the window of a trace", () => {
  it("stays within the trace, however it is zoomed and moved", () => {
    const whole = wholeTrace(10);
    expect(whole).toEqual({ from: 0, to: 10 });
    const near = zoomed(whole, 2, 2.5, 10);
    expect(near).toEqual({ from: 1.25, to: 6.25 });
    expect(zoomed(near, 0.01, 3, 10)).toEqual(whole);
    expect(moved(near, -5, 10)).toEqual({ from: 0, to: 5 });
    expect(moved(near, 5, 10)).toEqual({ from: 5, to: 10 });
    expect(centred(near, 9.9, 10)).toEqual({ from: 5, to: 10 });
    expect(zoomed(whole, 1e9, 5, 10).to).toBeGreaterThan(zoomed(whole, 1e9, 5, 10).from);
    expect(wholeTrace(0).to).toBeGreaterThan(0);
  });
});
