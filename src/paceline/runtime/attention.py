"""Attention on a CPU: which kernel computes it, paceline's or llama.cpp's, and a single operation.

paceline's kernel replaces llama.cpp's flash attention (docs/adr/0019). It is not used without flash attention, on a GPU, or
with a KV cache that is quantized or BF16.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from paceline import _native
from paceline.errors import InvalidParams, Unsupported
from paceline.runtime.native_core import build_info

VARIABLE = "PACELINE_CPU_ATTENTION"
Kernel = Literal["paceline", "llama.cpp"]

_MAX_THREADS = 64


def kernel() -> Kernel:
    """Return the kernel that this process uses now. Raises as `use_kernel_of_environment`."""
    use_kernel_of_environment()
    return "paceline" if _native.own_attention() else "llama.cpp"


def use_kernel(wanted: Kernel) -> None:
    """Select the kernel of this process, from the next operation on; at any time, from any thread.

    Raises `InvalidParams` for another name, `Unsupported` if this build lacks paceline's kernel.
    """
    use_kernel_of_environment()
    if wanted not in ("paceline", "llama.cpp"):
        raise InvalidParams(f"kernel must be 'paceline' or 'llama.cpp', not {wanted!r}")
    _native.use_own_attention(wanted == "paceline")


@cache
def use_kernel_of_environment() -> None:
    """Select the kernel that the variable PACELINE_CPU_ATTENTION names, once; do nothing if it is unset or empty.

    Called before the kernel is read and before a context is made. Raises as `use_kernel`.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "paceline", "llama.cpp"):
        raise InvalidParams(f"{VARIABLE} must be 'paceline' or 'llama.cpp', not {wanted!r}")
    if wanted:
        _native.use_own_attention(wanted == "paceline")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SingleAttention:
    """A single flash attention operation, as in a context's graph; for tests and measurements.

    Attributes:
        queries: float32 (streams, tokens, heads, dim_k).
        keys: float16 or float32 (streams, cells, kv_heads, dim_k).
        values: float16 or float32 (streams, cells, kv_heads, dim_v).
        mask: float16 (streams, tokens, cells), added to the scores; minus infinity hides a cell.
        sinks: float32 (heads,).
        scale: Factor of the scores.
        max_bias: ALiBi's largest bias; 0 is none.
        softcap: Limit of the scores; 0 is none.
    """

    queries: npt.NDArray[np.float32]
    keys: npt.NDArray[np.float32] | npt.NDArray[np.float16]
    values: npt.NDArray[np.float32] | npt.NDArray[np.float16]
    mask: npt.NDArray[np.float16] | None = None
    sinks: npt.NDArray[np.float32] | None = None
    scale: float = 1.0
    max_bias: float = 0.0
    softcap: float = 0.0

    def run(self, *, n_threads: int = 1, times: int = 1) -> tuple[npt.NDArray[np.float32], list[float]]:
        """Compute it `times` times. Return the outputs, float32 (streams, tokens, heads, dim_v), and the seconds of each time.

        Raises `InvalidParams` if arrays do not fit, `Unsupported` if this build lacks paceline's kernel.
        """
        use_kernel_of_environment()
        if not build_info().own_attention:
            raise Unsupported("this build has no kernel of paceline's, which is needed to compute a single operation")
        check_numbers(n_threads, times)
        mask = None if self.mask is None else checked_array("mask", self.mask, 3, np.float16)
        outputs, seconds = _native.flash_attention(
            checked_array("queries", self.queries, 4, np.float32),
            checked_array("keys", self.keys, 4, np.float16, np.float32),
            checked_array("values", self.values, 4, np.float16, np.float32),
            None if mask is None else mask.view(np.uint16),
            None if self.sinks is None else checked_array("sinks", self.sinks, 1, np.float32),
            self.scale,
            self.max_bias,
            self.softcap,
            n_threads,
            times,
        )
        return cast(npt.NDArray[np.float32], outputs), seconds


def checked_array(name: str, array: npt.NDArray[Any], ndim: int, *types: type[np.generic]) -> npt.NDArray[Any]:
    """Check an array and return it in C order. Other types are refused: converting could change values."""
    if array.ndim != ndim or array.dtype not in types:
        wanted = " or ".join(kind.__name__ for kind in types)
        raise InvalidParams(f"{name}: {wanted} of {ndim} dimensions is needed, not {array.dtype} of {array.ndim}")
    return np.ascontiguousarray(array)


def check_numbers(n_threads: int, times: int) -> None:
    """Raise `InvalidParams` for numbers of threads or repetitions that a single operation cannot have."""
    if not (1 <= n_threads <= _MAX_THREADS and 1 <= times <= 10**6):
        raise InvalidParams(f"n_threads must be 1 to {_MAX_THREADS} and times 1 to 10**6, not {n_threads}, {times}")
