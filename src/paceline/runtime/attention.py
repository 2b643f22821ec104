"""Attention on a CPU: who computes it, paceline's kernel or llama.cpp's, and one operation by itself.

The kernel stands in front of llama.cpp's flash attention where query heads share keys, or tokens are many: docs/adr/0019.
It has no part without flash attention, on a GPU, and where cells are quantized.
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
from paceline.runtime.build import build_info

VARIABLE = "PACELINE_CPU_ATTENTION"
Kernel = Literal["paceline", "llama.cpp"]

_MAX_THREADS = 64


def kernel() -> Kernel:
    """Which one computes in this process now. Raises as `use_kernel_of_environment`."""
    use_kernel_of_environment()
    return "paceline" if _native.own_attention() else "llama.cpp"


def use_kernel(wanted: Kernel) -> None:
    """Sets which one computes in this process, from the next operation on; at any time, from any thread.

    Raises `InvalidParams` for another word, `Unsupported` where paceline's is not in this build.
    """
    use_kernel_of_environment()
    if wanted not in ("paceline", "llama.cpp"):
        raise InvalidParams(f"kernel: {wanted!r} is none; it is 'paceline' or 'llama.cpp'")
    _native.use_own_attention(wanted == "paceline")


@cache
def use_kernel_of_environment() -> None:
    """Sets what the variable PACELINE_CPU_ATTENTION names, once; nothing where it is unset or empty.

    Whoever asks for the kernel and whoever makes a context calls it. Raises as `use_kernel`.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "paceline", "llama.cpp"):
        raise InvalidParams(f"{VARIABLE}: {wanted!r} is no kernel; it is 'paceline' or 'llama.cpp'")
    if wanted:
        _native.use_own_attention(wanted == "paceline")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPass:
    """One flash attention operation, as a context's graph has it; for tests and measurements.

    queries: float32 (streams, tokens, heads, dim_k). keys, values: float16 or float32 (streams, cells, kv_heads, dim).
    mask: float16 (streams, tokens, cells), added to the scores; minus infinity hides a cell. sinks: float32 (heads,).
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
        """The outputs, float32 (streams, tokens, heads, dim_v), and the seconds that each of the times took.

        Raises `InvalidParams` where arrays do not fit, `Unsupported` where paceline's kernel is not in this build.
        """
        use_kernel_of_environment()
        if not build_info().own_attention:
            raise Unsupported("this build has llama.cpp's attention alone, and nothing to call it by itself")
        if not (1 <= n_threads <= _MAX_THREADS and 1 <= times <= 10**6):
            raise InvalidParams(f"n_threads must be 1 to {_MAX_THREADS} and times 1 to 10**6, not {n_threads}, {times}")
        mask = None if self.mask is None else _array("mask", self.mask, 3, np.float16)
        outputs, seconds = _native.flash_attention(
            _array("queries", self.queries, 4, np.float32),
            _array("keys", self.keys, 4, np.float16, np.float32),
            _array("values", self.values, 4, np.float16, np.float32),
            None if mask is None else mask.view(np.uint16),
            None if self.sinks is None else _array("sinks", self.sinks, 1, np.float32),
            self.scale,
            self.max_bias,
            self.softcap,
            n_threads,
            times,
        )
        return cast(npt.NDArray[np.float32], outputs), seconds


def _array(name: str, array: npt.NDArray[Any], ndim: int, *types: type[np.floating[Any]]) -> npt.NDArray[Any]:
    """In C order. A number of another type is not rounded: it would mean something else."""
    if array.ndim != ndim or array.dtype not in types:
        wanted = " or ".join(one.__name__ for one in types)
        raise InvalidParams(f"{name}: {wanted} of {ndim} dimensions is needed, not {array.dtype} of {array.ndim}")
    return np.ascontiguousarray(array)
