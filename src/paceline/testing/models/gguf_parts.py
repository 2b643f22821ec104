"""GGUF files of random models: metadata values, tensors, vocabularies, the shared parts of specs, and writers.

Plain Python values have an obvious type, `Typed` is for the others. A tensor has a name, a shape, and the normal distribution
that its values come from. Shapes are NumPy's, outermost first: a matrix of a linear layer is (out, in). GGUF lists them the
other way round.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from paceline.runtime.matmul import dequantise, quantise

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter


@dataclass(frozen=True, slots=True)
class Typed:
    """A value with its GGUF type by name (`"INT64"`, `"FLOAT64"`, `"ARRAY"`); `of` is the type of an array's items."""

    value: Any
    type: str
    of: str | None = None


Value = (
    bool
    | int
    | float
    | str
    | Sequence[bool]
    | Sequence[int]
    | Sequence[float]
    | Sequence[str]
    | Sequence[bytes]
    | Typed
)
Metadata = Mapping[str, Value]
"""Plain values become BOOL, UINT32, FLOAT32, STRING, and arrays of BOOL, INT32, FLOAT32, STRING."""


def add_metadata(writer: GGUFWriter, metadata: Mapping[str, Value | None]) -> None:
    """Add every value to the writer; None stands for a key that is left out."""
    for key, value in metadata.items():
        if value is not None:
            typed = value if isinstance(value, Typed) else _typed(value)
            writer.add_key_value(key, typed.value, *_types(typed))


def every_value_type() -> dict[str, Value]:
    """One key for every type of value that GGUF knows, named `test.<type>`: extremes, Unicode, an empty string."""
    scalars = {
        "UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768, "UINT32": 4294967295, "INT32": -2147483648,
        "UINT64": 18446744073709551615, "INT64": -9223372036854775808, "FLOAT32": 0.5, "FLOAT64": 1e-300, "BOOL": True,
        "STRING": "naïve ☃ 🎈",
    }  # fmt: skip
    values: dict[str, Value] = {f"test.{name.lower()}": Typed(value, name) for name, value in scalars.items()}
    values["test.empty_string"] = Typed("", "STRING")
    values["test.array_string"] = Typed(["a", "", "ü"], "ARRAY", "STRING")
    values["test.array_int32"] = Typed([1, -2, 3], "ARRAY", "INT32")
    values["test.array_float32"] = Typed([0.5, 1.5], "ARRAY", "FLOAT32")
    values["test.array_bool"] = Typed([True, False], "ARRAY", "BOOL")
    return values


def _typed(value: Any) -> Typed:
    match value:
        case bool():
            return Typed(value, "BOOL")
        case int():
            return Typed(value, "UINT32")
        case float():
            return Typed(value, "FLOAT32")
        case str():
            return Typed(value, "STRING")
    return Typed(value, "ARRAY", _item_type(value[0]))


def _item_type(item: Any) -> str:
    match item:
        case bool():
            return "BOOL"
        case int():
            return "INT32"
        case float():
            return "FLOAT32"
    return "STRING"


def _types(typed: Typed) -> tuple[GGUFValueType, GGUFValueType | None]:
    from gguf import GGUFValueType

    return GGUFValueType[typed.type], GGUFValueType[typed.of] if typed.of else None


WeightType = Literal["F32", "F16", "Q8_0"]
StoredType = Literal["F32", "F16", "Q8_0", "I64"]

