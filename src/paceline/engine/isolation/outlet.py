"""The worker's way out: all that a tick brought as one message. Engine's thread, unless said otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from paceline.engine.backend import Backend
from paceline.engine.commands import Question
from paceline.engine.inbox import Inbox
from paceline.engine.isolation import messages
from paceline.engine.isolation.link import Link
from paceline.errors import EngineStopped, PacelineError
from paceline.params import SamplingParams
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.events import (
    Delta,
    Embedded,
    Ended,
    Event,
    Exported,
    HeldBack,
    Imported,
    Inspected,
    Released,
    Started,
)
from paceline.scheduling.sequence import Request
from paceline.streaming.chunk import StreamChunk

_REPORT_EVERY_S = 1.0
_ANY = 2**31


class _Page:
    """What was said of a request."""

    __slots__ = ("life", "num_told", "request")

    def __init__(self, request: Request | EmbeddingRequest) -> None:
        self.request = request
        self.life = messages.Life()
        self.num_told = [one.num_known for one in request.sequences] if isinstance(request, Request) else []


class SocketOutlet:
    """Knows what was said of every request. report: sends the metrics; called while ticks pass."""

    def __init__(self, link: Link, inbox: Inbox, backend: Backend, report: Callable[[], None]) -> None:
        self._link, self._inbox, self._backend, self._report = link, inbox, backend, report
        self._pages: dict[int, _Page] = {}
        self._questions: dict[int, Future[list[Any]]] = {}
        self._reported_s = 0.0

    def accept(self, request: Request | EmbeddingRequest) -> None:
        """Lets a request into the engine. Preparing thread."""
        self._pages[request.key] = _Page(request)
        self._inbox.submit(request, 0)

    def ask(self, command: Question) -> Future[list[Any]]:
        """Passes a question to the engine; its answer resolves the future. Any thread."""
        future = self._questions[command.key] = Future()
        self._inbox.put(command)
        return future

    def fail(self, key: int, error: PacelineError) -> None:
        """A request that could not be made ready. Preparing thread.

        Where the engine has ended the front is told nothing: the process ends, and another goes on with the request.
        """
        self._pages.pop(key, None)
        if isinstance(error, EngineStopped):
            return
        self._link.send(messages.encode(messages.Happened([messages.Failed(key, error)])))

    def deliver(self, events: list[Event]) -> None:
        """Sends what a tick brought."""
        parts: list[messages.Part] = []
        for event in events:
            parts += self._parts(event)
        if parts:
            self._link.send(messages.encode(messages.Happened(parts)))
        if time.monotonic() - self._reported_s > _REPORT_EVERY_S and events:
            self._report()
            self._reported_s = time.monotonic()

    def _parts(self, event: Event) -> list[messages.Part]:
        parts: list[messages.Part] = []
        if not isinstance(event, (Exported, Imported, Inspected, Embedded)) and event.key not in self._pages:
            return parts  # it was said to have failed already
        match event:
            case Delta(key, chunk):
                parts = self._chunk(key, chunk.choice, chunk)
            case HeldBack(key, choice):
                parts = self._chunk(key, choice, None)
            case Ended(key, chunk):
                parts = self._chunk(key, chunk.choice, chunk, is_last=True)
            case Started(key):
                self._inbox.started(key)
                parts = self._life(key, started=True)
            case Released(key):
                self._inbox.ended(key)
                self._pages.pop(key, None)
                parts = [messages.Freed(key)]
            case Embedded(key, vectors, error):
                parts = [messages.Vectors(key, [] if error else [_bytes(one) for one in vectors], error)]
            case Exported() | Imported() | Inspected():
                self._answer(event)
        return parts

    def _answer(self, event: Exported | Imported | Inspected) -> None:
        """Whoever asked is here, in the worker."""
        match event:
            case Exported(key, ranges) | Imported(key, ranges):
                self._questions.pop(key).set_result(ranges)
            case Inspected(key, snapshot):
                self._questions.pop(key).set_result([snapshot])

    def end_all(self, error: PacelineError) -> None:
        """Says of what is still open that it failed."""
        for key in list(self._pages):  # not tuple(), which other threads may come in the middle of
            self.fail(key, error)
            self._inbox.ended(key)
        for key in list(self._questions):
            question = self._questions.pop(key, None)
            if question is not None:
                question.set_exception(error)

    def close(self) -> None:
        """There is no thread any more: whatever is still asked ends at once."""
        self.end_all(EngineStopped("the engine was shut down; make a new one"))

    def _chunk(self, key: int, choice: int, chunk: StreamChunk | None, *, is_last: bool = False) -> list[messages.Part]:
        page = self._pages.get(key)
        if page is None:  # it was ended here already, after a failure of the engine's own
            return []
        request = page.request
        assert isinstance(request, Request)  # noqa: S101 - only they have chunks
        sequence, num_told = request.sequences[choice], page.num_told[choice]
        page.num_told[choice] = sequence.num_known
        goes_on, params = sequence.reason is None, request.params
        drawn = tuple(sequence.known[num_told:])
        untold = sequence.answer.latest_logprobs(_ANY if chunk else len(drawn)) if params.logprobs is not None else ()
        part = messages.Chunk(
            key=key,
            choice=choice,
            chunk=chunk,
            drawn=drawn,
            untold=untold if goes_on else (),
            state=self._backend.sampler_state(sequence.sampler) if goes_on and needs_state(params) else None,
            is_last=is_last,
        )
        return [*self._life(key, started=False), part]

    def _life(self, key: int, *, started: bool) -> list[messages.Part]:
        """What changed in the request's life since it was told last."""
        page = self._pages[key]
        life = _life_of(page.request)
        if life == page.life and not started:
            return []
        page.life = life
        return [messages.Lived(key, life, started)]


def needs_state(params: SamplingParams) -> bool:
    """Whether a sampler's draws follow from more than seed, choice and tokens."""
    return params.mirostat != 0 or ("adaptive_p" in params.samplers and params.adaptive_target >= 0)


def _life_of(request: Request | EmbeddingRequest) -> messages.Life:
    if isinstance(request, Request):
        return messages.Life(request.started_s, request.first_token_s, request.num_cached, request.cached_from)
    return messages.Life(request.started_s)


def _bytes(vector: Any) -> bytes:
    return np.asarray(vector, dtype=np.float32).tobytes()
