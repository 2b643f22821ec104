"""What one client gets of the looks at an engine: a snapshot, then what has changed, of its tenant. On the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

from paceline.kv_cache import TenantTree
from paceline.observability.activity_members import (
    mark_members,
    memory_member,
    others_member,
    queue_member,
    slot_members,
    tick_members,
    tree_member,
)
from paceline.scheduling.telemetry import MOST_MARKS, MOST_TICKS
from paceline.server.engine_events.engine_watch import SOON_S, EndReason, EngineWatch, Look, Watcher

if TYPE_CHECKING:
    from paceline.engine import EngineClient

_MOST_PAST: Final = 100  # merged columns of the ticks before a snapshot


class EngineEvent(NamedTuple):
    """An event of the stream, before it is encoded."""

    name: Literal["snapshot", "update", "end"]
    members: dict[str, Any]


class EventReader(Watcher):
    """One client's events. facts: members of each snapshot beside what was found; interval_s: least between events, to 10 ms.

    max_nodes: of the tree, 0: no tree. num_past: most ticks before the first event. Use as a context manager: leaving it ends
    the watch.
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
        """Begin to watch."""
        self._watch.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no longer."""
        self._watch.remove(self)

    def take(self, look: Look) -> None:
        """Take in what was found just now."""
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
        """Learn that there is nothing more to see."""
        self._ended = reason
        self._changed.set()

    async def next(self) -> EngineEvent:
        """Wait for the next event. `end` comes last, and again if this is called again."""
        while True:
            await self._changed.wait()
            if self._ended is not None:
                return EngineEvent("end", {"reason": self._ended})
            wait_s = self._sent_s + self.interval_s - time.monotonic()
            if wait_s > SOON_S:
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
            name: value for name, value in members.items() if name not in before or _differs(before[name], value)
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
        """Return the tree as a member, made anew only where it was looked at anew."""
        if not self._max_nodes:
            return {}
        if look.trees is not self._trees:
            self._trees, self._tree = look.trees, tree_member(look.trees, self._tenant, self._max_nodes)
        return {"tree": self._tree}


def _differs(before: Any, value: Any) -> bool:
    return before is not value and before != value


def engine_facts(engine: EngineClient, name: str, tenant: str) -> dict[str, Any]:
    """Return what a snapshot says of an engine beside what it does."""
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
