"""A worker engine on the fake backend, for tests of what happens between processes, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from paceline.engine.worker.restarts import RestartLimits
from paceline.engine.worker.worker_engine import Trial, WorkerEngine
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.scheduling.limits import Limits
from paceline.testing.fake_backend import BOS, FakeBackend

DEFAULT_BACKEND = "paceline.testing.fake_process:make_backend"
_N_VOCAB = 258


class FakeTokenizer:
    """A tokenizer whose tokens are bytes."""

    n_vocab = _N_VOCAB
    bos = BOS
    special_tokens: Mapping[str, int] = MappingProxyType({"bos": BOS})

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:  # noqa: ARG002
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:  # noqa: ARG002
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")


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


def limits_of(backend: FakeBackend, num_seq_ids: int) -> Limits:
    """Return the limits of a fake backend; where prefixes can be cached, half of the sequence ids are for them."""
    memory = backend.memory
    num_slots = num_seq_ids // 2 if memory.kind == "attention" else num_seq_ids
    return Limits(
        num_slots=num_slots,
        n_batch=256,
        n_ubatch=256,
        chunk_size=64,
        max_positions=memory.num_cells,
        num_seq_ids=num_seq_ids,
        host_bytes=2**20,
        num_cells=None if memory.kind == "recurrent" else memory.num_cells,
        max_scored=8,
        can_share_part=memory.kind == "attention",
        itl_target_s=0.05,
        max_tick_s=0.2,
        embed_tokens=256,
        embed_texts=8,
    )


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
