import type { VNode } from "preact";
import { useMemo, useState } from "preact/hooks";
import { shownCount } from "../ui/shown";
import { Panel } from "./panels";
import type { EngineState } from "./state";
import { type ShownNode, type TreeBox, layOutTree } from "./tree_layout";

interface Props {
  state: EngineState;
  focused: number | null;
  onFocus: (key: number | null) => void;
}

/** The radix tree: from left to right are tokens, and tokens shared by several sequences are one block. */
export function TreeView({ state, focused, onFocus }: Props): VNode {
  const { tree, others } = state;
  const boxes = useMemo(() => (tree ? layOutTree(tree) : []), [tree]);
  const height = boxes.length ? heightOf(boxes) : 0;
  const [hovered, setHovered] = useState<ShownNode | null>(null);
  const note = tree ? `${shownCount(tree.num_tokens)} tokens in ${shownCount(tree.num_nodes)} nodes${tree.is_complete ? "" : ", the first of them"}` : "";
  return (
    <Panel title="Radix tree" note={note} class="tree">
      {boxes.length === 0 ? (
        <p class="note">Nothing is cached yet.</p>
      ) : (
        <div class="tree-box" style={{ height: `${height}px` }} role="img" aria-label={spoken(boxes)} onPointerLeave={() => setHovered(null)}>
          {boxes.map((box) => (
            <Box
              key={box.node.id}
              box={box}
              height={height}
              isFocused={focused !== null && box.node.running.some(([key]) => key === focused)}
              onEnter={() => {
                setHovered(box.node);
                onFocus(box.node.running[0]?.[0] ?? null);
              }}
            />
          ))}
        </div>
      )}
      <p class="legend">
        <span>
          <i class="swatch decode" />
          running
        </span>
        <span>
          <i class="swatch cached" />
          cached
        </span>
        <span>
          <i class="swatch hosted" />
          in host memory
        </span>
        <span class="muted push">{hovered ? describe(hovered) : (others?.tree_tokens ?? 0) > 0 ? `${shownCount(others?.tree_tokens)} tokens of other tenants` : ""}</span>
      </p>
    </Panel>
  );
}

function Box({ box, height, isFocused, onEnter }: { box: TreeBox; height: number; isFocused: boolean; onEnter: () => void }): VNode {
  const { node } = box;
  const num = node.running.length;
  const kind = num ? "running" : node.on_device ? "held" : "hosted";
  const isNamed = box.width > 0.09 && box.height * height >= 15;
  return (
    <span
      class={`tree-node ${kind}${num > 1 ? " shared" : ""}${node.merged ? " merged" : ""}${isFocused ? " focused" : ""}`}
      style={{ left: `${100 * box.x}%`, width: `${100 * box.width}%`, top: `${100 * box.y}%`, height: `${100 * box.height}%` }}
      onPointerEnter={onEnter}
      title={describe(node)}
    >
      {isNamed && node.merged && <span>{shownCount(node.merged.count)} prefixes · {shownCount(node.merged.tokens)} tokens</span>}
      {isNamed && !node.merged && <span>{node.end - node.start}{num > 1 ? ` ×${num}` : num === 1 ? ` · #${node.running[0]?.[0]}` : ""}</span>}
    </span>
  );
}

/** Return the description of a node, in words. */
export function describe(node: ShownNode): string {
  if (node.merged) {
    const { count, tokens } = node.merged;
    return `${shownCount(count)} cached prefixes with ${shownCount(tokens)} tokens${node.on_device ? "" : " · in host memory"}`;
  }
  const parts = [`tokens ${shownCount(node.start)} to ${shownCount(node.end)}`];
  if (node.running.length) parts.push(`running: ${node.running.map(([key]) => `#${key}`).join(", ")}`);
  if (node.cached) parts.push(`${node.cached} cached ${node.cached === 1 ? "prefix" : "prefixes"}`);
  if (!node.on_device && node.on_host) parts.push("in host memory");
  if (node.has_state) parts.push("with a checkpoint");
  return parts.join(" · ");
}

function heightOf(boxes: readonly TreeBox[]): number {
  const lowest = Math.min(...boxes.map((box) => box.height));
  return Math.round(Math.min(420, Math.max(60, 22 / lowest)));
}

function spoken(boxes: readonly TreeBox[]): string {
  const shared = boxes.filter((box) => box.node.running.length > 1);
  const tokens = shared.reduce((sum, box) => sum + box.node.end - box.node.start, 0);
  return `${boxes.length} nodes. ${shared.length} of them, with ${tokens} tokens, are shared by several running sequences.`;
}