_BLOCK = 32  # values of a Q8_0 block, stored as one float16 scale and 32 signed bytes
_BYTE_SPREAD = 73.9  # standard deviation of a uniform signed byte


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be: `centre + spread * normal`, rows in `quiet_rows` a hundred times smaller than the others.

    diagonal: is added to the diagonal of a matrix, which then passes its input on. integers: the values themselves, for a
    table of 64-bit integers.

    Only a `matrix` is ever stored in less than 32 bits; llama.cpp wants other tensors (norms, biases, convolutions)
    as F32.
    """

    name: str
    shape: tuple[int, ...]
    spread: float
    centre: float = 0.0
    matrix: bool = False
    quiet_rows: tuple[int, ...] = ()
    diagonal: float = 0.0
    integers: tuple[int, ...] = ()

    def stored_type(self, wanted: WeightType) -> StoredType:
        """Return the type this tensor is stored in, in a model of weights `wanted`."""
        if self.integers:
            return "I64"
        if not self.matrix or self.diagonal or (wanted == "Q8_0" and self.shape[-1] % _BLOCK):
            return "F32"
        return wanted


def matrix(
    name: str, *shape: int, gain: float = 1.0, quiet_rows: tuple[int, ...] = (), diagonal: float = 0.0
) -> Tensor:
    """Return a linear layer (out, in) or a stack of them; `gain` is the spread of its output for input of spread 1."""
    return Tensor(name, shape, gain / shape[-1] ** 0.5, matrix=True, quiet_rows=quiet_rows, diagonal=diagonal)


def norm(name: str, size: int, *, scale: float = 1.0) -> Tensor:
    """Return the scale of a normalisation, about `scale`."""
    return Tensor(name, (size,), 0.05, centre=scale)


def bias(name: str, size: int, *, spread: float = 0.1, centre: float = 0.0) -> Tensor:
    """Return a bias, or any other vector around `centre`."""
    return Tensor(name, (size,), spread, centre)


def biased(name: str, n_out: int, n_in: int, *, gain: float = 1.0) -> Iterator[Tensor]:
    """Yield the matrix and the bias of a linear layer."""
    yield matrix(f"{name}.weight", n_out, n_in, gain=gain)
    yield bias(f"{name}.bias", n_out)


def layer_norm(name: str, size: int) -> Iterator[Tensor]:
    """Yield the scale and the bias of a normalisation."""
    yield norm(f"{name}.weight", size)
    yield bias(f"{name}.bias", size)


def fill(tensor: Tensor, seed: int, stored: StoredType) -> npt.NDArray[np.generic]:
    """Return the values of a tensor, a pure function of its name and `seed` (not of the order tensors are written in).

    Q8_0 comes as the bytes of its blocks: shape (..., bytes of a row), dtype uint8.
    """
    if tensor.integers:
        return np.array(tensor.integers, np.int64)
    random = np.random.Generator(np.random.PCG64([seed, zlib.crc32(tensor.name.encode())]))
    if stored == "Q8_0":
        return _blocks(tensor, random)
    values = random.standard_normal(tensor.shape, dtype=np.float32)
    values *= tensor.spread
    values += tensor.centre
    if tensor.diagonal:
        values += tensor.diagonal * np.eye(*tensor.shape, dtype=np.float32)
    values[list(tensor.quiet_rows)] *= 0.01
    return values.astype(np.float16) if stored == "F16" else values


def gguf_type(stored: StoredType) -> GGMLQuantizationType:
    """Return the constant of the package `gguf` for a stored type."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[stored]


