"""paceline's matrix products on a CPU against llama.cpp's, and both against the machine's limits.

python -m benchmarks.matmul [--part peaks|product|model] [--types q8_0,q4_K] [--shapes 896x4864] [--rows 1,8,512] [--kernel avx2]

peaks    bytes read and products of bytes and floats a second, on all threads: the roofline.
product  one product of each type, shape and number of rows; "of peak" is the larger of both shares of the roofline.
model    a prompt of 512 tokens, 8 streams and one stream of a model of half a billion weights (Q8_0), with --model-type Q4_K of a
         wider model, or of --model FILE.

Both sides in one process, in turns, llama.cpp with its own repacking; medians. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.model import half_billion, half_billion_of
from paceline import Context, Model
from paceline.runtime.matmul import (
    FLOATS,
    TYPES,
    MachinePeaks,
    SingleProduct,
    kernel,
    machine_peaks,
    quantise,
    use_kernel,
)

SHAPES = ("896x4864", "4864x896", "896x896", "896x128", "896x151936", "4096x4096")  # columns x rows of the weights
ROWS = (1, 2, 4, 7, 8, 16, 32, 128, 512)
BLOCKS_OF_256 = (
    "q2_K",
    "q3_K",
    "q4_K",
    "q5_K",
    "q6_K",
    "iq4_xs",
    "iq3_xxs",
    "iq3_s",
    "iq2_xxs",
    "iq2_xs",
    "iq2_s",
    "iq1_s",
    "iq1_m",
)
_SECONDS_A_TURN = 0.05
_DISTINCT_ROWS = 256  # of the weights; more repeat them, since quantising takes longer than all products


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of both sides. ours: paceline's kernel."""

    ours: str
    n_threads: int
    pairs: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of each side, pair by pair."""

    pairs: list[tuple[float, float]]

    @property
    def ours(self) -> float:
        """Our median."""
        return statistics.median(pair[1] for pair in self.pairs)

    def __str__(self) -> str:
        """Medians in milliseconds, and how many times as fast ours is: median and extremes of the pairs."""
        ratios = sorted(theirs / ours for theirs, ours in self.pairs)
        theirs = statistics.median(pair[0] for pair in self.pairs)
        spread = f"{statistics.median(ratios):5.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        return f"llama.cpp {theirs * 1e3:9.3f}, paceline {self.ours * 1e3:9.3f} ms: {spread} times as fast"


def weights_of(type_name: str, columns: int, rows: int) -> npt.NDArray[np.uint8]:
    """Return random weights: uint8 (1, rows, bytes of a row)."""
    values = np.random.default_rng(0).normal(size=(min(rows, _DISTINCT_ROWS), columns)).astype(np.float32)
    few = quantise(type_name, values)
    return np.resize(few, (rows, few.shape[1]))[None]


def product_seconds(one: SingleProduct, n_threads: int, times: int, name: str) -> float:
    """Return the median time of a product with a kernel."""
    use_kernel(name)
    return statistics.median(one.run(n_threads=n_threads, times=times)[1])


def compared(measure: Callable[[str], float], setting: Setting) -> Comparison:
    """Measure both sides in turns, in an order that alternates."""
    found = []
    for pair in range(setting.pairs):
        names = ("llama.cpp", setting.ours)
        seconds = {name: measure(name) for name in (names if pair % 2 else names[::-1])}
        found.append((seconds["llama.cpp"], seconds[setting.ours]))
    return Comparison(found)


def products(setting: Setting, cases: Iterator[tuple[str, int, int, int]], peaks: MachinePeaks) -> None:
    """Milliseconds of one product. cases: type, columns and rows of the weights, rows of activations."""
    for type_name, columns, out, count in cases:
        weights = weights_of(type_name, columns, out)
        activations = np.random.default_rng(1).normal(size=(count, 1, columns)).astype(np.float32)
        one = SingleProduct(type_name=type_name, weights=weights, activations=activations)
        times = max(3, min(500, int(_SECONDS_A_TURN / product_seconds(one, setting.n_threads, 2, setting.ours))))
        found = compared(partial(product_seconds, one, setting.n_threads, times), setting)
        read, products_ = weights.nbytes / found.ours, count * columns * out / found.ours
        share = max(read / peaks.bytes, products_ / (peaks.float_dots if type_name in FLOATS else peaks.dots))
        print(
            f"{type_name:7s} {columns:5d} x {out:6d} {count:4d} rows: {found}, "
            f"{read / 1e9:5.1f} GB/s, {products_ / 1e9:6.1f} G products/s, {100 * share:3.0f} % of peak",
            flush=True,
        )


def cases_of(types: str, shapes: str, rows: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield the cases of `products`, without shapes with a number of columns that is no multiple of the type's block."""
    for type_name in types.split(","):
        for shape in shapes.split(","):
            columns, out = map(int, shape.split("x"))
            if columns % (256 if type_name in BLOCKS_OF_256 else 32) == 0:
                for count in rows.split(","):
                    yield type_name, columns, out, int(count)


