import { signal } from "@preact/signals";
import { ConversationDatabase } from "./conversations/database";
import { ConversationStore } from "./conversations/store";
import { ServerFacts } from "./server_facts";

/** State shared by the whole page. */
export interface App {
  store: ConversationStore;
  server: ServerFacts;
}

/** Something that went wrong, for a moment on the screen; null: nothing. */
export const toast = signal<string | null>(null);

let timer: ReturnType<typeof setTimeout> | undefined;

export function showToast(text: string): void {
  toast.value = text;
  clearTimeout(timer);
  timer = setTimeout(() => {
    toast.value = null;
  }, 8000);
}

export async function startApp(): Promise<App> {
  const store = new ConversationStore(await ConversationDatabase.open());
  const server = new ServerFacts();
  void server.refresh();
  await store.load();
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") void server.refresh(); // it may be another server by now
  });
  addEventListener("pagehide", () => void store.flush());
  return { store, server };
}
