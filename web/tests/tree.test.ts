import { describe, expect, it } from "vitest";
import { MessageTree, type TreeNode } from "../src/conversations/tree";

const node = (id: string, parent: string | null, createdAt: number): TreeNode => ({ id, parent, createdAt });

function example(chosen: Record<string, string> = {}): MessageTree {
  return new MessageTree(
    [node("q", null, 1), node("a1", "q", 2), node("a2", "q", 3), node("b1", "a1", 4), node("b2", "a2", 5), node("b3", "a2", 6)],
    chosen,
  );
}

describe("MessageTree", () => {
  it("shows the newest branch where none was chosen", () => {
    expect(example().path()).toEqual(["q", "a2", "b3"]);
  });

  it("shows the chosen branch, and behind it what was chosen there before", () => {
    const tree = example();
    tree.choose("b2");
    expect(tree.path()).toEqual(["q", "a2", "b2"]);
    tree.choose("a1");
    expect(tree.path()).toEqual(["q", "a1", "b1"]);
    tree.choose("a2");
    expect(tree.path()).toEqual(["q", "a2", "b2"]);
  });

  it("restores the path from what was saved", () => {
    const tree = example();
    tree.choose("b1");
    expect(example(tree.chosen).path()).toEqual(["q", "a1", "b1"]);
  });

  it("shows a message that is added, and lists it among its branches", () => {
    const tree = example();
    tree.add(node("a3", "q", 7));
    expect(tree.path()).toEqual(["q", "a3"]);
    expect(tree.siblings("a1")).toEqual(["a1", "a2", "a3"]);
    expect(tree.pathTo("b1")).toEqual(["q", "a1", "b1"]);
  });

  it("refuses a message whose parent is not there", () => {
    const tree = example();
    expect(() => tree.add(node("x", "nowhere", 8))).toThrow(/nowhere/);
    expect(tree.size).toBe(6);
  });

  it("removes a branch as a whole and shows the one beside it", () => {
    const tree = example();
    expect(tree.remove("a2").sort()).toEqual(["a2", "b2", "b3"]);
    expect(tree.path()).toEqual(["q", "a1", "b1"]);
    expect(tree.remove("a2")).toEqual([]);
    tree.remove("q");
    expect(tree.path()).toEqual([]);
    expect(tree.size).toBe(0);
  });

  it("shows what came from elsewhere only where nothing was shown", () => {
    const tree = new MessageTree([node("q", null, 1), node("a", "q", 2)]);
    tree.addBeside(node("b", "q", 3)); // "a" was shown as the newest, without a choice
    expect(tree.path()).toEqual(["q", "a"]);
    tree.addBeside(node("c", "a", 4));
    expect(tree.path()).toEqual(["q", "a", "c"]);
    tree.addBeside(node("r", null, 5));
    expect(tree.path()).toEqual(["q", "a", "c"]);
  });

  it("shows a first message whose parent is missing, rather than lose it", () => {
    const tree = new MessageTree([node("x", "gone", 1), node("y", null, 2)]);
    expect(tree.path()).toEqual(["y"]);
    expect(tree.siblings("x")).toEqual(["x", "y"]);
    tree.choose("x");
    expect(tree.path()).toEqual(["x"]);
    expect(tree.remove("x")).toEqual(["x"]);
    expect(tree.path()).toEqual(["y"]);
  });

  it("finds the path of thousands of messages", () => {
    const nodes = Array.from({ length: 5000 }, (_, at) => node(`${at}`, at ? `${at - 1}` : null, at));
    expect(new MessageTree(nodes).path()).toHaveLength(5000);
  });
});
