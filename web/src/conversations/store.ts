import { type ReadonlySignal, type Signal, batch, computed, signal } from "@preact/signals";
import { messageOf } from "../api/errors";
import { type Begun, canContinue, chatBody } from "./chat_body";
import type { ConversationDatabase } from "./database";
import { type Attachment, type Conversation, type Message, type Overrides, newConversation, newId, titleOf } from "./model";
import type { Settings } from "./presets";
import { Reply, type Transport } from "./reply";
import { TabChannel, type TabMessage } from "./tabs";
import { MessageTree } from "./tree";

const SHOW_MS = 33; // between two drawings of a reply that grows
const SUMMARY_HEAD = "This is a summary of our conversation so far:";
const SUMMARY_REPLY = "I will go on from this summary.";
const EDITED = "You wrote this text.";
const CONTINUED = "You wrote the beginning of this text.";
const MOST_FOUND = 30;
const LINE_BEFORE = 30; // characters before the found text
const LINE_LENGTH = 120;
const SAVE_MS = 400; // between two writes of a reply that grows

/** A conversation in memory: it is shown, or generates a reply. */
export class OpenConversation {
  readonly facts: Signal<Conversation>;
  /** The ids of the messages that are shown, in order. */
  readonly path: Signal<readonly string[]>;
  /** Whether it was deleted, here or in another tab: nothing of it is kept or saved any more. */
  readonly isDeleted: Signal<boolean> = signal(false);
  readonly #messages = new Map<string, Signal<Message>>();
  readonly #removed = new Set<string>(); // another tab may still save them
  #tree: MessageTree;

