"""The streams of a demo: submitted together, read by one reader, each kept with what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.cli.demo_requests import DemoRequest
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.streaming import Stream, StreamChunk, Usage


@dataclass(slots=True)
class Answer:
    """One answer as far as it was read. reason: the value of its `FinishReason`; None while it goes on."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    reason: str | None = None
    stop: str | int | None = None

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)

    def take(self, chunk: StreamChunk) -> None:
        """Adds what a chunk brings."""
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        if chunk.finish_reason is not None:
            self.reason, self.stop = chunk.finish_reason.value, chunk.stop


class Running:
    """A request of the demo, from its submit to the last chunk that was read.

    error: why it was refused or failed. is_read: whether the reader takes what comes.
    """

    def __init__(self, request: DemoRequest, stream: Stream | None, error: PacelineError | None = None) -> None:
        self.request = request
        self.answers = [Answer() for _ in range(request.num_choices)]
        self.error = error
        self.is_read = True
        self._stream = stream
        self._is_over = stream is None

    def take(self) -> None:
        """Reads what is there."""
        from paceline.streaming import StreamChunk
        from paceline.streaming.feed import END

        while self._stream is not None and self.is_read and not self._is_over:
            chunk = self._stream.get(0)
            if isinstance(chunk, StreamChunk):
                self.answers[chunk.choice].take(chunk)
                self.error = self.error or chunk.error
            else:
                self._is_over = chunk is END
                return

    def cancel(self) -> None:
        """Ends it; its reader takes what is left. Any thread."""
        if self._stream is not None:
            self._stream.cancel()
        self.is_read = True

    @property
    def was_accepted(self) -> bool:
        """Whether the engine took it."""
        return self._stream is not None

    @property
    def is_over(self) -> bool:
        """Whether all of it was read."""
        return self._is_over

    @property
    def num_unread(self) -> int:
        """Tokens that wait for the reader."""
        return 0 if self._stream is None else self._stream.num_buffered

    @property
    def usage(self) -> Usage | None:
        """What it took; None before its end, or where it was refused."""
        return None if self._stream is None else self._stream.usage


class Streams:
    """All of them, in the order of their numbers. One thread submits and reads; `cancel_all` is for any."""

    def __init__(self) -> None:
        self._running: list[Running] = []
        self._are_cancelled = False

    def submit(self, llm: LLM, requests: Sequence[DemoRequest]) -> None:
        """Submits them; one that is refused has its error, and the others go on. Where all are, the first error is raised."""
        for request in requests:
            try:
                stream = llm.stream(request.prompt, **request.options)
            except PacelineError as error:
                self._running.append(Running(request, None, error))
            else:
                self._running.append(Running(request, stream))
                if self._are_cancelled:
                    stream.cancel()
        if not self.accepted and self._running[0].error is not None:
            raise self._running[0].error

    def __iter__(self) -> Iterator[Running]:
        return iter(tuple(self._running))

    @property
    def accepted(self) -> list[Running]:
        """Those that the engine took, in the order in which it did."""
        return [one for one in self if one.was_accepted]

    def take(self) -> None:
        """Reads what is there of all that are read."""
        for one in self._running:
            one.take()

    def cancel_all(self) -> None:
        """Ends all that have not ended."""
        self._are_cancelled = True
        for one in self:
            if not one.is_over:
                one.cancel()

    def switch_readers(self) -> None:
        """Stops the readers of all that go on, or starts them where all have stopped."""
        live = [one for one in self if not one.is_over]
        is_read = not any(one.is_read for one in live)
        for one in live:
            one.is_read = is_read

    @property
    def are_over(self) -> bool:
        """Whether all of them are."""
        return all(one.is_over for one in self._running)
