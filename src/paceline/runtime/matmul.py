"""Matrix products on a CPU: the choice between kernels of paceline and llama.cpp, and a single product.

paceline's kernels multiply quantised weights and weights of 16 bits, which a load packs for them, with float activations:
docs/adr/0056. They are not used on a GPU, for unsupported types of weights, or if a model is loaded with
`use_extra_bufts=False`; on ARM they are used only if selected.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from paceline import _native
from paceline.errors import InvalidParams, Unsupported
from paceline.runtime.attention import check_numbers, checked_array
from paceline.runtime.gguf_file import file_fingerprint
from paceline.runtime.native_core import build_info

_log = logging.getLogger("paceline.engine")

VARIABLE = "PACELINE_CPU_MATMUL"
TYPES = ("q8_0", "q4_0", "q5_0", "q4_1", "q5_1", "iq4_nl", "iq4_xs", "iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s",
         "iq1_s", "iq1_m", "mxfp4", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K")  # fmt: skip
"""The types of quantised weights that paceline's kernels multiply, as ggml names them."""
FLOATS = ("f16", "bf16")
"""The types of weights in floats that paceline's kernels for x86 multiply as well."""


def kernels() -> tuple[str, ...]:
    """Return the kernels of paceline that this build has and this processor can run, the fastest first."""
    return tuple(_native.own_matmul_kernels())


def kernel() -> str:
    """Return the kernel for models that are loaded now: a name in `kernels()`, or "llama.cpp". Raises as `use_kernel`."""
    use_kernel_of_environment()
    return _native.own_matmul() or "llama.cpp"


def use_kernel(wanted: str) -> None:
    """Select the kernel of this process: "paceline" (the fastest), a name in `kernels()`, or "llama.cpp".

    A model packs its weights for paceline's kernels, or not, when it is loaded, and keeps them. The choice among paceline's
    kernels may change between two passes. An engine's worker process takes the kernel in PACELINE_CPU_MATMUL.

    Raises `InvalidParams` for another name, `Unsupported` if this build or this processor lacks the kernel.
    """
    use_kernel_of_environment()
    _select("kernel", wanted)


@cache
def use_kernel_of_environment() -> None:
    """Select the kernel that the variable PACELINE_CPU_MATMUL names, once; do nothing if it is unset or empty.

    Called before the kernel is read and before a model is loaded. Raises as `use_kernel`.
    """
    if wanted := os.environ.get(VARIABLE, ""):
        _select(VARIABLE, wanted)


def _select(name: str, wanted: str) -> None:
    if wanted == "llama.cpp":
        _native.use_own_matmul(False)
        return
    if wanted not in ("paceline", *_ALL_KERNELS):
        known = ", ".join(repr(name) for name in ("paceline", "llama.cpp", *_ALL_KERNELS))
        raise InvalidParams(f"{name} must be one of {known}, not {wanted!r}")
    if not build_info().own_matmul:
        raise Unsupported(
            f"{name}: this build has llama.cpp's products alone; PACELINE_OWN_MATMUL=ON builds it with paceline's"
        )
    if not (usable := kernels()) or not _native.use_own_matmul_kernel(usable[0] if wanted == "paceline" else wanted):
        raise Unsupported(f"{name}: this processor runs {', '.join(usable) or 'none of the kernels'}, not {wanted!r}")
    _native.use_own_matmul(True)


_ALL_KERNELS = ("avx512_vnni", "avx2", "neon_i8mm", "neon_dotprod")