def _blocks(tensor: Tensor, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random Q8_0 blocks made directly: half a billion values take seconds, quantising floats would take minutes."""
    *outer, inner = tensor.shape
    count = int(np.prod(outer)) * (inner // _BLOCK)
    blocks = (
        np.frombuffer(random.bytes(count * (_BLOCK + 2)), np.uint8).reshape(*outer, inner // _BLOCK, _BLOCK + 2).copy()
    )
    scale = np.float16(tensor.spread / _BYTE_SPREAD)
    blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    if tensor.quiet_rows:
        blocks[list(tensor.quiet_rows), :, :2] = np.frombuffer(np.float16(scale / 100).tobytes(), np.uint8)
    return blocks.reshape(*outer, -1)


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # token types of GGUF

SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_PAIRS = ("t h", "h e", "th e", "i n", "e r", "a n", "r e", "o n", "an d", "in g", "Ġ a", "Ġ t", "Ġ the", "Ġt h", "Ġ w",
          "Ġ s", "o u", "Ġ b", "i t", "i s", "e n", "Ġ o", "o r", "a t", "Ġ i", "Ġ m", "l l", "Ġ and", "e d", "o w",
          "Ġ Ġ", "ĠĠ ĠĠ", "h el", "e l", "hel l", "hell o")  # fmt: skip


@dataclass(frozen=True, eq=False)
class SpecVocabulary:
    """The number of tokens, the control tokens among them, and the `tokenizer.*` metadata.

    Each source returns the same object every time, so specs with it can be compared and used as keys.
    """

    size: int
    control: tuple[int, ...]
    metadata: tuple[tuple[str, Value], ...]


@lru_cache
def byte_level() -> SpecVocabulary:
    """Return byte-level BPE of 299 tokens: id b < 256 is the byte b, then merges of common English pairs, then `SPECIALS`.

    Begins a sequence with `<|bos|>`, ends it with `<|eos|>` or `<|im_end|>`, has tokens to fill in the middle.
    """
    pairs = [pair.split() for pair in _PAIRS]
    tokens = [_visible(byte) for byte in range(256)] + [left + right for left, right in pairs] + list(SPECIALS)
    first = 256 + len(pairs)
    types = [_NORMAL] * first + [_CONTROL] * len(SPECIALS)
    ids = {text: first + place for place, text in enumerate(SPECIALS)}
    metadata: dict[str, Value] = {
        **_bpe(tokens, types, merges=list(_PAIRS)),
        "tokenizer.ggml.bos_token_id": ids["<|bos|>"],
        "tokenizer.ggml.eos_token_id": ids["<|eos|>"],
        "tokenizer.ggml.add_bos_token": True,
    }
    return SpecVocabulary(len(tokens), tuple(ids.values()), tuple(metadata.items()))


@lru_cache
def numbered(size: int = 300) -> SpecVocabulary:
    """Return tokens with their id as text: `<0>`, `<1>`, ... Joined text splits into ids again in exactly one way.

    The last token ends a sequence. Nothing is added before a prompt, and `"<7><12>"` is a prompt of two tokens.
    """
    tokens = [f"<{token}>" for token in range(size)]
    types = [_USER_DEFINED] * (size - 1) + [_CONTROL]
    metadata: dict[str, Value] = {
        **_bpe(tokens, types, merges=["< >"]),
        "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    return SpecVocabulary(size, (size - 1,), tuple(metadata.items()))


@lru_cache
def word_pieces() -> SpecVocabulary:
    """Return WordPiece as in BERT, lower case: letters, digits and punctuation, and some words."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = [
        "the",
        "a",
        "of",
        "and",
        "to",
        "in",
        "is",
        "was",
        "cat",
        "dog",
        "house",
        "river",
        "blue",
        "red",
        "small",
        "big",
    ]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    control = tuple(range(len(tokens)))
    tokens += ["▁" + text for text in (*letters, *"!\"#$%&'()*+,-./:;<=>?@", *words) if len(text) > 1 or text != "a"]
    tokens += ["▁" + "a", *letters, "ing", "ed", "er", "s" + "t", "th", "he", "ly"]
    tokens = list(dict.fromkeys(tokens))
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL] * len(control) + [_NORMAL] * (len(tokens) - len(control)),
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }
    return SpecVocabulary(len(tokens), control, tuple(metadata.items()))


@lru_cache
def copied(path: str | Path) -> SpecVocabulary:
    """Return the vocabulary of another GGUF file, like the `ggml-vocab-*.gguf` that the llama.cpp source tree carries."""
    from paceline.runtime.gguf_file import read_gguf

    found = {key.decode(): value for key, value in read_gguf(path).metadata.items() if key.startswith(b"tokenizer.")}
    metadata = tuple(
        (key, Typed(value.value, value.type.name, None if value.item_type is None else value.item_type.name))
        for key, value in found.items()
    )
    types = found["tokenizer.ggml.token_type"].value if "tokenizer.ggml.token_type" in found else []
    control = tuple(token for token, kind in enumerate(types) if kind == _CONTROL)
    return SpecVocabulary(len(found["tokenizer.ggml.tokens"].value), control, metadata)


