"""An `EngineClient` on the fake backend, in this process or with a worker process, for tests of code that holds a client."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from paceline.clock import MonotonicClock
from paceline.config import EngineConfig
from paceline.engine.adapters import AdapterRegistry
from paceline.engine.backend import Executor
from paceline.engine.core import Engine
from paceline.engine.engine_thread import Runner
from paceline.engine.in_process_engine import InProcessEngine
from paceline.engine.inbox import Inbox
from paceline.engine.output_router import OutputRouter
from paceline.engine.prompts import TextRequests
from paceline.engine.questions import Resources
from paceline.engine.saved_prefixes import StateFiles
from paceline.engine.worker.supervisor import RestartLimits
from paceline.engine.worker.worker_engine import Trial, WorkerEngine
from paceline.observability.heartbeat import Pulse
from paceline.observability.metrics import Instrument, Instruments, Metrics
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.scheduling.scheduler import Scheduler
from paceline.scheduling.strategies import resolve_strategy
from paceline.sequence import Limits
from paceline.speculation.drafters.heads import attach_heads
from paceline.speculation.named_drafter import resolve_drafter
from paceline.testing.fake_backend import FakeBackend, FakeTokenizer, limits_of


class FakeEngineClient(InProcessEngine):
    """An engine in this process whose thread runs a `FakeBackend`: everything but the model is real.

    Tokens are bytes, and the same prompt always gives the same text. It has no `Model`: routes of the server that show facts of
    a model, or render chats, need an engine with a model.

    Args:
        backend: The backend; None makes a `FakeBackend`.
        config: Options, of which queue, strategy, speculation, cache_prompt and state folder are used; num_slots follows from
            the backend.
        instruments: Instruments that the engine calls.

    Example:
        >>> engine = FakeEngineClient()
        >>> request = engine.prepare("hello", SamplingParams(max_tokens=3, ignore_eos=True), RequestOptions())
        >>> sum(len(chunk.token_ids) for chunk in engine.accept(request))
        3
        >>> engine.close()
    """

    def __init__(
        self,
        *,
        backend: FakeBackend | None = None,
        config: EngineConfig | None = None,
        instruments: Sequence[Instrument] = (),
    ) -> None:
        fake: Any = FakeBackend() if backend is None else backend
        config = EngineConfig() if config is None else config
        drafter = resolve_drafter(config.speculation)
        attach_heads(drafter, fake)
        limits = limits_of(fake, fake.memory.num_seq_ids)
        self.limits = dataclasses.replace(limits, max_draft=config.max_draft, min_draft=config.min_draft)
        self.config = config = dataclasses.replace(config, num_slots=self.limits.num_slots)
        self.metrics = Metrics(self.limits.num_slots)
        self.model: Any = SimpleNamespace(metadata={}, chat_templates={}, modalities=frozenset({"text"}))
        self.tokenizer: Any = FakeTokenizer()
        self.sampling_defaults = SamplingParams()
        self._clock, self._backend = MonotonicClock(), fake
        self._inbox = Inbox(self.limits.num_slots + config.max_queue, config.max_queue_tokens)
        self._router = OutputRouter(self._inbox)
        self._adapters = AdapterRegistry(sorted(fake.adapters))
        self._inbox.has_adapter = self._adapters.has_key
        self._text_requests = TextRequests(
            tokenizer=self.tokenizer,
            vocabulary=fake.vocabulary,
            limits=self.limits,
            shares=config.cache_prompt,
            adapters=self._adapters,
            next_key=self._inbox.next_key,
            make_samplers=fake.make_samplers,
            clock=self._clock,
        )
        self._resources = Resources(
            backend=fake,
            ask=self._router.ask,
            next_key=self._inbox.next_key,
            files=StateFiles(config.state_folder, b"fake"),
        )
        sink = Instruments(instruments, own=self.metrics)
        scheduler = Scheduler(self.limits, resolve_strategy(config.strategy), self._clock, sink, drafter)
        engine = Engine(self._inbox, scheduler, Executor(fake, self._clock))
        self._runner = Runner(engine, self._inbox, self._router, Pulse(self._clock), fake.abort, (fake.close,))
        self._thread = self._runner
        self._runner.end_when_lost(self)


DEFAULT_BACKEND = "paceline.testing.fake_engine_client:make_backend"


class FakeFrontModel:
    """The fake backend's model, as the front process knows it."""

    def __init__(self) -> None:
        self._backend = FakeBackend()
        self.model: Any = None
        self.tokenizer = FakeTokenizer()
        self.vocabulary: Vocabulary = self._backend.vocabulary
        self.sampling_defaults = SamplingParams()

    def check(self, params: SamplingParams) -> None:
        self._backend.make_samplers(params, [])

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Do nothing: there are no facts."""

    def close(self) -> None:
        """Do nothing: there is no memory."""


def make_backend(options: Mapping[str, Any]) -> tuple[FakeBackend, Limits]:
    """Make, in the worker, a backend with these options of `FakeBackend`, and its limits."""
    backend = FakeBackend(**options)
    return backend, limits_of(backend, options.get("num_seq_ids", 8))


def fake_worker_engine(
    *,
    backend: str = DEFAULT_BACKEND,
    backend_options: Mapping[str, Any] | None = None,
    restarts: RestartLimits | None = None,
    **options: Any,
) -> WorkerEngine:
    """Make an engine with a worker process on a fake backend.

    backend: names a function of `backend_options` that returns a `FakeBackend` and its limits.
    """
    trial = Trial(
        model=FakeFrontModel(),
        backend=backend,
        backend_options=backend_options or {},
        restarts=restarts or RestartLimits(),
    )
    return WorkerEngine("no-model", {"isolation": "process", **options}, trial)
