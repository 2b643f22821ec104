"""Prefill progress beside the chunks of a request: llama-server's `return_progress`. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Self

from paceline.errors import WorkerUnresponsive
from paceline.scheduling.records import SlotsSnapshot, SlotView
from paceline.server.running_request import ChunkBatch, ChunkSource
from paceline.streaming import StreamChunk, Usage


class ChunkSourceWrapper:
    """Base of sources that alter the chunks of another one: they define `batches`."""

    def __init__(self, source: ChunkSource[StreamChunk]) -> None:
        self._source = source

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of each prompt."""
        return self._source.prompts

    @property
    def heartbeat_s(self) -> float:
        """Seconds between comments on an idle stream."""
        return self._source.heartbeat_s

    @property
    def is_disconnected(self) -> bool:
        """True after the client disconnected."""
        return self._source.is_disconnected

    def cancel(self) -> None:
        """Cancel what is unfinished."""
        self._source.cancel()

    async def __aenter__(self) -> Self:
        await self._source.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._source.__aexit__(*error)


INTERVAL_S = 0.25
"""Seconds between two reads of the slots."""

ReadSlots = Callable[[], Awaitable[SlotsSnapshot]]


class ProgressChunk(StreamChunk, frozen=True, kw_only=True):
    """Prefill progress: `processed` prompt tokens are in memory, `cache` of them were not computed.

    elapsed_s: since the request got its slot; 0 in the first one, when nothing is computed.
    """

    cache: int
    processed: int
    elapsed_s: float

    def body(self, num_prompt: int) -> dict[str, int]:
        """Return llama-server's `prompt_progress`. num_prompt: tokens of the prompt."""
        return {
            "total": num_prompt,
            "cache": self.cache,
            "processed": self.processed,
            "time_ms": round(1000 * self.elapsed_s),
        }


class ProgressSource(ChunkSourceWrapper):
    """Adds `ProgressChunk`s before the first chunk of the only prompt.

    The first of them reports the cached tokens, the last one the whole prompt, each more than the one before.
    tenant, request_id: the request's own; clock: seconds from any point on.
    """

    def __init__(
        self,
        source: ChunkSource[StreamChunk],
        read_slots: ReadSlots,
        tenant: str,
        request_id: str,
        clock: Callable[[], float],
        interval_s: float = INTERVAL_S,
    ) -> None:
        super().__init__(source)
        self._read_slots, self._interval_s = read_slots, interval_s
        self._mine = (tenant, request_id, len(source.prompts[0]))
        self._steps = _ProgressSteps(len(source.prompts[0]), clock)

    async def batches(self) -> AsyncIterator[ChunkBatch]:
        """Yield progress until the first token, then the chunks of the wrapped source."""
        inner, steps = self._source.batches(), self._steps
        coming: asyncio.Future[ChunkBatch | None] = asyncio.ensure_future(_next(inner))
        try:
            while not coming.done():
                if chunks := steps.seen(await self._slot()):
                    yield chunks
                await asyncio.wait({coming}, timeout=self._interval_s)
            first = coming.result()
        finally:
            await _cancel_and_wait(coming)
        if first is None:
            return
        yield [*await self._last_steps(first, inner), *first]
        async for batch in inner:
            yield batch

    async def _last_steps(self, first: ChunkBatch, inner: AsyncIterator[ChunkBatch]) -> ChunkBatch:
        """Return the progress up to the whole prompt.

        Appends to `first` the chunks that arrive before the number of cached tokens is known.
        """
        while not self._steps.has_begun:
            if (usage := _usage(first)) is not None:
                return self._steps.all_of(usage)
            if chunks := self._steps.seen(await self._slot()):
                return [*chunks, *self._steps.rest()]
            if (more := await _next(inner)) is None:  # the slot is free, so this has the end; or the worker is replaced
                return []
            first += more
        return self._steps.rest()

    async def _slot(self) -> SlotView | None:
        """Return the request's slot, if it has one. Ids are the clients', and another request may have the same."""
        try:
            slots = await self._read_slots()
        except WorkerUnresponsive:  # the stream goes on with it, or with the next worker
            return None
        for slot in slots:
            if (slot.tenant, slot.request_id, slot.num_prompt_tokens) == self._mine:
                return slot
        return None


class _ProgressSteps:
    """Creates progress chunks, each with more of the prompt than the one before."""

    def __init__(self, num_prompt: int, clock: Callable[[], float]) -> None:
        self._num_prompt, self._clock = num_prompt, clock
        self._began_s, self._cache, self._processed = 0.0, 0, 0
        self.has_begun = False

    def seen(self, slot: SlotView | None) -> ChunkBatch:
        """Return the progress that a request's slot shows."""
        if slot is None:
            return []
        chunks = [] if self.has_begun else self._begin(slot.num_cached, slot.running_s)
        return [*chunks, *self._upto(min(slot.num_computed_tokens, self._num_prompt))]

    def all_of(self, usage: Usage) -> ChunkBatch:
        """Return the progress of a request that ended before its slot was read."""
        return [*self._begin(usage.cached_tokens, usage.prefill_s), *self.rest()]

    def rest(self) -> ChunkBatch:
        """Return the progress at the first token: the whole prompt."""
        return self._upto(self._num_prompt)

    def _begin(self, cache: int, running_s: float) -> ChunkBatch:
        self.has_begun = True
        self._began_s, self._cache, self._processed = self._clock() - running_s, cache, cache
        return [(0, self._chunk(0.0))]

    def _upto(self, processed: int) -> ChunkBatch:
        if processed <= self._processed:
            return []
        self._processed = processed
        return [(0, self._chunk(self._clock() - self._began_s))]

    def _chunk(self, elapsed_s: float) -> ProgressChunk:
        return ProgressChunk(index=0, cache=self._cache, processed=self._processed, elapsed_s=elapsed_s)


def _usage(batch: ChunkBatch) -> Usage | None:
    return next((chunk.usage for _, chunk in batch if chunk.usage is not None), None)


async def _next(batches: AsyncIterator[ChunkBatch]) -> ChunkBatch | None:
    return await anext(batches, None)


async def _cancel_and_wait(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it has released what it reads."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
