import type { VNode } from "preact";
import type { App } from "../app";

export function EngineView({ menu }: { app: App; menu: VNode }): VNode {
  return <header class="bar">{menu}<h1>Engine</h1></header>;
}
