"""An engine whose passes run in a process of its own: as `LocalEngine` for those who call it.

Prompts are tokenised and requests are checked here, on the caller's thread, with the vocabulary alone; the weights are in the
worker. What the worker's death does to requests is the business of `isolation.supervisor`.
"""

from __future__ import annotations

import atexit
import os
import queue
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from paceline import validation
from paceline.engine.arguments import engine_arguments
from paceline.engine.delivery import Delivery
from paceline.engine.heartbeat import Heartbeat
from paceline.engine.isolation import messages
from paceline.engine.isolation.front_inbox import FrontInbox
from paceline.engine.isolation.front_model import FrontModel, LlamaFrontModel, seeded
from paceline.engine.isolation.ledger import changed_options
from paceline.engine.isolation.requests_watch import RequestsWatch
from paceline.engine.isolation.restarts import RestartLimits
from paceline.engine.isolation.setup import worker_setup
from paceline.engine.isolation.supervisor import Policy, Supervisor
from paceline.engine.mapped import mapped
from paceline.engine.metrics import Metrics
from paceline.engine.metrics_snapshot import MetricsSnapshot
from paceline.engine.monotonic_clock import MonotonicClock
from paceline.engine.pairs import all_pairs
from paceline.engine.prompts import Prompt, embedding_texts, prompt_ids
from paceline.engine.text_requests import TextRequests
from paceline.errors import Aborted, EngineStopped
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Model
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.limits import Limits
from paceline.scheduling.sequence import Request
from paceline.scheduling.slots_snapshot import SlotsSnapshot, slots_snapshot
from paceline.streaming import StreamChannel

_STATS_S = 2.0  # that a worker has to answer; beyond, its last report counts
_LOOK_S = 0.1  # between two looks whether loading is to end
_CANCELLED = "loading the model was cancelled"
_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What takes llama.cpp's place in tests. model: of the front; backend, backend_options: see `messages.Setup`."""

    model: FrontModel
    backend: str
    backend_options: Mapping[str, Any]
    restarts: RestartLimits = field(default_factory=RestartLimits)


