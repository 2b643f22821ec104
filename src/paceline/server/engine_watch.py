"""Events about an engine: `EngineWatch` observes it for all clients, `EventReader` makes the events of one client.

On the event loop. An engine is observed up to ten times a second while a client reads; without clients it records nothing. A
client gets a snapshot, then the changes, of its own tenant.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

from paceline.errors import EngineStopped, PacelineError
from paceline.kv_cache import TenantTree
from paceline.observability.activity_members import (
    RateMeter,
    Rates,
    count_members,
    histogram_members,
    mark_members,
    memory_member,
    others_member,
    queue_member,
    slot_members,
    tick_members,
    tree_member,
)
from paceline.scheduling.records import MOST_DELAY_S, EngineActivity, Mark, TickActivity
from paceline.scheduling.telemetry import MOST_MARKS, MOST_TICKS

if TYPE_CHECKING:
    from paceline.engine import EngineClient
    from paceline.observability.heartbeat import Heartbeat
    from paceline.observability.metric_table import MetricsSnapshot


_log = logging.getLogger("paceline.server")

LEAST_S: Final = 0.1
"""The least time between two looks that find something."""

_SOON_S: Final = 0.01  # by which a look or an event may come early, as a shorter sleep costs one more wake-up
_IDLE_S: Final = 1.0  # between looks at an engine without requests
_TREE_S: Final = 1.0
_STATS_S: Final = 1.0
_STATS_AGE_S: Final = 1.5  # the greatest age of a report that is used while requests are open

EndReason = Literal["shutdown", "unloaded", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The result of one look at the engine. is_first: nothing before it counts. trees: the latest trees, perhaps older."""

    activity: EngineActivity
    heartbeat: Heartbeat
    rates: Rates
    rate_member: dict[str, float]
    trees: tuple[TenantTree, ...]
    stats: dict[str, Any]
    rss_bytes: int | None
    is_first: bool
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def shared(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the value of `make` for this key, which is called once for all watchers."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class Watcher(ABC):
    """Takes looks, with so many nodes of the radix tree (None: no tree) and this time between two, and learns of the end."""

    wants_nodes: int | None = None
    interval_s: float = LEAST_S

    @abstractmethod
    def take(self, look: Look) -> None:
        """Take in the newest look."""

    @abstractmethod
    def end(self, reason: EndReason) -> None:
        """Learn that no look follows."""


class EngineWatch:
    """The looks at one engine. why_ended: returns the reason for the end of an engine that this server closed."""

    def __init__(self, engine: Callable[[], EngineClient], why_ended: Callable[[], EndReason]) -> None:
        self._engine, self._why_ended = engine, why_ended
        self._watchers: list[Watcher] = []
        self._task: asyncio.Task[None] | None = None
        self._ended: EndReason | None = None
        self._looked_s = -1e9
        self._forget()

    def _forget(self) -> None:
        self._rates = RateMeter()
        self._last: EngineActivity | None = None
        self._trees: tuple[TenantTree, ...] = ()
        self._tree_s = self._stats_s = -1e9
        self._waits_until_s = -1e9  # when the task wakes up, or its delayed look is due
        self._is_joined = self._is_ticking = False
        self._stats: dict[str, Any] = {}
        self._stats_task: asyncio.Task[None] | None = None
        self._rss_bytes: int | None = None
        self._ticks: deque[TickActivity] = deque(maxlen=MOST_TICKS)
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)

    # ---- watchers

    @property
    def is_on(self) -> bool:
        """Whether there are watchers."""
        return bool(self._watchers)

    def past(self, num_ticks: int) -> tuple[list[TickActivity], list[Mark]]:
        """Return at most so many of the last ticks that other watchers have seen, and the marks."""
        ticks = list(self._ticks)
        return ticks[max(0, len(ticks) - num_ticks) :], list(self._marks)

    def add(self, watcher: Watcher) -> None:
        """Add a watcher, from the next look on. After the end, it learns of the end at once."""
        if self._ended is not None:
            watcher.end(self._ended)
            return
        self._watchers.append(watcher)
        self._is_joined = True
        if self._task is not None and self._waits_until_s > max(time.monotonic(), self._looked_s + LEAST_S) + _SOON_S:
            self._task.cancel()
            self._task = None
        if self._task is None:
            self._waits_until_s = -1e9
            self._task = asyncio.create_task(self._watch())

    def remove(self, watcher: Watcher) -> None:
        """Remove a watcher; without watchers there are no looks."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        if not self._watchers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._forget()

    def end(self, reason: EndReason) -> None:
        """End the streams of all present and later watchers."""
        self._ended = self._ended or reason
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.end(self._ended)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None

    # ---- looks

    async def _watch(self) -> None:
        try:
            while self._watchers:
                await self._turn()
        except EngineStopped:  # or unloaded
            self.end(self._why_ended())
        except Exception:  # noqa: BLE001 - its clients are to know
            _log.exception("the stream of engine events failed")
            self.end("failed")

    async def _turn(self) -> None:
        """Look if a look is due, else wait. Looks follow the shortest interval of the watchers, or a second without requests."""
        now_s, engine = time.monotonic(), self._engine()
        interval_s = max(LEAST_S, min(watcher.interval_s for watcher in self._watchers))
        is_moving = engine.num_open > 0 or any(self._rates.member().values())
        due_s = self._looked_s + (LEAST_S if self._is_joined else interval_s if is_moving else max(interval_s, _IDLE_S))
        # An engine that ticks replies with the tick that ends when the look is due: no thread has to wake up for that.
        delay_s = min(max(0.0, due_s - now_s), MOST_DELAY_S) if is_moving and self._is_ticking else 0.0
        if due_s - delay_s - now_s > _SOON_S:
            self._waits_until_s = min(due_s - delay_s, now_s + interval_s)
            await asyncio.sleep(self._waits_until_s - time.monotonic())
            return
        self._waits_until_s = due_s
        has_ticks, now_s = await self._look(engine, delay_s), time.monotonic()
        is_early = due_s - now_s > _SOON_S  # the engine had nothing to do: it is asked again when the look is due
        self._is_ticking = has_ticks and not is_early
        if not is_early:
            self._looked_s = now_s

    async def _look(self, engine: EngineClient, delay_s: float) -> bool:
        """Return whether the engine has ticked since the last look."""
        last = self._last
        after = 0 if last is None else last.last_number
        nodes = [watcher.wants_nodes for watcher in self._watchers if watcher.wants_nodes is not None]
        max_nodes = max(nodes) if nodes and time.monotonic() - self._tree_s >= _TREE_S else None
        activity = await _outcome(engine.ask_activity(after, max_nodes=max_nodes, delay_s=delay_s))
        if activity is None:
            self._is_joined = True  # its watchers have seen nothing
            return False
        is_first = last is None or activity.started_s != last.started_s
        if is_first:
            self._rates.clear()
            self._ticks.clear()
            self._marks.clear()
            self._trees = ()
            if after:  # its numbers are those of another log
                activity = await _outcome(engine.ask_activity(0, max_nodes=max_nodes)) or activity
        now_s = time.monotonic()
        self._last = activity
        self._rates.take(activity)
        self._ticks += activity.ticks
        self._marks += activity.marks
        if activity.trees is not None:
            self._trees, self._tree_s = activity.trees, now_s
        self._refresh_stats(engine, now_s)
        look = Look(
            activity=activity,
            heartbeat=engine.heartbeat(),
            rates=self._rates.of_sequences(),
            rate_member=self._rates.member(),
            trees=self._trees,
            stats=self._stats,
            rss_bytes=self._rss_bytes,
            is_first=is_first,
        )
        self._is_joined = False
        for watcher in tuple(self._watchers):
            watcher.take(look)
        return bool(activity.ticks)

    def _refresh_stats(self, engine: EngineClient, now_s: float) -> None:
        """Take the metrics that a ticking worker has reported; else ask for them in a thread, for a later look."""
        if now_s - self._stats_s < _STATS_S or (self._stats_task is not None and not self._stats_task.done()):
            return
        self._stats_s = now_s
        self._rss_bytes = _rss_bytes(engine.heartbeat().worker_pid)
        reported = engine.reported_stats(_STATS_AGE_S if engine.num_open else 0.0)
        if reported is None:
            self._stats_task = asyncio.create_task(self._ask_stats(engine))
        else:
            self._take_stats(reported)

    async def _ask_stats(self, engine: EngineClient) -> None:
        with suppress(PacelineError):
            self._take_stats(await asyncio.to_thread(engine.stats))

    def _take_stats(self, metrics: MetricsSnapshot) -> None:
        self._stats = {"counts": count_members(metrics), "histograms": histogram_members(metrics)}


async def _outcome(asked: Future[EngineActivity]) -> EngineActivity | None:
    """Wait for the reply to a question; None if a failed tick ended it. The engine goes on after such a tick."""
    try:
        return await asyncio.wrap_future(asked)
    except EngineStopped:
        raise
    except PacelineError as error:
        _log.debug("a look at the engine failed with a tick of it: %s", error)
        return None


def _rss_bytes(pid: int | None) -> int | None:
    try:
        pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return pages * resource.getpagesize()


_MOST_PAST: Final = 100  # merged columns of the ticks before a snapshot


class EngineEvent(NamedTuple):
    """An event of the stream, before it is encoded."""

    name: Literal["snapshot", "update", "end"]
    members: dict[str, Any]


class EventReader(Watcher):
    """One client's events. Use it as a context manager, which ends the watch.

    facts: further members of each snapshot. interval_s: the least time between events, to 10 ms. max_nodes: most nodes of the
    tree; 0: no tree. num_past: most ticks before the first event.
    """

    def __init__(
        self,
        watch: EngineWatch,
        facts: Mapping[str, Any],
        *,
        tenant: str = "",
        interval_s: float = 0.1,
        max_nodes: int = 256,
        num_past: int = 256,
    ) -> None:
        self._watch, self._facts, self._tenant = watch, dict(facts), tenant
        self._max_nodes, self._num_past = max_nodes, num_past
        self.wants_nodes = max_nodes or None
        self.interval_s = interval_s
        self._trees: tuple[TenantTree, ...] | None = None
        self._tree: dict[str, Any] = {}
        self._look: Look | None = None
        self._ended: EndReason | None = None
        self._changed = asyncio.Event()
        self._ticks: deque[dict[str, Any]] = deque(maxlen=MOST_TICKS)
        self._marks: deque[dict[str, Any]] = deque(maxlen=MOST_MARKS)
        self._is_begun = False
        self._sent: dict[str, Any] = {}
        self._sent_s = -1e9

    def __enter__(self) -> Self:
        self._watch.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.remove(self)

    def take(self, look: Look) -> None:
        """Take in the newest look."""
        tenant = self._tenant
        if look.is_first or self._look is None:
            self._is_begun = False
            self._ticks.clear()
            self._marks.clear()
            ticks, marks = self._watch.past(self._num_past)
            self._ticks += tick_members(ticks, tenant, _MOST_PAST)
            self._marks += mark_members(marks, tenant)
        else:
            activity = look.activity
            self._ticks += look.shared(("ticks", tenant), lambda: tick_members(activity.ticks, tenant))
            self._marks += look.shared(("marks", tenant), lambda: mark_members(activity.marks, tenant))
        self._look = look
        self._changed.set()

    def end(self, reason: EndReason) -> None:
        """Learn that no look follows."""
        self._ended = reason
        self._changed.set()

    async def next(self) -> EngineEvent:
        """Wait for the next event. The last event is `end`; later calls return it again."""
        while True:
            await self._changed.wait()
            if self._ended is not None:
                return EngineEvent("end", {"reason": self._ended})
            wait_s = self._sent_s + self.interval_s - time.monotonic()
            if wait_s > _SOON_S:
                await asyncio.sleep(wait_s)
                continue
            self._changed.clear()
            event = self._make()
            if event is not None:
                self._sent_s = time.monotonic()
                return event

    def _make(self) -> EngineEvent | None:
        look = self._look
        if look is None:
            return None
        members = {**look.shared(("state", self._tenant), lambda: self._state(look)), **self._tree_of(look)}
        is_begun, self._is_begun = self._is_begun, True
        before = self._sent if is_begun else {}
        changed = {
            name: value
            for name, value in members.items()
            if name not in before or (before[name] is not value and before[name] != value)
        }
        self._sent = members
        ticks, marks = list(self._ticks), list(self._marks)
        self._ticks.clear()
        self._marks.clear()
        now = {"now_s": round(look.activity.now_s, 6)}
        if not is_begun:
            begin = {"unix_s": round(time.time(), 3), **self._facts}
            return EngineEvent("snapshot", {**now, **begin, **changed, "ticks": ticks, "marks": marks})
        moved = {name: value for name, value in (("ticks", ticks), ("marks", marks)) if value}
        return EngineEvent("update", {**now, **moved, **changed}) if moved or changed else None

    def _state(self, look: Look) -> dict[str, Any]:
        activity, tenant, beat = look.activity, self._tenant, look.heartbeat
        return {
            "engine": {
                "state": beat.state,
                "is_alive": beat.is_alive,
                "worker_pid": beat.worker_pid,
                "num_restarts": beat.num_restarts,
                "num_crashes": beat.num_crashes,
            },
            "slots": slot_members(activity, tenant, look.rates),
            "others": others_member(activity, tenant, look.rates, look.trees),
            "queue": queue_member(activity, tenant),
            "memory": memory_member(activity, look.rss_bytes),
            "rates": look.rate_member,
            **look.stats,
        }

    def _tree_of(self, look: Look) -> dict[str, Any]:
        if not self._max_nodes:
            return {}
        if look.trees is not self._trees:
            self._trees, self._tree = look.trees, tree_member(look.trees, self._tenant, self._max_nodes)
        return {"tree": self._tree}


def engine_facts(engine: EngineClient, name: str, tenant: str) -> dict[str, Any]:
    """Return the members of a snapshot that do not change."""
    limits, config = engine.limits, engine.config
    strategy = config.strategy if isinstance(config.strategy, str) else type(config.strategy).__name__
    return {
        "model": name,
        "config": {
            "num_slots": limits.num_slots,
            "n_ctx": limits.max_positions,
            "num_cells": limits.num_cells,
            "host_bytes": limits.host_bytes,
            "itl_target_ms": round(1000 * limits.itl_target_s, 3),
            "max_tick_ms": round(1000 * limits.max_tick_s, 3),
            "batch_tokens": limits.n_batch,
            "chunk_size": limits.chunk_size,
            "strategy": strategy,
            "speculation": config.speculation is not None,
            "isolation": config.isolation,
            "tenant": tenant,
        },
    }
