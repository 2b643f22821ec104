import type { Mark, Tick } from "./types";

/** The data that `paceline trace show --html` puts into the page. */
export interface TraceData {
  title: string;
  summary: string;
  config: { num_slots: number; itl_target_ms: number | null };
  end_s: number;
  ticks: Tick[];
  marks: Mark[];
  requests: TraceRequest[];
  stays: Array<{ slot: number; key: number; choice: number; start_s: number; end_s: number | null; ending: string | null }>;
}

export interface TraceRequest {
  key: number;
  request_id: string | null;
  prompt_tokens: number;
  cached_tokens: number;
  submitted_at_s: number;
  ended_at_s: number | null;
  reason: string | null;
  generated_tokens: number;
  ttft_s: number | null;
}
