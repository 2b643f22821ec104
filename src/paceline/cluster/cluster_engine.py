"""An engine over replicas: to its callers the same as an engine with a worker process.

Prompts are tokenised and requests are checked here, on the caller's thread, with the vocabulary alone; the weights are where the
replicas are. The bounds of the queue are those of all replicas together.
"""

from __future__ import annotations

import math
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple

from paceline.clock import MonotonicClock
from paceline.cluster.dispatcher import Dispatcher
from paceline.cluster.replica_calls import Call, ReplicaCalls
from paceline.config import EngineConfig
from paceline.engine.adapters import AdapterRegistry, name_of
from paceline.engine.arguments import engine_arguments
from paceline.engine.base_engine import BaseEngine, fitted_config
from paceline.engine.inbox import FrontInbox
from paceline.engine.output_router import OutputRouter, map_future
from paceline.engine.prompts import Prompt, TextRequests
from paceline.engine.questions import (
    MediaSizes,
    Question,
    Reply,
    activity,
    digest,
    measure_media,
    measuring,
    slots,
)
from paceline.engine.worker import messages
from paceline.engine.worker.worker_engine import FrontModel, LlamaFrontModel, no_samplers
from paceline.engine.worker.worker_telemetry import ReplicaTotals, RequestsWatch
from paceline.errors import Aborted, AdapterError, EngineError, EngineStopped, Unsupported
from paceline.media import MediaExtent
from paceline.observability.instruments import Instruments
from paceline.observability.metrics import Metrics
from paceline.observability.metrics_snapshot import MetricsSnapshot
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import EmbeddingRequest, EngineActivity, SlotsSnapshot
from paceline.sequence import Limits, Request

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
_MEDIA_S: Final = 60.0
_POLL_S: Final = 0.1  # between two checks whether waiting is cancelled
_FILES = (
    "saved prefixes are files of one machine, and the replicas of a cluster have none in common; requests find cached prefixes "
    "on the replica that has them by themselves"
)
_DIGESTS = "a cluster has a prefix digest for each of its replicas, which routers get from them"
_ASK_SLOTS: Final = messages.encode(slots.call(0, ()))


