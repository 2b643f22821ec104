"""How far a prompt is, told until its answer begins; over a generation and slots that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.scheduling.slots_snapshot import SlotsSnapshot, SlotView
from paceline.server.generating import Batch
from paceline.server.llama_server.progress import ProgressChunk, ProgressingGeneration
from paceline.streaming import FinishReason, StreamChunk, Usage

MINE = SlotView(id=1, key=1, request_id="mine", num_prompt=10, num_cached=2, num_computed=6)
OTHERS = SlotView(id=0, key=2, request_id="other", num_prompt=10, num_cached=9, num_computed=9)


class Slow:
    """A generation whose first chunk waits for `begin`."""

    prompts = (tuple(range(10)),)

    def __init__(self, *chunks: StreamChunk) -> None:
        self.begin = asyncio.Event()
        self.is_closed = False
        self._chunks = chunks

    async def batches(self) -> AsyncIterator[Batch]:
        try:
            await self.begin.wait()
            for chunk in self._chunks:
                yield [(0, chunk)]
        finally:
            self.is_closed = True


async def told(slow: Any, *looks: list[SlotView]) -> list[StreamChunk]:
    """The chunks that a reader gets; the generation begins after the last of the looks."""
    left = list(looks)

    async def look() -> SlotsSnapshot:
        slots = left.pop(0) if left else [OTHERS, MINE]
        if not left:
            slow.begin.set()
        return SlotsSnapshot(tuple(slots), 0)

    generation = ProgressingGeneration(slow, look, "mine", interval_s=0)
    return [chunk async for batch in generation.batches() for _, chunk in batch]


def shown(chunks: list[StreamChunk]) -> list[Any]:
    """Of progress its numbers, of others their text."""
    return [(one.cache, one.processed) if isinstance(one, ProgressChunk) else one.text for one in chunks]


def test_progress_is_told_until_the_first_chunk_and_then_its_end() -> None:
    """A request that waits for a slot has none to tell of."""
    slow = Slow(StreamChunk(index=0, text="a"), StreamChunk(index=1, text="b"))
    chunks = asyncio.run(told(slow, [OTHERS], [OTHERS, MINE]))
    assert shown(chunks) in ([(2, 6), (2, 10), "a", "b"], [(2, 6), (2, 6), (2, 10), "a", "b"])


def test_an_answer_that_is_over_at_once_tells_what_it_took() -> None:
    """Its slot is somebody else's by then."""
    slow = Slow(StreamChunk(index=0, text="a", finish_reason=FinishReason.END, usage=Usage(cached_tokens=4)))
    chunks = asyncio.run(told(slow, [OTHERS]))
    assert shown(chunks)[-2:] == [(4, 10), "a"]


def test_a_reader_that_leaves_leaves_nothing_running() -> None:
    """What waits for the first chunk is ended with it."""

    async def leave() -> Slow:
        slow = Slow()

        async def look() -> SlotsSnapshot:
            return SlotsSnapshot((MINE,), 0)

        batches = ProgressingGeneration(slow, look, "mine", interval_s=0).batches()  # type: ignore[arg-type]
        await anext(batches)
        await batches.aclose()  # type: ignore[attr-defined]
        return slow

    assert asyncio.run(leave()).is_closed


def test_a_look_that_fails_fails_the_reading() -> None:
    """And is not swallowed; nothing is left waiting."""

    async def fail() -> SlotsSnapshot:
        raise RuntimeError("no slots")

    async def read() -> None:
        async for _ in ProgressingGeneration(Slow(), fail, "mine", interval_s=0).batches():  # type: ignore[arg-type]
            pass

    with pytest.raises(RuntimeError, match="no slots"):
        asyncio.run(read())
