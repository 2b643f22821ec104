"""A worker that is killed within a constrained chat: the next one goes on at the same place of the same constraint."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tests.exact import EXACT
from tests.sweeps import sampled

from paceline import LLM, ChatReply, FinishReason
from paceline.chat import ChatChunk
from paceline.engine.worker.worker_engine import WorkerEngine

ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "minLength": 12, "maxLength": 20}, "minItems": 4, "maxItems": 4},
        "kind": {"enum": ["fox", "bear"]},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["names", "kind", "age"],
    "additionalProperties": False,
}  # fmt: skip
NOTE = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
THINKING = {"start": "<think>", "ends": ["</think>"], "is_open": True, "budget": 4, "message": " Enough."}
PLAIN = {"reasoning_effort": "none"}


@pytest.fixture
def llm() -> Iterator[LLM]:
    """A worker without crashes before, since each in a row delays the next one's start."""
    with LLM(isolation="process", num_slots=2, n_ctx=2048, **EXACT) as made:
        yield made


def wait_for_restarts(llm: LLM, number: float) -> None:
    """Wait until so many workers have taken the engine over from the worker before them."""
    deadline = time.monotonic() + 60
    while llm.stats().number("paceline_engine_restarts_total") < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill(llm: LLM) -> None:
    """Kill the worker that has the engine."""
    engine = llm._engine
    assert isinstance(engine, WorkerEngine) and engine.worker_pid is not None
    os.kill(engine.worker_pid, signal.SIGKILL)


def disturbed(llm: LLM, kills_at: list[int], **options: Any) -> ChatReply[Any]:
    """Stream the chat, kill the worker after so many tokens, and return the reply."""
    before = llm.stats().number("paceline_engine_restarts_total")
    num_tokens, num_kills = 0, 0
    # However late a kill is, the stream has not ended: it pauses for its reader.
    with llm.stream_chat(ASKED, max_buffered_tokens=4, **options) as stream:
        while num_kills < len(kills_at):
            chunk = stream.get()
            assert isinstance(chunk, ChatChunk), "the message ended before the kills"
            num_tokens += len(chunk.token_ids)
            if num_tokens >= kills_at[num_kills]:
                # Tokens of the dead worker may be read before the next one is ready: its death would count as no restart.
                wait_for_restarts(llm, before + num_kills)
                kill(llm)
                num_kills += 1
        reply = stream.collect()
    wait_for_restarts(llm, before + num_kills)  # the last restart may come after a reply that was generated before
    return reply


CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "schema": ([9, 30], {"json_schema": SCHEMA, **PLAIN}),
    "thinking, then schema": ([9, 40], {"json_schema": SCHEMA, "thinking": THINKING}),
    "forced end of thinking": ([4, 6], {"json_schema": SCHEMA, "thinking": THINKING}),
    "required call": ([15, 40], {"tools": [NOTE], "tool_choice": "required", **PLAIN}),
    "required call after thinking": ([5, 45], {"tools": [NOTE], "tool_choice": "required"}),
    "call after a trigger": ([5, 45], {"tools": [NOTE], "tool_choice": "auto"}),
}


@pytest.mark.parametrize("case", sampled(reversed(CASES), every=3))
def test_a_killed_worker_changes_nothing_of_a_constrained_chat(llm: LLM, case: str) -> None:
    """Message and tokens equal those of an undisturbed run, and constrained text conforms to its schema."""
    kills_at, options = CASES[case]
    sampling: dict[str, Any] = {"seed": 4, "temperature": 0.9, "max_tokens": 400, "cache_prompt": False, **options}
    whole = llm.chat(ASKED, **sampling)
    reply = disturbed(llm, kills_at, **sampling)
    assert reply.choices[0].token_ids == whole.choices[0].token_ids
    assert (reply.content, reply.reasoning_content) == (whole.content, whole.reasoning_content)
    assert reply.finish_reason is (FinishReason.TOOL_CALLS if reply.tool_calls else FinishReason.STOP)
    if "tools" not in options:
        jsonschema.validate(json.loads(reply.content), SCHEMA)
    if "thinking" in options:
        assert reply.reasoning_content.rstrip().endswith("Enough.")
    if options.get("tool_choice") == "required":
        assert reply.tool_calls
    for call in reply.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
