"""Completions that end at a line: by its indent, by the time that has passed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.params import SamplingParams
from paceline.server.api_errors import ClientDisconnected
from paceline.server.dialects.llama_server.completion_request import LineLimits
from paceline.server.dialects.llama_server.completion_routes import LineLimitedSource, LineLimiter
from paceline.server.running_request import ChunkBatch, collect
from paceline.streaming import FinishReason, StreamChunk, Usage


def kept(limits: LineLimits, *texts: str, times: list[float] | None = None) -> tuple[str, bool]:
    """Return the text that a completion in these pieces keeps, and whether it is over."""
    clock = iter(times or [0.0] * len(texts))
    watch = LineLimiter(limits, lambda: next(clock))
    return "".join([watch.take(text) for text in texts]), watch.is_over


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("first\n  second\n    third\n  x", "first\n  second\n    third\n  x"),
        ("first\n  second\nthird", "first\n  second\n"),
        ("first\n x", "first\n "),
        ("first\n\n  x", "first\n"),
        ("\n\t\tx\n\tx", "\n\t\tx\n\t"),
        ("first\n ", "first\n "),
    ],
)
def test_a_line_that_begins_too_far_left_ends_the_completion(text: str, wanted: str) -> None:
    """However it is cut into pieces; the first line may begin anywhere, and an empty line ends it too."""
    limits = LineLimits(min_indent=2)
    assert kept(limits, text) == (wanted, wanted != text)
    assert kept(limits, *text)[0] == wanted


def test_a_line_break_after_the_time_ends_the_completion() -> None:
    """Counted from the first token; the line that it ends is kept."""
    limits = LineLimits(max_predict_s=1.0)
    assert kept(limits, "a\n", "b", "c\n", times=[5.0, 9.0, 5.9]) == ("a\nbc\n", False)
    assert kept(limits, "a", "b", "c\nd", "e", times=[5.0, 9.0, 9.1]) == ("abc\nd", True)


class Played:
    """A generation that brings these chunks; cancelling is noted."""

    heartbeat_s = 1.0
    prompts = ((1,),)

    def __init__(self, *chunks: StreamChunk, is_disconnected: bool = False) -> None:
        self._chunks, self.is_disconnected, self.num_cancels = chunks, is_disconnected, 0

    async def batches(self) -> AsyncIterator[ChunkBatch]:
        for chunk in self._chunks:
            yield [(0, chunk)]

    def cancel(self) -> None:
        self.num_cancels += 1


def limited(played: Any, n: int = 1) -> LineLimitedSource:
    """It, with lines of two blanks at least."""
    return LineLimitedSource(played, LineLimits(min_indent=2), lambda: 0.0, SamplingParams(n=n))


def test_a_completion_that_is_over_ends_with_length_and_computes_no_more() -> None:
    """Chunks that come until the engine has ended it are dropped."""
    played = Played(
        StreamChunk(index=0, token_ids=(1,), text="a\nb"),
        StreamChunk(index=1, token_ids=(2,), text="c"),
        StreamChunk(
            index=2, token_ids=(3,), text="d", finish_reason=FinishReason.CANCELLED, usage=Usage(prompt_tokens=1)
        ),
    )
    (completion,) = asyncio.run(collect(limited(played), SamplingParams()))
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("a\n", (1,), FinishReason.LENGTH)
    assert completion.usage.prompt_tokens == 1
    assert played.num_cancels == 1


def test_one_choice_that_is_over_leaves_the_others_running() -> None:
    """The engine is notified only when none is left."""
    over = StreamChunk(index=0, choice=1, token_ids=(1,), text="a\nb")
    played = Played(over, StreamChunk(index=0, choice=0, token_ids=(1,), text="x"))
    asyncio.run(drained(limited(played, n=2)))
    assert played.num_cancels == 0


async def drained(generation: LineLimitedSource) -> None:
    """Read it to its end."""
    async for _ in generation.batches():
        pass


def test_a_failure_and_a_disconnect_stay_what_they_are() -> None:
    """Neither is turned into a completion."""
    failed = Played(StreamChunk(index=0, finish_reason=FinishReason.ERROR, error=None, usage=Usage()))
    with pytest.raises(Exception, match="failed"):
        asyncio.run(collect(limited(failed), SamplingParams()))
    with pytest.raises(ClientDisconnected):
        asyncio.run(collect(limited(Played(is_disconnected=True)), SamplingParams()))
