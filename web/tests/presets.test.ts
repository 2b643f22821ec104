import { beforeEach, describe, expect, it } from "vitest";
import type { ParameterField } from "../src/api/types";
import { activeSettings } from "../src/chat/active_settings";
import { newConversation } from "../src/conversations/model";
import { deletePreset, hasSettings, presets, savePreset, settingsOf } from "../src/conversations/presets";

const settings = { system: "s", parameters: { temperature: 0, top_k: 5 }, schema: "", tools: "" };

describe("presets", () => {
  beforeEach(() => {
    for (const name of Object.keys(presets.peek())) deletePreset(name);
  });

  it("keep settings under a name, and nothing else of a conversation", () => {
    savePreset("  Precise  ", { ...newConversation("m"), ...settings });
    savePreset(" ", settings);
    expect(presets.peek()).toEqual({ Precise: settings });
    expect(JSON.parse(localStorage.getItem("paceline-presets") ?? "")).toEqual({ Precise: settings });
    savePreset("Precise", { ...settings, system: "t" });
    expect(presets.peek()["Precise"]?.system).toBe("t");
    deletePreset("Precise");
    expect(presets.peek()).toEqual({});
  });

  it("are recognised whatever the order of the parameters", () => {
    expect(hasSettings({ ...settings, parameters: { top_k: 5, temperature: 0 } }, settings)).toBe(true);
    expect(hasSettings({ ...settings, parameters: { top_k: 5 } }, settings)).toBe(false);
  });

  it("of another tab are taken over, and stored values of another shape are left out", () => {
    localStorage.setItem("paceline-presets", JSON.stringify({ a: settings, b: { system: 1 }, c: null }));
    dispatchEvent(new StorageEvent("storage", { key: "paceline-presets" }));
    expect(Object.keys(presets.peek())).toEqual(["a"]);
    localStorage.setItem("paceline-presets", "no JSON");
    dispatchEvent(new StorageEvent("storage", { key: "paceline-presets" }));
    expect(presets.peek()).toEqual({});
  });
});

describe("the settings in use", () => {
  it("are all that differs from the server's defaults, each with the conversation without it", () => {
    const facts = { ...newConversation(), ...settings, schema: "{}", tools: "[{}, {}]" };
    const active = activeSettings(facts, [{ name: "temperature", label: "Temperature" } as ParameterField]);
    expect(active.map(({ label, value }) => [label, value])).toEqual([
      ["System message", "s"], ["JSON schema", ""], ["Tools", "2"], ["Temperature", "0"], ["top_k", "5"],
    ]); // prettier-ignore
    expect(active[3]?.without).toEqual({ parameters: { top_k: 5 } });
    for (const { without } of active) Object.assign(facts, settingsOf({ ...facts, ...without }));
    expect(activeSettings(newConversation(), [])).toEqual([]);
  });
});
