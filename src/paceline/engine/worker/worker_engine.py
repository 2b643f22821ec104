"""An engine whose passes run in a process of its own: to its callers the same as `InProcessEngine`.

Prompts are tokenised and requests are checked here, on the caller's thread, with the vocabulary alone; the weights are in the
worker, which `supervisor` starts and replaces.
"""

from __future__ import annotations

import queue
import secrets
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline import validation
from paceline.clock import MonotonicClock
from paceline.constraints import check_constraint
from paceline.engine.adapters import AdapterRegistry, adapter_paths
from paceline.engine.arguments import ModelPath, engine_arguments, sampling_defaults
from paceline.engine.base_engine import BaseEngine, fitted_config, open_trace
from paceline.engine.commands import RequestCommand
from paceline.engine.inbox import FrontInbox
from paceline.engine.media_prompt import KeyedPrompt
from paceline.engine.output_router import OutputRouter
from paceline.engine.pending_results import map_future
from paceline.engine.prompts import Prompt, TextRequests, activity_numbers, digest_sizes
from paceline.engine.worker import messages
from paceline.engine.worker.lifecycle import Policy, RestartLimits
from paceline.engine.worker.questions import Questions
from paceline.engine.worker.relay import Relay, TakePart, relayed_embedding, relayed_request
from paceline.engine.worker.replay_log import changed_options
from paceline.engine.worker.setup import worker_setup
from paceline.engine.worker.supervisor import Supervisor
from paceline.engine.worker.worker_telemetry import FrontTrace, RequestsWatch
from paceline.errors import Aborted, EngineStopped, PacelineError, Unsupported
from paceline.kv_cache import PrefixDigest
from paceline.media import MediaExtent
from paceline.observability.instruments import Instruments
from paceline.observability.metrics import Metrics
from paceline.observability.metrics_snapshot import MetricsSnapshot
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import MediaPart, Model, Sampler
from paceline.runtime.remote_model import RemoteModel
from paceline.scheduling.activity import EngineActivity
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.limits import Limits
from paceline.scheduling.sequence import Request
from paceline.scheduling.telemetry import SlotsSnapshot, slots_snapshot

_STATS_S = 2.0  # for a worker to report; then its last report counts
_POLL_S = 0.1  # between two checks whether loading is cancelled
_MAX_RPC_WAIT_S = 30.0  # for a lost RPC server to be back; `rpc_timeout_s` may be shorter, and is for a pass as well
_MAX_EXTENTS = 1024  # of images and audio, whose parts are remembered
_CANCELLED = "loading the model was cancelled"


class FrontModel(Protocol):
    """What the front has of the model: a vocabulary, to tokenise, and to refuse a request before it is sent."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, for prompts and echoes."""

    @property
    def model(self) -> Any:
        """The model, as `LLM.model` returns it."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens' bytes and the ends of generation."""

    @property
    def sampling_defaults(self) -> SamplingParams:
        """The model's own defaults."""

    def check(self, params: SamplingParams) -> None:
        """Raise what a sampler with these params would raise."""

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Take the facts that only the loaded model of the worker has."""

    def close(self) -> None:
        """Free the memory."""


class LlamaFrontModel:
    """The vocabulary of a GGUF file."""

    def __init__(self, paths: list[str], kv_overrides: Mapping[str, Any] | None) -> None:
        chosen: Any = paths[0] if len(paths) == 1 else [Path(path) for path in paths]
        self.model = RemoteModel.load(chosen, vocab_only=True, kv_overrides=kv_overrides)
        self.tokenizer = tokenizer = self.model.tokenizer
        self.vocabulary = Vocabulary(tokenizer.pieces(False), tokenizer.pieces(True), tokenizer.eog_ids)
        self.sampling_defaults = sampling_defaults(self.model.metadata)

    def check(self, params: SamplingParams) -> None:
        """Make a sampler, which compiles the grammar, and drop it. The worker compiles the constraint for its vocabulary."""
        Sampler(params, self.model, is_masked=True).close()

    def describe(self, facts: Mapping[str, Any]) -> None:
        """See `FrontModel`."""
        self.model.describe(facts)

    def close(self) -> None:
        """See `FrontModel`."""
        self.model.free()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A replacement for llama.cpp in tests. model: of the front; backend, backend_options: see `messages.Setup`."""

    model: FrontModel
    backend: str
    backend_options: Mapping[str, Any]
    restarts: RestartLimits = field(default_factory=RestartLimits)


