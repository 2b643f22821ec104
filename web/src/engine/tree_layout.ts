import type { Tree, TreeNode } from "./types";

/** A node of the radix tree as a rectangle: left to right are tokens, top to bottom branches. Shares of the whole, 0 to 1. */
export interface TreeBox {
  node: TreeNode;
  x: number;
  y: number;
  width: number;
  height: number;
}

/** Lay a radix tree out: a node is as high as all of its descendants, so that shared tokens are one block. Pure. */
export function layOutTree(tree: Tree): TreeBox[] {
  const children = new Map<number | null, TreeNode[]>();
  const known = new Set(tree.nodes.map((node) => node.id));
  for (const node of tree.nodes) {
    const parent = node.parent !== null && known.has(node.parent) ? node.parent : null;
    const list = children.get(parent);
    if (list) list.push(node);
    else children.set(parent, [node]);
  }
  const leaves = countLeaves(tree.nodes, children);
  const total = (children.get(null) ?? []).reduce((sum, node) => sum + (leaves.get(node.id) ?? 1), 0);
  const longest = tree.nodes.reduce((most, node) => Math.max(most, node.end), 1);
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

function countLeaves(nodes: readonly TreeNode[], children: ReadonlyMap<number | null, TreeNode[]>): Map<number, number> {
  const leaves = new Map<number, number>();
  for (const node of [...nodes].reverse()) {
    // a parent stands before its children, so that these are counted already
    const below = children.get(node.id) ?? [];
    leaves.set(node.id, below.length ? below.reduce((sum, one) => sum + (leaves.get(one.id) ?? 1), 0) : 1);
  }
  return leaves;
}
