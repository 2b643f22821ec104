/** The events of `/v1/engine/events`: docs/reference/engine_events.md describes each member. */

export interface EngineConfig {
  num_slots: number;
  n_ctx: number;
  num_cells: number | null;
  host_bytes: number;
  itl_target_ms: number | null;
  max_tick_ms: number | null;
  batch_tokens: number;
  chunk_size: number;
  strategy: string;
  speculation: boolean;
  isolation: string;
  tenant: string;
}

export interface EngineFacts {
  state: string;
  is_alive: boolean;
  worker_pid: number | null;
  num_restarts: number;
  num_crashes: number;
}

export interface SlotEntry {
  id: number;
  state: "prefilling" | "decoding" | "paused";
  key: number;
  request_id: string;
  choice: number;
  prompt_tokens: number;
  cached_tokens: number;
  computed_tokens: number;
  generated_tokens: number;
  max_tokens: number | null;
  running_s: number;
  tokens_per_s: number | null;
  num_preempted: number;
  priority: number;
}

export interface Others {
  slots: number;
  prefilling: number;
  decoding: number;
  paused: number;
  waiting: number;
  tokens_per_s: number;
  tree_nodes: number;
  tree_tokens: number;
}

export interface QueueEntry {
  key: number;
  request_id: string;
  choice: number;
  prompt_tokens: number;
  generated_tokens: number;
  waiting_s: number;
  is_preempted: boolean;
  waits_for: number | null;
  reads_disk: boolean;
  priority: number;
}

/** Slot, key, choice, then tokens: prefill, decode, drafts, new. */
export type Row = [number, number, number, number, number, number, number];

export interface Tick {
  t: number;
  ms: number;
  step_ms: number;
  n: number;
  running: number;
  waiting: number;
  cells: number | null;
  rows?: Row[];
  /** Rows of other tenants, then tokens: prefill, decode, drafts, new. */
  others?: [number, number, number, number, number];
  longest_ms?: number;
  end_t?: number;
  /** Texts and tokens of an embedding tick. */
  embed?: [number, number];
}

export interface Mark {
  t: number;
  what: "started" | "preempted" | "ended" | "cancelled" | "failed";
  slot: number | null;
  key: number;
  choice: number;
  reason?: string;
}

export interface TreeNode {
  id: number;
  parent: number | null;
  start: number;
  end: number;
  running: Array<[number, number]>;
  cached: number;
  on_device: boolean;
  on_host: boolean;
  has_state: boolean;
}

export interface Tree {
  num_nodes: number;
  num_tokens: number;
  is_complete: boolean;
  nodes: TreeNode[];
}

export interface Memory {
  cells: number | null;
  free_cells: number | null;
  running_cells: number | null;
  cached_cells: number | null;
  host_bytes: number;
  rss_bytes: number | null;
}

export interface Rates {
  generated_per_s: number;
  prefill_per_s: number;
  ticks_per_s: number;
}

export interface Histogram {
  bounds: number[];
  counts: number[];
  sum: number;
  p50: number | null;
  p95: number | null;
  p99: number | null;
}

/** Members that replace their earlier values. */
export interface Members {
  model: string;
  config: EngineConfig;
  engine: EngineFacts;
  slots: SlotEntry[];
  others: Others | null;
  queue: { waiting: number; sequences: QueueEntry[]; embeddings: number };
  tree: Tree;
  memory: Memory;
  rates: Rates;
  counts: Record<string, number>;
  histograms: Record<string, Histogram>;
}

export type EngineEvent = Partial<Members> & {
  now_s: number;
  unix_s?: number;
  ticks?: Tick[];
  marks?: Mark[];
  reason?: string;
};
