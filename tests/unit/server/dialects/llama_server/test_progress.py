"""Prompt progress, reported until the completion begins; over a fake chunk source and fake slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.scheduling.records import SlotsSnapshot, SlotView
from paceline.server.running_request import ChunkBatch, ProgressChunk, ProgressSource
from paceline.streaming import FinishReason, StreamChunk, Usage

MINE = SlotView(
    id=1, key=1, request_id="mine", num_prompt_tokens=10, num_cached=2, num_computed_tokens=6, running_s=0.5
)
SAME_ID = SlotView(id=2, key=3, request_id="mine", num_prompt_tokens=99, num_cached=90, num_computed_tokens=90)
OTHERS = SlotView(id=0, key=2, request_id="other", num_prompt_tokens=10, num_cached=9, num_computed_tokens=9)


class Slow:
    """A generation with a first chunk that waits for `begin`."""

    prompts, heartbeat_s = (tuple(range(10)),), 1.0

    def __init__(self, *chunks: StreamChunk) -> None:
        self.begin = asyncio.Event()
        self.is_closed = False
        self._chunks = chunks

    async def batches(self) -> AsyncIterator[ChunkBatch]:
        try:
            await self.begin.wait()
            for chunk in self._chunks:
                yield [(0, chunk)]
        finally:
            self.is_closed = True


async def reported(slow: Any, *looks: list[SlotView]) -> list[StreamChunk]:
    """The chunks that a reader gets; the generation begins after the last of the looks, which then stays as it is."""
    left = list(looks)

    async def look() -> SlotsSnapshot:
        slots = left.pop(0) if len(left) > 1 else left[0]
        if len(left) == 1:
            slow.begin.set()
        return SlotsSnapshot(tuple(slots), 0)

    generation = ProgressSource(slow, look, "", "mine", lambda: 100.0, interval_s=0)
    return [chunk async for batch in generation.batches() for _, chunk in batch]


def shown(chunks: list[StreamChunk]) -> list[Any]:
    """Of progress its numbers, of others their text."""
    return [(chunk.cache, chunk.processed) if isinstance(chunk, ProgressChunk) else chunk.text for chunk in chunks]


def test_progress_goes_from_what_was_cached_to_the_whole_prompt() -> None:
    """A request that waits for a slot has none, and each chunk has more of the prompt than the last."""
    slow = Slow(StreamChunk(index=0, text="a"), StreamChunk(index=1, text="b"))
    chunks = asyncio.run(reported(slow, [OTHERS, SAME_ID], [OTHERS, MINE]))
    assert shown(chunks) == [(2, 2), (2, 6), (2, 10), "a", "b"]
    assert [chunk.elapsed_s for chunk in chunks if isinstance(chunk, ProgressChunk)] == [0.0, 0.5, 0.5]


def test_the_progress_of_another_tenants_request_is_not_reported() -> None:
    """A request of another tenant may have the same id and a prompt of the same length."""
    others = SlotView(
        id=0, key=9, request_id="mine", tenant="b", num_prompt_tokens=10, num_cached=7, num_computed_tokens=8
    )
    chunks = asyncio.run(reported(Slow(StreamChunk(index=0, text="a")), [others], [others, MINE]))
    assert shown(chunks) == [(2, 2), (2, 6), (2, 10), "a"]


def test_the_whole_prompt_is_reported_once() -> None:
    """It is also reported if it is computed before the first chunk is read."""
    computed = SlotView(id=1, key=1, request_id="mine", num_prompt_tokens=10, num_cached=2, num_computed_tokens=11)
    chunks = asyncio.run(reported(Slow(StreamChunk(index=0, text="a")), [computed]))
    assert shown(chunks) == [(2, 2), (2, 10), "a"]


def test_a_completion_that_is_over_at_once_reports_what_it_took() -> None:
    """Its slot belongs to another request by then; its end reports the cached tokens, at once or with a later chunk."""
    end = StreamChunk(index=0, text="b", finish_reason=FinishReason.STOP, usage=Usage(cached_tokens=4, prefill_s=0.25))
    for chunks, texts in (([end], ["b"]), ([StreamChunk(index=0, text="a"), end], ["a", "b"])):
        found = asyncio.run(reported(Slow(*chunks), [OTHERS]))
        assert shown(found) == [(4, 4), (4, 10), *texts]
        assert [item.elapsed_s for item in found if isinstance(item, ProgressChunk)] == [0.0, 0.25]


def test_a_stream_that_breaks_off_before_its_slot_was_seen_has_no_progress() -> None:
    """Its chunks come all the same."""
    assert shown(asyncio.run(reported(Slow(StreamChunk(index=0, text="a")), [OTHERS]))) == ["a"]
    assert asyncio.run(reported(Slow(), [OTHERS])) == []


def test_a_reader_that_leaves_leaves_nothing_running() -> None:
    """The task that waits for the first chunk is ended with it."""

    async def leave() -> Slow:
        slow = Slow()

        async def look() -> SlotsSnapshot:
            await asyncio.sleep(0)  # so that reading has begun
            return SlotsSnapshot((MINE,), 0)

        batches = ProgressSource(slow, look, "", "mine", lambda: 0.0, interval_s=0).batches()  # type: ignore[arg-type]
        await anext(batches)
        await batches.aclose()  # type: ignore[attr-defined]
        return slow

    assert asyncio.run(leave()).is_closed


def test_a_look_that_fails_fails_the_reading() -> None:
    """The error is not swallowed, and no task is left waiting."""

    async def fail() -> SlotsSnapshot:
        raise RuntimeError("no slots")

    async def read() -> None:
        generation = ProgressSource(Slow(), fail, "", "mine", lambda: 0.0, interval_s=0)  # type: ignore[arg-type]
        async for _ in generation.batches():
            pass

    with pytest.raises(RuntimeError, match="no slots"):
        asyncio.run(read())
