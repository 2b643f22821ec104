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

/**
 * Join idle leaves from the deepest level up until few enough leaves are left to tell apart: first leaves with the same parent
 * and place, then all leaves of an idle node with the node.
 */
function mergeLeaves(nodes: readonly TreeNode[]): ShownNode[] {
  const shown = new Map<number, ShownNode>(nodes.map((node) => [node.id, node]));
  const children = new Map<number, number[]>();
  const levels: number[][] = [];
  const depths = new Map<number, number>();
  for (const { id, parent } of nodes) {
    const depth = parent === null ? 0 : (depths.get(parent) ?? -1) + 1;
    depths.set(id, depth);
    (levels[depth] ??= []).push(id);
    if (parent !== null) children.set(parent, [...(children.get(parent) ?? []), id]);
  }
  let numLeaves = nodes.filter((node) => !children.get(node.id)?.length).length;
  const isIdleLeaf = (id: number): boolean => !children.get(id)?.length && !shown.get(id)?.running.length;
  const join = (into: number, ids: readonly number[]): void => {
    const parts = [into, ...ids].map((id) => shown.get(id) as ShownNode);
    const [first] = parts as [ShownNode];
    const isParent = ids.some((id) => shown.get(id)?.parent === into);
    shown.set(into, {
      ...first,
      start: Math.min(...parts.map((node) => node.start)),
      end: Math.max(...parts.map((node) => node.end)),
      cached: parts.reduce((sum, node) => sum + node.cached, 0),
      on_device: parts.some((node) => node.on_device),
      merged: {
        count: (isParent ? parts.slice(1) : parts).reduce((sum, node) => sum + (node.merged?.count ?? 1), 0),
        tokens: parts.reduce((sum, node) => sum + (node.merged?.tokens ?? node.end - node.start), 0),
      },
    });
    for (const id of ids) shown.delete(id);
    numLeaves -= isParent ? ids.length - 1 : ids.length;
  };
  for (let depth = levels.length - 2; depth >= 0 && numLeaves > MOST_LEAVES; depth--) {
    const parents = (levels[depth] ?? []).filter((id) => children.get(id)?.length);
    for (const parent of parents) {
      for (const onDevice of [true, false]) {
        const alike = (children.get(parent) ?? []).filter((id) => isIdleLeaf(id) && shown.get(id)?.on_device === onDevice);
        const [into, ...others] = alike;
        if (into === undefined || !others.length || numLeaves <= MOST_LEAVES) continue;
        join(into, others);
        children.set(parent, (children.get(parent) ?? []).filter((id) => !others.includes(id)));
      }
    }
    for (const parent of parents) {
      const below = children.get(parent) ?? [];
      if (numLeaves <= MOST_LEAVES || shown.get(parent)?.running.length || !below.every(isIdleLeaf)) continue;
      join(parent, below);
      children.set(parent, []);
    }
  }
  return [...shown.values()];
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
