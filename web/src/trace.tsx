import { render } from "preact";
import { TraceView } from "./engine/trace_view";
import type { TraceData } from "./engine/trace_types";
import "./style/trace.css";

const trace = JSON.parse(document.getElementById("paceline-trace")?.textContent ?? "null") as TraceData | null;
const root = document.getElementById("app") as HTMLElement;
if (trace) {
  document.title = `${trace.title} · paceline`;
  render(<TraceView trace={trace} />, root);
} else {
  root.textContent = "There is no trace in this file. paceline trace show --html makes one with a trace.";
}
