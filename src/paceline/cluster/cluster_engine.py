"""`ClusterEngine`: an `EngineClient` over several replicas of one model.

Prompts are tokenised and requests are checked here, on the caller's thread, with the vocabulary alone; the replicas have the
weights. The bounds of the queue are those of all replicas together.
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
from paceline.cluster.replica_calls import ReplicaCalls
from paceline.config import EngineConfig
from paceline.engine.adapters import AdapterRegistry, name_of
from paceline.engine.arguments import engine_arguments
from paceline.engine.base_engine import BaseEngine, fitted_config
from paceline.engine.inbox import FrontInbox
from paceline.engine.output_router import OutputRouter, map_future
from paceline.engine.prompts import Prompt, TextRequests
from paceline.engine.questions import (
    MEASURE_REPLY_S,
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
from paceline.observability.metric_table import MetricsSnapshot
from paceline.observability.metrics import Instruments, Metrics
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import EmbeddingRequest, EngineActivity, SlotsSnapshot
from paceline.sequence import Limits, Request

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
_POLL_S: Final = 0.1  # between two checks whether the wait for a replica is cancelled
_FILES = (
    "saved prefixes are files of one machine, and the replicas of a cluster have none in common; requests find cached prefixes "
    "on the replica that has them by themselves"
)
_DIGESTS = "a cluster has a prefix digest for each of its replicas, which routers get from them"
_ASK_SLOTS: Final = messages.encode(slots.call(0, ()))


class ClusterEngine(BaseEngine):
    """An engine over replicas.

    Args:
        paths: The files of the model; the vocabulary is loaded from them.
        options: The options of the replicas' engines, as `LLM` takes them.
        make_calls: Makes the calls to the replicas; called on the dispatcher's event loop.
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
        self.metrics = Metrics(self.config.num_slots, has_ticks=False)  # the replicas count ticks
        self._inbox = FrontInbox(1, self.config.max_queue_tokens)
        self._router = OutputRouter(self._inbox)
        self._totals = ReplicaTotals()
        watch = RequestsWatch(Instruments((), own=self.metrics), self._clock)
        self._dispatcher = Dispatcher(make_calls, self._inbox, self._router, self._clock, watch)
        self._thread = self._dispatcher
        self._dispatcher.end_when_lost(self)
        front: FrontModel | None = None
        try:  # the dispatcher finds replicas meanwhile
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
        adapters, this = (
            self._adapters,
            weakref.ref(self),
        )  # losing the engine ends the dispatcher, so it keeps no reference

        def on_joined(replicas: Mapping[str, messages.Ready]) -> None:
            if (engine := this()) is not None:
                engine.take_replicas(replicas)

        self._dispatcher.adapter_paths = lambda: {adapter.name: adapter.path for adapter in adapters.all()}
        self._dispatcher.on_joined = on_joined
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
        """Return host and process of each replica that reports them."""
        facts = {name: ready.facts for name, ready in self._dispatcher.replicas.items()}
        return {name: (known["host"], known["pid"]) for name, known in facts.items() if "pid" in known}

    def _take_limits(self, replicas: Mapping[str, messages.Ready]) -> None:
        """Take the slots of all replicas together, and the lowest of their other limits."""
        if not replicas:
            return  # as many requests as before may wait for the next replica
        all_limits = [
            Limits(**{**ready.limits, "boundary_ids": frozenset(ready.limits.get("boundary_ids", ()))})
            for ready in replicas.values()
        ]
        num_slots = sum(limits.num_slots for limits in all_limits)
        cells = [limits.num_cells for limits in all_limits if limits.num_cells is not None]
        self.limits = replace(
            min(all_limits, key=lambda limits: limits.max_positions),
            num_slots=num_slots,
            num_cells=sum(cells) if len(cells) == len(all_limits) else None,
            max_embedding_tokens=min(limits.max_embedding_tokens for limits in all_limits),
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
        """Take the limits of the present replicas. On the dispatcher's thread."""
        self._take_limits(replicas)
        self._text_requests = replace(self._text_requests, limits=self.limits)

    # ---- requests

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """Prepare a request; without a seed it gets one, so that another replica draws the same tokens."""
        if params.seed is None:
            params = params.replace(seed=secrets.randbits(64))
        return super().prepare(prompt, params, options)

    def _checked_pooling(self, request: EmbeddingRequest) -> str | None:
        return request.pooling  # replicas check it

    # ---- adapters and files

    def _load_adapter(self, key: str, path: str) -> None:
        self._set_adapter(name_of(key), path)

    def _free_adapter(self, key: str) -> None:
        name = name_of(key)
        if all(adapter.name != name for adapter in self.loras()):  # else another file has replaced it in the replicas
            self._set_adapter(name, None)

    def _set_adapter(self, name: str, path: str | None) -> None:
        """Change an adapter of all replicas. Raises the first error; then replicas may differ until it is tried again."""
        replies = self._dispatcher.ask_all("set_adapter", name, path).result()
        if not replies:
            raise EngineError(f"no replica was there to change the adapter {name!r}; try again")
        for replica_id, data in replies.items():
            if (error := _reply(data).error) is not None:
                raise AdapterError(f"replica {replica_id}: {error}") from error

    # ---- state

    def stats(self) -> MetricsSnapshot:
        """Return the metrics of all replicas together. A replica that is gone counts with its last report."""
        with suppress(EngineStopped):
            for name, snapshot in self.replica_stats().items():
                self._totals.report(name, snapshot)
        return self._totals.together(self.metrics.snapshot())

    def reported_stats(self, max_age_s: float) -> None:
        """Return None: replicas report only when they are asked."""

    def replica_stats(self) -> dict[str, MetricsSnapshot]:
        """Return the metrics of each replica."""
        replies = {
            name: messages.decode_up(data) for name, data in self._dispatcher.ask_state("stats").result().items()
        }
        return {
            name: MetricsSnapshot(tuple(reply.samples) if isinstance(reply, messages.Stats) else ())
            for name, reply in replies.items()
        }

    def _ask(self, question: Question[R, *Ts], args: tuple[*Ts], delay_s: float = 0.0) -> Future[R]:
        """Ask all replicas for their slots, for the questions on slots and activity. Raises `Unsupported` for other questions.

        The slots come in the order of the replicas' ids. An activity has slots only, without delay: ticks and trees are
        the replicas' own.
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
        """Return the slots of each replica."""
        return _slots(self._dispatcher.ask_state("ask", _ASK_SLOTS).result())

    def _joined_slots(self, replies: dict[str, bytes]) -> SlotsSnapshot:
        """Return the slots with new ids and keys, since each replica numbers its own."""
        found = _slots(replies)
        views = [
            replace(view, key=None if view.key is None else view.key * len(found) + index)
            for index, name in enumerate(sorted(found))
            for view in found[name]
        ]
        num_on_replicas = len({view.key for view in views if view.key is not None})
        num_waiting = max(
            0, self._inbox.num_open - num_on_replicas, sum(snapshot.num_waiting for snapshot in found.values())
        )
        return SlotsSnapshot(tuple(replace(view, id=index) for index, view in enumerate(views)), num_waiting)


def _reply(data: bytes) -> Reply:
    """Return the `Reply` of a replica. Raises `EngineError` for one of another version."""
    reply = messages.decode_up(data)
    if not isinstance(reply, Reply):
        raise EngineError(f"a replica replied by a {type(reply).__name__}")
    return reply


def _slots(replies: Mapping[str, bytes]) -> dict[str, SlotsSnapshot]:
    read = {name: _reply(data) for name, data in replies.items()}
    return {name: slots.result(reply) for name, reply in read.items() if reply.result is not None}


def _measure(dispatcher: Dispatcher, args: tuple[MediaExtent]) -> Future[tuple[MediaSizes, ...]]:
    """Ask a replica for the sizes of an image or audio, and wait for the reply."""
    measured: Future[tuple[MediaSizes, ...]] = Future()
    try:
        reply = _reply(dispatcher.ask_one("ask", messages.encode(measure_media.call(0, args))).result(MEASURE_REPLY_S))
    except TimeoutError:
        text = f"no replica measured an image or audio within {MEASURE_REPLY_S:.0f} s; try again"
        raise EngineError(text) from None
    if reply.error is not None:
        raise reply.error
    measured.set_result(measure_media.result(reply))
    return measured
