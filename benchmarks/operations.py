"""The time of each operation of a pass, against the machine's limits.

python -m benchmarks.operations [--model FILE | --random lfm2-350m] [--passes prompt,8,1] [--kernel llama.cpp] [--rounds 5]

A prompt of 512 tokens, 8 streams and one stream, after 64 cells each, of a model of half a billion weights (Q8_0), of --model
FILE or of a model of `benchmarks.state_models`. "Of peak" is the larger of both shares of the roofline: bytes, and products of
codes or of floats. An operation computed by itself takes some microseconds more than in a pass; the output compares the sum of
all with a pass without timing. Medians of all passes. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.model import half_billion
from benchmarks.state_models import MODELS, model_file
from paceline import Context, Model
from paceline.runtime import OperationTime
from paceline.runtime.matmul import MachinePeaks, kernel, machine_peaks, use_kernel

_NUM_CELLS = 64  # behind which streams decode
_STREAM_PASSES = 10  # in a round
_LEAST_SHARE = 0.005  # of a pass; what takes less is summed up
_FLOATS = ("f32", "f16", "bf16", "")


@dataclass(frozen=True, slots=True)
class Work:
    """A pass: so many streams with so many new tokens each."""

    name: str
    num_streams: int
    num_tokens: int

    def prepare(self, context: Context) -> None:
        """Give the streams the cells that they decode behind."""
        context.clear()
        if self.num_tokens == 1:
            for stream in range(self.num_streams):
                context.decode([17] * _NUM_CELLS, seq_ids=stream)

    @property
    def num_passes(self) -> int:
        """How often it is computed in a round."""
        return _STREAM_PASSES if self.num_tokens == 1 else 1

    def run(self, context: Context) -> float:
        """Compute it once; return the seconds."""
        count = self.num_streams * self.num_tokens
        ids = [100 + 7 * i % 997 for i in range(count)]
        start = time.perf_counter()
        context.decode(ids, seq_ids=[i // self.num_tokens for i in range(count)])
        return time.perf_counter() - start


WORKS = {
    "prompt": Work("a prompt of 512", 1, 512),
    "8": Work("8 streams", 8, 1),
    "1": Work("1 stream", 1, 1),
}
Key = tuple[str, str, str]


@dataclass(slots=True)
class Passes:
    """Times of passes: as a whole without timing, and of their operations."""

    plain: list[float]
    operations: dict[Key, list[OperationTime]]

    def add(self, work: Work, plain: Context, timed: Context) -> None:
        """Compute a round with each context."""
        work.prepare(plain)
        self.plain += [work.run(plain) for _ in range(work.num_passes)]
        work.prepare(timed)
        timed.operation_times()
        for _ in range(work.num_passes):
            work.run(timed)
            for timing in timed.operation_times():
                self.operations.setdefault((timing.operation, timing.name, timing.type), []).append(timing)

    def report(self, peaks: MachinePeaks) -> Iterator[str]:
        """Yield a line for each operation, longest first."""
        medians = {key: statistics.median([event.seconds for event in seen]) for key, seen in self.operations.items()}
        total, rest = sum(medians.values()), 0.0
        yield (
            f"{statistics.median(self.plain) * 1e3:.2f} ms; operations one by one {total * 1e3:.2f} ms, "
            f"{sum(seen[0].num_times for seen in self.operations.values())} of them\n"
        )
        yield "| operation | result | type | times | ms | share | of peak |"
        yield "|---|---|---|---|---|---|---|"
        for key, seconds in sorted(medians.items(), key=lambda item: -item[1]):
            if seconds < _LEAST_SHARE * total:
                rest += seconds
                continue
            one = self.operations[key][0]
            yield (
                f"| {one.operation} | {one.name} | {one.type} | {one.num_times} | {seconds * 1e3:.3f} "
                f"| {100 * seconds / total:.1f} % | {100 * share_of_peak(one, seconds, peaks):.0f} % |"
            )
        yield f"| all others | | | | {rest * 1e3:.3f} | {100 * rest / total:.1f} % | |"


def share_of_peak(one: OperationTime, seconds: float, peaks: MachinePeaks) -> float:
    """Return the larger of both shares of the roofline."""
    most_products = peaks.float_dots if one.type in _FLOATS else peaks.dots
    return max(one.num_bytes / peaks.bytes, one.num_products / most_products) / seconds


def measure(path: Path, works: Mapping[str, Work], rounds: int, n_threads: int) -> dict[str, Passes]:
    """Compute the passes of a model in turns, the first turn for warming up."""
    found = {name: Passes([], {}) for name in works}
    with (
        Model.load(path) as model,
        _context(model, n_threads) as plain,
        _context(model, n_threads, timed=True) as timed,
    ):
        for turn in range(rounds + 1):
            for name, work in works.items():
                (found[name] if turn else Passes([], {})).add(work, plain, timed)
    return found


def _context(model: Model, n_threads: int, *, timed: bool = False) -> Context:
    return Context(
        model,
        times_operations=timed,
        n_ctx=2048,
        n_batch=512,
        n_ubatch=512,
        n_seq_max=8,
        n_outputs_max=8,
        n_threads=n_threads,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="GGUF file")
    model.add_argument("--random", choices=MODELS, help="of random weights, written on first use")
    parser.add_argument("--passes", default=",".join(WORKS), help="of prompt, 8, 1")
    parser.add_argument(
        "--kernel", default="paceline", help='of the matrix products: "llama.cpp" or one of paceline\'s'
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    use_kernel("paceline")
    peaks = machine_peaks(given.threads)
    use_kernel(given.kernel)
    print(
        f"{kernel()}, {given.threads} threads: {peaks.bytes / 1e9:.1f} GB/s read, {peaks.dots / 1e9:.0f} G products/s "
        f"of codes, {peaks.float_dots / 1e9:.0f} of floats",
        flush=True,
    )
    path = given.model or (model_file(given.random) if given.random else half_billion(None))
    works = {name: WORKS[name] for name in given.passes.split(",")}
    for name, found in measure(path, works, given.rounds, given.threads).items():
        print(f"\n{works[name].name}: " + "\n".join(found.report(peaks)), flush=True)


if __name__ == "__main__":
    main()
