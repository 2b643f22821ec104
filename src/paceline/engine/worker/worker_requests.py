"""Requests in a worker: prepared from messages, and their events of each tick sent to the front in one write.

Preparing has threads of its own, since it takes time: the engine's thread and the listening thread do not wait for it, and
requests for text do not wait for images or audio. The engine's thread calls the sink, unless noted otherwise.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from paceline.engine.adapters import name_of
from paceline.engine.backend import Backend, as_paceline_error, prepare_embedding
from paceline.engine.core import Ask, Cancel, Command, RequestCommand
from paceline.engine.inbox import Inbox
from paceline.engine.media_encoder import MediaEncoder, num_bytes
from paceline.engine.output_router import PendingResults, end_each
from paceline.engine.questions import Call, Question, Reply, find_question
from paceline.engine.worker import messages
from paceline.engine.worker.black_box import BlackBox
from paceline.engine.worker.messages import Link
from paceline.engine.worker.worker_telemetry import WorkerTrace
from paceline.errors import Aborted, AdapterError, Cancelled, EngineStopped, PacelineError, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions, cache_scope
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
    """The part of a request that the front has received."""

    __slots__ = ("num_sent", "progress", "request")

    def __init__(self, request: Request | EmbeddingRequest) -> None:
        self.request = request
        self.progress = Progress()
        self.num_sent = [sequence.num_tokens for sequence in request.sequences] if isinstance(request, Request) else []


class SocketSink:
    """Sends the changes of every request since its last message.

    Args:
        link: The socket to the front.
        inbox: The engine's commands.
        backend: Has the states of samplers.
        report: Sends the metrics; called while ticks pass.
        trace: Its lines are sent before the events of a tick, so that the front has them when a request has ended.
    """

    def __init__(
        self,
        link: Link,
        inbox: Inbox,
        backend: Backend,
        report: Callable[[], None],
        trace: WorkerTrace | None = None,
    ) -> None:
        self._link, self._inbox, self._backend, self._report, self._trace = link, inbox, backend, report, trace
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
        if self._trace is not None:
            self._trace.flush()
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
        """Resolve a future, or return the reply to the front by its key, without a result that cannot be encoded."""
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
        """Add the fields that the front needs to an event; return whether the event is to be sent."""
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
        """Report all open requests as failed. An exception of a request is raised after the others."""

        def end(key: int) -> None:
            if key in self._sent:
                self.fail(key, error)
                self._inbox.ended(key)
            self._results.resolve(key, [], error)
            if (call := self._calls.get(key)) is not None:
                self._link.send(messages.encode(Reply(call[0])))
                self._calls.pop(key, None)

        try:
            if self._trace is not None:
                self._trace.flush()
        finally:
            end_each([*self._sent, *self._results, *self._calls], end)

    def close(self) -> None:
        """End the open requests, since the thread has ended."""
        self.end_all(EngineStopped("the engine was shut down; make a new one"))


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that is sent: their frames keep the rows of the pass, and these keep the request."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def needs_state(params: SamplingParams) -> bool:
    """Whether a sampler's draws depend on more than seed, choice and tokens."""
    return params.mirostat != 0 or ("adaptive_p" in params.samplers and params.adaptive_target >= 0)


Work = TypeVar("Work")


class WorkQueue(Generic[Work]):
    """Work for a thread, added by other threads. Tenants take turns, since a grammar may take a second to compile."""

    def __init__(self) -> None:
        self._added: queue.SimpleQueue[tuple[str, Work]] = queue.SimpleQueue()
        self._waiting: dict[str, deque[Work]] = {}  # by tenant; the next tenant comes first

    def put(self, work: Work, tenant: str = "") -> None:
        """Add work. Any thread."""
        self._added.put((tenant, work))

    def get(self, timeout_s: float | None = None) -> Work:
        """Wait for the next work, and return it. Raises `queue.Empty` after timeout_s. Called by the same thread always."""
        if not self._waiting:
            self._sort(self._added.get(timeout=timeout_s))
        while not self._added.empty():
            self._sort(self._added.get())
        tenant = next(iter(self._waiting))
        own = self._waiting.pop(tenant)
        work = own.popleft()
        if own:
            self._waiting[tenant] = own  # after the other tenants
        return work

    def _sort(self, added: tuple[str, Work]) -> None:
        tenant, work = added
        self._waiting.setdefault(tenant, deque()).append(work)