class ProcessEngine:
    """A front and its worker. Options as `LLM` takes them; what cannot go to another process raises `InvalidParams`.

    Any thread may call. `close` ends it; so does the collector, and the end of the process.
    """

    def __init__(
        self, model: Model | str | os.PathLike[str] | None, options: Mapping[str, Any], trial: Trial | None = None
    ) -> None:
        arguments = engine_arguments(options)
        self.config = config = arguments.config
        setup = worker_setup(model, options)
        self._front: FrontModel
        restarts = RestartLimits()
        if trial is None:
            self._front = LlamaFrontModel(setup.model, setup.options.get("kv_overrides"))
        else:
            self._front, restarts = trial.model, trial.restarts
            setup = messages.replaced(setup, trial.backend, dict(trial.backend_options))
        self.tokenizer, self.model = self._front.tokenizer, self._front.model
        self.sampling_defaults = self._front.sampling_defaults
        self.metrics = Metrics(config.num_slots, has_ticks=False)  # the worker counts those
        self._clock = MonotonicClock()
        self._inbox = FrontInbox(config.num_slots + config.max_queue, config.max_queue_tokens)
        self._delivery = Delivery(self._inbox)
        policy = Policy(on_engine_death=config.on_engine_death or "replay", restarts=restarts)
        watch = RequestsWatch(self.metrics, self._clock)
        self._supervisor = Supervisor(setup, policy, self._inbox, self._delivery, self._clock, watch)
        _supervisors.add(self._supervisor)
        weakref.finalize(self, self._supervisor.abandon).atexit = False
        try:
            ready = self._loaded(arguments.model)
        except BaseException:
            self.close()
            self._front.close()
            raise
        self.limits = Limits(**ready.limits)
        self._front.describe(ready.facts)
        self._text_requests = TextRequests(
            tokenizer=self.tokenizer,
            vocabulary=self._front.vocabulary,
            limits=self.limits,
            shares=config.cache_prompt,
            adapters=tuple(ready.adapters),
            next_key=self._inbox.next_key,
            make_samplers=partial(_no_samplers, self._front),
            clock=self._clock,
        )

    def _loaded(self, options: Mapping[str, Any]) -> messages.Ready:
        """Waits for the worker; progress is called here, on the caller's thread. Raises `Aborted` where that is wanted."""
        progress, cancel = options.get("progress"), options.get("cancel")
        while (fraction := self._next_progress(cancel)) is not None:
            if progress is not None and progress(fraction) is False:
                raise Aborted(_CANCELLED)
        return self._supervisor.ready.result()

    def _next_progress(self, cancel: Any) -> float | None:
        """What the worker says next of its loading; a worker that says nothing can be cancelled as well."""
        while cancel is None or not cancel.is_set():
            with suppress(queue.Empty):
                return self._supervisor.loading.get(timeout=None if cancel is None else _LOOK_S)
        raise Aborted(_CANCELLED)

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """A request for text, checked and tokenised; `accept` starts it. Raises `RequestError`s."""
        self._check_usable()
        return self._text_requests.prepare(prompt, seeded(params), options)

    def accept(self, request: Request, request_index: int = 0) -> StreamChannel:
        """Starts a prepared request, once; its channel fills up. Raises `QueueFull` or `EngineStopped`: then nothing began.

        Its times begin here.
        """
        request.submitted_s = self._clock.now()
        return self._delivery.submit(request, request_index)

    def embed(self, texts: Sequence[Prompt], pooling: str | None, options: RequestOptions) -> Future[list[Any]]:
        """Accepts texts to be embedded: a future of a vector each, not normalised. What the worker refuses fails the future."""
        return self._embed_ids(embedding_texts(texts, self.tokenizer, options), pooling, options)

    def rerank(self, query: str, documents: Sequence[str], options: RequestOptions) -> Future[list[Any]]:
        """Accepts documents to be scored for a query: a future of one score each, as arrays of one number."""
        return self._embed_ids(all_pairs(self.model, query, documents), "rank", options)

    def save_prefix(self, name: str, prompt: Prompt, options: RequestOptions) -> int:
        """Has the worker write what memory has of a prompt; answers how many of its tokens that is. Raises `StateError`."""
        ids = prompt_ids(prompt, self.tokenizer, options)
        return self._ask_prefix("save", name, ids, options).num_saved

    def load_prefix(self, name: str, options: RequestOptions) -> list[int]:
        """Has the worker put a saved prefix into its memory; answers its tokens. Raises `StateError`. A death forgets it."""
        return self._ask_prefix("load", name, [], options).token_ids

    def erase_prefix(self, name: str) -> None:
        """Deletes a saved prefix. Raises `StateError` where there is none."""
        self._ask_prefix("erase", name, [], RequestOptions())

    def _ask_prefix(
        self, action: Literal["save", "load", "erase"], name: str, ids: list[int], options: RequestOptions
    ) -> messages.PrefixDone:
        self._check_usable()
        message = messages.Prefix(0, action, validation.text("name", name), ids, changed_options(options))
        done = self._supervisor.questions.ask_prefix(message).result()
        if done.error is not None:
            raise done.error
        return done

    def _embed_ids(self, ids: list[list[int]], pooling: str | None, options: RequestOptions) -> Future[list[Any]]:
        self._check_usable()
        if not ids:
            done: Future[list[Any]] = Future()
            done.set_result([])
            return done
        request = EmbeddingRequest(
            key=self._inbox.next_key(), texts=ids, pooling=pooling, options=options, submitted_s=self._clock.now()
        )
        return self._delivery.submit_embedding(request)

    def _check_usable(self) -> None:
        self._supervisor.check_process()
        self._inbox.check_open()

    def stats(self) -> MetricsSnapshot:
        """What the engine has done and holds; see docs/metrics.md. What a worker did after its last report dies with it."""
        if self._supervisor.is_alive:
            with suppress(TimeoutError):
                self._supervisor.questions.ask_stats().result(_STATS_S)
        return self._supervisor.totals.together(self.metrics.snapshot())

    def ask_slots(self) -> Future[SlotsSnapshot]:
        """What each slot does after the worker's tick; waits for nothing. While there is no worker, all are idle.

        `EngineStopped` where there is no engine any more.
        """
        self._supervisor.check_process()
        return mapped(self._supervisor.questions.ask_slots(), self._or_idle)

    def slots(self) -> SlotsSnapshot:
        """The answer to `ask_slots`; waits for the worker's tick, so never call it on an event loop."""
        return self.ask_slots().result()

    def _or_idle(self, told: SlotsSnapshot | None) -> SlotsSnapshot:
        if told is not None:
            return told
        if not self._supervisor.is_alive:
            raise EngineStopped("the engine was shut down; make a new one")
        return slots_snapshot((), num_slots=self.limits.num_slots, num_waiting=self._inbox.num_open)

    def heartbeat(self) -> Heartbeat:
        """Whether the worker's engine turns, or another worker is on its way; asks nobody anything."""
        return self._supervisor.heartbeat()

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Ends engine and worker: cancels what runs or, with drain, lets it finish first, at most timeout_s. Idempotent."""
        self._supervisor.close(drain=drain, timeout_s=timeout_s)

    @property
    def num_open(self) -> int:
        """Requests that were accepted and have not ended."""
        return self._inbox.num_open

    @property
    def is_closed(self) -> bool:
        """Whether it takes no requests any more."""
        return self._inbox.is_closed

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self._supervisor.worker_pid


def _no_samplers(front: FrontModel, params: SamplingParams, _ids: list[int]) -> tuple[object, ...]:
    """They are made in the worker; what is wrong with the params is raised here."""
    front.check(params)
    return ()


@atexit.register
def _end_all() -> None:
    """Before Python goes down: no worker is left, no reader without an ending."""
    for supervisor in tuple(_supervisors):
        supervisor.close(drain=False, timeout_s=None)
