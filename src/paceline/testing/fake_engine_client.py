"""An `EngineClient` on the fake backend, in this process or with a worker process, for tests of code that holds a client."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.arguments import EngineArguments
from paceline.engine.engine_factory import Parts
from paceline.engine.in_process_engine import InProcessEngine
from paceline.engine.worker.supervisor import RestartLimits
from paceline.engine.worker.worker_engine import FrontModel, Trial, WorkerEngine
from paceline.observability.metrics import Instrument
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.sequence import Limits
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
        limits = limits_of(fake, fake.memory.num_seq_ids)
        parts = Parts(
            backend=fake,
            limits=dataclasses.replace(limits, max_draft=config.max_draft, min_draft=config.min_draft),
            model=SimpleNamespace(
                metadata={}, chat_templates={}, modalities=frozenset({"text"}), tokenizer=FakeTokenizer()
            ),
            adapters=tuple(sorted(fake.adapters)),
            fingerprint=b"fake",
            at_end=(fake.close,),
        )
        arguments = EngineArguments(config=config, model={}, context={}, lora=(), instruments=instruments)
        self._begin(arguments, lambda _: parts)


DEFAULT_BACKEND = "paceline.testing.fake_engine_client:make_backend"


class FakeFrontModel(FrontModel):
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
