import { signal } from "@preact/signals";
import type { Conversation } from "./model";

/** The settings of a conversation that a preset holds. */
export type Settings = Pick<Conversation, "system" | "parameters" | "schema" | "tools">;

export const DEFAULT = "Default"; // the preset of new conversations
const NAME = "paceline-presets";
const MOST_NAME = 60; // characters

/** Presets by their names. They stay in this browser. */
export const presets = signal<Readonly<Record<string, Settings>>>(stored());

/** Return the settings of a conversation. */
export function settingsOf({ system, parameters, schema, tools }: Settings): Settings {
  return { system, parameters, schema, tools };
}

/** Return whether a conversation has these settings. */
export function hasSettings(facts: Settings, settings: Settings): boolean {
  return textOf(facts) === textOf(settings);
}

/** Keep settings under a name, in place of a preset that has it. */
export function savePreset(name: string, settings: Settings): void {
  const short = name.trim().slice(0, MOST_NAME);
  if (short) keep({ ...presets.peek(), [short]: settingsOf(settings) });
}

export function deletePreset(name: string): void {
  const { [name]: _, ...others } = presets.peek();
  keep(others);
}

function textOf(settings: Settings): string {
  const { system, parameters, schema, tools } = settings;
  return JSON.stringify([system, Object.entries(parameters).sort(([a], [b]) => (a < b ? -1 : 1)), schema, tools]);
}

function keep(next: Readonly<Record<string, Settings>>): void {
  presets.value = next;
  try {
    localStorage.setItem(NAME, JSON.stringify(next));
  } catch {
    // Storage is blocked or full: the presets last as long as the page.
  }
}

function stored(): Record<string, Settings> {
  try {
    const value: unknown = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    if (typeof value !== "object" || value === null || Array.isArray(value)) return {};
    return Object.fromEntries(Object.entries(value).filter((pair): pair is [string, Settings] => isSettings(pair[1])));
  } catch {
    return {};
  }
}

function isSettings(value: unknown): value is Settings {
  if (typeof value !== "object" || value === null) return false;
  const { system, parameters, schema, tools } = value as Record<string, unknown>;
  return [system, schema, tools].every((text) => typeof text === "string") && typeof parameters === "object" && parameters !== null && !Array.isArray(parameters);
}

addEventListener("storage", (event) => {
  if (event.key === NAME) presets.value = stored(); // of another tab
});
