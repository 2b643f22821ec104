"""Times of looks at an engine, by its queries: an engine with replies given by a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from tests.polling import async_wait_until

from paceline.errors import DecodeError
from paceline.observability.metric_table import MetricsSnapshot
from paceline.observability.metrics import Metrics
from paceline.scheduling.records import EngineActivity, SlotsSnapshot, TickActivity, TickRecord
from paceline.server.engine_watch import LEAST_S, EngineWatch, Look, Watcher

LONG_S = 60.0


class Viewer(Watcher):
    """Counts the events shown."""

    def __init__(self, interval_s: float = LEAST_S, wants_nodes: int | None = None) -> None:
        self.interval_s, self.wants_nodes = interval_s, wants_nodes
        self.looks: list[Look] = []
        self.reasons: list[str] = []

    def take(self, look: Look) -> None:
        self.looks.append(look)

    def end(self, reason: str) -> None:
        self.reasons.append(reason)


class AskedEngine:
    """Keeps the questions. ticks: whether it replies as an engine that ticks, when the delay is over; else at once."""

    def __init__(self, *, ticks: bool = True) -> None:
        self.num_open, self.ticks = 1, ticks
        self.delays: list[float] = []
        self.nodes: list[int | None] = []
        self.dues: list[float] = []
        self.num_stats = 0
        self.held: list[Future[EngineActivity]] | None = None
        self.failure: Exception | None = None
        self._number = 0

    def ask_activity(self, after: int, *, max_nodes: int | None, delay_s: float) -> Future[EngineActivity]:
        self.delays.append(delay_s)
        self.nodes.append(max_nodes)
        self.dues.append(time.monotonic() + delay_s)
        future: Future[EngineActivity] = Future()
        if self.held is not None:
            self.held.append(future)
        elif self.failure is not None:
            failure, self.failure = self.failure, None
            future.set_exception(failure)
        elif self.ticks and delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._reply, future)
        else:
            self._reply(future)
        return future

    def _reply(self, future: Future[EngineActivity]) -> None:
        if not future.cancelled():
            future.set_result(self.activity())

    def activity(self) -> EngineActivity:
        self._number += 1
        record = TickRecord(
            index=self._number, kind="generate", start_s=0.0, elapsed_s=0.001, step_s=0.001, rows=(), num_slots=1,
            num_running=1, num_waiting=0, num_cells=0, budget=10, num_embedded=0, num_embedded_tokens=0,
        )  # fmt: skip
        return EngineActivity(
            started_s=1.0,
            now_s=time.monotonic(),
            last_number=self._number,
            slots=SlotsSnapshot((), 0),
            ticks=(TickActivity(self._number, record),) if self.ticks else (),
            trees=() if self.nodes[-1] else None,
        )

    def heartbeat(self) -> Any:
        return SimpleNamespace(worker_pid=None)

    def reported_stats(self, max_age_s: float) -> MetricsSnapshot | None:
        return Metrics().snapshot() if max_age_s else None

    def stats(self) -> MetricsSnapshot:
        self.num_stats += 1
        return Metrics().snapshot()


def watch_of(engine: AskedEngine) -> EngineWatch:
    found: Any = engine
    return EngineWatch(lambda: found, lambda: "failed")


def run(steps: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(steps(), LONG_S))


def test_an_engine_that_ticks_is_asked_ahead() -> None:
    """For the tick that ends when the next look is due, at once after the last one; its reports do for the counts."""

    async def steps() -> None:
        engine, viewer = AskedEngine(), Viewer(0.15)
        watch = watch_of(engine)
        watch.add(viewer)
        await async_wait_until(lambda: len(viewer.looks) == 4)
        assert engine.delays[0] == 0.0
        assert all(0.0 < delay <= 0.15 for delay in engine.delays[1:4])
        assert engine.num_stats == 0
        watch.remove(viewer)

    run(steps)


def test_an_engine_that_does_not_tick_is_asked_when_a_look_is_due() -> None:
    """Though requests are open: it would reply at once, and later changes would be seen later."""

    async def steps() -> None:
        engine, viewer = AskedEngine(ticks=False), Viewer()
        watch = watch_of(engine)
        began_s = time.monotonic()
        watch.add(viewer)
        await async_wait_until(lambda: len(viewer.looks) == 4)
        assert time.monotonic() - began_s > 2.8 * LEAST_S
        assert engine.delays == [0.0] * 4
        watch.remove(viewer)

    run(steps)


def test_an_early_reply_is_followed_by_a_look_when_it_is_due() -> None:
    """The engine had nothing to do any more: a new request is not seen an interval later than possible."""

    async def steps() -> None:
        engine, viewer = AskedEngine(), Viewer(0.3)
        watch = watch_of(engine)
        take = viewer.take

        def last_tick(look: Look) -> None:
            engine.ticks = False
            take(look)

        viewer.take = last_tick  # type: ignore[method-assign]
        began_s = time.monotonic()
        watch.add(viewer)
        await async_wait_until(lambda: len(viewer.looks) == 3)
        assert time.monotonic() - began_s > 0.28
        assert [delay > 0 for delay in engine.delays] == [False, True, False]
        watch.remove(viewer)

    run(steps)


def test_one_who_joins_does_not_wait_for_a_look_that_comes_later() -> None:
    """Another question is put at once, and the reply to the first is not waited for."""

    async def steps() -> None:
        engine, viewers = AskedEngine(), [Viewer(0.9), Viewer(0.9)]
        watch = watch_of(engine)
        watch.add(viewers[0])
        await async_wait_until(lambda: len(engine.delays) == 2)
        await asyncio.sleep(LEAST_S + 0.05)
        watch.add(viewers[1])
        await async_wait_until(lambda: bool(viewers[1].looks))
        assert engine.delays[1] > 0
        assert engine.delays[2] == 0.0
        assert len(viewers[0].looks) == 2
        for viewer in viewers:
            watch.remove(viewer)

    run(steps)


def test_a_long_interval_is_slept_through_but_for_its_end() -> None:
    """As a question does not wait for more than a second, and a log ends without questions."""

    async def steps() -> None:
        engine, viewer = AskedEngine(), Viewer(1.3)
        watch = watch_of(engine)
        began_s = time.monotonic()
        watch.add(viewer)
        await async_wait_until(lambda: len(viewer.looks) == 2)
        assert time.monotonic() - began_s > 1.25
        assert 0.0 < engine.delays[1] <= 1.0
        watch.remove(viewer)

    run(steps)


def test_those_who_join_share_the_look_that_is_on_its_way() -> None:
    """It is asked for once, however many they are and however long the tick takes."""

    async def steps() -> None:
        engine, viewers = AskedEngine(), [Viewer(30.0) for _ in range(20)]
        watch = watch_of(engine)
        watch.add(viewers[0])
        await async_wait_until(lambda: len(viewers[0].looks) == 1)
        engine.held = []
        await asyncio.sleep(LEAST_S + 0.05)
        for viewer in viewers[1:]:
            watch.add(viewer)
            await asyncio.sleep(0.005)
        await async_wait_until(lambda: bool(engine.held))
        assert engine.held is not None
        (asked,) = engine.held
        asked.set_result(engine.activity())
        await async_wait_until(lambda: all(viewer.looks for viewer in viewers))
        assert len(engine.delays) == 2
        for viewer in viewers:
            watch.remove(viewer)

    run(steps)


def test_the_tree_is_wanted_a_second_after_the_last() -> None:
    """By the time that it is asked for, so that it never comes sooner."""

    async def steps() -> None:
        engine, viewer = AskedEngine(), Viewer(0.25, wants_nodes=8)
        watch = watch_of(engine)
        watch.add(viewer)
        await async_wait_until(lambda: engine.nodes.count(8) == 3)
        first, second, third = [due_s for due_s, nodes in zip(engine.dues, engine.nodes, strict=True) if nodes]
        assert min(second - first, third - second) > 0.95
        assert engine.nodes.count(None) >= 3
        watch.remove(viewer)

    run(steps)


def test_a_failed_tick_is_no_look_and_no_end() -> None:
    """The next question is put as if there had been none."""

    async def steps() -> None:
        engine, viewer = AskedEngine(), Viewer(3600.0)
        watch = watch_of(engine)
        engine.failure = DecodeError("a failed tick")
        watch.add(viewer)
        await async_wait_until(lambda: len(viewer.looks) == 1)  # not an interval later, as nothing was seen
        assert engine.failure is None
        assert viewer.reasons == []
        watch.remove(viewer)

    run(steps)
