"""An engine whose passes run in a process of its own: as `LocalEngine` for those who call it.

Prompts are tokenised and requests are checked here, on the caller's thread, with the vocabulary alone; the weights are in the
worker. What the worker's death does to requests is the business of `isolation.supervisor`.
"""

from __future__ import annotations

import atexit
import os
import queue
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from paceline import validation
from paceline.engine.any_engine import AnyEngine
from paceline.engine.arguments import engine_arguments
from paceline.engine.delivery import Delivery
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
from paceline.engine.prompts import Prompt, prompt_ids
from paceline.engine.text_requests import TextRequests
from paceline.errors import Aborted, EngineStopped
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Model
from paceline.scheduling.limits import Limits
from paceline.scheduling.sequence import Request
from paceline.scheduling.slots_snapshot import SlotsSnapshot, slots_snapshot

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


class ProcessEngine(AnyEngine):
    """A front and its worker. Options as `LLM` takes them; what cannot go to another process raises `InvalidParams`."""

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
        self._loop = self._supervisor
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
        """See `AnyEngine`. A request without a seed gets one: whoever goes on with it draws with the same."""
        return super().prepare(prompt, seeded(params), options)

    def _checked_pooling(self, ids: list[list[int]], pooling: str | None) -> str | None:  # noqa: ARG002 - the worker looks
        return pooling

    def save_prefix(self, name: str, prompt: Prompt, options: RequestOptions) -> int:
        """See `AnyEngine`."""
        ids = prompt_ids(prompt, self.tokenizer, options)
        return self._ask_prefix("save", name, ids, options).num_saved

    def load_prefix(self, name: str, options: RequestOptions) -> list[int]:
        """See `AnyEngine`."""
        return self._ask_prefix("load", name, [], options).token_ids

    def erase_prefix(self, name: str) -> None:
        """See `AnyEngine`."""
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

    def stats(self) -> MetricsSnapshot:
        """See `AnyEngine`."""
        if self._supervisor.is_alive:
            with suppress(TimeoutError):
                self._supervisor.questions.ask_stats().result(_STATS_S)
        return self._supervisor.totals.together(self.metrics.snapshot())

    def ask_slots(self) -> Future[SlotsSnapshot]:
        """See `AnyEngine`."""
        self._supervisor.check_process()
        return mapped(self._supervisor.questions.ask_slots(), self._or_idle)

    def _or_idle(self, told: SlotsSnapshot | None) -> SlotsSnapshot:
        if told is not None:
            return told
        if not self._supervisor.is_alive:
            raise EngineStopped("the engine was shut down; make a new one")
        return slots_snapshot((), num_slots=self.limits.num_slots, num_waiting=self._inbox.num_open)

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
