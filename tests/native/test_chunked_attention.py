"""Attention by chunks (Llama 4): a window that begins anew every 8,192 tokens and loses nothing in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from tests.exact import EXACT

from paceline.errors import Unsupported
from paceline.runtime import Context, MemoryClass, Model
from paceline.testing.models import LlamaSpec, write_model
from paceline.testing.models.gguf_parts import Value

pytestmark = pytest.mark.native

CHUNK = 8192  # llama.cpp's, whatever a file says


@dataclass(frozen=True, kw_only=True)
class Llama4Spec(LlamaSpec):
    """Llama 4 without layers of experts, which its files name all the same; three of four layers see their chunk alone."""

    architecture: ClassVar[str] = "llama4"
    n_layer: int = 4
    n_embd: int = 32
    n_head: int = 2
    n_head_kv: int = 1
    n_ff: int = 32
    n_ctx_train: int = 4 * CHUNK

    def metadata(self) -> dict[str, Value]:
        values: dict[str, Value] = {
            "expert_count": 2,
            "expert_used_count": 1,
            "expert_feed_forward_length": self.n_ff,
            "interleave_moe_layer_step": 0,
        }
        return super().metadata() | self.prefixed(values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = write_model(tmp_path_factory.mktemp("llama4") / "llama4.gguf", Llama4Spec())
    with Model.load(path) as found:
        assert (found.memory_class, found.n_swa) == (MemoryClass.SLIDING_WINDOW, CHUNK)
        yield found


def ids(count: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 250, count).tolist()
    return found


def decode(context: Context, tokens: list[int]) -> np.ndarray:
    for start in range(0, len(tokens), 512):
        context.decode(tokens[start : start + 512])
    return context.logits((len(tokens) - 1) % 512)


def test_a_sequence_goes_back_within_its_chunk_as_if_it_had_never_gone_on(model: Model) -> None:
    """After the first chunk, too: the logits equal those of a sequence that was computed that way; no further back than that."""
    beginning, other = ids(CHUNK + 30, 1), ids(10, 3)
    with Context(model, n_ctx=CHUNK + 2048, n_batch=512, n_seq_max=1, **EXACT) as context:
        decode(context, [*beginning, *ids(1200, 2)])
        assert 31 < context.positions(0).first <= CHUNK  # type: ignore[union-attr]  # cells of the first chunk were reused
        context.remove(0, CHUNK + 30)
        found = decode(context, other)
        context.remove(0, CHUNK)  # the first position of the chunk
        with pytest.raises(Unsupported, match="window"):
            context.remove(0, CHUNK - 1)
        context.clear()
        expected = decode(context, [*beginning, *other])
    assert np.allclose(found, expected, atol=1e-3)