  constructor(conversation: Conversation, messages: readonly Message[]) {
    this.facts = signal(conversation);
    for (const message of messages) this.#messages.set(message.id, signal(message));
    this.#tree = new MessageTree(messages, conversation.chosen);
    this.path = signal(this.#tree.path());
  }

  get tree(): MessageTree {
    return this.#tree;
  }

  get id(): string {
    return this.facts.peek().id;
  }

  /** Return a message; it is there as long as its id is in the tree. */
  message(id: string): Signal<Message> {
    const found = this.#messages.get(id);
    if (!found) throw new Error(`message ${id} is not in this conversation`);
    return found;
  }

  has(id: string): boolean {
    return this.#messages.has(id);
  }

  /** Whether it was deleted, here or in another tab, or the message in it that something was to follow. */
  lacks(parent: string | null): boolean {
    return this.isDeleted.peek() || (parent !== null && !this.has(parent));
  }

  /** Take back a message that was removed. */
  restore(message: Message): void {
    this.#removed.delete(message.id);
    this.put(message, false);
    this.path.value = this.tree.path();
  }

  wasRemoved(id: string): boolean {
    return this.#removed.has(id);
  }

  all(): Message[] {
    return [...this.#messages.values()].map((one) => one.peek());
  }

  /** Take in a message, new or changed. isOurs: of this tab, which shows it. */
  put(message: Message, isOurs = true): void {
    const known = this.#messages.get(message.id);
    if (known) {
      known.value = message;
      return;
    }
    this.#messages.set(message.id, signal(message));
    if (isOurs) this.tree.add(message);
    else this.tree.addBeside(message);
  }

  /** Remove a message and all that follows it; return them, parents first. */
  remove(id: string): Message[] {
    const removed = this.tree.remove(id).map((one) => this.message(one).peek());
    this.path.value = this.tree.path(); // before its descendants are gone
    for (const one of removed) {
      this.#messages.delete(one.id);
      this.#removed.add(one.id);
    }
    return removed;
  }

  /** Let go of everything, as it was deleted. */
  clear(): void {
    this.#tree = new MessageTree();
    batch(() => {
      this.isDeleted.value = true;
      this.path.value = [];
    });
    this.#messages.clear();
  }
}

/** A line of a message that holds a wanted text. */
export interface FoundLine {
  conversation: string;
  message: string;
  title: string;
  line: string;
}

/** All conversations, and the replies that are generated. Everything is saved as it happens. */
export class ConversationStore {
  readonly list: Signal<readonly Conversation[]> = signal([]);
  readonly replies: Signal<ReadonlyMap<string, Reply>> = signal(new Map());
  /** The conversations with a reply that is generated here. */
  readonly busy: ReadonlySignal<ReadonlySet<string>>;
  /** The error of saving; null: none. */
  readonly failure: Signal<string | null> = signal(null);
  readonly #open = new Map<string, Promise<OpenConversation | null>>();
  readonly #places = new Map<string, string>(); // conversations of replies
  readonly #saves = new Map<string, { timer: ReturnType<typeof setTimeout>; opened: OpenConversation }>();
  readonly #unshown = new Map<string, Message>(); // changed replies that were not drawn yet
  readonly #writes = new Set<Promise<void>>(); // also of messages of other tabs
  readonly #tabs: TabChannel;

  constructor(
    private readonly database: ConversationDatabase,
    private readonly transport?: Transport,
    tabs = new TabChannel(),
  ) {
    this.#tabs = tabs;
    this.#tabs.onMessage = (message) => void this.#tracked(this.#otherTab(message));
    this.busy = computed(() => new Set([...this.replies.value.keys()].map((id) => this.#places.get(id) ?? "")));
  }

  /** Read the list, and go on with the replies that were being generated when the page was left. */
  async load(): Promise<void> {
    this.list.value = await this.database.conversations();
    for (const id of await this.database.streaming()) await this.open(id);
  }

  /** Return a conversation with its messages; null: there is none. */
  open(id: string): Promise<OpenConversation | null> {
    let opening = this.#open.get(id);
    if (!opening) {
      opening = this.#read(id);
      this.#open.set(id, opening);
    }
    return opening;
  }

  /** Make a conversation. It is saved with its first message. */
  create(model = "", settings?: Settings): OpenConversation {
    const opened = new OpenConversation({ ...newConversation(model), ...settings }, []);
    this.#open.set(opened.id, Promise.resolve(opened));
    return opened;
  }

  /** Add a message of a person behind `parent` and generate the reply. */
  async send(opened: OpenConversation, parent: string | null, content: string, attachments: readonly Attachment[]): Promise<void> {
    if (opened.lacks(parent)) return;
    const message = this.#newMessage(opened, parent, "user");
    const facts = opened.facts.peek();
    if (!facts.title) opened.facts.value = { ...facts, title: titleOf(content) || (attachments[0]?.name ?? "") };
    this.#add(opened, { ...message, content, ...(attachments.length && { attachments: [...attachments] }) });
    await this.reply(opened, message.id);
  }

  /** Add the results of a message's tool calls, and generate the reply. */
  async sendResults(opened: OpenConversation, caller: string, results: ReadonlyMap<string, string>): Promise<void> {
    if (opened.lacks(caller)) return;
    let parent = caller;
    for (const [toolCallId, content] of results) {
      const message = this.#newMessage(opened, parent, "tool");
      this.#add(opened, { ...message, content, toolCallId });
      parent = message.id;
    }
    await this.reply(opened, parent);
  }

  /** Generate replies after a message, each as a new branch. overrides: settings in place of the conversation's. */
  async reply(opened: OpenConversation, parent: string, overrides?: Overrides, count = 1): Promise<void> {
    if (opened.lacks(parent)) return;
    const first: Message = { ...this.#newMessage(opened, parent, "assistant"), state: "streaming", ...(overrides && { overrides }) };
    const seed = overrides?.parameters?.["seed"] ?? opened.facts.peek().parameters["seed"];
    const replies = Array.from({ length: count }, (_, at): Message => {
      if (at === 0) return first;
      const others = typeof seed === "number" && { overrides: { ...overrides, parameters: { ...overrides?.parameters, seed: seed + at } } };
      return { ...first, id: newId(), createdAt: first.createdAt + at, ...others };
    });
    for (const message of replies) this.#add(opened, message);
    await Promise.all(replies.map((message) => this.#run(opened, message)));
  }

  /** Let the model continue the text of a reply that was stopped, that a limit has ended, or that a person wrote. */
  async continueReply(opened: OpenConversation, id: string): Promise<void> {
    if (opened.lacks(id)) return;
    const { finishReason: _, stream: __, error: ___, errorCode: ____, ...kept } = opened.message(id).peek();
    if (kept.state === "streaming" || !canContinue(opened.facts.peek(), kept)) return;
    const notes = kept.notes?.map((note) => (note === EDITED ? CONTINUED : note));
    const message: Message = { ...kept, state: "streaming", ...(notes && { notes }) };
    opened.put(message);
    await this.#run(opened, message, true);
  }

  /** Add a reply with a text of a person beside another one; return its id. */
  async rewrite(opened: OpenConversation, id: string, content: string): Promise<string | null> {
    if (opened.lacks(id)) return null;
    const { parent, reasoning, model } = opened.message(id).peek();
    const message: Message = { ...this.#newMessage(opened, parent, "assistant"), content, notes: [EDITED] };
    this.#add(opened, { ...message, ...(reasoning && { reasoning }), ...(model && { model }) });
    return message.id;
  }

  /** Generate a failed reply again: in its place if it is empty and nothing follows it, else as a branch. */
  async retry(opened: OpenConversation, id: string): Promise<void> {
    const parent = opened.has(id) ? opened.message(id).peek().parent : null;
    if (parent === null) return;
    const { overrides, state, content, reasoning, toolCalls } = opened.message(id).peek();
    const isEmpty = state === "failed" && !content && !reasoning && !toolCalls?.length;
    if (isEmpty && !opened.all().some((one) => one.parent === id)) await this.deleteBranch(opened, id);
    await this.reply(opened, parent, overrides);
  }

  /** Go on with a reply that failed before the server reported the state of its stream. */
  async goOn(opened: OpenConversation, id: string): Promise<void> {
    if (opened.has(id) && opened.message(id).peek().stream) await this.#takeOver(opened, opened.message(id).peek());
  }

  /** Stop a reply, in whichever tab it is generated. */
  stop(id: string): void {
    const reply = this.replies.peek().get(id);
    if (reply) reply.stop();
    else this.#tabs.send({ kind: "stop", message: id });
  }

  /** Show the branch with this message. */
  choose(opened: OpenConversation, id: string): void {
    opened.tree.choose(id);
    this.#showTree(opened);
  }

  /** Delete a message and all that follows it; return a function that takes it back. */
  async deleteBranch(opened: OpenConversation, id: string): Promise<() => Promise<void>> {
    const { chosen } = opened.tree;
    const removed = await this.#removeBranch(opened, id);
    this.#tabs.send({ kind: "removed", conversation: opened.id, message: id, generation: generationOf(removed[0]) });
    return async () => {
      const [first] = removed;
      if (!first || opened.lacks(first.parent) || opened.has(id)) return;
      const restored = removed.map((message) => ({ ...ended(message), generation: generationOf(message) + 1 }));
      for (const message of restored) opened.restore(message);
      if (chosen[first.parent ?? ""] === id) opened.tree.choose(id);
      this.#showTree(opened);
      await this.#saving(() => this.database.saveAll(opened.facts.peek(), restored));
      for (const { id } of restored) this.#tabs.send({ kind: "message", conversation: opened.id, message: id, isRestored: true });
    };
  }

  /** Return lines of messages that hold a text in any case. */
  async search(text: string, abort?: AbortSignal): Promise<FoundLine[]> {
    const titles = new Map(this.list.peek().map((one) => [one.id, one.title]));
    const messages = await this.database.messagesWith(text, MOST_FOUND, abort);
    return messages.map(({ id, conversation, content }) => ({
      conversation, message: id, title: titles.get(conversation) ?? "", line: lineWith(content, text),
    })); // prettier-ignore
  }

  /** Show the branch with a found message. */
  async reveal({ conversation, message }: FoundLine): Promise<void> {
    const opened = await this.open(conversation);
    if (opened?.has(message)) this.choose(opened, message);
  }

  async #removeBranch(opened: OpenConversation, id: string): Promise<Message[]> {
    const removed = opened.remove(id);
    if (!removed.length) return [];
    for (const one of removed) this.replies.peek().get(one.id)?.stop();
    this.#showTree(opened);
    await this.#saving(() => this.database.deleteMessages(removed.map((one) => one.id)));
    return removed;
  }

  /** Make a conversation of the path to a message; return it. The server has its prefix cached. */
  async fork(opened: OpenConversation, id: string): Promise<OpenConversation> {
    const facts = opened.facts.peek();
    const { id: own, createdAt, updatedAt } = newConversation();
    const copy: Conversation = { ...facts, id: own, createdAt, updatedAt, chosen: {} };
    const messages: Message[] = [];
    for (const one of opened.tree.pathTo(id)) {
      const { stream: _, ...message } = opened.message(one).peek();
      const state = message.state === "streaming" ? "stopped" : message.state;
      messages.push({ ...message, id: newId(), conversation: copy.id, parent: messages.at(-1)?.id ?? null, state });
    }
    const forked = new OpenConversation(copy, messages);
    this.#open.set(copy.id, Promise.resolve(forked));
    await this.#saving(() => this.database.saveAll(copy, messages));
    this.#list(copy);
    return forked;
  }

  /** Send no message before this one any more, or all of them again. */
  beginContext(opened: OpenConversation, id: string, isBegun: boolean): void {
    if (opened.lacks(id)) return;
    const { contextSince: _, ...message } = opened.message(id).peek();
    const changed = isBegun ? { ...message, contextSince: Date.now() } : message;
    opened.put(changed);
    void this.#saving(() => this.database.saveMessage(changed)).then(() =>
      this.#tabs.send({ kind: "message", conversation: opened.id, message: id }),
    );
  }

  /** Make a conversation that begins with a summary of another one; return it. */
  async forkWithSummary(opened: OpenConversation, summary: string): Promise<OpenConversation> {
    const { id, createdAt, updatedAt } = newConversation();
    const facts = opened.facts.peek();
    const copy: Conversation = { ...facts, id, createdAt, updatedAt, title: titleOf(`${facts.title} (summary)`), chosen: {} };
    const common = { conversation: id, state: "done" } as const;
    const first: Message = {
      ...common, id: newId(), parent: null, role: "user", createdAt, content: `${SUMMARY_HEAD}\n\n${summary.trim()}`,
    }; // prettier-ignore
    const second: Message = {
      ...common, id: newId(), parent: first.id, role: "assistant", createdAt: createdAt + 1, content: SUMMARY_REPLY,
    }; // prettier-ignore
    const forked = new OpenConversation(copy, [first, second]);
    this.#open.set(id, Promise.resolve(forked));
    await this.#saving(() => this.database.saveAll(copy, [first, second]));
    this.#list(copy);
    return forked;
  }

  /** Change a conversation's title, model or parameters. */
  update(opened: OpenConversation, change: Partial<Conversation>): void {
    opened.facts.value = { ...opened.facts.peek(), ...change };
    if (opened.tree.size) this.#saveFacts(opened);
  }

  async rename(id: string, title: string): Promise<void> {
    const opened = await this.open(id);
    if (opened) this.update(opened, { title });
  }

  /** Put a conversation first in the list, or back. */
  async pin(id: string, isPinned: boolean): Promise<void> {
    const opened = await this.open(id);
    if (opened) this.update(opened, { isPinned });
  }

  /** Delete a conversation; return a function that takes it back. */
  async delete(id: string): Promise<() => Promise<void>> {
    const opened = await this.open(id);
    const conversation = opened?.facts.peek();
    const messages = opened?.all().map(ended) ?? [];
    await this.#letGo(id);
    const generation = generationOf(conversation);
    await this.#saving(() => this.database.deleteConversation(id, generation));
    this.#tabs.send({ kind: "deleted", conversation: id, generation });
    return async () => {
      if (conversation) await this.#saving(() => this.add([{ conversation: { ...conversation, generation: generation + 1 }, messages }]));
    };
  }

  /** Forget a conversation that is deleted: its replies end, and nothing of them is saved any more. */
  async #letGo(id: string): Promise<void> {
    const opened = await this.#open.get(id);
    this.#open.delete(id);
    this.list.value = this.list.peek().filter((one) => one.id !== id);
    const messages = opened?.all().map((one) => one.id) ?? [];
    opened?.clear();
    for (const message of messages) this.replies.peek().get(message)?.stop();
  }

  /** Take in conversations that were imported. */
  async add(imported: ReadonlyArray<{ conversation: Conversation; messages: readonly Message[] }>): Promise<void> {
    await this.database.saveMany(imported);
    for (const one of imported) this.#list(one.conversation);
    this.#tabs.send({ kind: "list" });
  }

  /** Return all conversations with their messages, as they are saved. */
  async everything(): Promise<Array<{ conversation: Conversation; messages: Message[] }>> {
    await this.flush();
    const all = await this.database.conversations();
    return Promise.all(
      all.map(async (conversation) => ({ conversation, messages: rooted(await this.database.messages(conversation.id)) })),
    );
  }

  /** Write pending changes now. */
  async flush(): Promise<void> {
    await Promise.all([...this.#saves].map(([id, { opened }]) => this.#saveNow(opened, id)));
    await Promise.all(this.#writes);
  }

  /** Write pending changes, and hear no more of other tabs. */
  async close(): Promise<void> {
    this.#tabs.close();
    await this.flush();
  }

  async #read(id: string): Promise<OpenConversation | null> {
    const conversation = await this.database.conversation(id);
    if (!conversation) {
      this.#open.delete(id);
      return null;
    }
    const opened = new OpenConversation(conversation, await this.database.messages(id));
    for (const message of opened.all()) if (message.state === "streaming") void this.#takeOver(opened, message);
    return opened;
  }

  /** Go on with a reply of a page that is gone; another tab that still generates it keeps it. */
  async #takeOver(opened: OpenConversation, message: Message): Promise<void> {
    await this.#tabs.owning(message.id, async () => {
      const saved = await this.database.message(message.id);
      if (!saved || opened.isDeleted.peek() || !opened.has(saved.id)) return;
      const { error: _, errorCode: __, ...going } = saved;
      opened.put(isUnfinished(saved) ? { ...going, state: "streaming" } : saved);
      if (isUnfinished(saved)) await this.#generate(opened, opened.message(saved.id).peek());
    });
  }

  async #run(opened: OpenConversation, message: Message, isContinued = false): Promise<void> {
    await this.#tabs.owning(message.id, () => this.#generate(opened, message, isContinued));
  }

  async #generate(opened: OpenConversation, message: Message, isContinued = false): Promise<void> {
    const reply = new Reply(
      message,
      {
        body: (begun?: Begun) => chatBody(overridden(opened.facts.peek(), message.overrides), this.#before(opened, message), begun),
        canContinue: (now) => canContinue(opened.facts.peek(), now),
        changed: (now, isFinal) => this.#changed(opened, now, isFinal),
      },
      ...(this.transport ? [this.transport] : []),
    );
    this.#places.set(message.id, opened.id);
    this.replies.value = new Map(this.replies.peek()).set(message.id, reply);
    await reply.run(isContinued);
    const left = new Map(this.replies.peek());
    left.delete(message.id);
    this.#places.delete(message.id);
    this.replies.value = left;
  }

  #before(opened: OpenConversation, message: Message): Message[] {
    const path = message.parent === null ? [] : opened.tree.pathTo(message.parent);
    return path.map((id) => opened.message(id).peek());
  }

  /** Show and save a changed reply: a stream changes hundreds of times a second, and is drawn far less often. */
  #changed(opened: OpenConversation, message: Message, isFinal: boolean): void {
    if (!opened.has(message.id)) return; // it was deleted meanwhile
    const isWaiting = this.#unshown.has(message.id);
    this.#unshown.set(message.id, message);
    if (isFinal) this.#show(opened, message.id);
    else if (!isWaiting) setTimeout(() => this.#show(opened, message.id), SHOW_MS);
    if (!isFinal) {
      if (this.#saves.has(message.id)) return;
      const timer = setTimeout(() => void this.#saveNow(opened, message.id), SAVE_MS);
      this.#saves.set(message.id, { timer, opened });
      return;
    }
    void this.#saveNow(opened, message.id);
  }

  #show(opened: OpenConversation, id: string): void {
    const message = this.#unshown.get(id);
    this.#unshown.delete(id);
    if (message && opened.has(id)) opened.put(message);
  }

  async #saveNow(opened: OpenConversation, id: string): Promise<void> {
    clearTimeout(this.#saves.get(id)?.timer);
    this.#saves.delete(id);
    this.#show(opened, id);
    if (!opened.has(id)) return;
    await this.#saving(() => this.database.saveMessage(opened.message(id).peek()));
    this.#tabs.send({ kind: "message", conversation: opened.id, message: id });
  }

  #newMessage(opened: OpenConversation, parent: string | null, role: Message["role"]): Message {
    const last = parent === null ? 0 : opened.message(parent).peek().createdAt;
    const createdAt = Math.max(Date.now(), last + 1);
    return { id: newId(), conversation: opened.id, parent, role, content: "", createdAt, state: "done" };
  }

  #add(opened: OpenConversation, message: Message): void {
    opened.put(message);
    this.#showTree(opened, false);
    const facts = { ...opened.facts.peek(), updatedAt: Date.now(), chosen: opened.tree.chosen };
    opened.facts.value = facts;
    this.#list(facts);
    void this.#saving(() => this.database.saveAll(facts, [message])).then(() =>
      this.#tabs.send({ kind: "message", conversation: opened.id, message: message.id }),
    );
  }

  #showTree(opened: OpenConversation, isSaved = true): void {
    batch(() => {
      opened.path.value = opened.tree.path();
      if (isSaved) this.update(opened, { chosen: opened.tree.chosen });
    });
  }

