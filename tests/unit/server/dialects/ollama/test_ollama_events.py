"""Ollama's responses, whole and as lines."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.chat import ChatChoice, ChatChunk, ChatCompletion, MessageDelta, ParsedMessage, ToolCall, ToolCallDelta
from paceline.output import Vocabulary
from paceline.server.dialects.ollama.ollama_routes import OllamaReply, timestamp
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage

USAGE = Usage(prompt_tokens=20, cached_tokens=15, completion_tokens=7, queue_s=1, prefill_s=0.5, decode_s=2)
CALLS = (ToolCall("weather", '{"city": "Oslo"}', "c1"), ToolCall("time", "", "c2"))
BODIES = [
    {"id": "c1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}},
    {"id": "c2", "function": {"index": 1, "name": "time", "arguments": {}}},
]


def reply(**options: Any) -> OllamaReply:
    return OllamaReply(**{"model": "m", "is_chat": True, **options})


def decoded(lines: list[bytes]) -> list[dict[str, Any]]:
    """The lines without their times, which are checked."""
    found = [msgspec.json.decode(line) for line in lines]
    for line in found:
        assert line.pop("created_at").endswith("Z")
        assert line.pop("model") == "m"
    return found


def whole(message: ParsedMessage, reason: FinishReason = FinishReason.STOP, **options: Any) -> dict[str, Any]:
    choice = ChatChoice(index=0, message=message, finish_reason=reason, text="", token_ids=())
    completion = ChatCompletion(choices=(choice,), prompt_token_ids=(), usage=USAGE)
    (body,) = decoded([reply(**options).whole(completion)])
    return body


def test_the_last_line_has_counts_and_nanoseconds() -> None:
    """Never zero, since clients divide by them."""
    body = whole(ParsedMessage("Hi.", "Hm."))
    assert body.pop("message") == {"role": "assistant", "content": "Hi.", "thinking": "Hm."}
    assert body == {
        "done": True,
        "done_reason": "stop",
        "total_duration": 3_500_000_000,
        "load_duration": 0,
        "prompt_eval_count": 20,
        "prompt_eval_duration": 500_000_000,
        "eval_count": 7,
        "eval_duration": 2_000_000_000,
    }
    assert reply().ending(FinishReason.LENGTH, Usage())["eval_duration"] == 1
    assert whole(ParsedMessage(), FinishReason.LENGTH)["done_reason"] == "length"


def test_lines_equal_the_whole_reply() -> None:
    """Text and thinking as they come, calls whole and before the last line."""
    message = ParsedMessage("Let me see.", "Hm.", CALLS)
    deltas = (
        MessageDelta(reasoning_content="Hm."),
        MessageDelta(content="Let "),
        MessageDelta(content="me see."),
        MessageDelta(tool_call=ToolCallDelta(0, "weather", '{"city"', "c1")),
        MessageDelta(tool_call=ToolCallDelta(0, arguments=': "Oslo"}')),
        MessageDelta(tool_call=ToolCallDelta(1, "time", "", "c2")),
    )
    lines = reply(warnings=("w",)).events()
    end = ChatChunk(choice=0, finish_reason=FinishReason.STOP, message=message, usage=USAGE)
    found = decoded(
        [line for delta in deltas for line in lines(0, ChatChunk(choice=0, deltas=(delta,)))] + lines(0, end)
    )
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert "".join(line["message"]["content"] for line in found) == message.content
    assert "".join(line["message"].get("thinking", "") for line in found) == message.reasoning_content
    assert [line["message"].get("tool_calls") for line in found] == [None] * 3 + [BODIES, None]
    assert found[-1]["warnings"] == ["w"]
    assert whole(message)["message"]["tool_calls"] == BODIES


@pytest.mark.parametrize("arguments", ['{"city": "Os', "{", '{"a": 1'])
def test_a_call_that_was_cut_off_is_left_out(arguments: str) -> None:
    """No program should run with half of its arguments."""
    message = ParsedMessage("", "", (CALLS[0], ToolCall("time", arguments, "c2")))
    end = ChatChunk(choice=0, finish_reason=FinishReason.LENGTH, message=message, usage=USAGE)
    streamed, last = decoded(reply().events()(0, end))
    assert (
        streamed["message"]["tool_calls"] == whole(message, FinishReason.LENGTH)["message"]["tool_calls"] == BODIES[:1]
    )
    assert last["done_reason"] == "length"


def test_a_completion_has_a_response_and_log_probabilities() -> None:
    """Each line has its tokens'."""
    pieces = (b"a", b"b")
    lines = reply(is_chat=False, num_top=1).events()
    scores = (Vocabulary(pieces, pieces, frozenset()).with_texts(0, TokenLogprobs(-0.5, (1,), (-0.25,))),)
    chunk = StreamChunk(index=0, text="a", token_ids=(0,), logprobs=scores)
    end = StreamChunk(index=0, text="", token_ids=(), finish_reason=FinishReason.STOP, usage=USAGE)
    first, last = decoded([*lines(0, chunk), *lines(0, end)])
    top = {"token": "b", "logprob": -0.25, "bytes": [98]}
    assert first == {
        "response": "a",
        "logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [top]}],
        "done": False,
    }
    assert (last["response"], last["done"], "logprobs" in last) == ("", True, False)


def test_a_time_is_written_as_ollama_does() -> None:
    """In UTC, with fractions of a second."""
    assert timestamp(0) == "1970-01-01T00:00:00.000000Z"
