"""Chunks: joining, and the order of reasons."""

from __future__ import annotations

import json
from dataclasses import asdict

import msgspec
import pytest
from tests.unit.streaming.pieces import delta

from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage


def test_joined_chunks_have_everything_of_all_and_the_last_ones_ending() -> None:
    """Ids, text and logprobs follow each other, the index is the first one's, the ending the last one's."""
    usage = Usage(completion_tokens=3)
    prompt_logprobs = (TokenLogprobs(-0.5),)
    first = msgspec.structs.replace(delta(7, 1), prompt_logprobs=prompt_logprobs)
    last = StreamChunk(
        index=9,
        token_ids=(3,),
        text="!",
        logprobs=(TokenLogprobs(-3.0),),
        finish_reason=FinishReason.STOP,
        stop="###",
        stop_token_ids=(8, 9),
        usage=usage,
    )
    joined = StreamChunk.joined_all([first, delta(8, 2), last])
    assert joined == StreamChunk(
        index=7,
        token_ids=(1, 2, 3),
        text="bc!",
        logprobs=(TokenLogprobs(-1.0), TokenLogprobs(-2.0), TokenLogprobs(-3.0)),
        prompt_logprobs=prompt_logprobs,
        finish_reason=FinishReason.STOP,
        stop="###",
        stop_token_ids=(8, 9),
        usage=usage,
    )


def test_joining_two_is_joining_all_of_two() -> None:
    """`joined` and `joined_all` agree, and one chunk alone stays itself."""
    first, second = delta(0, 1, 2), delta(2, 3)
    assert first.joined(second) == StreamChunk.joined_all([first, second]) == delta(0, 1, 2, 3)
    assert StreamChunk.joined_all([first]) is first


def test_a_chunk_is_not_terminal_by_default() -> None:
    """A plain chunk has no reason, no usage and no error, and cannot be changed."""
    chunk = StreamChunk(index=0)
    assert (chunk.finish_reason, chunk.usage, chunk.error, chunk.token_ids, chunk.text) == (None, None, None, (), "")
    with pytest.raises(AttributeError, match="immutable"):
        chunk.index = 1  # type: ignore[misc]


def test_a_reason_is_a_string() -> None:
    """It compares, prints and encodes as its value, alone and within a record."""
    reason = FinishReason.LENGTH
    assert (reason == "length", f"{reason}", f"{reason:>8}", str(reason)) == (True, "length", "  length", "length")  # type: ignore[comparison-overlap]
    assert {reason: 1}["length"] == 1  # type: ignore[index]
    chunk = StreamChunk(index=0, finish_reason=reason, usage=Usage())
    assert (
        json.loads(json.dumps(msgspec.structs.asdict(chunk) | {"usage": asdict(Usage())}))["finish_reason"] == "length"
    )


def test_reasons_are_ranked_as_they_are_listed() -> None:
    """Within one tick an error wins over a cancel, and so on down to the length."""
    order = ["ERROR", "CANCELLED", "DEADLINE", "SHUTDOWN", "SLOW_READER", "STOP", "REPETITION", "LENGTH", "TOOL_CALLS"]
    assert [reason.name for reason in sorted(FinishReason, key=lambda reason: reason.rank)] == order