class PackedCache:
    """The file with the packed weights of one model, for one load.

    The file belongs to the model's files, as long as they are unchanged, and to the options of the load. It is used if all of its
    checksums are right; otherwise the weights are packed, and the file is written anew on a thread after the load. A file that
    cannot be read or written is logged and changes nothing else.
    """

    def __init__(self, folder: Path, sources: Sequence[Path], *options: object) -> None:
        """Open the file, if there is one, and start to verify it.

        Args:
            folder: The folder of the file, which is made if it is missing.
            sources: The model's files.
            options: Options of the load that change its weights or their places.
        """
        self._sources = sources
        self._options = repr(options)
        absolute = "\0".join([*(str(path.absolute()) for path in sources), self._options])
        name = hashlib.blake2b(absolute.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        self._path = folder / f"{sources[0].stem}-{name}.packed"
        self._key = self._identity()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            _log.warning(
                "packed weights are not kept: the folder %s cannot be made: %s", folder, error.strerror or error
            )
        self._load = _native.PackedLoad(os.fsencode(self._path), self._key)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Use the file for the weights that this thread loads meanwhile, and write it afterwards if weights were packed."""
        self._load.begin()
        try:
            yield
        finally:
            self._load.end()
        if self._load.mapped_bytes:
            _log.info("packed weights are mapped from %s (%d MiB)", self._path, self._load.mapped_bytes >> 20)
        if self._load.problem:
            _log.warning("packed weights in %s are not used: %s", self._path, self._load.problem)
        if self._load.has_packed and self._identity() == self._key:
            self._load.start_writing()

    @property
    def is_mapped(self) -> bool:
        """Whether the weights are mapped from the file."""
        return self._load.mapped_bytes > 0

    def finish(self) -> None:
        """Wait until the file is written, and log a problem; once."""
        if problem := self._load.wait_until_written():
            _log.warning("packed weights were not written to %s: %s", self._path, problem)

    def _identity(self) -> bytes:
        """Return 32 bytes that change with the model's files and the options. Raises `OSError`."""
        stamps = [(found.st_size, found.st_mtime_ns, found.st_ctime_ns) for found in map(Path.stat, self._sources)]
        content = file_fingerprint(self._sources, self._options)
        return hashlib.blake2b(content + repr(stamps).encode(), digest_size=32).digest()


def quantise(type_name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return rows of weights in a type of ggml, as its files have them: uint8 (rows, bytes of a row). values: (rows, columns)."""
    return cast(npt.NDArray[np.uint8], _native.quantise(type_name, checked_array("values", values, 2, np.float32)))


def dequantise(type_name: str, weights: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the values of rows of weights: float32 (rows, columns). weights: uint8 (rows, bytes of a row)."""
    return cast(npt.NDArray[np.float32], _native.dequantise(type_name, checked_array("weights", weights, 2, np.uint8)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePeaks:
    """Measured peaks of some threads in a second: bytes read from memory, and products of codes and of floats."""

    bytes: float
    dots: float
    float_dots: float


def machine_peaks(n_threads: int = 1) -> MachinePeaks:
    """Measure the machine with the instructions of the kernel in use; takes a second.

    Raises `InvalidParams`, and `Unsupported` if this build lacks paceline's kernels.
    """
    _check_built()
    return MachinePeaks(**dict(zip(("bytes", "dots", "float_dots"), _native.machine_peaks(n_threads), strict=True)))


def _check_built() -> None:
    use_kernel_of_environment()
    if not build_info().own_matmul:
        raise Unsupported("this build has no kernels of paceline's; PACELINE_OWN_MATMUL=ON builds it with them")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SingleProduct:
    """A single matrix product, as in a context's graph; for tests and measurements.

    Attributes:
        type_name: The type of the weights, like "q8_0".
        weights: uint8 (matrices, rows, bytes of a row), as `quantise` returns them.
        activations: float32 (tokens, used, columns); `used` is 1 without experts.
        experts: int32 (tokens, used), the matrix of each row of activations. None for a single matrix.
    """

    type_name: str
    weights: npt.NDArray[np.uint8]
    activations: npt.NDArray[np.float32]
    experts: npt.NDArray[np.int32] | None = None

    def run(self, *, n_threads: int = 1, times: int = 1) -> tuple[npt.NDArray[np.float32], list[float], str]:
        """Compute it `times` times with the kernel in use.

        Return the outputs, float32 (tokens, used, rows), the seconds of each time, and the kind of buffer of the weights.

        Raises `InvalidParams` if arrays do not fit, `Unsupported` if this build lacks paceline's kernels.
        """
        _check_built()
        check_numbers(n_threads, times)
        outputs, seconds, buffer = _native.matrix_product(
            self.type_name,
            checked_array("weights", self.weights, 3, np.uint8),
            checked_array("activations", self.activations, 3, np.float32),
            None if self.experts is None else checked_array("experts", self.experts, 2, np.int32),
            n_threads,
            times,
        )
        return cast(npt.NDArray[np.float32], outputs), seconds, buffer
