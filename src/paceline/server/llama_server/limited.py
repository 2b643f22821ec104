"""A generation whose answers may end at a line: what comes after is neither told nor, where nobody else needs it, computed.

On the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec

from paceline.completion import Completion, completion_of
from paceline.params import SamplingParams
from paceline.server.generating import Batch, Generation
from paceline.server.llama_server.line_limits import LineLimits, LineWatch
from paceline.server.llama_server.wrapped import WrappedGeneration
from paceline.server.problems import FAILED_ENDINGS, ClientGone, Refused, problem_of_ending
from paceline.streaming import FinishReason, StreamChunk


class LimitedGeneration(WrappedGeneration):
    """Reads like the generation that it has; it ends that one when the last of its answers is over."""

    def __init__(
        self, generation: Generation, limits: LineLimits, clock: Callable[[], float], params: SamplingParams
    ) -> None:
        super().__init__(generation)
        self._limits, self._clock = limits, clock
        self._watches: dict[tuple[int, int], LineWatch] = {}
        self._wants_logprobs = params.logprobs is not None
        self._num_open = len(generation.prompts) * params.n

    async def batches(self) -> AsyncIterator[Batch]:
        """See `Generation`; an answer that was cut ends with LENGTH."""
        async for batch in self._generation.batches():
            yield [(index, self._limited(index, chunk)) for index, chunk in batch]

    async def collected(self) -> list[Completion]:
        """See `Generation`."""
        parts: list[list[StreamChunk]] = [[] for _ in self._generation.prompts]
        async for batch in self.batches():
            for index, chunk in batch:
                parts[index].append(chunk)
        if self.is_abandoned:
            raise ClientGone
        return [self._completion(index, chunks) for index, chunks in enumerate(parts)]

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

    def _completion(self, index: int, chunks: list[StreamChunk]) -> Completion:
        for chunk in chunks:
            if chunk.finish_reason in FAILED_ENDINGS:
                raise chunk.error if chunk.error is not None else Refused(problem_of_ending(chunk.finish_reason))
        return completion_of(
            chunks,
            prompt=self._generation.prompts[index],
            wants_logprobs=self._wants_logprobs,
            wants_prompt_logprobs=False,
            index=index,
        )