class RequestPreparer:
    """Makes requests of messages and submits them to the engine."""

    def __init__(
        self,
        inbox: Inbox,
        sink: SocketSink,
        backend: Backend,
        box: BlackBox,
        lost_adapters: Mapping[str, PacelineError] = MappingProxyType({}),
        encoder: MediaEncoder | None = None,
    ) -> None:
        """lost_adapters: errors of an earlier worker's adapters that are missing. encoder: of media, if there is a projector."""
        self._inbox, self._sink, self._backend, self._box = inbox, sink, backend, box
        self._vocabulary = dataclasses.replace(backend.vocabulary, names_tokens=False)  # the front adds the texts
        self._lost_adapters, self._encoder = lost_adapters, encoder
        self._lock = threading.Lock()
        self._pending: dict[int, list[Command]] = {}  # commands for requests that are not ready
        self.on_encoded: Callable[[int, int], object] = lambda _key, _num_bytes: None
        """Called with a request whose media were encoded, and the bytes of their embeddings."""

    def expect(self, key: int) -> None:
        """Keep commands for a request that was received until it is ready. Listening thread."""
        with self._lock:
            self._pending[key] = []

    def pass_on(self, command: RequestCommand) -> None:
        """Pass a command on after its request. Listening thread."""
        with self._lock:
            early = self._pending.get(command.key)
            if early is not None:
                early.append(command)
                return
        self._inbox.put(command)

    def encode(self, message: messages.EngineRequest, is_given_up: Callable[[], bool]) -> None:
        """Prepare a request after its images or audio were encoded. Encoding thread."""
        self._prepare(message, self._box.encode, is_given_up)

    def reserve(self, message: messages.EngineRequest) -> bool:
        """Make the context of an embedding request with images or audio before they are encoded. Preparing thread.

        Threads of a context have the priority of the thread that makes it, and the encoding thread has a low priority. Returns
        False if the context cannot be made, which is reported to the front.
        """
        self._box.prepare(message.key)
        try:
            self._texts(message)
        except Exception as error:  # noqa: BLE001 - the thread survives a request that fails
            self._fail(message.key, error)
            self._pass_on_pending(message.key)
            return False
        finally:
            self._box.prepare(None)
        return True

    def _fail(self, key: int, error: Exception) -> None:
        """Report the error of a request to the front, and hold no embeddings for it."""
        self._sink.fail(key, as_paceline_error(error))
        self._inbox.on_left(key)

    def _pass_on_pending(self, key: int) -> None:
        """Put the commands that came while a request was prepared into the inbox after it."""
        with self._lock:
            for command in self._pending.pop(key, ()):
                self._inbox.put(command)

    def prepare(self, message: messages.EngineRequest) -> None:
        """Prepare a request, or report its error to the front. Preparing thread.

        A request with images or audio has ended before they were encoded, and the scheduler reports its end.
        """
        self._prepare(message, self._box.prepare, lambda: True)

    def _prepare(
        self,
        message: messages.EngineRequest,
        note: Callable[[int | None], None],
        is_given_up: Callable[[], bool],
    ) -> None:
        note(message.key)
        try:
            request = self._texts(message) if message.is_embedding else self._request(message)
            if message.attachments:
                self._encode(request, message, is_given_up)
            self._sink.accept(request)
        except Exception as error:  # noqa: BLE001 - the thread survives a request that fails
            self._fail(message.key, error)
        finally:
            note(None)
        self._pass_on_pending(message.key)

    def _request(self, message: messages.EngineRequest) -> Request:
        params, options = SamplingParams(**message.params or {}), RequestOptions(**message.options)
        for key, _ in options.lora:
            if key in self._lost_adapters:
                why = self._lost_adapters[key]
                raise AdapterError(f"the adapter {name_of(key)!r} could not be loaded again: {why}")
        if params.prompt_logprobs is not None:  # else the front would not know of scores that wait for an interval
            options = dataclasses.replace(options, interval=1)
        (prompt,) = message.prompts
        text = [token for token in prompt if token >= 0] if message.media else prompt
        with cache_scope(options.tenant, options.cache_salt):
            samplers = self._backend.make_samplers(params, text)
        for sampler, state in zip(samplers, message.states, strict=True):
            if state is not None and state.reason is None:
                self._backend.resume_sampler(sampler, state.token_ids, state.sampler_state)
        return message.for_text(params, options, self._vocabulary, samplers=samplers, states=message.states)

    def _encode(
        self,
        request: Request | EmbeddingRequest,
        message: messages.EngineRequest,
        is_given_up: Callable[[], bool],
    ) -> None:
        """Have the attachments encoded while the request is open. Raises the errors of the attachments."""
        if self._encoder is None:
            raise Unsupported("the worker has no projector for the images or audio of this request")
        key, namespace = request.key, (request.options.tenant, request.options.cache_salt)
        files = message.restored_attachments()
        if is_given_up():
            request.embeddings = Cancelled("the request ended before its images or audio were encoded")
            request.cancelled = self.is_cancelled(key)
            return
        try:
            request.embeddings = self._encoder.encode(
                key, files, request.media, namespace, lambda: is_given_up() or self.is_cancelled(key)
            )
        except (Cancelled, Aborted) as error:
            # A command follows, or the deadline is past: the scheduler ends it in order.
            request.embeddings, request.cancelled = error, self.is_cancelled(key)
            return
        self.on_encoded(key, num_bytes(request.embeddings.values()))

    def is_cancelled(self, key: int) -> bool:
        """Return whether a request that is not ready was cancelled. Any thread."""
        with self._lock:
            return any(isinstance(command, Cancel) for command in self._pending.get(key, ()))

    def _texts(self, message: messages.EngineRequest) -> EmbeddingRequest:
        request = message.for_embedding(RequestOptions(**message.options))
        request.pooling = prepare_embedding(self._backend, request)
        return request
