"""What a random tensor looks like: a name, a shape, and the normal distribution its values come from.

Shapes are NumPy's, outermost first: a matrix of a linear layer is (out, in). GGUF lists them the other way round.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

WeightType = Literal["F32", "F16", "Q8_0"]

_BLOCK = 32  # values of a Q8_0 block, stored as one float16 scale and 32 signed bytes
_BYTE_SPREAD = 73.9  # standard deviation of a uniform signed byte


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be: `centre + spread * normal`, rows in `quiet_rows` a hundred times smaller than the others.

    Only a `matrix` is ever stored in less than 32 bits; what is no matrix (norms, biases, convolutions) llama.cpp wants
    as F32.
    """

    name: str
    shape: tuple[int, ...]
    spread: float
    centre: float = 0.0
    matrix: bool = False
    quiet_rows: tuple[int, ...] = ()

    def stored_type(self, wanted: WeightType) -> WeightType:
        """Return the type this tensor is stored in, in a model of weights `wanted`."""
        if not self.matrix or (wanted == "Q8_0" and self.shape[-1] % _BLOCK):
            return "F32"
        return wanted


def matrix(name: str, *shape: int, gain: float = 1.0, quiet_rows: tuple[int, ...] = ()) -> Tensor:
    """Return a linear layer (out, in) or a stack of them; `gain` is the spread of its output for input of spread 1."""
    return Tensor(name, shape, gain / shape[-1] ** 0.5, matrix=True, quiet_rows=quiet_rows)


def norm(name: str, size: int, *, scale: float = 1.0) -> Tensor:
    """Return the scale of a normalisation, about `scale`."""
    return Tensor(name, (size,), 0.05, centre=scale)


def bias(name: str, size: int, *, spread: float = 0.1, centre: float = 0.0) -> Tensor:
    """Return a bias, or any other vector around `centre`."""
    return Tensor(name, (size,), spread, centre)


def fill(tensor: Tensor, seed: int, stored: WeightType) -> npt.NDArray[np.generic]:
    """Return the values of a tensor, a pure function of its name and `seed` (not of the order tensors are written in).

    Q8_0 comes as the bytes of its blocks: shape (..., bytes of a row), dtype uint8.
    """
    random = np.random.Generator(np.random.PCG64([seed, zlib.crc32(tensor.name.encode())]))
    if stored == "Q8_0":
        return _blocks(tensor, random)
    values = random.standard_normal(tensor.shape, dtype=np.float32)
    values *= tensor.spread
    values += tensor.centre
    values[list(tensor.quiet_rows)] *= 0.01
    return values.astype(np.float16) if stored == "F16" else values


def gguf_type(stored: WeightType) -> GGMLQuantizationType:
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
