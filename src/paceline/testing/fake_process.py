"""An engine in a process of its own that runs the fake backend: for what happens between processes, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.engine.isolation.restarts import RestartLimits
from paceline.engine.process_engine import ProcessEngine, Trial
from paceline.params import SamplingParams
from paceline.scheduling.limits import Limits, Vocabulary
from paceline.testing.fake_backend import BOS, FakeBackend

DEFAULT_BACKEND = "paceline.testing.fake_process:make_backend"
_N_VOCAB = 258


class FakeTokenizer:
    """Bytes are tokens."""

    n_vocab = _N_VOCAB
    bos = BOS

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:  # noqa: ARG002
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:  # noqa: ARG002
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")


class FakeFrontModel:
    """What a front knows of the fake backend's model."""

    def __init__(self) -> None:
        self._backend = FakeBackend()
        self.model: Any = None
        self.tokenizer = FakeTokenizer()
        self.vocabulary: Vocabulary = self._backend.vocabulary
        self.sampling_defaults = SamplingParams()

    def check(self, params: SamplingParams) -> None:
        self._backend.make_samplers(params, [])

    def describe(self, facts: Mapping[str, Any]) -> None:
        """There is nothing to know."""

    def close(self) -> None:
        """There is nothing to give back."""


def make_backend(options: Mapping[str, Any]) -> tuple[FakeBackend, Limits]:
    """In the worker: a backend with these options of `FakeBackend`, and its limits."""
    backend = FakeBackend(**options)
    return backend, limits_of(backend, options.get("num_seq_ids", 8))


def limits_of(backend: FakeBackend, num_seq_ids: int) -> Limits:
    """What a fake backend with so many sequence ids allows; where paths can be kept, half of them are for that."""
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


def fake_process_engine(
    *,
    backend: str = DEFAULT_BACKEND,
    backend_options: Mapping[str, Any] | None = None,
    restarts: RestartLimits | None = None,
    **options: Any,
) -> ProcessEngine:
    """An engine whose worker runs what `backend` names: a function of its options that answers a `FakeBackend` and limits."""
    trial = Trial(
        model=FakeFrontModel(),
        backend=backend,
        backend_options=backend_options or {},
        restarts=restarts or RestartLimits(),
    )
    return ProcessEngine("no-model", {"isolation": "process", **options}, trial)
