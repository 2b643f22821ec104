import { type DBSchema, type IDBPDatabase, openDB } from "idb";
import type { Conversation, Message } from "./model";

const NAME = "paceline";
const VERSION = 1;

interface Schema extends DBSchema {
  conversations: { key: string; value: Conversation };
  messages: { key: string; value: Message; indexes: { conversation: string; state: string } };
}

/** Conversations and their messages in the browser, in IndexedDB. A message is a record of its own: streams write one alone. */
export class ConversationDatabase {
  private constructor(private readonly database: IDBPDatabase<Schema>) {}

  /** onOutdated: called when a newer version of the page needs the database, which is closed for it. */
  static async open(name = NAME, onOutdated: () => void = () => undefined): Promise<ConversationDatabase> {
    const database = await openDB<Schema>(name, VERSION, {
      upgrade(opened) {
        opened.createObjectStore("conversations", { keyPath: "id" });
        const messages = opened.createObjectStore("messages", { keyPath: "id" });
        messages.createIndex("conversation", "conversation");
        messages.createIndex("state", "state");
      },
      blocking(_current, _blocked, event) {
        (event.target as IDBDatabase).close(); // else the newer version waits for this tab
        onOutdated();
      },
    });
    return new ConversationDatabase(database);
  }

  /** Return all conversations, the last changed first. */
  async conversations(): Promise<Conversation[]> {
    const all = await this.database.getAll("conversations");
    return all.sort((a, b) => b.updatedAt - a.updatedAt);
  }

  async conversation(id: string): Promise<Conversation | undefined> {
    return this.database.get("conversations", id);
  }

  async messages(conversation: string): Promise<Message[]> {
    return this.database.getAllFromIndex("messages", "conversation", conversation);
  }

  /** Return messages whose content holds a text in any case, the newest conversation's first. */
  async messagesWith(text: string, most: number, abort?: AbortSignal): Promise<Message[]> {
    const found: Message[] = [];
    for (const { id } of await this.conversations()) {
      if (abort?.aborted || found.length >= most) break;
      found.push(...(await this.messages(id)).filter((message) => message.content.toLowerCase().includes(text)));
    }
    return found.slice(0, most);
  }

  /** Return the conversations with a reply that was being generated when it was saved. */
  async streaming(): Promise<string[]> {
    const messages = await this.database.getAllFromIndex("messages", "state", "streaming");
    return [...new Set(messages.map((message) => message.conversation))];
  }

  async message(id: string): Promise<Message | undefined> {
    return this.database.get("messages", id);
  }

  async saveConversation(conversation: Conversation): Promise<void> {
    await this.database.put("conversations", conversation);
  }

  async saveMessage(message: Message): Promise<void> {
    await this.database.put("messages", message);
  }

  /** Save a conversation with messages in one transaction: all of it or nothing. */
  async saveAll(conversation: Conversation, messages: readonly Message[]): Promise<void> {
    await this.saveMany([{ conversation, messages }]);
  }

  /** Save conversations with their messages in one transaction: all of them or nothing. */
  async saveMany(all: ReadonlyArray<{ conversation: Conversation; messages: readonly Message[] }>): Promise<void> {
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    const writes: Promise<unknown>[] = [transaction.done];
    try {
      for (const { conversation, messages } of all) {
        writes.push(transaction.objectStore("conversations").put(conversation));
        for (const message of messages) writes.push(transaction.objectStore("messages").put(message));
      }
      await Promise.all(writes);
    } catch (error) {
      if (!transaction.error) transaction.abort(); // a record that cannot be stored does not end it by itself
      await Promise.allSettled(writes);
      throw error;
    }
  }

  async deleteMessages(ids: readonly string[]): Promise<void> {
    const transaction = this.database.transaction("messages", "readwrite");
    await Promise.all([...ids.map((id) => transaction.store.delete(id)), transaction.done]);
  }

  /** Delete a conversation with its messages, unless it has a newer generation. */
  async deleteConversation(id: string, generation: number): Promise<void> {
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    const saved = await transaction.objectStore("conversations").get(id);
    if ((saved?.generation ?? 0) > generation) return transaction.done;
    const keys = await transaction.objectStore("messages").index("conversation").getAllKeys(id);
    await Promise.all([
      transaction.objectStore("conversations").delete(id),
      ...keys.map((key) => transaction.objectStore("messages").delete(key)),
      transaction.done,
    ]);
  }

  close(): void {
    this.database.close();
  }
}
