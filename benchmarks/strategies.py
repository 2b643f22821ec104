"""Throughput against the longest gap, for every batch strategy: the cost of bounding inter-token latency.

python -m benchmarks.strategies [--streams 8] [--load equal|mixed|long] [--rounds 3] [--picture FILE.png]

A closed loop of clients, each with its next request as soon as its last request has ended, greedy and to full length.

equal   two requests a client, of 128 prompt tokens and 64 generated
mixed   four a client, of 64 to 192 and 32 to 96
long    two a client, of 1,024 and 64
beside  all clients decode 200 tokens, and one prompt of 2,000 comes: how long they wait, and it

Each round runs every strategy in turn. Figures are medians over the rounds; the first column of the table is
relative to the best median of the table. Longest gap: of any client between two of its tokens. --small takes a random Llama of
50 million parameters instead of the 0.5 billion.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

from benchmarks.batching import small
from benchmarks.model import half_billion
from paceline import LLM, EndRecord, Instrument, Model, RequestRecord, SamplingParams, TickRecord

STRATEGIES = (
    "paced",
    "paced:efficiency=0,prefill_share=0.2",
    "paced:efficiency=0.9",
    "paced:efficiency=1",
    "decode_maximal",
    "prefill_priority",
    "balanced",
)


@dataclass
class Job:
    """A request, and when it was submitted and its tokens came, in seconds."""

    prompt: list[int]
    max_tokens: int
    submitted_s: float = 0.0
    times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.submitted_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times_s)]


def jobs(load: str, streams: int, n_vocab: int) -> list[Job]:
    """Return the requests of a load, the same every time; prompts have nothing in common."""
    random = Random(3)
    shapes: dict[str, Callable[[], tuple[int, int]]] = {
        "equal": lambda: (128, 64),
        "mixed": lambda: (random.randint(64, 192), random.randint(32, 96)),
        "long": lambda: (1024, 64),
        "beside": lambda: (16, 200),
    }
    count = {"equal": 2, "mixed": 4, "long": 2, "beside": 1}[load] * streams
    lengths = [shapes[load]() for _ in range(count)] + ([(2000, 8)] if load == "beside" else [])
    return [Job([random.randrange(n_vocab * 9 // 10) for _ in range(prompt)], tokens) for prompt, tokens in lengths]


class ClosedLoop(Instrument):
    """Notes the tokens of each request by the ends of the ticks that drew them, and counts ended requests."""

    def __init__(self, requests: Sequence[Job]) -> None:
        self._requests = requests
        self._by_key: dict[int, Job] = {}
        self._ended = threading.Semaphore(0)

    def request_queued(self, record: RequestRecord) -> None:
        if record.request_id is not None:
            self._by_key[record.key] = self._requests[int(record.request_id)]

    def tick_finished(self, record: TickRecord) -> None:
        now_s = time.perf_counter()
        for row in record.rows:
            if row.key in self._by_key:
                self._by_key[row.key].times_s += [now_s] * row.num_new

    def request_ended(self, record: EndRecord) -> None:
        if record.key in self._by_key:
            self._ended.release()

    def run(self, llm: LLM, streams: int, *, late: int) -> float:
        """Keep `streams` requests open until all have ended; the last `late` come a second later. Return the seconds."""
        open_streams, start_s = [], time.perf_counter()
        for number, job in enumerate(self._requests):
            if number >= len(self._requests) - late:
                time.sleep(1.0)
            elif number >= streams:
                self._ended.acquire()
            job.submitted_s = time.perf_counter()
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.max_tokens)
            open_streams.append(llm.stream(job.prompt, params, request_id=str(number), interval=1_000_000))
        for _ in range(len(self._requests) - max(0, len(self._requests) - late - streams)):
            self._ended.acquire()
        seconds = time.perf_counter() - start_s
        for stream in open_streams:
            stream.close()
        return seconds


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run. Gaps are of the streams, without the prompt beside them."""

    tokens_per_s: float
    itl_median_s: float
    itl_p99_s: float
    longest_s: float
    ttft_median_s: float
    ttft_longest_s: float