  #saveFacts(opened: OpenConversation): void {
    const facts = opened.facts.peek();
    this.#list(facts);
    void this.#saving(() => this.database.saveConversation(facts)).then(() => this.#tabs.send({ kind: "facts", conversation: opened.id }));
  }

  #list(conversation: Conversation): void {
    const others = this.list.peek().filter((one) => one.id !== conversation.id);
    this.list.value = [...others, conversation].sort((a, b) => b.updatedAt - a.updatedAt);
  }

  async #saving(save: () => Promise<void>): Promise<void> {
    const write = save().catch((error: unknown) => {
      this.failure.value = `The browser could not save this: ${messageOf(error)}`;
    });
    await this.#tracked(write);
  }

  /** Wait for work with the database; the store is closed after it. */
  async #tracked(work: Promise<void>): Promise<void> {
    this.#writes.add(work);
    await work.finally(() => this.#writes.delete(work));
  }

  async #otherTab(message: TabMessage): Promise<void> {
    if (message.kind === "deleted") {
      const { conversation, generation } = message;
      if (generationOf(await this.database.conversation(conversation)) > generation) return; // it was taken back since
      await this.#letGo(conversation);
      await this.#saving(() => this.database.deleteConversation(conversation, generation)); // changes that this tab has saved since
      return;
    }
    if (message.kind === "list") {
      this.list.value = await this.database.conversations();
      return;
    }
    if (message.kind === "stop") {
      this.replies.peek().get(message.message)?.stop();
      return;
    }
    const opened = await this.#open.get(message.conversation);
    const before = opened?.facts.peek();
    const facts = await this.database.conversation(message.conversation);
    const isNew = before === opened?.facts.peek(); // else it was changed here meanwhile, and is about to be saved
    if (facts && isNew) this.#list(facts);
    if (!opened || !facts || opened.isDeleted.peek()) return;
    // Which branches are shown is each tab's own affair.
    if (isNew) opened.facts.value = { ...facts, chosen: opened.tree.chosen };
    if (message.kind === "facts") return;
    const saved = await this.database.message(message.message);
    if (message.kind === "removed") {
      if (generationOf(saved) > message.generation) return; // it was taken back since
      await this.#removeBranch(opened, message.message); // with additions of this tab since
      return;
    }
    if (this.replies.peek().has(message.message)) return;
    if (!saved || opened.lacks(saved.parent) || (opened.wasRemoved(saved.id) && !message.isRestored)) return;
    if (message.isRestored) return opened.restore(saved);
    const isKnown = opened.has(saved.id);
    opened.put(saved, false);
    opened.path.value = opened.tree.path();
    // Once the other tab releases it by closing.
    if (!isKnown && saved.state === "streaming" && this.#tabs.keepsApart) void this.#takeOver(opened, saved);
  }
}

