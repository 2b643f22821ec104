import { signal } from "@preact/signals";

const NAME = "paceline-api-key";

let kept = ""; // if storage is blocked: as long as the page

/** Why a key is asked for; null: it is not. */
export const keyQuestion = signal<string | null>(null);

let waiting: Array<(given: boolean) => void> = [];

/** Return the key of this browser session; empty: none. */
export function apiKey(): string {
  try {
    return sessionStorage.getItem(NAME) ?? kept;
  } catch {
    return kept;
  }
}

/** Ask for a key and wait for it. Resolves to false if the question is dismissed; rejects if it is aborted. */
export function askForKey(reason: string, abort?: AbortSignal | null): Promise<boolean> {
  abort?.throwIfAborted();
  keyQuestion.value = reason;
  return new Promise((resolve, reject) => {
    waiting.push(resolve);
    abort?.addEventListener("abort", () => {
      waiting = waiting.filter((one) => one !== resolve);
      if (!waiting.length) keyQuestion.value = null;
      reject(new DOMException("aborted", "AbortError"));
    });
  });
}

/** Take a key and let all requests go on that wait for one. */
export function giveKey(key: string): void {
  kept = key.trim();
  try {
    sessionStorage.setItem(NAME, kept);
  } catch {
    // storage is blocked
  }
  settle(true);
}

/** Leave the question without a key. */
export function dismissKey(): void {
  settle(false);
}

/** Forget the key. */
export function forgetKey(): void {
  kept = "";
  try {
    sessionStorage.removeItem(NAME);
  } catch {
    // storage is blocked
  }
}

function settle(given: boolean): void {
  keyQuestion.value = null;
  const now = waiting;
  waiting = [];
  for (const resolve of now) resolve(given);
}
