"""Continuous batching with each of the four strategies, against two older ways of serving.

python -m benchmarks.batching [--rounds 3]

Six chats (64 prompt tokens, 48 generated) arrive half a second apart; two prompts of 1,000 tokens arrive while they
decode. Every method serves the same requests on the same model, greedy and to their full length:

paced, decode_maximal, prefill_priority, balanced   the engine, 8 slots, no prefix caching
sequential slots        every running sequence has a forward pass of its own, in turn; a prompt is one pass
accumulate and flush    the requests of a time window become a batch, which runs to its end before the next

--small takes a random Llama of 50 million parameters instead of the 0.5 billion, for a slow or busy machine.

Each round runs all methods in turn, and the figures are medians over the rounds: on a machine with other load,
compare within one table and not between two. Inter-token latency is measured on the chats.
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

from benchmarks.model import cache_folder, half_billion
from paceline import LLM, Context, EndRecord, Instrument, Model, RequestRecord, Sampler, SamplingParams, TickRecord
from paceline.runtime import StepRow
from paceline.testing.models import LlamaSpec, write_model

WINDOW_S = 0.25
CHATS, CHAT_PROMPT, CHAT_TOKENS = 6, 64, 48
LONG_PROMPT, LONG_TOKENS = 1000, 8


@dataclass
class Job:
    """A request of the load and when its tokens came, in seconds since the load began."""

    arrival_s: float
    prompt: list[int]
    max_tokens: int
    times_s: list[float] = field(default_factory=list)

    @property
    def is_chat(self) -> bool:
        return len(self.prompt) == CHAT_PROMPT

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.arrival_s

    @property
    def is_done(self) -> bool:
        return len(self.times_s) == self.max_tokens


def load(n_vocab: int) -> list[Job]:
    """Return the requests, the same every time, in order of arrival."""
    shapes = [(0.5 * number, CHAT_PROMPT, CHAT_TOKENS) for number in range(CHATS)]
    shapes += [(1.2, LONG_PROMPT, LONG_TOKENS), (2.2, LONG_PROMPT, LONG_TOKENS)]
    return [
        Job(arrival, [(7919 * (row + 1) + 31 * column) % (n_vocab * 9 // 10) for column in range(length)], tokens)
        for row, (arrival, length, tokens) in enumerate(sorted(shapes))
    ]


# ---- the engine


class TokenTimes(Instrument):
    """Note when tokens come, by the ends of the ticks that drew them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._by_key: dict[int, Job] = {}
        self._left = len(jobs)
        self.start_s = 0.0
        self.is_over = threading.Event()

    def request_queued(self, record: RequestRecord) -> None:
        if record.request_id is not None:
            self._by_key[record.key] = self._jobs[int(record.request_id)]

    def tick_finished(self, record: TickRecord) -> None:
        now_s = time.perf_counter() - self.start_s
        for row in record.rows:
            if row.key in self._by_key:
                self._by_key[row.key].times_s += [now_s] * row.num_new

    def request_ended(self, record: EndRecord) -> None:
        self._left -= record.key in self._by_key
        if self._left == 0:
            self.is_over.set()


def continuous(model: Model, jobs: Sequence[Job], strategy: str) -> None:
    """Serve the load with the engine."""
    watch = TokenTimes(jobs)
    with LLM(model, strategy=strategy, num_slots=8, n_ctx=8192, instruments=[watch], cache_prompt=False) as llm:
        llm.generate(jobs[0].prompt, max_tokens=2)  # the first pass allocates
        watch.start_s = time.perf_counter()
        streams = []
        for number, job in enumerate(jobs):
            time.sleep(max(0.0, watch.start_s + job.arrival_s - time.perf_counter()))
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.max_tokens)
            streams.append(llm.stream(job.prompt, params, request_id=str(number)))
        watch.is_over.wait()
        for stream in streams:
            stream.close()


# ---- what it replaces


class Loop:
    """A bare loop over `Context.step`: requests that have arrived and run."""

    def __init__(self, context: Context, model: Model, jobs: Sequence[Job]) -> None:
        self._context, self._model = context, model
        self._coming = list(enumerate(jobs))
        self._state: dict[int, tuple[Sampler, int, list[int]]] = {}  # sampler, position, tokens to compute
        self.jobs = jobs
        self.start_s = time.perf_counter()

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.start_s

    @property
    def is_over(self) -> bool:
        return all(job.is_done for job in self.jobs)

    def arrived(self) -> list[int]:
        """Numbers of the requests that have arrived since the last call; sleeps until one has if none runs."""
        if not self._state and self._coming:
            time.sleep(max(0.0, self._coming[0][1].arrival_s - self.now_s))
        numbers = []
        while self._coming and self._coming[0][1].arrival_s <= self.now_s:
            number, job = self._coming.pop(0)
            sampler = Sampler(SamplingParams(temperature=0, ignore_eos=True), self._model)
            sampler.accept_prompt(job.prompt)
            self._state[number] = (sampler, 0, list(job.prompt))
            numbers.append(number)
        return numbers

    def step(self, numbers: Sequence[int]) -> list[int]:
        """Run one forward pass over these requests; return the unfinished requests."""
        rows = []
        for number in numbers:
            sampler, position, tokens = self._state[number]
            rows.append(StepRow(seq_id=number, position=position, token_ids=tokens, samplers=(sampler,)))
        result = self._context.step(rows)
        now_s, left = self.now_s, []
        for number, row, output in zip(numbers, rows, result.rows, strict=True):
            job, (sampler, position, _) = self.jobs[number], self._state[number]
            drawn = list(output.draws[0].token_ids)
            job.times_s.append(now_s)
            self._state[number] = (sampler, position + len(row.token_ids), drawn)
            if job.is_done:
                del self._state[number]
            else:
                left.append(number)
        return left


