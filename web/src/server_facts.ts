import { type ReadonlySignal, type Signal, signal } from "@preact/signals";
import { ApiError, messageOf } from "./api/errors";
import { requestJson } from "./api/http";
import type { ModelEntry, ModelFacts, PageFacts } from "./api/types";

const RETRY_MS = 2000;

/** The page's facts about the server and its models. It asks again while there is no answer, or a model loads. */
export class ServerFacts {
  readonly page: Signal<PageFacts | null> = signal(null);
  /** Why the server is not known; null: it is. */
  readonly failure: Signal<string | null> = signal(null);
  readonly #models = new Map<string, Signal<ModelFacts | null>>();
  #timer: ReturnType<typeof setTimeout> | undefined;

  /** Ask now. */
  async refresh(): Promise<void> {
    clearTimeout(this.#timer);
    try {
      this.page.value = await requestJson<PageFacts>("v1/engine/page");
      this.failure.value = null;
    } catch (error) {
      this.failure.value = messageOf(error);
      if (error instanceof ApiError && error.status === 401) return; // the person does not want to give a key
    }
    const isLoading = this.page.peek()?.models.some((one) => one.state === "loading");
    if (this.failure.peek() !== null || isLoading) {
      this.#timer = setTimeout(() => void this.refresh(), RETRY_MS);
    }
    for (const [name, facts] of this.#models) if (!facts.peek()) void this.#ask(name, facts);
  }

  /** Return the entry of a model by any of its names or an adapter's; of none: the server's default. */
  entry(name: string): ModelEntry | undefined {
    const page = this.page.value;
    const wanted = name || page?.default_model || "";
    return page?.models.find((one) => one.id === wanted || one.aliases.includes(wanted) || one.adapters.includes(wanted)) ?? page?.models[0];
  }

  /** Return the facts of a model; null: none yet, as while it is not loaded. */
  model(name: string): ReadonlySignal<ModelFacts | null> {
    let facts = this.#models.get(name);
    if (!facts) {
      facts = signal<ModelFacts | null>(null);
      this.#models.set(name, facts);
      void this.#ask(name, facts);
    }
    return facts;
  }

  /** Ask about a model again, as it may have been loaded by a request. */
  async know(name: string): Promise<void> {
    const facts = this.#models.get(name);
    if (facts && !facts.peek()) await Promise.all([this.#ask(name, facts), this.refresh()]);
  }

  async #ask(name: string, facts: Signal<ModelFacts | null>): Promise<void> {
    try {
      const query = name ? `?model=${encodeURIComponent(name)}` : "";
      facts.value = await requestJson<ModelFacts>(`v1/engine/model${query}`);
    } catch {
      facts.value = null; // it is not loaded, or the server is away, which `page` says
    }
  }
}
