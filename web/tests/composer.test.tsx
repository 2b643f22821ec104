import { signal } from "@preact/signals";
import { render } from "preact";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import type { App } from "../src/app";
import { Composer } from "../src/chat/composer";
import { type Message, newConversation } from "../src/conversations/model";
import { OpenConversation } from "../src/conversations/store";

let root: HTMLElement;
const send = vi.fn();
const app = { store: { send }, server: { model: () => signal(null) } } as unknown as App;

beforeEach(() => {
  vi.stubGlobal("matchMedia", () => ({ matches: false }));
  vi.stubGlobal("fetch", async () => Promise.reject(new TypeError("no server")));
  send.mockClear();
  root = document.createElement("div");
  document.body.append(root);
});

afterEach(() => {
  render(null, root);
  root.remove();
  vi.unstubAllGlobals();
});

/** Draw the composer of a conversation whose only message has this state. */
function composed(state: Message["state"]): OpenConversation {
  const facts = newConversation();
  const opened = new OpenConversation(facts, [
    { id: "r", conversation: facts.id, parent: null, role: "assistant", content: "", createdAt: 1, state },
  ]); // prettier-ignore
  show(opened);
  return opened;
}

function show(opened: OpenConversation): void {
  render(<Composer app={app} opened={opened} onSent={() => undefined} />, root);
}

function field(): HTMLTextAreaElement {
  return root.querySelector("textarea") as HTMLTextAreaElement;
}

function write(text: string): void {
  field().value = text;
  field().dispatchEvent(new Event("input", { bubbles: true }));
}

function enter(): void {
  field().dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true }));
}

/** Attach a file that is read when the returned function is called. */
function attach(name: string): () => void {
  let finish = (): void => undefined;
  const bytes = new Promise<ArrayBuffer>((resolve) => (finish = () => resolve(new TextEncoder().encode(name).buffer as ArrayBuffer)));
  const file = Object.assign(new File([""], name), { arrayBuffer: () => bytes });
  const input = root.querySelector("input[type=file]") as HTMLInputElement;
  Object.defineProperty(input, "files", { value: [file], configurable: true });
  input.dispatchEvent(new Event("change", { bubbles: true }));
  return finish;
}

const chips = (): Array<string | null> => [...root.querySelectorAll(".chips li > span:first-of-type")].map((one) => one.textContent);

it("sends a queued message after the reply, also if another conversation is shown by then", async () => {
  const opened = composed("streaming");
  write("and then?");
  enter();
  await vi.waitFor(() => expect(root.textContent).toContain("Sent after this reply"));
  composed("done");
  await vi.waitFor(() => expect(root.textContent).not.toContain("Sent after this reply"));
  opened.put({ ...opened.message("r").peek(), state: "done" });
  await vi.waitFor(() => expect(send).toHaveBeenCalledTimes(1));
  expect(send.mock.calls[0]?.[0] === opened).toBe(true);
  expect(send.mock.calls[0]?.slice(1)).toEqual(["r", "and then?", []]);
});

it("keeps a queued message as a draft if the reply fails", async () => {
  const opened = composed("streaming");
  write("and then?");
  enter();
  await vi.waitFor(() => expect(root.textContent).toContain("Sent after this reply"));
  opened.put({ ...opened.message("r").peek(), state: "failed" });
  await vi.waitFor(() => expect(root.textContent).not.toContain("Sent after this reply"));
  expect(send).not.toHaveBeenCalled();
  expect(field().value).toBe("and then?");
});

it("sends no message before all its files are read", async () => {
  const opened = composed("done");
  write("look");
  const [finishA, finishB] = [attach("a.txt"), attach("b.txt")];
  finishB();
  await vi.waitFor(() => expect(chips()).toEqual(["b.txt"]));
  enter();
  expect(send).not.toHaveBeenCalled();
  finishA();
  await vi.waitFor(() => expect(chips()).toEqual(["b.txt", "a.txt"]));
  await vi.waitFor(() => expect(root.textContent).not.toContain("Reading"));
  enter();
  expect(send).toHaveBeenCalledTimes(1);
  expect(send.mock.calls[0]?.[0] === opened).toBe(true);
  expect(send.mock.calls[0]?.slice(1, 3)).toEqual(["r", "look"]);
  expect(send.mock.calls[0]?.[3]).toHaveLength(2);
});

it("stops reading files when asked", async () => {
  composed("done");
  attach("a.txt");
  await vi.waitFor(() => expect(root.textContent).toContain("Reading the files"));
  [...root.querySelectorAll("button")].find((one) => one.textContent === "Cancel")?.click();
  await vi.waitFor(() => expect(root.textContent).not.toContain("Reading the files"));
  write("look");
  enter();
  expect(send).toHaveBeenCalledTimes(1);
});

it.each([
  ["cells of a spreadsheet", "image.png", "1\t2\n", false],
  ["a picture", "image.png", "", true],
  ["a file with its name", "a.txt", "a.txt", true],
])("pastes %s", (_, name, text, isFile) => {
  composed("done");
  const pasted = new Event("paste", { bubbles: true, cancelable: true });
  const files = [Object.assign(new File(["x"], name), { arrayBuffer: async () => new ArrayBuffer(0) })];
  field().dispatchEvent(Object.assign(pasted, { clipboardData: { files, getData: () => text } }));
  expect(pasted.defaultPrevented).toBe(isFile);
});