class ClusterEngine(BaseEngine):
    """A front over replicas.

    Args:
        paths: The files of the model, of which the vocabulary is loaded.
        options: Of the engines of the replicas, as `LLM` takes them.
        make_calls: Makes what connects with the replicas; called on the engine's event loop.
        share: The share of all requests of the replicas that this front may have.
        cancel: Ends the wait for the first replica when it is set.
        front_model: In place of `paths`, for tests.

    Raises:
        ModelLoadError: The vocabulary cannot be loaded.
        Aborted: cancel was set before there was a replica.
    """

    def __init__(
        self,
        paths: Sequence[str],
        options: Mapping[str, Any],
        make_calls: Callable[[], ReplicaCalls],
        *,
        share: float = 1.0,
        cancel: threading.Event | None = None,
        front_model: FrontModel | None = None,
    ) -> None:
        self.config: EngineConfig = engine_arguments(options).config
        self._per_replica = self.config
        self._share = share
        self._clock = MonotonicClock()
        self.metrics = Metrics(self.config.num_slots, has_ticks=False)  # the replicas count those
        self._inbox = FrontInbox(1, self.config.max_queue_tokens)
        self._router = OutputRouter(self._inbox)
        self._totals = ReplicaTotals()
        watch = RequestsWatch(Instruments((), own=self.metrics), self._clock)
        self._dispatcher = Dispatcher(make_calls, self._inbox, self._router, self._clock, watch)
        self._thread = self._dispatcher
        self._dispatcher.end_when_lost(self)
        front: FrontModel | None = None
        try:  # replicas are found meanwhile
            front = LlamaFrontModel(list(paths), options.get("kv_overrides")) if front_model is None else front_model
            ready = self._first_replica(cancel)
        except BaseException:
            try:
                self.close()
            finally:
                if front is not None:
                    front.close()
            raise
        self._front = front
        self.tokenizer, self.model = front.tokenizer, front.model
        self.sampling_defaults = front.sampling_defaults
        front.describe(ready.facts)
        self._adapters = AdapterRegistry(ready.adapters)
        self._inbox.has_adapter = self._adapters.has_key
        self._take_limits(self._dispatcher.replicas or {"": ready})
        self._text_requests = TextRequests(
            tokenizer=self.tokenizer,
            vocabulary=front.vocabulary,
            limits=self.limits,
            shares=self.config.cache_prompt,
            adapters=self._adapters,
            next_key=self._inbox.next_key,
            make_samplers=partial(no_samplers, front),
            clock=self._clock,
            measure=measuring(partial(_measure, self._dispatcher)),
        )
        self._dispatcher.adapter_paths = partial(_adapter_paths, self._adapters)
        self._dispatcher.on_joined = partial(_joined, weakref.ref(self))
        self._dispatcher.announce()
        self._dispatcher.on_gone = self._totals.gone

    def _first_replica(self, cancel: threading.Event | None) -> messages.Ready:
        while cancel is None or not cancel.is_set():
            with suppress(TimeoutError):
                return self._dispatcher.ready.result(_POLL_S)
        raise Aborted("waiting for the first replica was cancelled")

    @property
    def replicas(self) -> tuple[str, ...]:
        """The ids of the replicas that are connected."""
        return tuple(self._dispatcher.replicas)

    def replica_places(self) -> dict[str, tuple[str, int]]:
        """Return host and process of each replica, where they are known."""
        facts = {name: one.facts for name, one in self._dispatcher.replicas.items()}
        return {name: (one["host"], one["pid"]) for name, one in facts.items() if "pid" in one}

    def _take_limits(self, replicas: Mapping[str, messages.Ready]) -> None:
        """Take the slots of all replicas together, and the least of what each of them allows."""
        if not replicas:
            return  # requests wait for the next one, as many as before
        all_limits = [Limits(**_limits_of(one)) for one in replicas.values()]
        num_slots = sum(one.num_slots for one in all_limits)
        least = min(all_limits, key=lambda one: one.max_positions)
        cells = [one.num_cells for one in all_limits]
        self.limits = replace(
            least,
            num_slots=num_slots,
            num_cells=None if None in cells else sum(one for one in cells if one is not None),
            max_embedding_tokens=min(one.max_embedding_tokens for one in all_limits),
        )
        max_queue = self._per_replica.max_queue * len(all_limits)
        most_tokens = self._per_replica.max_queue_tokens
        queue_tokens = None if most_tokens is None else most_tokens * len(all_limits)
        self.config = fitted_config(
            replace(self._per_replica, max_queue=max_queue, max_queue_tokens=queue_tokens), self.limits
        )
        self._inbox.set_bounds(
            self._share_of(num_slots + max_queue), None if queue_tokens is None else self._share_of(queue_tokens)
        )
        self.metrics.set_num_slots(num_slots)

    def _share_of(self, count: int) -> int:
        return max(1, math.ceil(count * self._share))

    def take_replicas(self, replicas: Mapping[str, messages.Ready]) -> None:
        """Take over what the replicas of the moment say of themselves. On the dispatcher's thread."""
        self._take_limits(replicas)
        self._text_requests = replace(self._text_requests, limits=self.limits)

    # ---- requests

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """See `EngineClient`. A request without a seed gets one, so that another replica draws the same."""
        if params.seed is None:
            params = params.replace(seed=secrets.randbits(64))
        return super().prepare(prompt, params, options)

    def _checked_pooling(self, request: EmbeddingRequest) -> str | None:
        return request.pooling  # replicas check it

    # ---- adapters and files

    def _load_adapter(self, key: str, path: str) -> None:
        self._on_all(key, "load_lora", name_of(key), path, True)

    def _free_adapter(self, key: str) -> None:
        name = name_of(key)
        if all(one.name != name for one in self.loras()):  # else another file has taken its place in the replicas
            self._on_all(key, "unload_lora", name)

    def _on_all(self, key: str, method: Call, *args: Any) -> None:
        """Change the adapters of all replicas. Raises the first error; then replicas may differ until it is tried again."""
        replies = self._dispatcher.ask_all(method, *args).result()
        if not replies:
            raise EngineError(f"no replica was there to change the adapter {name_of(key)!r}; try again")
        for replica_id, data in replies.items():
            done = messages.decode_up(data)
            error = done.error if isinstance(done, Reply) else None
            if error is not None:
                raise AdapterError(f"replica {replica_id}: {error}") from error

    # ---- state

    def stats(self) -> MetricsSnapshot:
        """See `EngineClient`: of all replicas together. What one did after its last report is lost with it."""
        with suppress(EngineStopped):
            for name, snapshot in self.replica_stats().items():
                self._totals.report(name, snapshot)
        return self._totals.together(self.metrics.snapshot())

    def reported_stats(self, max_age_s: float) -> None:
        """See `EngineClient`: replicas report nothing unasked."""

    def replica_stats(self) -> dict[str, MetricsSnapshot]:
        """Return the metrics of each replica, as it reports them."""
        replies = self._dispatcher.ask_state("stats").result()
        return {name: MetricsSnapshot(tuple(_samples(data))) for name, data in replies.items()}

    def _ask(self, question: Question[R, *Ts], args: tuple[*Ts], delay_s: float = 0.0) -> Future[R]:
        """Ask all replicas for their slots, or for activity, of which they have slots alone and no delay.

        The slots come in the order of the replicas' ids; ticks and trees are the replicas' own. Raises `Unsupported` for others.
        """
        del args, delay_s
        self._dispatcher.check_process()
        joined: Any
        if question.name == slots.name:
            joined = self._joined_slots
        elif question.name == activity.name:
            joined = self._joined_activity
        else:
            raise Unsupported(_DIGESTS if question.name == digest.name else _FILES)
        return map_future(self._dispatcher.ask_state("ask", _ASK_SLOTS), joined)

    def _joined_activity(self, replies: dict[str, bytes]) -> EngineActivity:
        found, now_s = self._joined_slots(replies), self._clock.now()
        return EngineActivity(started_s=0.0, now_s=now_s, last_number=0, slots=found, num_waiting=found.num_waiting)

    def replica_slots(self) -> dict[str, SlotsSnapshot]:
        """Return what each slot of each replica does."""
        return _slots(self._dispatcher.ask_state("ask", _ASK_SLOTS).result())

    def _joined_slots(self, replies: dict[str, bytes]) -> SlotsSnapshot:
        """Return the slots under ids and keys that are unique here: replicas count both by themselves."""
        found = _slots(replies)
        views = [
            replace(one, key=None if one.key is None else one.key * len(found) + index)
            for index, name in enumerate(sorted(found))
            for one in found[name]
        ]
        num_on_replicas = len({one.key for one in views if one.key is not None})
        num_waiting = max(0, self._inbox.num_open - num_on_replicas, sum(one.num_waiting for one in found.values()))
        return SlotsSnapshot(tuple(replace(one, id=index) for index, one in enumerate(views)), num_waiting)


