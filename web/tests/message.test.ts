import { describe, expect, it } from "vitest";
import type { ModelEntry } from "../src/api/types";
import { failureText, phaseText } from "../src/chat/message_view";
import type { Message } from "../src/conversations/model";

describe("the line of a reply that waits", () => {
  it("has the progress of a model that is loaded for it", () => {
    const model = { id: "m", state: "loading", progress: 0.42 } as ModelEntry;
    expect(phaseText({ kind: "sending" }, false, model)).toBe("m is loading, 42 %");
    expect(phaseText({ kind: "loading", message: "Loading model" }, false, model)).toBe("m is loading, 42 %");
    expect(phaseText({ kind: "sending" }, false, { ...model, state: "loaded" })).toBe("Waiting for the server…");
    expect(phaseText({ kind: "writing" }, true, model)).toBeNull();
  });
});

describe("the text of a failed reply", () => {
  const failed = (errorCode: string): string => failureText({ error: "raise n_ctx, or say truncate", errorCode } as Message);

  it("speaks of conversations and messages, and not of the API", () => {
    for (const code of ["context_length_exceeded", "no_kv_slot", "queue_full"]) expect(failed(code)).not.toMatch(/n_ctx|truncate/);
    expect(failed("context_length_exceeded")).toContain("longer than the model can read");
    expect(failed("another")).toBe("raise n_ctx, or say truncate");
  });
});
