import { signal } from "@preact/signals";
import { ConversationDatabase } from "./conversations/database";
import { ConversationStore } from "./conversations/store";
import { ServerFacts } from "./server_facts";

/** State shared by the whole page. */
export interface App {
  store: ConversationStore;
  server: ServerFacts;
}

/** A sentence for a moment on the screen, with what a person may do about it. */
export interface Toast {
  text: string;
  action?: { label: string; run: () => void };
}

export const toast = signal<Toast | null>(null);

let timer: ReturnType<typeof setTimeout> | undefined;

export function showToast(text: string, action?: Toast["action"]): void {
  toast.value = { text, ...(action && { action }) };
  clearTimeout(timer);
  timer = setTimeout(() => {
    toast.value = null;
  }, action ? 12_000 : 8000);
}

export async function startApp(): Promise<App> {
  const database = await ConversationDatabase.open(undefined, () => {
    store.failure.value = "A newer version of this page is open in another tab. Load this tab again: it saves nothing until then.";
  });
  const store: ConversationStore = new ConversationStore(database);
  const server = new ServerFacts();
  void server.refresh();
  await store.load();
  // Else the browser may clear conversations when its disk is full. Some browsers ask a person about it.
  if (store.list.peek().length) void navigator.storage?.persist?.().catch(() => undefined);
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") void server.refresh(); // it may be another server by now
  });
  addEventListener("pagehide", () => void store.flush());
  return { store, server };
}
