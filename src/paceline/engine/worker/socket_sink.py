"""Sends what a worker's tick brought to the front, in one write. Engine's thread, unless noted otherwise."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from paceline.engine.backend import Backend
from paceline.engine.commands import Ask
from paceline.engine.inbox import Inbox
from paceline.engine.pending_results import PendingResults, end_each
from paceline.engine.questions import Call, Question, Reply, find_question
from paceline.engine.worker import messages
from paceline.engine.worker.link import Link
from paceline.errors import EngineStopped, PacelineError
from paceline.params import SamplingParams
from paceline.scheduling.records import (
    Answered,
    Delta,
    Embedded,
    EmbeddingRequest,
    Event,
    Failed,
    Released,
    RequestEvent,
    Started,
)
from paceline.sequence import Progress, Request

_log = logging.getLogger("paceline.engine")

_AnyQuestion = Question[Any, *tuple[Any, ...]]
_REPORT_EVERY_S = 1.0
_ANY = 2**31


class _SentState:
    """What the front has received of a request."""

    __slots__ = ("num_sent", "progress", "request")

    def __init__(self, request: Request | EmbeddingRequest) -> None:
        self.request = request
        self.progress = Progress()
        self.num_sent = [one.num_tokens for one in request.sequences] if isinstance(request, Request) else []


class SocketSink:
    """Sends the changes of every request since its last message. report: sends the metrics; called while ticks pass."""

    def __init__(self, link: Link, inbox: Inbox, backend: Backend, report: Callable[[], None]) -> None:
        self._link, self._inbox, self._backend, self._report = link, inbox, backend, report
        self._sent: dict[int, _SentState] = {}
        self._results = PendingResults()
        self._calls: dict[int, tuple[int, _AnyQuestion]] = {}  # of the front, with their numbers, by key
        self._reported_s = 0.0

    def accept(self, request: Request | EmbeddingRequest) -> None:
        """Submit a request to the engine. Preparing thread."""
        self._sent[request.key] = _SentState(request)
        self._inbox.submit(request, 0)

    def ask(self, command: Ask) -> Future[Any]:
        """Put a command into the inbox; the engine's answer resolves the future. Any thread."""
        future = self._results.add(command.key)
        self._inbox.put(command)
        return future

    def answer(self, call: Call, due_s: float) -> None:
        """Have the engine answer the front's question; the reply goes with the tick's events. Listening thread."""
        question = find_question(call)
        command = question.command(self._inbox.next_key(), question.args(call), due_s)
        self._calls[command.key] = call.number, question
        self._inbox.put(command)

    def fail(self, key: int, error: PacelineError) -> None:
        """Report a request that could not be prepared. Preparing thread.

        If the engine has ended nothing is sent: the process ends, and another continues the request.
        """
        if not isinstance(error, EngineStopped):
            self._link.send(messages.encode(messages.Happened([Failed(key, error)])))
        self._sent.pop(key, None)

    def deliver(self, events: list[Event]) -> None:
        """Send a tick's events and the replies to questions in one write: the front wakes up once for both."""
        sent: list[RequestEvent] = []
        replies: dict[int, bytes] = {}
        for event in events:
            if isinstance(event, Answered):
                replies |= self._reply(event)
            elif self._complete(event):
                sent.append(event)
        happened = [messages.encode(messages.Happened(sent))] if sent else []
        if happened or replies:
            self._link.send(*happened, *replies.values())
        for key in replies:
            self._calls.pop(key, None)
        if time.monotonic() - self._reported_s > _REPORT_EVERY_S and events:
            self._report()
            self._reported_s = time.monotonic()

    def _reply(self, event: Answered) -> dict[int, bytes]:
        """Resolve a future, or return the reply to the front by its key; it has no result if that cannot be encoded."""
        call = self._calls.get(event.key)
        if call is None:  # asked by this process, or `end_all` has replied
            self._results.resolve(event.key, event.result)
            return {}
        number, question = call
        try:
            return {event.key: messages.encode(question.reply(number, event.result))}
        except Exception:  # noqa: BLE001 - the tick's requests go on
            _log.exception("the answer to the question %s could not be sent", question.name)
            return {event.key: messages.encode(Reply(number))}

    def _complete(self, event: RequestEvent) -> bool:
        """Add what the front needs of the request to an event; return whether the event is to be sent."""
        if isinstance(event, Embedded):
            vectors = [] if event.error is not None else event.vectors
            event.vectors = [np.asarray(vector, dtype=np.float32).tobytes() for vector in vectors]
            return True
        sent = self._sent.get(event.key)
        if sent is None:  # the front has its failure already
            return False
        match event:
            case Delta():
                self._complete_delta(event, sent)
            case Started(key):
                self._inbox.started(key)
                event.progress = sent.progress = msgspec.structs.replace(sent.request.progress)
            case Released(key):
                self._inbox.ended(key)
                self._sent.pop(key, None)
        return True

    def _complete_delta(self, event: Delta, sent: _SentState) -> None:
        request, chunk = sent.request, event.chunk
        assert isinstance(request, Request)  # noqa: S101 - only they have chunks
        sequence, num_sent = request.sequences[event.choice], sent.num_sent[event.choice]
        sent.num_sent[event.choice] = sequence.num_tokens
        params = request.params
        event.drawn = tuple(sequence.token_ids[num_sent:])
        if sequence.reason is None:
            if params.logprobs is not None:
                num_unsent = len(event.drawn) if chunk is None else _ANY
                event.unsent_logprobs = sequence.output.latest_logprobs(num_unsent)
            if needs_state(params):
                event.sampler_state = self._backend.sampler_state(sequence.sampler)
        if request.progress != sent.progress:
            event.progress = sent.progress = msgspec.structs.replace(request.progress)
        if chunk is not None and chunk.error is not None:
            _forget_frames(chunk.error)

    def end_all(self, error: PacelineError) -> None:
        """Report what is still open as failed. Raise what kept a request from that, after all others."""

        def end(key: int) -> None:
            if key in self._sent:
                self.fail(key, error)
                self._inbox.ended(key)
            self._results.resolve(key, [], error)
            if (call := self._calls.get(key)) is not None:
                self._link.send(messages.encode(Reply(call[0])))
                self._calls.pop(key, None)

        end_each([*self._sent, *self._results, *self._calls], end)

    def close(self) -> None:
        """End what is still open, as the thread has ended."""
        self.end_all(EngineStopped("the engine was shut down; make a new one"))


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that is only sent: the frames keep the rows of the pass, and these the request."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def needs_state(params: SamplingParams) -> bool:
    """Whether a sampler's draws depend on more than seed, choice and tokens."""
    return params.mirostat != 0 or ("adaptive_p" in params.samplers and params.adaptive_target >= 0)