def _bpe(tokens: list[str], types: list[int], *, merges: list[str]) -> dict[str, Value]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


def _visible(byte: int) -> str:
    """Return the character that stands for a byte in a byte-level vocabulary: itself if it prints, else one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in printable].index(byte))


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
    n_heads: int = 0  # draft heads, layers after the others
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 128
    n_ctx_train: int = 1024
    pooling: Pooling | None = None
    vocabulary: SpecVocabulary = field(default_factory=byte_level)

    architecture: ClassVar[str]
    has_rms_norms: ClassVar[bool] = True

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.n_embd // self.n_head

    def own_metadata(self) -> dict[str, Value]:
        """Return the metadata that this architecture has beside the sizes, without its prefix."""
        return {}

    def metadata(self) -> dict[str, Value]:
        """Return the metadata of the file, without the vocabulary's."""
        values: dict[str, Value] = {
            "context_length": self.n_ctx_train,
            "embedding_length": self.n_embd,
            "block_count": self.n_layer + self.n_heads,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.layer_norm_rms_epsilon" if self.has_rms_norms else "attention.layer_norm_epsilon": 1e-5,
            "vocab_size": self.vocabulary.size,
        }
        if self.pooling is not None:
            values["pooling_type"] = POOLING_TYPES[self.pooling]
        return self.prefixed(values | self.own_metadata())

    def prefixed(self, values: dict[str, Value]) -> dict[str, Value]:
        """Return the values under keys of this architecture."""
        return {f"{self.architecture}.{key}": value for key, value in values.items()}

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor, in the order of the file."""
        yield from self.head()
        for layer in range(self.n_layer + self.n_heads):
            yield from self.block(f"blk.{layer}", layer)

    def head(self) -> Iterator[Tensor]:
        """Yield the tensors that are of no layer."""
        return head(self)

    def block(self, block: str, layer: int) -> Iterator[Tensor]:
        """Yield the tensors of a layer, which have names that begin with `block`; the draft heads are the last layers."""
        raise NotImplementedError


def head(size: Sizes, *, gain: float = 1.0, tied: bool = False) -> Iterator[Tensor]:
    """Yield embeddings, the last norm, and the output layer unless the embeddings are tied to it.

    As an output layer tied embeddings make logits of spread sqrt(n_embd): far too sharp, so they are smaller.
    """
    yield embedding(size, gain=3.0 / size.n_embd**0.5 if tied else gain)
    yield norm("output_norm.weight", size.n_embd)
    if not tied:
        yield output(size)


def embedding(size: Sizes, *, gain: float = 1.0) -> Tensor:
    """Token embeddings with values of the spread `gain`; the embeddings of control tokens are nearly zero."""
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
    """Norms of query and key; large norms for the queries, else attention would look at everything equally."""
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


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A ChatML template; use it as `metadata={"tokenizer.chat_template": CHAT_TEMPLATE}`."""

_FILE_TYPES: dict[WeightType, int] = {"F32": 0, "F16": 1, "Q8_0": 7}  # llama.cpp's numbers


def write_model(path: str | Path, spec: ModelSpec, *, seed: int = 0, weights: WeightType = "F32",
                metadata: Mapping[str, Value | None] | None = None) -> Path:  # fmt: skip
    """Write a random model: the same arguments give the same bytes.

    `metadata` adds keys, replaces keys of the spec, or leaves them out (None). Needs the package `gguf`.
    """
    return _write(Path(path), spec, seed, weights, metadata or {})[0]


def write_split_model(path: str | Path, spec: ModelSpec, *, parts: int = 3, seed: int = 0, weights: WeightType = "F32",
                      metadata: Mapping[str, Value | None] | None = None) -> list[Path]:  # fmt: skip
    """Write the same model as `parts` files, `tiny.gguf` as `tiny-00001-of-00003.gguf` and so on; return their paths."""
    count = len(list(spec.tensors()))
    per_part = math.ceil(count / parts)
    if parts < 2 or math.ceil(count / per_part) != parts:
        raise ValueError(
            f"{count} tensors cannot be split evenly into {parts} parts of at least one: pass 2 to {count // 2} parts"
        )
    return _write(Path(path), spec, seed, weights, metadata or {}, per_part)


