import { signal } from "@preact/signals";

/** Which view is open. */
export type Route = { view: "new" } | { view: "chat"; id: string } | { view: "engine" };

export const route = signal<Route>(parseRoute(location.hash));

addEventListener("hashchange", () => {
  route.value = parseRoute(location.hash);
});

/** Return the view of the part of the address behind the `#`. */
export function parseRoute(hash: string): Route {
  if (hash === "#/engine") return { view: "engine" };
  const id = /^#\/chat\/([0-9a-f]{24})$/.exec(hash)?.[1];
  return id ? { view: "chat", id } : { view: "new" };
}

export function addressOf(to: Route): string {
  if (to.view === "engine") return "#/engine";
  return to.view === "chat" ? `#/chat/${to.id}` : "#/";
}

export function goTo(to: Route, { replace = false } = {}): void {
  if (replace) {
    history.replaceState(null, "", addressOf(to));
    route.value = to;
  } else {
    location.hash = addressOf(to);
  }
}
