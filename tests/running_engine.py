"""An engine on the fake backend with its own thread, with passes that a test can hold up. No sleeps: gates and bounded waits."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence as Many
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from tests.engine_world import Faults, make_limits, make_request, make_scheduler

from paceline.clock import MonotonicClock
from paceline.engine.backend import Executor, Lora
from paceline.engine.core import Engine, TimedPasses
from paceline.engine.engine_thread import Runner
from paceline.engine.inbox import Inbox
from paceline.engine.output_router import OutputRouter
from paceline.errors import Aborted
from paceline.observability.heartbeat import Pulse
from paceline.observability.metrics import Instrument, Metrics
from paceline.request import RequestOptions
from paceline.scheduling.records import EmbeddingRequest
from paceline.scheduling.scheduler import Scheduler
from paceline.scheduling.strategies import resolve_strategy
from paceline.sequence import Request, Row, RowOutput
from paceline.streaming import StreamChannel
from paceline.testing.fake_backend import FakeBackend

LONG_S = 60.0  # no wait of a test that passes takes so long
_MANY_CELLS = 200_000  # so many that no test gets to the end of them, however long a busy machine lets a test wait


def fail_the_next_tick(scheduler: Scheduler) -> None:
    """With a mistake of the engine's own."""

    def broken(*_: Any) -> Any:
        del scheduler.apply  # type: ignore[method-assign]
        raise AssertionError("our own mistake")

    scheduler.apply = broken  # type: ignore[method-assign]


class GatedBackend(FakeBackend):
    """A fake with passes that wait while `gate` is closed, or until they are aborted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.is_in_pass = threading.Event()
        self.num_aborts = 0

    def step(self, rows: Many[Row], lora: Lora) -> list[RowOutput]:
        self._wait()
        return super().step(rows, lora)

    def embed(self, texts: list[list[int]], pooling: str | None) -> list[Any]:
        self._wait()
        return super().embed(texts, pooling)

    def abort(self) -> None:
        self.num_aborts += 1
        self.gate.set()

    def abort_embedding(self) -> None:
        self.abort()

    def hold(self) -> None:
        """From the next pass on the engine's thread waits."""
        self.is_in_pass.clear()
        self.gate.clear()

    def wait_for_pass(self) -> None:
        """Wait until the engine's thread is at the gate."""
        assert self.is_in_pass.wait(LONG_S)

    def _wait(self) -> None:
        before = self.num_aborts
        self.is_in_pass.set()
        assert self.gate.wait(LONG_S)
        if self.num_aborts > before:
            raise Aborted("told to stop")


class Running:
    """A whole engine, as `LLM` has it but for the model. As a context manager it closes."""

    def __init__(
        self,
        *,
        max_requests: int = 1000,
        max_queue_tokens: int | None = None,
        instruments: tuple[Instrument, ...] = (),
        num_slots: int = 4,
        calibration: TimedPasses | None = None,
        **backend: Any,
    ) -> None:
        self.faults, self.metrics, self.clock = Faults(), Metrics(), MonotonicClock()
        self.backend = GatedBackend(
            **{
                "num_cells": _MANY_CELLS,
                "num_seq_ids": num_slots + 3,
                "fail": self.faults.of_pass,
                "fail_row": self.faults.of_row,
                **backend,
            }
        )
        limits = make_limits(self.backend, num_slots=num_slots)
        self.scheduler = make_scheduler(limits, resolve_strategy("paced"), self.clock, (self.metrics, *instruments))
        self.inbox = Inbox(max_requests, max_queue_tokens)
        self.router = OutputRouter(self.inbox)
        engine = Engine(self.inbox, self.scheduler, Executor(self.backend, self.clock), calibration)
        self.runner = Runner(
            engine, self.inbox, self.router, Pulse(self.clock), self.backend.abort, (self.backend.close,)
        )

    def request(self, prompt: str | list[int] = "hello", **options: Any) -> Request:
        return make_request(self.backend, self.clock, self.inbox.next_key(), prompt, **options)

    def submit(self, prompt: str | list[int] = "hello", **options: Any) -> StreamChannel:
        return self.router.submit(self.request(prompt, **options), 0)

    def embed(self, *texts: str, **options: Any) -> Future[list[Any]]:
        request = EmbeddingRequest(
            key=self.inbox.next_key(),
            texts=[self.backend.encode(text) for text in texts],
            pooling=None,
            options=RequestOptions(**options),
            submitted_s=self.clock.now(),
        )
        return self.router.submit_embedding(request)

    def hold(self) -> None:
        self.backend.hold()

    def wait_for_pass(self) -> None:
        self.backend.wait_for_pass()

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        self.runner.close(drain=drain, timeout_s=timeout_s)
        assert not self.runner.is_alive

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.backend.gate.set()
        self.close()


def in_threads(*functions: Any) -> None:
    """Run the calls at the same time, each in a thread, and raise an exception of theirs."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Any) -> None:
        start.wait(LONG_S)
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive(), _stack_of(thread)
    if errors:
        raise errors[0]


def _stack_of(thread: threading.Thread) -> str:
    """Return the stack of a hanging thread, and of the engines' threads that it may wait for."""
    frames = sys._current_frames()
    waits = [entry for entry in threading.enumerate() if entry is thread or entry.name.startswith("paceline-engine")]
    return "\n".join(
        f"{wait.name}:\n" + "".join(traceback.format_stack(frames[wait.ident]))
        for wait in waits
        if wait.ident in frames
    )