def run(model: Model, load: str, streams: int, strategy: str) -> Figures:
    """Serve the load once, with a new engine."""
    requests = jobs(load, streams, model.n_vocab)
    loop, late = ClosedLoop(requests), int(load == "beside")
    n_ctx = (streams + late) * max(
        256, max(len(request.prompt) for request in requests[: len(requests) - late]) + 256
    ) + 2304 * late
    options = {"num_slots": streams + late, "n_ctx": n_ctx, "cache_prompt": False}
    with LLM(model, strategy=strategy, instruments=[loop], **options) as llm:  # type: ignore[arg-type]
        llm.generate([1, 2, 3], max_tokens=2)  # the first pass allocates
        seconds = loop.run(llm, streams, late=late)
    if short := sum(len(job.times_s) != job.max_tokens for job in requests):
        raise SystemExit(
            f"{strategy}: {short} of {len(requests)} requests ended early, so that figures would not compare"
        )
    gaps = sorted(gap for job in requests[: len(requests) - late] for gap in job.gaps_s)
    ttfts = sorted(job.ttft_s for job in requests)
    return Figures(
        tokens_per_s=sum(job.max_tokens for job in requests) / seconds,
        itl_median_s=statistics.median(gaps),
        itl_p99_s=gaps[int(0.99 * len(gaps))],
        longest_s=gaps[-1],
        ttft_median_s=statistics.median(ttfts),
        ttft_longest_s=ttfts[-1],
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median."""
    return Figures(*(statistics.median(getattr(round_, name) for round_ in rounds) for name in Figures.__slots__))


def draw(path: Path, title: str, found: dict[str, Figures]) -> None:
    """Draw throughput over the longest gap, a point a strategy."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    best = max(item.tokens_per_s for item in found.values())
    for name, item in found.items():
        axes.plot(item.longest_s, item.tokens_per_s / best, "o")
        axes.annotate(
            name, (item.longest_s, item.tokens_per_s / best), textcoords="offset points", xytext=(6, 4), fontsize=8
        )
    axes.set(
        xscale="log",
        xlabel="longest gap between two tokens of a stream, s",
        ylabel="tokens/s, of the best",
        title=title,
    )
    axes.margins(x=0.3)
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Parse the command line, run, and print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--load", choices=("equal", "mixed", "long", "beside"), default="mixed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategy", action="append", help="instead of all; may be given several times")
    parser.add_argument("--small", action="store_true", help="a random Llama of 50 million parameters")
    parser.add_argument("--model", type=Path, help="another GGUF file")
    parser.add_argument("--llama-cpp-source", type=Path)
    parser.add_argument("--picture", type=Path, help="a PNG file to draw (needs matplotlib)")
    options = parser.parse_args()
    model = Model.load(options.model or (small() if options.small else half_billion(options.llama_cpp_source)))
    rounds: dict[str, list[Figures]] = {name: [] for name in options.strategy or STRATEGIES}
    for number in range(options.rounds):
        for name, seen in rounds.items():
            seen.append(run(model, options.load, options.streams, name))
            print(f"round {number + 1}: {name}: {seen[-1]}", flush=True)
    found = {name: medians(seen) for name, seen in rounds.items()}
    best = max(item.tokens_per_s for item in found.values())
    title = f"{options.streams} streams, {options.load}; {model.desc}, {os.cpu_count()} cores"
    print(f"\n{title}, medians of {options.rounds} rounds\n")
    print(
        "| strategy | of the best | tokens/s | ITL median, ms | p99 | longest | TTFT median, s | longest |\n"
        + "|---" * 8
        + "|"
    )
    for name, item in found.items():
        gaps = f"{1000 * item.itl_median_s:.0f} | {1000 * item.itl_p99_s:.0f} | {1000 * item.longest_s:.0f}"
        ttfts = f"{item.ttft_median_s:.2f} | {item.ttft_longest_s:.2f}"
        print(f"| {name} | {item.tokens_per_s / best:.3f} | {item.tokens_per_s:.1f} | {gaps} | {ttfts} |")
    if options.picture:
        draw(options.picture, title, found)


if __name__ == "__main__":
    main()
