"""The parts of a GGUF file: metadata values, and random tensors.

Plain Python values have an obvious type, `Typed` is for the others. A tensor has a name, a shape, and the normal distribution
that its values come from. Shapes are NumPy's, outermost first: a matrix of a linear layer is (out, in). GGUF lists them the
other way round.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

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

    Only a `matrix` is ever stored in less than 32 bits; what is no matrix (norms, biases, convolutions) llama.cpp wants
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
