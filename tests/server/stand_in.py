"""An engine without a model for the server to stand before: passes that a test can hold up, and what became of requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.running_engine import LONG_S, Running

from paceline.config import EngineConfig
from paceline.errors import PromptTooLong
from paceline.observability.heartbeat import Heartbeat
from paceline.observability.instruments import Instrument
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.sequence import Request
from paceline.scheduling.telemetry import EndRecord, TickRecord
from paceline.streaming import FinishReason, StreamChannel
from paceline.testing.fake_backend import FakeTokenizer


class Ends(Instrument):
    """Tells a test when requests ended and slots became free."""

    def __init__(self) -> None:
        self._reasons: queue.SimpleQueue[FinishReason] = queue.SimpleQueue()
        self._freed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ticks_left: int | None = None
        self._hold: Callable[[], None] = lambda: None

    def hold_after(self, ticks: int, hold: Callable[[], None]) -> None:
        """Calls it, on the engine's thread, when so many ticks are over."""
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
        """Of the next request that ends, or has."""
        return self._reasons.get(timeout=LONG_S)

    def freed(self) -> int:
        """The next slot that is free, or has become so."""
        return self._freed.get(timeout=LONG_S)


class StandInEngine:
    """What the server uses of an engine. `running.hold()` stops its passes, `running.backend.gate.set()` lets them go."""

    def __init__(self, *, num_slots: int = 2, max_queue: int = 8, **backend: Any) -> None:
        self.ends = Ends()
        self.running = Running(
            max_requests=num_slots + max_queue,
            num_slots=num_slots,
            instruments=(self.ends,),
            **{"eos_every": 10**9, "num_cells": 20_000, **backend},
        )
        self.metrics = self.running.metrics
        self.config = EngineConfig(num_slots=num_slots, max_queue=max_queue)
        self.tokenizer = FakeTokenizer()
        self.model = SimpleNamespace(metadata={}, chat_templates={})
        self.sampling_defaults = SamplingParams()
        self.is_closed = False

    def prepare(self, prompt: Any, params: SamplingParams, options: RequestOptions) -> Request:
        if len(prompt) > 5000:
            raise PromptTooLong("the prompt is too long", len(prompt), 5000)
        fields = {name: getattr(params, name) for name in ("max_tokens", "n", "ignore_eos", "temperature", "seed")}
        rest = {name: getattr(options, name) for name in RequestOptions.__slots__ if name != "lora"}
        return self.running.request(prompt, **fields, **rest)

    def accept(self, request: Request, request_index: int = 0) -> StreamChannel:
        return self.running.router.submit(request, request_index)

    def heartbeat(self) -> Heartbeat:
        return self.running.runner.heartbeat()

    @property
    def ended(self) -> Any:
        return self.running.runner.ended

    @property
    def num_open(self) -> int:
        return self.running.inbox.num_open

    def stats(self) -> Any:
        return self.metrics.snapshot()

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        self.is_closed = True
        self.running.backend.gate.set()
        self.running.close(drain=drain, timeout_s=timeout_s)

    def hold_after(self, ticks: int) -> None:
        """Lets the engine tick so often, then holds it up."""
        self.ends.hold_after(ticks, self.running.hold)

    def assert_empty(self) -> None:
        """Nothing waits, nothing runs, no slot is taken."""
        now = self.metrics.snapshot()
        assert (now.queued, now.resident) == (0, 0)
        self.metrics.check()


class StandInLLM:
    """In the place of an `AsyncLLM`. load: set to let loading end; failure: how it ends then."""

    def __init__(self, engine: Any = None, *, is_loaded: bool = True, failure: Exception | None = None) -> None:
        self.engine = StandInEngine() if engine is None else engine
        self.load, self._failure = threading.Event(), failure
        if is_loaded:
            self.load.set()

    async def start(self) -> None:
        import asyncio

        await asyncio.to_thread(self.load.wait, LONG_S)
        if self._failure is not None:
            raise self._failure

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        import asyncio

        self.load.set()
        await asyncio.to_thread(self.engine.close, drain=drain, timeout_s=timeout_s)


def prompts(count: int) -> Sequence[str]:
    """Some that differ."""
    return [f"prompt number {index}" for index in range(count)]
