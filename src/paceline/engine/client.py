"""`EngineClient`: the engine as its callers see it, wherever its passes run. Requests and questions in, channels and futures out.

The server, `LLM` and `AsyncLLM` use this class and nothing else of an engine. Any thread may call its methods. Tokenising,
grammars and checks happen on the caller's thread; the results of `accept`, `embed` and `rerank` come from the engine's thread.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
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
    Measure,
    Prompt,
    TextRequests,
    activity_numbers,
    all_pairs,
    digest_sizes,
    embeddable,
    embedding_request,
    refuse_media,
)
from paceline.engine.questions import Question
from paceline.engine.saved_prefixes import PrefixNamespace
from paceline.errors import AdapterInUse, AdapterNotFound, EngineStopped, InvalidParams
from paceline.kv_cache import PrefixDigest
from paceline.observability.heartbeat import Heartbeat
from paceline.observability.metric_table import MetricsSnapshot
from paceline.observability.metrics import Metrics
from paceline.observability.trace_file import TraceRecorder
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Model, Tokenizer
from paceline.scheduling.records import EmbeddingRequest, EngineActivity, SlotsSnapshot
from paceline.sequence import Limits, Request
from paceline.streaming import StreamChannel

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
_log = logging.getLogger("paceline.engine")


class EngineClient(ABC):
    """A model and the engine that computes with it. `close` ends it; so do the garbage collector and the end of the process.

    Attributes:
        model: The model; with a worker process, its vocabulary and metadata only.
        tokenizer: The model's tokenizer.
        config: The options of the engine.
        limits: The numbers of slots, cells and tokens that follow from model, options and machine.
        sampling_defaults: The model's own defaults for the fields that a request leaves open.
    """

    model: Model
    tokenizer: Tokenizer
    config: EngineConfig
    limits: Limits
    sampling_defaults: SamplingParams
    metrics: Metrics
    _adapters: AdapterRegistry
    _clock: Clock
    _inbox: Inbox
    _router: OutputRouter
    _text_requests: TextRequests
    _thread: EngineThread

    def _take_requests(
        self,
        adapters: AdapterRegistry,
        vocabulary: Vocabulary,
        make_samplers: Callable[[SamplingParams, list[int]], tuple[object, ...]],
        measure: Measure = refuse_media,
    ) -> None:
        """Prepare for requests, when inbox, limits and tokenizer are set. For the arguments see `TextRequests`."""
        self._adapters, self._inbox.has_adapter = adapters, adapters.has_key
        self._text_requests = TextRequests(
            tokenizer=self.tokenizer,
            vocabulary=vocabulary,
            limits=self.limits,
            shares=self.config.cache_prompt,
            adapters=adapters,
            next_key=self._inbox.next_key,
            make_samplers=make_samplers,
            clock=self._clock,
            measure=measure,
        )

    # ---- requests

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """Check and tokenise a request for text; `accept` starts it. Raises `RequestError`s."""
        self.check_usable()
        return self._text_requests.prepare(prompt, params, options)

    def accept(
        self, request: Request, request_index: int = 0, channel: StreamChannel | None = None, *, waits: bool = False
    ) -> StreamChannel:
        """Start a prepared request, once, and return its channel: the given channel, or a new channel.

        Cancelling the channel cancels the request. The request's times begin here. If an adapter was replaced since the request
        was prepared, the request runs with the new adapter of that name.

        Args: request: The result of `prepare`. request_index: A number of the caller's, for the completion and the chunks.
            channel: A channel that has served no request; None: one is made. waits: Whether a request that finds the queue full
            waits in line for room. It never raises `QueueFull`; if the engine is closed before its turn, its channel ends with
            `EngineStopped`.

        Raises:
            QueueFull: The queue is full.
            EngineStopped: The engine accepts no requests any more.
            InvalidParams: The channel has served a request before, or an adapter was unloaded. Nothing has begun.
        """
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
        """Accept texts to embed and return a future of one vector each, not normalised. Cancelling it cancels the request.

        A text may be segments with images or audio, which are embedded with pooling "last" only. waits: as for `accept`; the
        future fails with `EngineStopped`. Raises as `prepare` and `accept`; an error that a worker finds fails the future.
        """
        return self._embed_prompts(self.embeddable(texts, options), pooling, options, waits=waits)

    def embeddable(self, texts: Sequence[Prompt | EmbeddingPrompt], options: RequestOptions) -> list[EmbeddingPrompt]:
        """Return the token ids of texts as `embed` takes them; texts that are too long are cut if options.truncate is set.

        Segments with media become a `ComposedPrompt`; its length is its number of tokens and cells. Raises `InvalidParams`,
        `PromptTooLong` without truncate, and `Unsupported` for media that the model does not take.
        """
        self.check_usable()
        longest, measure = self.limits.max_embedding_tokens, self._text_requests.measure
        return embeddable(texts, self.tokenizer, options, longest, measure)

    def pairs(self, query: str, documents: Iterable[str], options: RequestOptions) -> list[list[int]]:
        """Return the token ids of a query with each document; options.truncate cuts documents, never the query.

        Raises `InvalidParams`, `PromptTooLong` if a pair does not fit, and `Unsupported` for a classification model of several
        classes.
        """
        self.check_usable()
        return all_pairs(self.model, query, documents, self.limits.max_embedding_tokens, options.truncate)

    def rerank(
        self, query: str, documents: Sequence[str], options: RequestOptions, *, waits: bool = False
    ) -> Future[list[Any]]:
        """Accept documents to score for a query and return a future of an array for each; its first number is the score.

        Raises as `pairs` and `embed`.
        """
        return self._embed_prompts(self.pairs(query, documents, options), "rank", options, waits=waits)

    def _embed_prompts(
        self, prompts: Sequence[EmbeddingPrompt], pooling: str | None, options: RequestOptions, *, waits: bool
    ) -> Future[list[Any]]:
        self.check_usable()
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
        """Return the pooling of a request. Raises the errors of the request or its texts that this process can find."""

    def expect_tenants(self, tenants: Iterable[str]) -> None:
        """Set the tenants that may send requests, with "" for requests without a tenant. No tenant may take the whole queue.

        Without this call a tenant may use the whole queue until a second tenant sends a request.
        """
        self._inbox.expect_tenants(tenants)

    def most_requests(self, tenant: str) -> int:
        """Return the most requests that a tenant may have open at once while other tenants have none."""
        return self._inbox.most_requests(tenant)

    # ---- LoRA adapters

    def load_lora(self, name: str, path: str | os.PathLike[str], *, in_place: bool = False) -> None:
        """Load an adapter, which requests may use by its name from then on.

        in_place: whether it may replace an adapter of this name, which is freed when the last request that uses it has ended.
        Waits for the file to be read, so never call it on an event loop. Raises `AdapterError`, and `InvalidParams` for a name
        that is taken.
        """
        self.check_usable()
        file = validation.path("path", path).absolute()
        in_place = validation.boolean("in_place", in_place, default=False)
        key = self._adapters.begin(name, in_place=in_place)
        try:
            check_adapter_file(file)
            self._load_adapter(key, str(file))
        except BaseException as error:
            self._adapters.cancel(name, is_over=isinstance(error, Exception))  # not if the wait was interrupted
            raise
        replaced = self._adapters.add(LoraAdapter(name, str(file), key))
        if replaced is not None:
            free = threading.Thread(target=self._free_when_unused, args=(replaced.key,), daemon=True)
            free.start()

    def unload_lora(self, name: str, *, timeout_s: float | None = 30.0) -> None:
        """Refuse new requests with an adapter, wait until the open ones have ended, and free it with its cached prefixes.

        Never call it on an event loop. Raises `AdapterNotFound`, and `AdapterInUse` if requests are still open after timeout_s;
        then the adapter stays.
        """
        self.check_usable()
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
        """Return the adapters that requests may use, in the order of loading; a replacement has the place of its predecessor."""
        return self._adapters.all()

    def was_lora_unloaded(self, name: str) -> bool:
        """Return whether an adapter of this name was unloaded; it may have been loaded again. True once `loras` misses it."""
        return self._adapters.was_unloaded(name)

    def _free_when_unused(self, key: str) -> None:
        self._inbox.retire_adapter(key, None)
        self._inbox.forget_adapter(key)
        with suppress(EngineStopped):
            self._free_adapter(key)

    def _load_adapter(self, key: str, path: str) -> None:
        self.ask(questions.load_adapter, key, path).result()

    def _free_adapter(self, key: str) -> None:
        """Free an adapter that no open request uses, and its cached prefixes."""
        self.ask(questions.free_adapter, key).result()

    # ---- saved prefixes

    def save_prefix(self, name: str, prompt: Prompt | KeyedPrompt, options: RequestOptions) -> int:
        """Write the part of a prompt that the KV cache has to a file and return its number of tokens. Raises `StateError`."""
        self.check_usable()
        keyed = self._text_requests.keyed(prompt, options)
        return self.ask(questions.save_prefix, validation.text("name", name), keyed, self._namespace(options)).result()

    def load_prefix(self, name: str, options: RequestOptions) -> list[int]:
        """Load a saved prefix into the host cache and return its token ids. If the worker dies, the prefix is forgotten.

        Raises `StateError`.
        """
        self.check_usable()
        return self.ask(questions.load_prefix, validation.text("name", name), self._namespace(options)).result()

    def erase_prefix(self, name: str) -> None:
        """Delete a saved prefix. Raises `StateError` if there is none."""
        self.check_usable()
        self.ask(questions.erase_prefix, validation.text("name", name)).result()

    def _namespace(self, options: RequestOptions) -> PrefixNamespace:
        resolved = self._adapters.resolve(options)
        return resolved.lora, resolved.tenant, resolved.cache_salt

    # ---- state

    def ask(self, question: Question[R, *Ts], *args: *Ts) -> Future[R]:
        """Return a future of the answer to a question of the module `questions`.

        A question that reads files may be answered before this returns. Raises as `ask_slots`.
        """
        return self._ask(question, args)

    @abstractmethod
    def _ask(self, question: Question[R, *Ts], args: tuple[*Ts], delay_s: float = 0.0) -> Future[R]:
        """Return a future of the answer; of a question in place "tick" the answer after the first tick from delay_s on."""

    @abstractmethod
    def stats(self) -> MetricsSnapshot:
        """Return all metrics, see docs/metrics.md. The counts of a dead worker since its last report are lost."""

    @abstractmethod
    def reported_stats(self, max_age_s: float) -> MetricsSnapshot | None:
        """Return all metrics, of ticks as of the worker's last report; None if the report is older than max_age_s.

        Waits for nothing. A worker reports once a second while it ticks.
        """

    def ask_slots(self) -> Future[SlotsSnapshot]:
        """Return a future of the activity of each slot after the current tick; while there is no worker, all slots are idle.

        Raises `EngineStopped`, here or in the future, after the engine has ended. The future fails with `WorkerUnresponsive`
        if a worker does not reply in time.
        """
        return self.ask(questions.slots)

    def slots(self) -> SlotsSnapshot:
        """Return the result of `ask_slots`. Waits for the current tick, so never call it on an event loop."""
        return self.ask_slots().result()

    def prefix_digest(self, max_prefixes: int = 1024, *, block_tokens: int | None = None) -> Future[PrefixDigest]:
        """Return a future of hashes of the cached prefixes after the current tick, for routing requests to their prefixes.

        Compare them with `prefix_hash` of a prompt's first num_tokens token ids; hashes do not name the model. They leave out
        prompts that are still being computed and the newest tokens of running sequences. While there is no worker nothing is
        cached. Making a digest takes a part of a tick. It confirms a guessed prompt, so it is for trusted callers.

        Args:
            max_prefixes: Most prefixes, up to 65,536; prefixes with the fewest branches before them come first.
            block_tokens: None: prefixes end where cached sequences branch or end. A number: they end at whole blocks of so many
                tokens, the shortest first, which shows to within a block how far a prompt follows a cached prompt.

        Raises:
            InvalidParams: A number is out of its range.
            EngineError: As `ask_slots`.
        """
        return self.ask(questions.digest, *digest_sizes(max_prefixes, block_tokens))

    def ask_activity(
        self, after: int = 0, *, max_nodes: int | None = None, delay_s: float = 0.0
    ) -> Future[EngineActivity]:
        """Return a future of the engine's activity after the current tick, and of its latest ticks.

        While there is no worker there is no activity. Reading the tree takes a part of a tick.

        Args:
            after: `EngineActivity.last_number` of the last reply, 0 at first: later ticks are in the reply. The engine records
                ticks from the first question on, until no question has come for five seconds.
            max_nodes: Most nodes of the radix tree for each tenant, up to 4,096; None: no tree.
            delay_s: Seconds, up to 1: the result is of the first tick that ends so much later, or has no work. A worker sends
                it in one write with the tokens of that tick, so that the supervising thread wakes up once for both.

        Raises:
            InvalidParams: A number is out of its range.
            EngineError: As `ask_slots`.
        """
        after, max_nodes, delay_s = activity_numbers(after, max_nodes, delay_s)
        return self._ask(questions.activity, (after, max_nodes), delay_s)

    def heartbeat(self) -> Heartbeat:
        """Return whether the engine ticks, or its worker is being started. Waits for nothing."""
        return self._thread.heartbeat()

    def wake(self) -> None:
        """Start the worker again if `sleep_idle_s` ended it, and count as use of it. Waits for nothing."""
        self._thread.check_process()

    @property
    def ended(self) -> Future[EngineStopped | None]:
        """A future that is done when every request has ended for good and no new request is accepted.

        Its result is the reason if the engine gave up by itself, None if it was closed. It cannot be cancelled.
        """
        return self._thread.ended

    @property
    def num_open(self) -> int:
        """Number of requests that were accepted and have not ended."""
        return self._inbox.num_open

    # ---- the end

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """End the engine: cancel open requests or, with drain, let them finish first, at most timeout_s. Idempotent."""
        self._thread.close(drain=drain, timeout_s=timeout_s)

    @property
    def is_closed(self) -> bool:
        """Whether new requests are refused for good."""
        return self._inbox.is_closed

    def check_usable(self) -> None:
        """Raise `EngineStopped` if no request is accepted any more."""
        self._thread.check_process()
        self._inbox.check_open()


def fitted_config(config: EngineConfig, limits: Limits) -> EngineConfig:
    """Return the options with the engine's number of slots, which a fit to memory may have lowered."""
    return replace(config, num_slots=limits.num_slots)


def open_trace(config: EngineConfig, start_s: float) -> TraceRecorder | None:
    """Return the recorder of `config.trace`; None without a trace. Raises `InvalidParams` if the file cannot be opened."""
    if config.trace is None:
        return None
    try:
        path = validation.path("trace", config.trace)
        return TraceRecorder(path, start_s=start_s, max_bytes=config.trace_max_bytes)
    except OSError as error:
        raise InvalidParams(f"trace {config.trace} cannot be written: {error.strerror or error}") from None


def close_trace(recorder: TraceRecorder) -> None:
    """Close the trace of an engine that ends; an error is logged."""
    try:
        recorder.close()
    except OSError as error:
        _log.error("the trace is not whole: %s", error.strerror or error)
