"""Attention on a CPU: who computes it, paceline's kernel or llama.cpp's, and one operation by itself.

The kernel stands in front of llama.cpp's flash attention where query heads share keys, or tokens are many: docs/adr/0019.
It is off without flash attention, on a GPU, and where cells are quantized.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from paceline import _native
from paceline.errors import InvalidParams

VARIABLE = "PACELINE_CPU_ATTENTION"
Kernel = Literal["paceline", "llama.cpp"]

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float16]


def kernel() -> Kernel:
    """Which one computes in this process now."""
    return "paceline" if _native.own_attention() else "llama.cpp"


def use_kernel(wanted: Kernel) -> None:
    """Sets which one computes in this process, from the next operation on; at any time, from any thread.

    Raises `InvalidParams` for another word, `Unsupported` where paceline's is not in this build.
    """
    if wanted not in ("paceline", "llama.cpp"):
        raise InvalidParams(f"kernel: {wanted!r} is none; it is 'paceline' or 'llama.cpp'")
    _native.use_own_attention(wanted == "paceline")


@cache
def use_kernel_of_environment() -> None:
    """Sets what the variable PACELINE_CPU_ATTENTION names, once; nothing where it is unset or empty. Raises as `use_kernel`."""
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
    keys: Floats
    values: Floats
    mask: npt.NDArray[np.float16] | None = None
    sinks: npt.NDArray[np.float32] | None = None
    scale: float = 1.0
    max_bias: float = 0.0
    softcap: float = 0.0

    def run(self, *, n_threads: int = 1, times: int = 1) -> tuple[npt.NDArray[np.float32], list[float]]:
        """The outputs, float32 (streams, tokens, heads, dim_v), and the seconds that each time took."""
        outputs, seconds = _native.flash_attention(
            np.ascontiguousarray(self.queries, np.float32),
            np.ascontiguousarray(self.keys),
            np.ascontiguousarray(self.values),
            None if self.mask is None else np.ascontiguousarray(self.mask, np.float16).view(np.uint16),
            self.sinks,
            self.scale,
            self.max_bias,
            self.softcap,
            n_threads,
            times,
        )
        return cast(npt.NDArray[np.float32], outputs), seconds
