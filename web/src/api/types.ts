/** Bodies of the server's API, as far as the page reads them. */

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number; cached_from?: string };
  completion_tokens_details?: { reasoning_tokens?: number; draft_tokens?: number; accepted_draft_tokens?: number };
}

export interface Timings {
  prompt_ms?: number;
  prompt_per_second?: number;
  predicted_ms?: number;
  predicted_per_second?: number;
  predicted_n?: number;
}

export interface ToolCallDelta {
  index?: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

export interface ChatEvent {
  model?: string;
  choices?: Array<{
    delta?: { content?: string | null; reasoning_content?: string | null; tool_calls?: ToolCallDelta[] };
    finish_reason?: string | null;
  }>;
  usage?: Usage | null;
  timings?: Timings;
  warnings?: string[];
  prompt_progress?: { total: number; cache: number; processed: number; time_ms: number };
  error?: unknown;
}

export interface ModelEntry {
  id: string;
  aliases: string[];
  state: "loading" | "loaded" | "sleeping" | "unloaded" | "failed";
  progress: number;
  modalities: string[];
  adapters: string[];
  error: string | null;
}

/** The body of `/v1/engine/page`. */
export interface PageFacts {
  version: string;
  tenant: string;
  is_router: boolean;
  default_model: string | null;
  models: ModelEntry[];
  features: Record<string, boolean>;
  links: Record<string, string>;
}

export interface ParameterField {
  name: string;
  label: string;
  group: string;
  type: "number" | "integer" | "boolean" | "text" | "texts" | "json";
  default: unknown;
  minimum: number | null;
  maximum: number | null;
  step: number | null;
  choices: string[] | null;
  help: string;
}

/** The body of `/v1/engine/model`, about a loaded model. */
export interface ModelFacts {
  id: string;
  /** The name in its file; empty: none. */
  name: string;
  modalities: string[];
  n_ctx: number;
  num_slots: number;
  itl_target_ms: number | null;
  has_chat_template: boolean;
  chat: { thinking: boolean; tools: boolean; system: boolean };
  media: { max_images: number; image_types: string[]; audio_types: string[] };
  parameters: ParameterField[];
}
