"""An engine without a model for the server: passes that a test can hold up, and when requests ended."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.engine_world import Faults
from tests.running_engine import LONG_S, GatedBackend

from paceline.config import EngineConfig
from paceline.observability.metrics import Instrument
from paceline.scheduling.records import EndRecord, TickRecord
from paceline.streaming import FinishReason
from paceline.testing import FakeEngineClient


class Ends(Instrument):
    """Notifies a test when requests end and slots become free."""

    def __init__(self) -> None:
        self._reasons: queue.SimpleQueue[FinishReason] = queue.SimpleQueue()
        self._freed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ticks_left: int | None = None
        self._hold: Callable[[], None] = lambda: None

    def hold_after(self, ticks: int, hold: Callable[[], None]) -> None:
        """Call it, on the engine's thread, when so many ticks are over."""
        self._hold, self._ticks_left = hold, ticks

    def tick_finished(self, record: TickRecord) -> None:
        if self._ticks_left is not None:
            self._ticks_left -= 1
            if self._ticks_left == 0:
                self._hold()

    def request_ended(self, record: EndRecord) -> None:
        self._reasons.put(record.reason)

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:
        self._freed.put(slot)

    def reason(self) -> FinishReason:
        """Return the finish reason of the next request that ends, or has ended."""
        return self._reasons.get(timeout=LONG_S)

    def freed(self) -> int:
        """The next slot that is free, or has become so."""
        return self._freed.get(timeout=LONG_S)


class StandInEngine(FakeEngineClient):
    """An engine without a model: `backend.hold()` stops its passes, `backend.gate.set()` resumes them, `faults` fails them."""

    def __init__(self, *, num_slots: int = 2, max_queue: int = 8, **backend: Any) -> None:
        self.ends, self.faults = Ends(), Faults()
        options = {"eos_every": 10**9, "num_cells": 20_000, "num_seq_ids": 2 * num_slots, **backend}
        self.backend = GatedBackend(fail=self.faults.of_pass, **options)
        super().__init__(backend=self.backend, config=EngineConfig(max_queue=max_queue), instruments=(self.ends,))

    def hold_after(self, ticks: int) -> None:
        """Let the engine tick so often, then block it."""
        self.ends.hold_after(ticks, self.backend.hold)

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        self.backend.gate.set()
        super().close(drain=drain, timeout_s=timeout_s)

    def assert_empty(self) -> None:
        """Nothing waits, nothing runs, no slot is taken."""
        now = self.metrics.snapshot()
        assert (now.queued, now.resident) == (0, 0)
        self.metrics.check()


class StandInLLM:
    """In the place of an `AsyncLLM`. load: set to let loading end; failure: how it ends then."""

    def __init__(self, engine: Any = None, *, is_loaded: bool = True, failure: Exception | None = None) -> None:
        self.engine = StandInEngine() if engine is None else engine
        self.load, self._failure, self.progress = threading.Event(), failure, 0.0
        if is_loaded:
            self.load.set()

    def begin(self) -> None:
        """Nothing: `start` loads."""

    @property
    def failure(self) -> Exception | None:
        return self._failure

    async def start(self) -> None:
        await asyncio.to_thread(self.load.wait, LONG_S)
        if self._failure is not None:
            raise self._failure

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        self.load.set()
        await asyncio.to_thread(self.engine.close, drain=drain, timeout_s=timeout_s)


def prompts(count: int) -> Sequence[str]:
    """Some that differ."""
    return [f"prompt number {index}" for index in range(count)]
