import type { Tree, TreeNode } from "./types";

const MOST_LEAVES = 16; // beyond, idle leaves with the same parent are one block

/** A node, or idle leaves in one. merged: their number and all their tokens. */
export type ShownNode = TreeNode & { merged?: { count: number; tokens: number } };

/** A node of the radix tree as a rectangle: left to right are tokens, top to bottom branches. Shares of the whole, 0 to 1. */
export interface TreeBox {
  node: ShownNode;
  x: number;
  y: number;
  width: number;
  height: number;
}

/** Lay a radix tree out: a node is as high as all of its descendants, so that shared tokens are one block. Pure. */
export function layOutTree(tree: Tree): TreeBox[] {
  const children = new Map<number | null, ShownNode[]>();
  const nodes = mergeLeaves(tree.nodes);
  const known = new Set(nodes.map((node) => node.id));
  for (const node of nodes) {
    const parent = node.parent !== null && known.has(node.parent) ? node.parent : null;
    const list = children.get(parent);
    if (list) list.push(node);
    else children.set(parent, [node]);
  }
  const leaves = countLeaves(nodes, children);
  const total = (children.get(null) ?? []).reduce((sum, node) => sum + (leaves.get(node.id) ?? 1), 0);
  const longest = nodes.reduce((most, node) => Math.max(most, node.end), 1);
  const boxes: TreeBox[] = [];
  const place: Array<{ parent: number | null; top: number }> = [{ parent: null, top: 0 }];
  for (let next = place.pop(); next; next = place.pop()) {
    let top = next.top;
    for (const node of children.get(next.parent) ?? []) {
      const height = leaves.get(node.id) ?? 1;
      boxes.push({
        node,
        x: node.start / longest,
        y: top / total,
        width: (node.end - node.start) / longest,
        height: height / total,
      });
      place.push({ parent: node.id, top });
      top += height;
    }
  }
  return boxes;
}

/** Join idle leaves with the same parent, on the device or in host memory, if there are too many leaves to tell apart. */
function mergeLeaves(nodes: readonly TreeNode[]): ShownNode[] {
  const parents = new Set(nodes.map((node) => node.parent));
  const isLeaf = (node: TreeNode): boolean => !parents.has(node.id);
  if (nodes.filter(isLeaf).length <= MOST_LEAVES) return [...nodes];
  const merged = new Map<string, ShownNode>();
  const shown: ShownNode[] = [];
  for (const node of nodes) {
    if (!isLeaf(node) || node.running.length) {
      shown.push(node);
      continue;
    }
    const kind = `${node.parent} ${node.on_device}`;
    const before = merged.get(kind);
    const tokens = node.end - node.start;
    if (!before) {
      const first = { ...node, merged: { count: 1, tokens } };
      merged.set(kind, first);
      shown.push(first);
      continue;
    }
    before.start = Math.min(before.start, node.start);
    before.end = Math.max(before.end, node.end);
    before.cached += node.cached;
    before.merged = { count: (before.merged?.count ?? 0) + 1, tokens: (before.merged?.tokens ?? 0) + tokens };
  }
  return shown.map((node) => {
    const { merged: found, ...single } = node;
    return found?.count === 1 ? single : node;
  });
}

function countLeaves(nodes: readonly TreeNode[], children: ReadonlyMap<number | null, ShownNode[]>): Map<number, number> {
  const leaves = new Map<number, number>();
  for (const node of [...nodes].reverse()) {
    // a parent stands before its children, so that these are counted already
    const below = children.get(node.id) ?? [];
    leaves.set(node.id, below.length ? below.reduce((sum, one) => sum + (leaves.get(one.id) ?? 1), 0) : 1);
  }
  return leaves;
}