def sequential(loop: Loop) -> None:
    """Run a pass for each running sequence, in turn."""
    running: list[int] = []
    while not loop.is_over:
        running += loop.arrived()
        running = [number for number in running if loop.step([number])]


def accumulate(loop: Loop) -> None:
    """Batches of the requests of a time window, each run to its end."""
    while not loop.is_over:
        numbers = loop.arrived()
        time.sleep(WINDOW_S)
        numbers += loop.arrived()
        while numbers:
            numbers = loop.step(numbers)


def bare(serve: Callable[[Loop], None]) -> Callable[[Model, Sequence[Job]], None]:
    """Serve the load with a bare loop."""

    def run(model: Model, jobs: Sequence[Job]) -> None:
        with Context(model, n_ctx=8192, n_batch=4096, n_seq_max=len(jobs)) as context:
            warm = Sampler(SamplingParams(temperature=0), model)
            context.step([StepRow(seq_id=0, position=0, token_ids=jobs[0].prompt, samplers=(warm,))])
            context.remove(0)
            serve(Loop(context, model, jobs))

    return run


METHODS: dict[str, Callable[[Model, Sequence[Job]], None]] = {
    "paced": lambda model, jobs: continuous(model, jobs, "paced"),
    "decode_maximal": lambda model, jobs: continuous(model, jobs, "decode_maximal"),
    "prefill_priority": lambda model, jobs: continuous(model, jobs, "prefill_priority"),
    "balanced": lambda model, jobs: continuous(model, jobs, "balanced"),
    "sequential slots": bare(sequential),
    "accumulate and flush": bare(accumulate),
}

COLUMNS = ("tokens/s", "ITL p50 ms", "ITL p99 ms", "longest ms", "TTFT chat s", "TTFT long s")


def figures(jobs: Sequence[Job]) -> tuple[float, ...]:
    """In the order of COLUMNS."""
    chats = [job for job in jobs if job.is_chat]
    gaps = sorted(after - before for job in chats for before, after in pairwise(job.times_s))
    return (
        sum(job.max_tokens for job in jobs) / max(job.times_s[-1] for job in jobs),
        1000 * statistics.median(gaps),
        1000 * gaps[int(0.99 * len(gaps))],
        1000 * gaps[-1],
        statistics.mean(job.ttft_s for job in chats),
        statistics.mean(job.ttft_s for job in jobs if not job.is_chat),
    )


def small() -> Path:
    """Return the path of the small model's file, written on first use."""
    path = cache_folder() / "benchmarks" / "llama-50m-q8_0.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        spec = LlamaSpec(n_layer=8, n_embd=768, n_head=12, n_head_kv=4, n_ff=2048, n_ctx_train=2048)
        write_model(path.with_suffix(".part"), spec, seed=1, weights="Q8_0").replace(path)
    return path


def main() -> None:
    """Parse the command line and print the table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a random Llama of 50 million parameters")
    parser.add_argument("--model", type=Path, help="another GGUF file")
    parser.add_argument("--llama-cpp-source", type=Path)
    options = parser.parse_args()
    file = options.model or (small() if options.small else half_billion(options.llama_cpp_source))
    model = Model.load(file)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in METHODS}
    for number in range(options.rounds):
        for name, serve in METHODS.items():
            jobs = load(model.n_vocab)
            serve(model, jobs)
            found[name].append(figures(jobs))
            numbers = " ".join(f"{value:.3g}" for value in found[name][-1])
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}: {name}: {numbers}", flush=True)
    print(f"\n{model.desc}, {os.cpu_count()} cores, medians of {options.rounds} rounds\n")
    print("| method | " + " | ".join(COLUMNS) + " |\n|---" * 1 + "|---" * len(COLUMNS) + "|")
    for name, rows in found.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"| {name} | " + " | ".join(f"{value:.3g}" for value in medians) + " |")


if __name__ == "__main__":
    main()
