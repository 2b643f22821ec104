"""A generation whose answers may end at a line: what comes after is neither told nor, where nobody else needs it, computed.

On the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec

from paceline.params import SamplingParams
from paceline.server.generating import Batch, Readable
from paceline.server.llama_server.line_limits import LineLimits, LineWatch
from paceline.server.llama_server.wrapped import WrappedGeneration
from paceline.streaming import FinishReason, StreamChunk


class LimitedGeneration(WrappedGeneration):
    """Reads like the generation that it has; it ends that one when the last of its answers is over."""

    def __init__(
        self, generation: Readable, limits: LineLimits, clock: Callable[[], float], params: SamplingParams
    ) -> None:
        super().__init__(generation)
        self._limits, self._clock = limits, clock
        self._watches: dict[tuple[int, int], LineWatch] = {}
        self._num_open = len(generation.prompts) * params.n

    async def batches(self) -> AsyncIterator[Batch]:
        """See `Generation`; an answer that was cut ends with LENGTH."""
        async for batch in self._generation.batches():
            yield [(index, self._limited(index, chunk)) for index, chunk in batch]

    def _limited(self, index: int, chunk: StreamChunk) -> StreamChunk:
        watch = self._watches.get((index, chunk.choice))
        if watch is None:
            watch = self._watches[index, chunk.choice] = LineWatch(self._limits, self._clock)
        if watch.is_over:
            reason = None if chunk.finish_reason is None else FinishReason.LENGTH
            return StreamChunk(index=chunk.index, choice=chunk.choice, finish_reason=reason, usage=chunk.usage)
        kept = watch.take(chunk.text)
        if chunk.finish_reason is not None or watch.is_over:
            self._num_open -= 1
            if self._num_open == 0:
                self._generation.cancel()
        return chunk if kept == chunk.text else msgspec.structs.replace(chunk, text=kept)
