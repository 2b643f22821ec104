"""What the engines of this machine share behind `EngineClient`: preparing, accepting, embedding, tracing, closing. Any thread."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, TypeVarTuple

from paceline import validation
from paceline.clock import Clock
from paceline.config import EngineConfig
from paceline.engine import questions
from paceline.engine.adapters import AdapterRegistry, LoraAdapter, check_adapter_file
from paceline.engine.engine_thread import EngineThread
from paceline.engine.inbox import Inbox
from paceline.engine.output_router import OutputRouter
from paceline.engine.prompts import (
    EmbeddingPrompt,
    KeyedPrompt,
    Prompt,
    TextRequests,
    activity_numbers,
    all_pairs,
    digest_sizes,
    embeddable,
    embedding_request,
)
from paceline.engine.questions import Question
from paceline.engine.saved_prefixes import PrefixNamespace
from paceline.errors import AdapterInUse, AdapterNotFound, EngineStopped, InvalidParams
from paceline.kv_cache import PrefixDigest
from paceline.observability.heartbeat import Heartbeat
from paceline.observability.metrics import Metrics
from paceline.observability.trace_file import TraceRecorder
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Model, Tokenizer
from paceline.scheduling.records import EmbeddingRequest, EngineActivity, SlotsSnapshot
from paceline.sequence import Limits, Request
from paceline.streaming import StreamChannel

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
_log = logging.getLogger("paceline.engine")


class BaseEngine(ABC):
    """An `EngineClient` with an inbox, an output router and one thread; subclasses define where the passes run."""

    model: Model
    tokenizer: Tokenizer
    config: EngineConfig
    limits: Limits
    metrics: Metrics
    sampling_defaults: SamplingParams
    _adapters: AdapterRegistry
    _clock: Clock
    _inbox: Inbox
    _router: OutputRouter
    _text_requests: TextRequests
    _thread: EngineThread

    # ---- requests

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """See `EngineClient`."""
        self._check_usable()
        return self._text_requests.prepare(prompt, params, options)

    def accept(
        self, request: Request, request_index: int = 0, channel: StreamChannel | None = None, *, waits: bool = False
    ) -> StreamChannel:
        """See `EngineClient`."""
        request.submitted_s = self._clock.now()
        lora = self._adapters.renew(request.lora)
        while True:
            request.set_lora(lora)
            try:
                return self._router.submit(request, request_index, channel, waits=waits)
            except InvalidParams:
                lora = self._adapters.renew(request.lora)
                if lora == request.lora:  # no adapter was replaced just now
                    raise

    def embed(
        self,
        texts: Sequence[Prompt | EmbeddingPrompt],
        pooling: str | None,
        options: RequestOptions,
        *,
        waits: bool = False,
    ) -> Future[list[Any]]:
        """See `EngineClient`."""
        return self._embed_prompts(self.embeddable(texts, options), pooling, options, waits=waits)

    def embeddable(self, texts: Sequence[Prompt | EmbeddingPrompt], options: RequestOptions) -> list[EmbeddingPrompt]:
        """See `EngineClient`."""
        self._check_usable()
        longest, measure = self.limits.max_embedding_tokens, self._text_requests.measure
        return embeddable(texts, self.tokenizer, options, longest, measure)

    def pairs(self, query: str, documents: Iterable[str], options: RequestOptions) -> list[list[int]]:
        """See `EngineClient`."""
        self._check_usable()
        return all_pairs(self.model, query, documents, self.limits.max_embedding_tokens, options.truncate)

    def rerank(
        self, query: str, documents: Sequence[str], options: RequestOptions, *, waits: bool = False
    ) -> Future[list[Any]]:
        """See `EngineClient`."""
        return self._embed_prompts(self.pairs(query, documents, options), "rank", options, waits=waits)

    def _embed_prompts(
        self, prompts: Sequence[EmbeddingPrompt], pooling: str | None, options: RequestOptions, *, waits: bool
    ) -> Future[list[Any]]:
        self._check_usable()
        if not prompts:
            done: Future[list[Any]] = Future()
            done.set_result([])
            return done
        request = embedding_request(self._inbox.next_key(), prompts, pooling, options)
        request.pooling = self._checked_pooling(request)
        request.submitted_s = self._clock.now()
        return self._router.submit_embedding(request, waits=waits)

    @abstractmethod
    def _checked_pooling(self, request: EmbeddingRequest) -> str | None:
        """Return the pooling of a request. Raises what this process can find wrong with it or its texts."""

    def expect_tenants(self, tenants: Iterable[str]) -> None:
        """See `EngineClient`."""
        self._inbox.expect_tenants(tenants)

    def most_requests(self, tenant: str) -> int:
        """See `EngineClient`."""
        return self._inbox.most_requests(tenant)

    # ---- LoRA adapters

    def load_lora(self, name: str, path: str | os.PathLike[str], *, in_place: bool = False) -> None:
        """See `EngineClient`."""
        self._check_usable()
        file = validation.path("path", path).absolute()
        in_place = validation.boolean("in_place", in_place, default=False)
        key = self._adapters.begin(name, in_place=in_place)
        try:
            check_adapter_file(file)
            self._load_adapter(key, str(file))
        except BaseException as error:
            self._adapters.cancel(name, is_over=isinstance(error, Exception))  # not where the wait was interrupted
            raise
        replaced = self._adapters.add(LoraAdapter(name, str(file), key))
        if replaced is not None:
            free = threading.Thread(target=self._free_when_unused, args=(replaced.key,), daemon=True)
            free.start()

    def unload_lora(self, name: str, *, timeout_s: float | None = 30.0) -> None:
        """See `EngineClient`."""
        self._check_usable()
        if timeout_s is not None:
            timeout_s = validation.number("timeout_s", timeout_s, 0, 1e9)
        adapter = self._adapters.find(validation.text("name", name))
        if not self._inbox.retire_adapter(adapter.key, timeout_s):
            raise AdapterInUse(
                f"the adapter {name!r} was not unloaded: {self._inbox.num_using(adapter.key)} requests that use it did not end "
                f"within {timeout_s} s; try again later, or cancel them"
            )
        if not self._adapters.remove(adapter):
            raise AdapterNotFound(f"the adapter {name!r} was unloaded or replaced by another call")
        self._inbox.forget_adapter(adapter.key)
        self._free_adapter(adapter.key)

    def loras(self) -> tuple[LoraAdapter, ...]:
        """See `EngineClient`."""
        return self._adapters.all()

    def was_lora_unloaded(self, name: str) -> bool:
        """See `EngineClient`."""
        return self._adapters.was_unloaded(name)

    def _free_when_unused(self, key: str) -> None:
        self._inbox.retire_adapter(key, None)
        self._inbox.forget_adapter(key)
        with suppress(EngineStopped):
            self._free_adapter(key)

    def _load_adapter(self, key: str, path: str) -> None:
        """Load a file under a new key. Raises `AdapterError`."""
        self.ask(questions.load_adapter, key, path).result()

    def _free_adapter(self, key: str) -> None:
        """Free an adapter of which no request is open, and what is cached of it."""
        self.ask(questions.free_adapter, key).result()

    # ---- questions

    def ask(self, question: Question[R, *Ts], *args: *Ts) -> Future[R]:
        """See `EngineClient`."""
        return self._ask(question, args)

    @abstractmethod
    def _ask(self, question: Question[R, *Ts], args: tuple[*Ts], delay_s: float = 0.0) -> Future[R]:
        """Return a future of the answer; of a question in place "tick" the answer after the first tick from delay_s on."""

    def save_prefix(self, name: str, prompt: Prompt | KeyedPrompt, options: RequestOptions) -> int:
        """See `EngineClient`."""
        self._check_usable()
        keyed = self._text_requests.keyed(prompt, options)
        return self.ask(questions.save_prefix, validation.text("name", name), keyed, self._namespace(options)).result()

    def load_prefix(self, name: str, options: RequestOptions) -> list[int]:
        """See `EngineClient`."""
        self._check_usable()
        return self.ask(questions.load_prefix, validation.text("name", name), self._namespace(options)).result()

    def erase_prefix(self, name: str) -> None:
        """See `EngineClient`."""
        self._check_usable()
        self.ask(questions.erase_prefix, validation.text("name", name)).result()

    def _namespace(self, options: RequestOptions) -> PrefixNamespace:
        resolved = self._adapters.resolve(options)
        return resolved.lora, resolved.tenant, resolved.cache_salt

    def ask_slots(self) -> Future[SlotsSnapshot]:
        """See `EngineClient`."""
        return self.ask(questions.slots)

    def prefix_digest(self, max_prefixes: int = 1024, *, block_tokens: int | None = None) -> Future[PrefixDigest]:
        """See `EngineClient`."""
        return self.ask(questions.digest, *digest_sizes(max_prefixes, block_tokens))

    def ask_activity(
        self, after: int = 0, *, max_nodes: int | None = None, delay_s: float = 0.0
    ) -> Future[EngineActivity]:
        """See `EngineClient`."""
        after, max_nodes, delay_s = activity_numbers(after, max_nodes, delay_s)
        return self._ask(questions.activity, (after, max_nodes), delay_s)

    def slots(self) -> SlotsSnapshot:
        """See `EngineClient`."""
        return self.ask_slots().result()

    def heartbeat(self) -> Heartbeat:
        """See `EngineClient`."""
        return self._thread.heartbeat()

    def wake(self) -> None:
        """See `EngineClient`."""
        self._thread.check_process()

    @property
    def ended(self) -> Future[EngineStopped | None]:
        """See `EngineClient`."""
        return self._thread.ended

    @property
    def num_open(self) -> int:
        """See `EngineClient`."""
        return self._inbox.num_open

    # ---- the end

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """See `EngineClient`."""
        self._thread.close(drain=drain, timeout_s=timeout_s)

    @property
    def is_closed(self) -> bool:
        """See `EngineClient`."""
        return self._inbox.is_closed

    def _check_usable(self) -> None:
        self._thread.check_process()
        self._inbox.check_open()


def fitted_config(config: EngineConfig, limits: Limits) -> EngineConfig:
    """Return the options with the number of slots that the engine has, which a fit to memory may have lowered."""
    return replace(config, num_slots=limits.num_slots)


def open_trace(config: EngineConfig, start_s: float) -> TraceRecorder | None:
    """Return the recorder of `config.trace`; None without one. Raises `InvalidParams` if the file cannot be opened."""
    if config.trace is None:
        return None
    try:
        path = validation.path("trace", config.trace)
        return TraceRecorder(path, start_s=start_s, max_bytes=config.trace_max_bytes)
    except OSError as error:
        raise InvalidParams(f"trace {config.trace} cannot be written: {error.strerror or error}") from None


def close_trace(recorder: TraceRecorder) -> None:
    """Close a trace at the end of its engine; what cannot be written is logged."""
    try:
        recorder.close()
    except OSError as error:
        _log.error("the trace is not whole: %s", error.strerror or error)
