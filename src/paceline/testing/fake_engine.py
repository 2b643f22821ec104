"""An engine on the fake backend that a test ticks by hand: no model, no thread, no real time.

The scheduler, the executor and the streams are real; only the backend and the clock are fakes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from paceline import validation
from paceline.engine.adapters import AdapterRegistry
from paceline.engine.arguments import StreamKeywords, request_arguments
from paceline.engine.backend import Executor
from paceline.engine.core import Engine
from paceline.engine.inbox import Inbox
from paceline.engine.output_router import OutputRouter
from paceline.engine.prompts import Prompt, TextRequests
from paceline.keywords import with_keywords
from paceline.observability.metric_table import MetricsSnapshot
from paceline.observability.metrics import Instrument, Instruments, Metrics
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.scheduler import Scheduler
from paceline.scheduling.strategies import BatchStrategy, resolve_strategy
from paceline.streaming import StreamChannel
from paceline.testing.fake_backend import FakeBackend, FakeTokenizer, ManualClock, limits_of

_GREEDY = SamplingParams(temperature=0)


class FakeEngine:
    """Run requests on a `FakeBackend`, one tick at a time, on the calling thread.

    Tokens are bytes and drawn from a hash of the sequence, so the same prompt always gives the same text,
    whatever runs beside it. Every tick ends with a check of the scheduler's invariants and of the metrics.

    Args:
        backend: The backend; None makes a `FakeBackend` on `clock`. Pass the engine's clock to your own backend.
        clock: The engine's clock; None makes a `ManualClock`. Passes advance it by the backend's cost.
        strategy: A batch strategy, or the name of one.
        instruments: Instruments that the engine calls.
        num_slots: Sequences that run at once.
        max_queue: Requests that may be open beyond one for each slot.
        n_batch: Most tokens of a tick.
        chunk_size: Most prompt tokens of one sequence in a tick.
        itl_target_ms: Inter-token latency that the strategy "paced" aims at, on the fake clock.
        host_cache_bytes: Most that offloaded prefixes may take.

    Example:
        >>> engine = FakeEngine()
        >>> stream = engine.submit("hello", max_tokens=3, ignore_eos=True)
        >>> engine.run()
        >>> stream.finish_reason.value
        'length'
    """

    def __init__(  # noqa: PLR0913 - an engine's options
        self,
        *,
        backend: FakeBackend | None = None,
        clock: ManualClock | None = None,
        strategy: str | BatchStrategy = "paced",
        instruments: Sequence[Instrument] = (),
        num_slots: int = 4,
        max_queue: int = 256,
        n_batch: int = 64,
        chunk_size: int = 32,
        itl_target_ms: float = 50.0,
        host_cache_bytes: int = 16_000,
    ) -> None:
        validation.integer("num_slots", num_slots, 1)
        self.clock = ManualClock() if clock is None else clock
        self.backend = FakeBackend(clock=self.clock, num_seq_ids=num_slots + 3) if backend is None else backend
        limits = dataclasses.replace(
            limits_of(self.backend, self.backend.memory.num_seq_ids),
            num_slots=num_slots,
            n_batch=validation.integer("n_batch", n_batch, 1),
            n_ubatch=n_batch,
            chunk_size=validation.integer("chunk_size", chunk_size, 1),
            itl_target_s=validation.number("itl_target_ms", itl_target_ms, above=0) / 1000,
            max_tick_s=1.0,
            host_bytes=validation.integer("host_cache_bytes", host_cache_bytes, 0),
        )
        self._metrics = Metrics(num_slots)
        watching = Instruments(instruments, own=self._metrics)
        self._scheduler = Scheduler(limits, resolve_strategy(strategy), self.clock, watching)
        self._inbox = Inbox(num_slots + validation.integer("max_queue", max_queue, 0))
        self._router = OutputRouter(self._inbox)
        self._engine = Engine(self._inbox, self._scheduler, Executor(self.backend, self.clock))
        self._requests = TextRequests(
            tokenizer=FakeTokenizer(),
            vocabulary=self.backend.vocabulary,
            limits=limits,
            shares=True,
            adapters=AdapterRegistry(sorted(self.backend.adapters)),
            next_key=self._inbox.next_key,
            make_samplers=self.backend.make_samplers,
            clock=self.clock,
        )

    @with_keywords(SamplingParams, RequestOptions)
    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[StreamKeywords]
    ) -> StreamChannel:
        """Submit a request; it starts with the next tick.

        Args:
            prompt: Text, whose bytes are its tokens, or token ids.
            params: Sampling parameters; greedy if None.
            **options: Fields of `SamplingParams` and `RequestOptions`.

        Returns:
            The request's channel. Read it with `get(timeout_s=0)`; after `run` also with a loop. A channel that is dropped
            cancels its request.

        Raises:
            RequestError: The request is wrong, as with `LLM.stream`.
            QueueFull: As many requests are open as may be.
        """
        sampling, rest = request_arguments(_GREEDY, params, options)
        return self._router.submit(self._requests.prepare(prompt, sampling, rest), 0)

    def tick(self) -> None:
        """Run one tick and deliver its chunks.

        Raises:
            AssertionError: An invariant of the engine is broken.
        """
        self._router.deliver(self._engine.tick())
        self._scheduler.check()
        self._metrics.check()

    def run(self, max_ticks: int = 10_000) -> None:
        """Tick until nothing is left to do.

        A request that is paused by a slow reader, or that waits for a deadline, is nothing to do: read its channel or
        advance the clock, and call `run` again.

        Raises:
            AssertionError: There is still work after `max_ticks`, or an invariant is broken.
        """
        for _ in range(max_ticks):
            self.tick()
            if self._engine.is_idle:
                return
        raise AssertionError(f"the engine still has work after {max_ticks} ticks; is a strategy starving a request?")

    def stats(self) -> MetricsSnapshot:
        """Return all metrics so far, as `LLM.stats` does."""
        return self._metrics.snapshot()