def write_lora(
    path: str | Path,
    spec: ModelSpec,
    *,
    rank: int = 4,
    seed: int = 1,
    targets: tuple[str, ...] = ("attn_q", "attn_v", "ffn_down"),
    metadata: Mapping[str, Value | None] | None = None,
) -> Path:
    """Write an adapter that changes the matrices `targets` of every layer, enough to change the generated text.

    Its alpha is twice its rank; `metadata` adds keys, replaces them or leaves them out (None).
    """
    from gguf import GGUFWriter

    path = Path(path)
    changed = [tensor for tensor in spec.tensors() if len(tensor.shape) == 2 and tensor.name.split(".")[-2] in targets]
    if not changed:
        raise ValueError(f"targets {targets} name no matrix of a {spec.architecture} model")
    writer = GGUFWriter(path, spec.architecture)
    facts: dict[str, Value | None] = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 2.0 * rank,
    }
    add_metadata(writer, facts | dict(metadata or {}))
    for tensor in changed:
        for half in _halves(tensor, rank):
            writer.add_tensor(half.name, fill(half, seed, "F32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write(path: Path, spec: ModelSpec, seed: int, weights: WeightType, metadata: Mapping[str, Value | None],
           tensors_per_part: int = 0) -> list[Path]:  # fmt: skip
    from gguf import GGUFWriter

    tensors = list(spec.tensors())
    writer = GGUFWriter(path, spec.architecture, split_max_tensors=tensors_per_part)
    general: dict[str, Value | None] = {
        "general.name": f"tiny random {spec.architecture}",
        "general.file_type": _FILE_TYPES[weights],
    }
    add_metadata(writer, general | spec.metadata() | dict(spec.vocabulary.metadata) | dict(metadata))
    for tensor in tensors:
        _announce(writer, tensor, weights)
    paths = writer.format_shard_names(path)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:  # one at a time: a large model needs the memory of its largest tensor only
            writer.write_tensor_data(fill(tensor, seed, tensor.stored_type(weights)))
    finally:
        writer.close()
    return paths


def _announce(writer: GGUFWriter, tensor: Tensor, weights: WeightType) -> None:
    from gguf import GGML_QUANT_SIZES

    stored = tensor.stored_type(weights)
    values, size = GGML_QUANT_SIZES[gguf_type(stored)]
    n_bytes = math.prod(tensor.shape) // values * size
    writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes, raw_dtype=gguf_type(stored))


def _halves(tensor: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    n_out, n_in = tensor.shape
    return (
        Tensor(f"{tensor.name}.lora_a", (rank, n_in), n_in**-0.5),
        Tensor(f"{tensor.name}.lora_b", (n_out, rank), rank**-0.5),
    )


def write_requantised(path: str | Path, source: str | Path, type_name: str) -> Path:
    """Write a model again with its Q8_0 matrices as another type, like "Q4_K"; return the path.

    Matrices with columns of no whole blocks of that type stay Q8_0. Needs the package `gguf`.
    """
    import gguf

    reader, wanted = gguf.GGUFReader(source), gguf.GGMLQuantizationType[type_name]
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for entry in reader.fields.values():
        if not entry.name.startswith("GGUF.") and entry.name != "general.architecture":
            kind = entry.types[0]
            writer.add_key_value(entry.name, entry.contents(), kind, entry.types[-1] if len(entry.types) > 1 else None)
    block_columns = gguf.GGML_QUANT_SIZES[wanted][0]
    for tensor in reader.tensors:
        data, kept = np.ascontiguousarray(tensor.data), tensor.tensor_type
        if kept.name == "Q8_0" and int(tensor.shape[0]) % block_columns == 0:
            data, kept = quantise(type_name.lower().replace("_k", "_K"), dequantise("q8_0", data)), wanted
        writer.add_tensor(tensor.name, data, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
