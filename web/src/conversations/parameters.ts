import type { ParameterField } from "../api/types";
import type { Parameters, ParameterValue } from "./model";

/** Return a default as people read it; empty: there is none. */
export function shownDefault(field: ParameterField): string {
  const value = field.default;
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(Number(value.toPrecision(4)));
  if (typeof value === "boolean") return value ? "on" : "off";
  if (Array.isArray(value)) return value.join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** Return a parameter from the typed text; null: no text. Throws with a sentence if it is not valid. */
export function parseParameter(field: ParameterField, text: string): ParameterValue | null {
  switch (field.type) {
    case "texts": {
      const lines = text.split("\n").filter((line) => line !== "");
      return lines.length ? lines : null;
    }
    case "json": {
      const value = parseJson(text, "any");
      return value === undefined ? null : (value as ParameterValue);
    }
    case "text":
      return text === "" ? null : text;
    case "boolean":
      return text === "" ? null : text === "true";
    default:
      return text.trim() === "" ? null : parseNumber(field, text.trim());
  }
}

function parseNumber(field: ParameterField, text: string): number {
  const value = Number(text.replace(",", "."));
  if (!Number.isFinite(value)) throw new Error(`“${text}” is no number.`);
  if (field.type === "integer" && !Number.isInteger(value)) throw new Error("A whole number is needed.");
  if (field.minimum != null && value < field.minimum) throw new Error(`The least is ${field.minimum}.`);
  if (field.maximum != null && value > field.maximum) throw new Error(`The most is ${field.maximum}.`);
  return value;
}

/** Return a parameter as it stands in its field. */
export function shownParameter(parameters: Parameters, field: ParameterField): string {
  const value = parameters[field.name];
  if (value === undefined) return "";
  if (field.type === "texts" && Array.isArray(value)) return value.join("\n");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** Return JSON from the typed text; undefined: no text. Throws with a sentence. */
export function parseJson(text: string, kind: "object" | "list" | "any"): unknown {
  if (text.trim() === "") return undefined;
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is no JSON: ${error instanceof Error ? error.message : String(error)}`);
  }
  const isList = Array.isArray(value);
  if (kind === "list" && !isList) throw new Error("A list is needed: [ … ].");
  if (kind === "object" && (isList || typeof value !== "object" || value === null)) {
    throw new Error("An object is needed: { … }.");
  }
  return value;
}
