"""How far the prompt of a stream is, told from time to time until its answer begins (`return_progress`). On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from paceline.scheduling.slots_snapshot import SlotsSnapshot, SlotView
from paceline.server.generating import Batch, Readable
from paceline.server.llama_server.wrapped import WrappedGeneration
from paceline.streaming import StreamChunk

INTERVAL_S = 0.25
"""Between two looks at the slots."""

Look = Callable[[], Awaitable[SlotsSnapshot]]


class ProgressChunk(StreamChunk, frozen=True, kw_only=True):
    """No part of the answer: of the prompt's tokens `processed` are computed, `cache` of them were before."""

    cache: int
    processed: int


class ProgressingGeneration(WrappedGeneration):
    """The generation of one prompt, with `ProgressChunk`s before its first chunk. look: at the slots; request_id: its own."""

    def __init__(self, generation: Readable, look: Look, request_id: str, interval_s: float = INTERVAL_S) -> None:
        super().__init__(generation)
        self._look, self._request_id, self._interval_s = look, request_id, interval_s

    async def batches(self) -> AsyncIterator[Batch]:
        """See `Generation`."""
        inner = super().batches()
        first: asyncio.Future[Batch | None] = asyncio.ensure_future(_next(inner))
        try:
            while not (await asyncio.wait({first}, timeout=self._interval_s))[0]:
                if (slot := await self._slot()) is not None:
                    yield [(0, _progress(slot.num_cached, min(slot.num_computed, slot.num_prompt)))]
            batch = first.result()
        finally:
            await _ended(first)
        if batch is None:
            return
        num_prompt = len(self.prompts[0])
        yield [(0, _progress(await self._num_cached(batch), num_prompt)), *batch]
        async for batch in inner:
            yield batch

    async def _slot(self) -> SlotView | None:
        """The request's; None while it has none."""
        return next((one for one in await self._look() if one.request_id == self._request_id), None)

    async def _num_cached(self, batch: Batch) -> int:
        """Of the prompt; the end of an answer tells it, and until then its slot."""
        for _, chunk in batch:
            if chunk.usage is not None:
                return chunk.usage.cached_tokens
        slot = await self._slot()
        return 0 if slot is None else slot.num_cached


def _progress(cache: int, processed: int) -> ProgressChunk:
    return ProgressChunk(index=0, cache=cache, processed=processed)


async def _next(batches: AsyncIterator[Batch]) -> Batch | None:
    return await anext(batches, None)


async def _ended(task: asyncio.Future[Any]) -> None:
    """Waits until a task that nobody wants any more has let go of what it reads."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