def _joined(engine: weakref.ref[ClusterEngine], replicas: Mapping[str, messages.Ready]) -> None:
    """Call the engine without keeping it alive: losing it ends the dispatcher."""
    found = engine()
    if found is not None:
        found.take_replicas(replicas)


def _adapter_paths(adapters: AdapterRegistry) -> dict[str, str]:
    return {one.name: one.path for one in adapters.all()}


def _limits_of(ready: messages.Ready) -> dict[str, Any]:
    limits = dict(ready.limits)
    return {**limits, "boundary_ids": frozenset(limits.get("boundary_ids", ()))}


def _samples(data: bytes) -> list[Any]:
    message = messages.decode_up(data)
    return message.samples if isinstance(message, messages.Stats) else []


def _slots(replies: Mapping[str, bytes]) -> dict[str, SlotsSnapshot]:
    found = {}
    for name, data in replies.items():
        reply = messages.decode_up(data)
        if isinstance(reply, Reply) and reply.result is not None:
            found[name] = slots.result(reply)
    return found


def _measure(dispatcher: Dispatcher, args: tuple[MediaExtent]) -> Future[tuple[MediaSizes, ...]]:
    """Ask a replica what an image or audio becomes, and wait for the reply."""
    measured: Future[tuple[MediaSizes, ...]] = Future()
    try:
        data = dispatcher.ask_one("ask", messages.encode(measure_media.call(0, args))).result(_MEDIA_S)
    except TimeoutError:
        raise EngineError(f"no replica measured an image or audio within {_MEDIA_S:.0f} s; try again") from None
    reply = messages.decode_up(data)
    if not isinstance(reply, Reply):
        raise EngineError(f"a replica measured an image or audio by a {type(reply).__name__}")
    if reply.error is not None:
        raise reply.error
    measured.set_result(measure_media.result(reply))
    return measured