def model_passes(context: Context) -> Iterator[tuple[str, float]]:
    """Yield the seconds of a prompt of 512, of a tick of 8 streams and of one stream, the latter two behind 64 cells each."""
    for name, streams, tokens in (("prompt of 512", 1, 512), ("8 streams", 8, 1), ("1 stream", 1, 1)):
        for stream in range(8):
            context.remove(stream)
        if tokens == 1:
            for stream in range(streams):
                context.decode([17] * 64, seq_ids=stream)
        seconds = []
        for _ in range(1 if tokens > 1 else 10):
            ids = [100 + 7 * i % 997 for i in range(streams * tokens)]
            start = time.perf_counter()
            context.decode(ids, seq_ids=[i // tokens for i in range(streams * tokens)])
            seconds.append(time.perf_counter() - start)
        yield name, statistics.median(seconds)


def models(setting: Setting, path: Path) -> None:
    """Milliseconds of a pass of the model."""
    with ExitStack() as opened:
        contexts = {name: _context(opened, path, name, setting.n_threads) for name in ("llama.cpp", setting.ours)}
        use_kernel(setting.ours)
        found: dict[str, list[tuple[float, float]]] = {}
        for pair in range(setting.pairs + 1):
            turn: dict[str, Mapping[str, float]] = {}
            for name in list(contexts)[:: 1 if pair % 2 else -1]:
                turn[name] = dict(model_passes(contexts[name]))
            if pair:  # the first one warms up
                for what, theirs in turn["llama.cpp"].items():
                    found.setdefault(what, []).append((theirs, turn[setting.ours][what]))
    for what, pairs in found.items():
        print(f"{what:14s} {Comparison(pairs)}", flush=True)


def _context(opened: ExitStack, path: Path, name: str, n_threads: int) -> Context:
    use_kernel(name)
    start = time.perf_counter()
    model = opened.enter_context(Model.load(path))
    print(f"{name} loads the model in {time.perf_counter() - start:.2f} s")
    return opened.enter_context(
        Context(model, n_ctx=2048, n_batch=512, n_ubatch=512, n_seq_max=8, n_outputs_max=8, n_threads=n_threads)
    )


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["peaks", "product", "model", "all"], default="all")
    parser.add_argument("--types", default=",".join(TYPES + FLOATS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--kernel", default="paceline", help="of paceline's kernels, the one that is compared")
    parser.add_argument(
        "--model", type=Path, default=None, help="GGUF file; without it a random one of half a billion weights"
    )
    parser.add_argument("--model-type", help="of the matrices of a random model, as gguf names it: Q4_K")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    use_kernel(given.kernel)
    setting = Setting(kernel(), given.threads, given.pairs)
    if given.part != "model":
        peaks = machine_peaks(given.threads)
        print(
            f"{setting.ours}, {given.threads} threads: {peaks.bytes / 1e9:.1f} GB/s read, "
            f"{peaks.dots / 1e9:.0f} G products/s of bytes, {peaks.float_dots / 1e9:.0f} of floats",
            flush=True,
        )
        if given.part != "peaks":
            products(setting, cases_of(given.types, given.shapes, given.rows), peaks)
    if given.part in ("model", "all"):
        models(setting, given.model or (half_billion_of(given.model_type) if given.model_type else half_billion(None)))


if __name__ == "__main__":
    main()