function overridden(facts: Conversation, overrides: Overrides = {}): Conversation {
  return { ...facts, ...(overrides.model && { model: overrides.model }), parameters: { ...facts.parameters, ...overrides.parameters } };
}

/** Return how often a record was deleted and taken back. */
function generationOf(record: Message | Conversation | undefined): number {
  return record?.generation ?? 0;
}

/** A message whose reply ends with it. */
function ended({ stream: _, ...message }: Message): Message {
  return message.state === "streaming" ? { ...message, state: "stopped" } : message;
}

/** Return the part of the line with a text, around it. */
function lineWith(content: string, text: string): string {
  const at = content.toLowerCase().indexOf(text);
  const start = content.lastIndexOf("\n", at) + 1;
  const from = at - start > LINE_BEFORE ? at - LINE_BEFORE : start;
  const line = content.slice(from).split("\n", 1)[0] ?? "";
  return `${from > start ? "…" : ""}${line.slice(0, LINE_LENGTH).trim()}`;
}

/** Whether the server may still have the missing part of a reply. */
function isUnfinished(message: Message): boolean {
  return message.state === "streaming" || (message.state === "failed" && message.stream !== undefined);
}

/** Messages as shown: a message without a saved parent begins a conversation. */
function rooted(messages: readonly Message[]): Message[] {
  const ids = new Set(messages.map((one) => one.id));
  return messages.map((one) => (one.parent === null || ids.has(one.parent) ? one : { ...one, parent: null }));
}
