"""The protocol of model specs, and the parts that most of them share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from paceline.testing.models.gguf_parts import Tensor, Value, bias, matrix, norm
from paceline.testing.models.vocabulary import SpecVocabulary, byte_level

Pooling = Literal["none", "mean", "cls", "last", "rank"]
POOLING_TYPES: dict[Pooling, int] = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}


class ModelSpec(Protocol):
    """An architecture with its sizes: the metadata and tensors of a model file."""

    architecture: ClassVar[str]

    @property
    def vocabulary(self) -> SpecVocabulary:
        """The vocabulary of the model."""

    def metadata(self) -> dict[str, Value]:
        """Return the metadata of the architecture, without the vocabulary's."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor, in the order of the file."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that all kinds share; small enough to write and run in milliseconds."""

    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 128
    n_ctx_train: int = 1024
    pooling: Pooling | None = None
    vocabulary: SpecVocabulary = field(default_factory=byte_level)

    architecture: ClassVar[str]

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.n_embd // self.n_head

    def common_metadata(self, *, rms: bool = True) -> dict[str, Value]:
        """Return the metadata that nearly every architecture has."""
        values: dict[str, Value] = {
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
            "block_count": self.n_layer,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.layer_norm_rms_epsilon" if rms else "attention.layer_norm_epsilon": 1e-5,
            "vocab_size": self.vocabulary.size,
        }
        if self.pooling is not None:
            values["pooling_type"] = POOLING_TYPES[self.pooling]
        return self.prefixed(values)

    def prefixed(self, values: dict[str, Value]) -> dict[str, Value]:
        """Return the values under keys of this architecture."""
        return {f"{self.architecture}.{key}": value for key, value in values.items()}


def embedding(size: Sizes, *, gain: float = 1.0) -> Tensor:
    """Token embeddings whose values have the spread `gain`; those of control tokens are nearly zero."""
    gain = gain * size.n_embd**0.5
    return matrix("token_embd.weight", size.vocabulary.size, size.n_embd, gain=gain, quiet_rows=size.vocabulary.control)


def output(size: Sizes, *, gain: float = 3.0) -> Tensor:
    """Return the output layer: logits of spread `gain`, but near zero for control tokens: a random text seldom ends itself."""
    return matrix("output.weight", size.vocabulary.size, size.n_embd, gain=gain, quiet_rows=size.vocabulary.control)


def attention(
    size: Sizes, block: str, *, head_size: int = 0, biases: bool = False, gain: float = 1.5
) -> Iterator[Tensor]:
    """Query, key, value and output of one attention layer, strong enough that a text depends on all of its past."""
    head_size = head_size or size.head_size
    widths = {
        "attn_q": size.n_head * head_size,
        "attn_k": size.n_head_kv * head_size,
        "attn_v": size.n_head_kv * head_size,
    }
    for name, width in widths.items():
        yield matrix(f"{block}.{name}.weight", width, size.n_embd, gain=gain)
        if biases:
            yield bias(f"{block}.{name}.bias", width)
    yield matrix(f"{block}.attn_output.weight", size.n_embd, size.n_head * head_size, gain=gain)


def query_key_norms(size: Sizes, block: str) -> Iterator[Tensor]:
    """Norms of query and key; large ones for the queries, else attention would look at everything equally."""
    yield norm(f"{block}.attn_q_norm.weight", size.head_size, scale=3.0)
    yield norm(f"{block}.attn_k_norm.weight", size.head_size)


def feed_forward(size: Sizes, block: str, *, gain: float = 1.5) -> Iterator[Tensor]:
    """Gate, up and down of one gated feed-forward layer."""
    yield matrix(f"{block}.ffn_gate.weight", size.n_ff, size.n_embd, gain=gain)
    yield matrix(f"{block}.ffn_up.weight", size.n_ff, size.n_embd, gain=gain)
    yield matrix(f"{block}.ffn_down.weight", size.n_embd, size.n_ff, gain=gain)


def experts(size: Sizes, block: str, n_expert: int, n_ff: int, *, gain: float = 1.5) -> Iterator[Tensor]:
    """Yield a router and the stacked experts of one mixture-of-experts layer."""
    yield matrix(f"{block}.ffn_gate_inp.weight", n_expert, size.n_embd, gain=gain)
    yield matrix(f"{block}.ffn_gate_exps.weight", n_expert, n_ff, size.n_embd, gain=gain)
    yield matrix(f"{block}.ffn_up_exps.weight", n_expert, n_ff, size.n_embd, gain=gain)
    yield matrix(f"{block}.ffn_down_exps.weight", n_expert, size.n_embd, n_ff, gain=gain)


def norms(block: str, size: int, *names: str) -> Iterator[Tensor]:
    """Yield the scales of several normalisations of one block."""
    for name in names:
        yield norm(f"{block}.{name}.weight", size)
