"""Prepares requests for the worker's engine: samplers, grammars, stop strings, what was generated before.

On threads of their own, since all of that takes time: neither the engine's thread nor the listening one waits for it, and
requests for text wait for no images or audio.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from paceline.engine.adapters import name_of
from paceline.engine.backend import Backend, prepare_embedding
from paceline.engine.commands import Cancel, Command, RequestCommand
from paceline.engine.executor import as_paceline_error
from paceline.engine.inbox import Inbox
from paceline.engine.media_encoder import MediaEncoder, num_bytes
from paceline.engine.worker import messages
from paceline.engine.worker.black_box import BlackBox
from paceline.engine.worker.socket_sink import SocketSink
from paceline.errors import Aborted, AdapterError, Cancelled, PacelineError, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions, cache_scope
from paceline.scheduling.records import EmbeddingRequest
from paceline.sequence import Request

Work = TypeVar("Work")


class WorkQueue(Generic[Work]):
    """Work for one thread, which other threads add. Tenants take turns, as a grammar may take a second to compile."""

    def __init__(self) -> None:
        self._added: queue.SimpleQueue[tuple[str, Work]] = queue.SimpleQueue()
        self._waiting: dict[str, deque[Work]] = {}  # by tenant; the next tenant comes first

    def put(self, work: Work, tenant: str = "") -> None:
        """Add work. Any thread."""
        self._added.put((tenant, work))

    def get(self, timeout_s: float | None = None) -> Work:
        """Return the next work, and wait for it. Raises `queue.Empty` after timeout_s. One thread."""
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
        """lost_adapters: why adapters of an earlier worker are not there. encoder: of media, if there is a projector."""
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
        """Pass a command on, after the request itself. Listening thread."""
        with self._lock:
            early = self._pending.get(command.key)
            if early is not None:
                early.append(command)
                return
        self._inbox.put(command)

    def encode(self, message: messages.EngineRequest, is_given_up: Callable[[], bool]) -> None:
        """As `prepare`, for a request with images or audio, which are encoded first. Encoding thread."""
        self._prepare(message, self._box.encode, is_given_up)

    def reserve(self, message: messages.EngineRequest) -> bool:
        """Make what an embedding request with images or audio needs, before they are encoded. Preparing thread.

        Threads of a context have the priority of the one that makes it, and that of encoding is low. Returns False where it
        cannot be made, and the front knows.
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
        """Report to the front what is wrong with a request, and hold nothing for it."""
        self._sink.fail(key, as_paceline_error(error))
        self._inbox.on_left(key)

    def _pass_on_pending(self, key: int) -> None:
        """Put the commands that came while a request was prepared into the inbox after it."""
        with self._lock:
            for command in self._pending.pop(key, ()):
                self._inbox.put(command)

    def prepare(self, message: messages.EngineRequest) -> None:
        """Prepare a request, or report to the front what is wrong with it. Preparing thread.

        A request with images or audio has ended before they were encoded: the scheduler is to say so.
        """
        self._prepare(message, self._box.prepare, _yes)

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
        """Have the attachments encoded, as long as the request is wanted. Raises what is wrong with them."""
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
            return any(isinstance(one, Cancel) for one in self._pending.get(key, ()))

    def _texts(self, message: messages.EngineRequest) -> EmbeddingRequest:
        request = message.for_embedding(RequestOptions(**message.options))
        request.pooling = prepare_embedding(self._backend, request)
        return request


def _yes() -> bool:
    return True