class WorkerEngine(BaseEngine):
    """A front and its worker. Options as `LLM` takes them; what cannot go to another process raises `InvalidParams`."""

    def __init__(self, model: Model | ModelPath | None, options: Mapping[str, Any], trial: Trial | None = None) -> None:
        arguments = engine_arguments(options)
        self.config = config = arguments.config
        self._clock = MonotonicClock()
        start_s = self._clock.now()
        setup = worker_setup(model, options, None if config.trace is None else start_s)
        restarts = RestartLimits() if trial is None else trial.restarts
        if trial is not None:
            setup = messages.replaced(setup, trial.backend, dict(trial.backend_options))
        if config.max_restarts is not None:
            restarts = replace(restarts, max_restarts=config.max_restarts)
        policy = Policy(
            on_engine_death=config.on_engine_death or "replay",
            restarts=restarts,
            hang_timeout_s=config.hang_timeout_s,
            sleep_idle_s=config.sleep_idle_s,
            rpc_wait_s=min(config.rpc_timeout_s, _MAX_RPC_WAIT_S),
        )
        self.metrics = Metrics(config.num_slots, has_ticks=False)  # the worker counts those
        self._inbox = FrontInbox(config.num_slots + config.max_queue, config.max_queue_tokens)
        self._router = OutputRouter(self._inbox)
        watch = self._watch(start_s)
        self._supervisor = Supervisor(setup, policy, self._inbox, self._router, self._clock, watch)
        self._thread = self._supervisor
        self._supervisor.end_when_lost(self)
        front: FrontModel | None = None
        try:  # the worker starts meanwhile
            front = LlamaFrontModel(setup.model, setup.options.get("kv_overrides")) if trial is None else trial.model
            ready = self._loaded(arguments.model)
        except BaseException:
            try:
                super().close()  # there may be no front yet
            finally:
                if front is not None:
                    front.close()
            raise
        self._front = front
        self._supervisor.ended.add_done_callback(partial(_close_front, front))
        self.tokenizer, self.model = front.tokenizer, front.model
        self.sampling_defaults = front.sampling_defaults
        self._take_limits(ready)
        self._front.describe(ready.facts)
        self._adapters = AdapterRegistry(ready.adapters, adapter_paths(arguments.lora))
        self._inbox.has_adapter = self._adapters.has_key
        self._text_requests = TextRequests(
            tokenizer=self.tokenizer,
            vocabulary=self._front.vocabulary,
            limits=self.limits,
            shares=config.cache_prompt,
            adapters=self._adapters,
            next_key=self._inbox.next_key,
            make_samplers=partial(no_samplers, self._front),
            clock=self._clock,
            measure=partial(_measured, self._supervisor.questions, {}),
        )
        self._supervisor.on_replaced = partial(_replaced, weakref.ref(self))

    def _take_limits(self, ready: messages.Ready) -> None:
        """Take the numbers of a worker, whose fit to memory may have come out unlike that of the one before."""
        self._facts = ready.facts
        self.limits = Limits(**ready.limits)
        self.config = config = fitted_config(self.config, self.limits)
        self._inbox.set_bounds(config.num_slots + config.max_queue, config.max_queue_tokens)
        self.metrics.set_num_slots(config.num_slots)

    def take_replacement(self, ready: messages.Ready) -> None:
        """Take over what a later worker says of itself. On the supervisor's thread."""
        self._take_limits(ready)
        self._text_requests = replace(self._text_requests, limits=self.limits)

    def _watch(self, trace_start_s: float) -> RequestsWatch:
        """Metrics, and the trace that the options ask for. Raises `InvalidParams` where its file cannot be opened."""
        recorder = open_trace(self.config, trace_start_s)
        trace = None if recorder is None else FrontTrace(recorder)
        instruments = Instruments(() if trace is None else (trace,), own=self.metrics)
        return RequestsWatch(instruments, self._clock, trace)

    def _loaded(self, options: Mapping[str, Any]) -> messages.Ready:
        """Wait for the worker; progress is called here, on the caller's thread. Raises `Aborted` if it is cancelled."""
        progress, cancel = options.get("progress"), options.get("cancel")
        while (fraction := self._next_progress(cancel)) is not None:
            if progress is not None and progress(fraction) is False:
                raise Aborted(_CANCELLED)
        return self._supervisor.ready.result()

    def _next_progress(self, cancel: Any) -> float | None:
        """Return the next progress of loading; a worker that reports none can be cancelled as well."""
        while cancel is None or not cancel.is_set():
            with suppress(queue.Empty):
                return self._supervisor.loading.get(timeout=None if cancel is None else _POLL_S)
        raise Aborted(_CANCELLED)

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """See `EngineClient`. A request without a seed gets one, so that a replay draws the same."""
        if params.seed is None:
            params = params.replace(seed=secrets.randbits(64))
        return super().prepare(prompt, params, options)

    # ---- requests of another front

    def relay(self, message: messages.Generate | messages.Embed, take: TakePart) -> int:
        """Run a request that another front holds, on from what was generated of it, and return its key here.

        take: called on the supervising thread with each part, under this key; `Freed` is the last one. Times in message and
        parts are those of this engine's clock. Its adapters are found by name. The bounds of the queue are the other front's.
        Raises as `accept`, but for `QueueFull`.
        """
        self._check_usable()
        key, inbox = self._inbox.next_key(), self._inbox
        options = self._adapters.resolve(RequestOptions(**message.options))
        request: Request | EmbeddingRequest
        if isinstance(message, messages.Embed):
            request, states, num_tokens = relayed_embedding(message, key, options), None, sum(map(len, message.texts))
        else:
            request = relayed_request(message, key, options, self._front.vocabulary)
            states, num_tokens = message.states, len(message.prompt)
        self._supervisor.relays[key] = Relay(take, states)
        try:
            inbox.submit(request, num_tokens, is_accepted=True)
        except BaseException:
            self._supervisor.relays.pop(key, None)
            raise
        return key

    def command(self, command: RequestCommand) -> None:
        """Pass a command on to a relayed request; one that has ended is not there any more, and nothing happens."""
        self._inbox.put(command)

    def describe(self) -> messages.Ready:
        """Return what the worker said of itself, with the adapters of the moment: what another front needs to know."""
        adapters = [one.name for one in self.loras()]
        return messages.Ready(messages.PROTOCOL, asdict(self.limits), self._facts, adapters)

    def measure_media(self, question: messages.MeasureMedia) -> messages.MediaMeasured:
        """Return what an image or audio of an extent becomes in a prompt; an error is in the reply. Waits for the worker."""
        try:
            return self._supervisor.questions.ask_media(question.extent).result()
        except PacelineError as error:
            return messages.MediaMeasured(question.number, (), error)

    def _checked_pooling(self, request: EmbeddingRequest) -> str | None:
        return request.pooling  # the worker checks it

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """See `EngineClient`."""
        super().close(drain=drain, timeout_s=timeout_s)
        if self._supervisor.ended.done():
            self._front.close()

    def save_prefix(self, name: str, prompt: Prompt | KeyedPrompt, options: RequestOptions) -> int:
        """See `EngineClient`."""
        self._check_usable()
        keyed = self._text_requests.keyed(prompt, options)
        return self._ask_prefix("save", name, keyed, options).num_saved

    def load_prefix(self, name: str, options: RequestOptions) -> list[int]:
        """See `EngineClient`."""
        return self._ask_prefix("load", name, KeyedPrompt([]), options).token_ids

    def erase_prefix(self, name: str) -> None:
        """See `EngineClient`."""
        self._ask_prefix("erase", name, KeyedPrompt([]), RequestOptions())

    def _ask_prefix(
        self, action: Literal["save", "load", "erase"], name: str, prompt: KeyedPrompt, options: RequestOptions
    ) -> messages.PrefixDone:
        self._check_usable()
        resolved = changed_options(self._adapters.resolve(options))
        message = messages.Prefix(0, action, validation.text("name", name), prompt, resolved)
        return self._supervisor.questions.ask_prefix(message).result()

    def _load_adapter(self, key: str, path: str) -> None:
        self._supervisor.questions.ask_load_adapter(key, path).result()

    def _free_adapter(self, key: str) -> None:
        self._supervisor.forget_adapter(key)
        self._supervisor.questions.ask_free_adapter(key).result()

    def stats(self) -> MetricsSnapshot:
        """See `EngineClient`."""
        if self._supervisor.is_alive:
            with suppress(TimeoutError):
                self._supervisor.questions.ask_stats().result(_STATS_S)
        return self._supervisor.totals.together(self.metrics.snapshot())

    def reported_stats(self, max_age_s: float) -> MetricsSnapshot | None:
        """See `EngineClient`."""
        totals = self._supervisor.totals
        is_new = self._clock.now() - totals.reported_s <= max_age_s
        return totals.together(self.metrics.snapshot()) if is_new else None

    def ask_slots(self) -> Future[SlotsSnapshot]:
        """See `EngineClient`."""
        self._supervisor.check_process()
        return map_future(self._supervisor.questions.ask_slots(), self._or_idle)

    def _or_idle(self, reply: SlotsSnapshot | None) -> SlotsSnapshot:
        if reply is None:
            self._check_not_ended()
            return slots_snapshot((), num_slots=self.limits.num_slots, num_waiting=self._inbox.num_open)
        return reply

    def prefix_digest(self, max_prefixes: int = 1024, *, block_tokens: int | None = None) -> Future[PrefixDigest]:
        """See `EngineClient`."""
        self._supervisor.check_process()
        asked = self._supervisor.questions.ask_digest(*digest_sizes(max_prefixes, block_tokens))
        return map_future(asked, self._or_empty)

    def _or_empty(self, reply: PrefixDigest | None) -> PrefixDigest:
        if reply is None:
            self._check_not_ended()
            return PrefixDigest()
        return reply

    def ask_activity(
        self, after: int = 0, *, max_nodes: int | None = None, delay_s: float = 0.0
    ) -> Future[EngineActivity]:
        """See `EngineClient`."""
        self._supervisor.check_process()
        asked = self._supervisor.questions.ask_activity(*activity_numbers(after, max_nodes, delay_s))
        return map_future(asked, self._or_inactive)

    def _or_inactive(self, reply: EngineActivity | None) -> EngineActivity:
        if reply is None:
            slots = self._or_idle(None)
            return EngineActivity(started_s=0.0, now_s=self._clock.now(), last_number=0, slots=slots)
        return reply

    def _check_not_ended(self) -> None:
        if not self._supervisor.is_alive:
            raise EngineStopped("the engine was shut down; make a new one")

    def wake(self) -> None:
        """See `EngineClient`."""
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
    """Call the engine without keeping it alive: losing it ends the supervisor."""
    found = engine()
    if found is not None:
        found.take_replacement(ready)


def _measured(
    questions: Questions, known: dict[MediaExtent, tuple[MediaPart, ...]], extent: MediaExtent
) -> tuple[MediaPart, ...]:
    """Return the parts of an image or audio; the worker is asked once for each extent."""
    found = known.get(extent)
    if found is None:
        parts = questions.ask_media(extent).result().parts
        found = tuple(
            MediaPart(one.tokens, one.num_cells, one.num_positions, one.is_causal, None, None) for one in parts
        )
        if len(known) >= _MAX_EXTENTS:
            known.clear()
        known[extent] = found
    return found


def no_samplers(front: FrontModel, params: SamplingParams, _ids: list[int]) -> tuple[object, ...]:
    """Return none, as the worker makes them; raise what is wrong with the params."""
    if params.constraint is not None and not isinstance(params.constraint, str):
        raise Unsupported(
            'constraint: an object does not go to the worker of isolation="process"; give a function that makes it by name, '
            "as 'module:attr'"
        )
    if not all(isinstance(one, str) for one in params.logits_processors):
        raise Unsupported(
            'logits_processors: a function does not go to the worker of isolation="process"; give it by name, as '
            "'module:attr'"
        )
    check_constraint(params)
    front.check(params)
    return ()
