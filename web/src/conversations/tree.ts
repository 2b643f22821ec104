import type { Message } from "./model";

/** The part of a message that makes the tree. */
export type TreeNode = Pick<Message, "id" | "parent" | "createdAt">;

/**
 * The messages of a conversation as a tree: whoever edits a message or asks for another reply adds a branch, and nothing is
 * lost. One path is shown: from the first message on, at each step the chosen successor. Pure.
 */
export class MessageTree {
  readonly #nodes = new Map<string, TreeNode>();
  readonly #children = new Map<string, string[]>();
  #chosen: Record<string, string>;

  /** chosen: successors by their parents, "" for the first message; without a choice, the newest. */
  constructor(nodes: Iterable<TreeNode> = [], chosen: Record<string, string> = {}) {
    this.#chosen = { ...chosen };
    const sorted = [...nodes].sort((a, b) => a.createdAt - b.createdAt);
    for (const node of sorted) this.#nodes.set(node.id, node);
    for (const node of sorted) this.#link(node);
  }

  get size(): number {
    return this.#nodes.size;
  }

  get chosen(): Record<string, string> {
    return { ...this.#chosen };
  }

  /** Add a message and show it. Throws if its parent is missing. */
  add(node: TreeNode): void {
    if (node.parent !== null && !this.#nodes.has(node.parent)) {
      throw new Error(`message ${node.id} follows ${node.parent}, which is not in the conversation`);
    }
    this.#nodes.set(node.id, node);
    this.#link(node);
    this.choose(node.id);
  }

  /** Add a message from another tab: it is shown only if nothing else was. Its parent exists. */
  addBeside(node: TreeNode): void {
    const place = this.#place(node);
    const shown = this.#next(place);
    this.#nodes.set(node.id, node);
    this.#link(node);
    if (shown !== undefined) this.#chosen[place] = shown;
  }

  /** Remove a message and all that follows it; return their ids. */
  remove(id: string): string[] {
    const node = this.#nodes.get(id);
    if (!node) return [];
    const removed = this.#below(id);
    const place = this.#place(node);
    const siblings = this.#children.get(place) ?? [];
    const at = siblings.indexOf(id);
    siblings.splice(at, 1);
    for (const one of removed) {
      this.#nodes.delete(one);
      this.#children.delete(one);
      delete this.#chosen[one];
    }
    const next = siblings[Math.max(0, at - 1)];
    if (this.#chosen[place] === id) {
      delete this.#chosen[place];
      if (next) this.#chosen[place] = next;
    }
    return removed;
  }

  /** Show the path through a message: all before it, and after it as it was chosen last. */
  choose(id: string): void {
    for (let node = this.#nodes.get(id); node; node = node.parent === null ? undefined : this.#nodes.get(node.parent)) {
      this.#chosen[this.#place(node)] = node.id;
    }
  }

  /** Return the ids of the path that is shown. */
  path(): string[] {
    const path: string[] = [];
    for (let id = this.#next(""); id !== undefined; id = this.#next(id)) path.push(id);
    return path;
  }

  /** Return the ids from the first message to this one, both included. */
  pathTo(id: string): string[] {
    const path: string[] = [];
    for (let node = this.#nodes.get(id); node; node = node.parent === null ? undefined : this.#nodes.get(node.parent)) {
      path.push(node.id);
    }
    return path.reverse();
  }

  /** Return the branches at a message: itself and those with the same parent, the oldest first. */
  siblings(id: string): readonly string[] {
    const node = this.#nodes.get(id);
    return node ? (this.#children.get(this.#place(node)) ?? []) : [];
  }

  #next(parent: string): string | undefined {
    const children = this.#children.get(parent);
    if (!children?.length) return undefined;
    const chosen = this.#chosen[parent];
    return chosen !== undefined && children.includes(chosen) ? chosen : children[children.length - 1];
  }

  /** The predecessor of a message: "" for first messages, and for messages with a missing parent. */
  #place(node: TreeNode): string {
    return node.parent !== null && this.#nodes.has(node.parent) ? node.parent : "";
  }

  #link(node: TreeNode): void {
    const parent = this.#place(node);
    const children = this.#children.get(parent);
    if (children) children.push(node.id);
    else this.#children.set(parent, [node.id]);
  }

  #below(id: string): string[] {
    const found = [id];
    for (let at = 0; at < found.length; at++) found.push(...(this.#children.get(found[at] as string) ?? []));
    return found;
  }
}
