"""A source that alters the chunks of a completion: line limits (`n_indent`, `t_max_predict_ms`). On the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from paceline.params import SamplingParams
from paceline.server.prefill_progress import ChunkSourceWrapper
from paceline.server.running_request import ChunkBatch, ChunkSource
from paceline.streaming import FinishReason, StreamChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """min_indent: least indentation of every line but the first; generation stops before a line with less.

    max_predict_s: seconds since the first token after which a line break stops generation; None: no limit.
    """

    min_indent: int = 0
    max_predict_s: float | None = None

    @property
    def has_any(self) -> bool:
        """True if there is a limit."""
        return self.min_indent > 0 or self.max_predict_s is not None


class LineLimiter:
    """Applies the limits to one choice. clock: seconds from any point on."""

    def __init__(self, limits: LineLimits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._first_s: float | None = None
        self._indent: int | None = None  # blanks of the line that has begun; None within a line's text
        self.is_over = False

    def take(self, text: str) -> str:
        """Return the part of the next text before the limit; "" after `is_over`."""
        if self.is_over:
            return ""
        now = self._clock()
        self._first_s = now if self._first_s is None else self._first_s
        kept = self._indented(text)
        limit = self._limits.max_predict_s
        if limit is not None and "\n" in kept and now - self._first_s > limit:
            self.is_over = True
        return kept

    def _indented(self, text: str) -> str:
        if self._limits.min_indent == 0:
            return text
        for position, letter in enumerate(text):
            if self._indent is not None:
                if letter in " \t":
                    self._indent += 1
                    continue
                if self._indent < self._limits.min_indent:
                    self.is_over = True
                    return text[:position]
            self._indent = 0 if letter == "\n" else None
        return text


class LineLimitedSource(ChunkSourceWrapper):
    """Cuts choices at their line limits, and cancels the wrapped source when the last of them is over."""

    def __init__(
        self, source: ChunkSource[StreamChunk], limits: LineLimits, clock: Callable[[], float], params: SamplingParams
    ) -> None:
        super().__init__(source)
        self._limits, self._clock = limits, clock
        self._watches: dict[tuple[int, int], LineLimiter] = {}
        self._num_open = len(source.prompts) * params.n

    async def batches(self) -> AsyncIterator[ChunkBatch]:
        """Yield chunks; a choice that was cut ends with LENGTH."""
        async for batch in self._source.batches():
            yield [(index, self._limited(index, chunk)) for index, chunk in batch]

    def _limited(self, index: int, chunk: StreamChunk) -> StreamChunk:
        watch = self._watches.get((index, chunk.choice))
        if watch is None:
            watch = self._watches[index, chunk.choice] = LineLimiter(self._limits, self._clock)
        if watch.is_over:
            reason = None if chunk.finish_reason is None else FinishReason.LENGTH
            return StreamChunk(index=chunk.index, choice=chunk.choice, finish_reason=reason, usage=chunk.usage)
        kept = watch.take(chunk.text)
        if chunk.finish_reason is not None or watch.is_over:
            self._num_open -= 1
            if self._num_open == 0:
                self._source.cancel()
        return chunk if kept == chunk.text else msgspec.structs.replace(chunk, text=kept)
