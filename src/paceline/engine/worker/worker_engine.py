"""An engine whose passes run in a process of its own: to its callers the same as `InProcessEngine`.

Prompts are tokenised and requests are checked here, on the caller's thread, with the vocabulary alone; the weights are in the
worker, which `supervisor` starts and replaces.
"""

from __future__ import annotations

import queue
import secrets
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import msgspec

from paceline.clock import MonotonicClock
from paceline.constraints import check_constraint
from paceline.engine.adapters import AdapterRegistry, adapter_paths
from paceline.engine.arguments import ModelPath, engine_arguments, sampling_defaults
from paceline.engine.client import EngineClient, fitted_config, open_trace
from paceline.engine.core import RequestCommand
from paceline.engine.inbox import FrontInbox
from paceline.engine.output_router import OutputRouter, map_future
from paceline.engine.prompts import Prompt
from paceline.engine.questions import Idle, Question, measure_media, measuring, report
from paceline.engine.worker import messages
from paceline.engine.worker.open_requests import Relay, TakeEvent
from paceline.engine.worker.supervisor import NO_WORKER, Policy, RestartLimits, Supervisor
from paceline.engine.worker.worker_process import worker_setup
from paceline.engine.worker.worker_telemetry import FrontTrace, RequestsWatch
from paceline.errors import Aborted, EngineStopped, Unsupported
from paceline.observability.metric_table import MetricsSnapshot
from paceline.observability.metrics import Instruments, Metrics
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Model, Sampler
from paceline.runtime.model import RemoteModel
from paceline.scheduling.records import EmbeddingRequest
from paceline.sequence import Limits, Request

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
_STATS_S = 2.0  # for a worker to report; then its last report counts
_POLL_S = 0.1  # between two checks whether loading is cancelled
_MAX_RPC_WAIT_S = 30.0  # for a lost RPC server to be back; `rpc_timeout_s` may be shorter, and is for a pass as well
_CANCELLED = "loading the model was cancelled"


class FrontModel:
    """The vocabulary of a GGUF file, with which the front tokenises prompts and refuses wrong requests before it sends them.

    Attributes:
        model: The model as `LLM.model` returns it.
        tokenizer: The tokenizer of prompts and echoes.
        vocabulary: The bytes of the tokens and the ends of generation.
        sampling_defaults: The model's own sampling parameters.
    """

    def __init__(self, paths: list[str], kv_overrides: Mapping[str, Any] | None) -> None:
        chosen: Any = paths[0] if len(paths) == 1 else [Path(path) for path in paths]
        self.model = RemoteModel.load(chosen, vocab_only=True, kv_overrides=kv_overrides)
        self.tokenizer: Any = self.model.tokenizer
        tokenizer = self.model.tokenizer
        self.vocabulary = Vocabulary(tokenizer.pieces(False), tokenizer.pieces(True), tokenizer.eog_ids)
        self.sampling_defaults = sampling_defaults(self.model.metadata)

    def check(self, params: SamplingParams) -> None:
        """Raise the error of a sampler with these params: make one, which compiles the grammar, and drop it.

        The worker compiles the constraint for its own vocabulary.
        """
        Sampler(params, self.model, is_masked=True).close()

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Take the facts that only the loaded model of the worker has."""
        self.model.describe(facts)

    def close(self) -> None:
        """Free the memory."""
        self.model.free()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A replacement for llama.cpp in tests. model: the front's; backend, backend_options: see `messages.Setup`."""

    model: FrontModel
    backend: str
    backend_options: Mapping[str, Any]
    restarts: RestartLimits = field(default_factory=RestartLimits)


class FrontEngine(EngineClient):
    """An engine with the weights in other processes. Prompts and requests are checked here, with the vocabulary only."""

    _front: FrontModel

    def _load_front(self, load: Callable[[], FrontModel], wait: Callable[[], messages.Ready]) -> messages.Ready:
        """Load the vocabulary while the other process starts, and wait for it. An error of either ends the engine."""
        front: FrontModel | None = None
        try:
            front = load()
            ready = wait()
        except BaseException:
            try:
                EngineClient.close(self)  # there may be no front yet
            finally:
                if front is not None:
                    front.close()
            raise
        self._front = front
        self.tokenizer, self.model = front.tokenizer, front.model
        self.sampling_defaults = front.sampling_defaults
        front.describe(ready.facts)
        return ready

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """Prepare a request. Without a seed it gets one, so that another process draws the same tokens again."""
        if params.seed is None:
            params = params.replace(seed=secrets.randbits(64))
        return super().prepare(prompt, params, options)

    def _checked_pooling(self, request: EmbeddingRequest) -> str | None:
        return request.pooling  # the process with the weights checks it


class WorkerEngine(FrontEngine):
    """A front and its worker. Options as of `LLM`. Raises `InvalidParams` for objects that cannot go to another process."""

    def __init__(self, model: Model | ModelPath | None, options: Mapping[str, Any], trial: Trial | None = None) -> None:
        arguments = engine_arguments(options)
        self.config = config = arguments.config
        self._clock = MonotonicClock()
        start_s = self._clock.now()
        setup = worker_setup(model, options, None if config.trace is None else start_s)
        restarts = RestartLimits() if trial is None else trial.restarts
        if trial is not None:
            setup = msgspec.structs.replace(setup, backend=trial.backend, backend_options=dict(trial.backend_options))
        if config.max_restarts is not None:
            restarts = replace(restarts, max_restarts=config.max_restarts)
        policy = Policy(
            on_engine_death=config.on_engine_death or "replay",
            restarts=restarts,
            hang_timeout_s=config.hang_timeout_s,
            sleep_idle_s=config.sleep_idle_s,
            rpc_wait_s=min(config.rpc_timeout_s, _MAX_RPC_WAIT_S),
        )
        self.metrics = Metrics(config.num_slots, has_ticks=False)  # the worker counts ticks
        self._inbox = FrontInbox(config.num_slots + config.max_queue, config.max_queue_tokens)
        self._router = OutputRouter(self._inbox)
        watch = self._watch(start_s)
        self._supervisor = Supervisor(setup, policy, self._inbox, self._router, self._clock, watch)
        self._thread = self._supervisor
        self._supervisor.end_when_lost(self)
        load = partial(FrontModel, setup.model, setup.options.get("kv_overrides"))
        ready = self._load_front(load if trial is None else lambda: trial.model, partial(self._loaded, arguments.model))
        self._supervisor.ended.add_done_callback(partial(_close_front, self._front))
        self._take_limits(ready)
        self._take_requests(
            AdapterRegistry(ready.adapters, adapter_paths(arguments.lora)),
            self._front.vocabulary,
            partial(no_samplers, self._front),
            measuring(partial(self._supervisor.calls.ask, measure_media)),
        )
        self._supervisor.on_replaced = partial(_replaced, weakref.ref(self))

    def _take_limits(self, ready: messages.Ready) -> None:
        """Take the limits of a worker. Its fit to memory may differ from the fit of the worker before."""
        self._facts = ready.facts
        self.limits = Limits(**ready.limits)
        self.config = config = fitted_config(self.config, self.limits)
        self._inbox.set_bounds(config.num_slots + config.max_queue, config.max_queue_tokens)
        self.metrics.set_num_slots(config.num_slots)

    def take_replacement(self, ready: messages.Ready) -> None:
        """Take the description of a later worker. On the supervisor's thread."""
        self._take_limits(ready)
        self._text_requests = replace(self._text_requests, limits=self.limits)

    def _watch(self, trace_start_s: float) -> RequestsWatch:
        """Return the metrics and the trace that the options ask for. Raises `InvalidParams` if its file cannot be opened."""
        recorder = open_trace(self.config, trace_start_s)
        trace = None if recorder is None else FrontTrace(recorder)
        instruments = Instruments(() if trace is None else (trace,), own=self.metrics)
        return RequestsWatch(instruments, self._clock, trace)

    def _loaded(self, options: Mapping[str, Any]) -> messages.Ready:
        """Wait for the worker. progress is called on the caller's thread. Raises `Aborted` after a cancel."""
        progress, cancel = options.get("progress"), options.get("cancel")
        while (fraction := self._next_progress(cancel)) is not None:
            if progress is not None and progress(fraction) is False:
                raise Aborted(_CANCELLED)
        return self._supervisor.ready.result()

    def _next_progress(self, cancel: Any) -> float | None:
        """Return the next progress of loading. A worker that reports no progress can be cancelled as well."""
        while cancel is None or not cancel.is_set():
            with suppress(queue.Empty):
                return self._supervisor.loading.get(timeout=None if cancel is None else _POLL_S)
        raise Aborted(_CANCELLED)

    # ---- requests of another front

    def relay(self, message: messages.EngineRequest, take: TakeEvent) -> int:
        """Run a request that another front holds, after the tokens that were generated of it, and return its key here.

        take: called on the supervising thread with each event, under this key; `Released` is the last one. Times in message and
        events are those of this engine's clock. Its adapters are found by name. The bounds of the queue are the other front's.
        Raises as `accept`, but for `QueueFull`.
        """
        self.check_usable()
        key, inbox = self._inbox.next_key(), self._inbox
        options, attachments = self._adapters.resolve(RequestOptions(**message.options)), message.restored_attachments()
        request: Request | EmbeddingRequest
        if message.is_embedding:
            request, states = message.for_embedding(options, key=key, attachments=attachments), None
        else:
            params, vocabulary = SamplingParams(**message.params or {}), self._front.vocabulary
            request = message.for_text(params, options, vocabulary, key=key, samplers=(), attachments=attachments)
            states = message.states
        self._supervisor.relays[key] = Relay(take, states)
        try:
            inbox.submit(request, sum(map(len, message.prompts)), is_accepted=True)
        except BaseException:
            self._supervisor.relays.pop(key, None)
            raise
        return key

    def command(self, command: RequestCommand) -> None:
        """Pass a command on to a relayed request; do nothing if the request has ended."""
        self._inbox.put(command)

    def describe(self) -> messages.Ready:
        """Return the worker's description of itself with the present adapters, as another front needs it."""
        adapters = [adapter.name for adapter in self.loras()]
        return messages.Ready(messages.PROTOCOL, asdict(self.limits), self._facts, adapters)

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """End the engine, and free the vocabulary."""
        super().close(drain=drain, timeout_s=timeout_s)
        if self._supervisor.ended.done():
            self._front.close()

    def _free_adapter(self, key: str) -> None:
        self._supervisor.forget_adapter(key)
        super()._free_adapter(key)

    def _ask(self, question: Question[R, *Ts], args: tuple[*Ts], delay_s: float = 0.0) -> Future[R]:
        self._supervisor.check_process()
        asked = self._supervisor.calls.ask(question, args, delay_s)
        return asked if question.idle is None else map_future(asked, partial(self._or_idle, question.idle))

    def _or_idle(self, idle: Idle[R], answer: R) -> R:
        if answer is not NO_WORKER:
            return answer
        if not self._supervisor.is_alive:
            raise EngineStopped("the engine was shut down; make a new one")
        return idle(self.limits, self.num_open)

    def stats(self) -> MetricsSnapshot:
        """Return the metrics of the front, and of the worker if it replies in time, else of its last report."""
        if self._supervisor.is_alive:
            with suppress(TimeoutError):
                self._supervisor.calls.ask(report).result(_STATS_S)
        return self._supervisor.totals.together(self.metrics.snapshot())

    def reported_stats(self, max_age_s: float) -> MetricsSnapshot | None:
        """Return the metrics as of the worker's last report; None if it is older than max_age_s."""
        totals = self._supervisor.totals
        is_new = self._clock.now() - totals.reported_s <= max_age_s
        return totals.together(self.metrics.snapshot()) if is_new else None

    def wake(self) -> None:
        """Start the worker again if it sleeps, and count as use of it."""
        super().wake()
        self._supervisor.wake()

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self._supervisor.worker_pid


def _close_front(front: FrontModel, ended: Future[EngineStopped | None]) -> None:
    if ended.result() is None:  # after a crash too many requests are still read, and refused with the reason
        front.close()


def _replaced(engine: weakref.ref[WorkerEngine], ready: messages.Ready) -> None:
    """Call the engine without keeping it alive, since losing it ends the supervisor."""
    if (alive := engine()) is not None:
        alive.take_replacement(ready)


def no_samplers(front: FrontModel, params: SamplingParams, _ids: list[int]) -> tuple[object, ...]:
    """Return no samplers, since the worker makes them. Raises the errors of the params."""
    if params.constraint is not None and not isinstance(params.constraint, str):
        raise Unsupported(
            'constraint: an object does not go to the worker of isolation="process"; give a function that makes it by name, '
            "as 'module:attr'"
        )
    if not all(isinstance(processor, str) for processor in params.logits_processors):
        raise Unsupported(
            'logits_processors: a function does not go to the worker of isolation="process"; give it by name, as '
            "'module:attr'"
        )
    check_constraint(params)
    front.check(params)
    return ()
