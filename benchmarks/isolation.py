"""The cost of a worker process, the time of a restart, and a check that nothing is lost when it dies.

python -m benchmarks.isolation [--part overhead|restart|kills] [--model FILE]

overhead  tokens/s of many streams, process against thread, in interleaved pairs.
restart   from a kill -9 to the next token of a running stream, against the time that loading takes.
kills     streams under load while the worker is killed again and again; every stream is compared with an undisturbed one.

The first two are ratios or differences within one run; run them on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from benchmarks.engine import prompts
from paceline import LLM, Model, Sampler, SamplingParams
from paceline.demo import demo_model_path
from paceline.engine.worker.supervisor import RestartLimits
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.streaming import TokenLogprobs
from paceline.streaming.chunk import Completion

# With these a token has the same logits whether it comes in a prompt or by itself.
EXACT: dict[str, Any] = {"flash_attn": "off", "type_k": "f32", "type_v": "f32", "n_threads": 1}

NUM_LISTED = 40  # as top_k: tokens whose log-probabilities are compared where two completions part
CLOSE = 0.2  # difference of log-probabilities of two greedy tokens: twice the noise of an 8-bit model


def worker_pid(llm: LLM) -> int | None:
    """Of the worker that this LLM started."""
    engine = llm._engine  # noqa: SLF001 - the process to kill
    assert isinstance(engine, WorkerEngine)
    return engine.worker_pid


def tokens_per_s(llm: LLM, num_streams: int, num_tokens: int) -> float:
    """Of streams that are all read, each by a thread."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1)
    ids = prompts(num_streams, 16, llm.model.n_vocab)
    with ThreadPoolExecutor(num_streams) as threads:
        start = time.perf_counter()
        streams = [llm.stream(token_id, params) for token_id in ids]
        list(threads.map(lambda stream: [None for _ in stream], streams))
        return num_streams * num_tokens / (time.perf_counter() - start)


def overhead(model: Path, num_streams: int, num_tokens: int, pairs: int) -> None:
    """Run interleaved pairs; both engines are loaded all the time, and one of the two runs."""
    options: dict[str, Any] = {"num_slots": num_streams, "n_ctx": num_streams * (num_tokens + 64)}
    with LLM(model, **options) as here, LLM(model, isolation="process", **options) as apart:
        for llm in (here, apart):
            tokens_per_s(llm, num_streams, 16)
        rows = []
        for pair in range(pairs):
            order = (here, apart) if pair % 2 == 0 else (apart, here)
            found = {llm: tokens_per_s(llm, num_streams, num_tokens) for llm in order}
            rows.append((found[here], found[apart]))
    ratios = sorted(process / thread for thread, process in rows)
    print(
        f"{num_streams} streams: thread {statistics.median(row[0] for row in rows):.0f} tok/s, "
        f"process {statistics.median(row[1] for row in rows):.0f} tok/s, "
        f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})"
    )


def restart(model: Path, runs: int) -> None:
    """Load times, and times from a kill to the next token of any stream."""
    loads, gaps = [], []
    for _ in range(runs):
        start = time.perf_counter()
        with LLM(model, isolation="process", num_slots=4, n_ctx=4096) as llm:
            loads.append(time.perf_counter() - start)
            llm.generate([5, 6, 7], max_tokens=10)
            pid = worker_pid(llm)
            assert pid is not None
            start = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            llm.generate([5, 6, 7], max_tokens=1)
            gaps.append(time.perf_counter() - start)
    print(
        f"load {statistics.median(loads):.2f} s, from a kill to a token {statistics.median(gaps):.2f} s, "
        f"differences {', '.join(f'{gap - load:+.2f}' for gap, load in zip(gaps, loads, strict=True))}"
    )


@contextmanager
def setting(event: threading.Event) -> Iterator[None]:
    """Set the event when the block is left, also by an exception."""
    try:
        yield
    finally:
        event.set()


def kills(model: Path, wanted: int, num_tokens: int, between_s: tuple[float, float]) -> None:
    """Random moments, so long after each other, 12 streams at a time; greedy and seeded."""
    rng = random.Random(1)
    asked: list[tuple[list[int], dict[str, Any]]] = [
        ([index + 5, 6, 7], {"seed": index, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": NUM_LISTED})
        for index in range(12)
    ]
    for index in range(0, 12, 3):
        asked[index][1]["temperature"] = 0
    vocabulary = Model.load(model, vocab_only=True)
    with LLM(model, isolation="process", num_slots=8, n_ctx=8192, **EXACT) as llm:
        expected = [llm.generate(ids, **options) for ids, options in asked]
        engine = llm._engine  # noqa: SLF001 - its limit on restarts
        assert isinstance(engine, WorkerEngine)
        engine._supervisor._restarts.limits = RestartLimits(max_restarts=wanted + 1, first_wait_s=0.0)  # noqa: SLF001
        done, num_killed = threading.Event(), 0

        def kill_on() -> None:
            nonlocal num_killed
            while num_killed < wanted and not done.wait(rng.uniform(*between_s)):
                pid = worker_pid(llm)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    num_killed += 1
            done.set()

        killer = threading.Thread(target=kill_on)
        killer.start()
        rounds = 0
        different: list[Difference] = []
        with ThreadPoolExecutor(len(asked)) as threads, setting(done):
            while not done.is_set():
                found = list(threads.map(lambda request: llm.generate(request[0], **request[1]), asked))
                rounds += 1
                different += [
                    difference(vocabulary, item, a, b)
                    for item, a, b in zip(asked, found, expected, strict=True)
                    if (a.token_ids, a.text) != (b.token_ids, b.text)
                ]
        killer.join()
    print(
        f"{num_killed} kills, {rounds * len(asked)} streams, all complete; {len(different)} differ from when they ran alone "
        f"({sum(run.is_greedy for run in different)} of them greedy), {sum(run.is_explained for run in different)} of these by "
        f"the noise of the logits, which was {max((run.noise for run in different), default=0):.3f} at most"
    )


@dataclass(frozen=True)
class Difference:
    """The first difference between two completions of the same request.

    noise: median difference at that token of the log-probabilities of the tokens that both list; a lost or doubled token
    before it would make it large. is_explained: each token is the draw of its request's sampler from its own logits, and for
    greedy requests the two tokens were nearly equally likely in either completion.
    """

    is_greedy: bool
    noise: float
    is_explained: bool


def difference(model: Model, asked: tuple[list[int], dict[str, Any]], one: Completion, other: Completion) -> Difference:
    """Kernels sum in another order in another batch, so that logits differ a little, and the draws from them may."""
    assert one.logprobs is not None
    assert other.logprobs is not None
    assert len(one.token_ids) == len(other.token_ids)
    at = next(index for index, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b)
    mine, theirs = one.logprobs[at], other.logprobs[at]
    values = dict(zip(theirs.token_ids, theirs.values, strict=True))
    apart = [abs(v - values[token]) for token, v in zip(mine.token_ids, mine.values, strict=True) if token in values]
    is_greedy, noise = asked[1].get("temperature") == 0, statistics.median(apart) if apart else float("inf")
    again = [redrawn(model, asked, each.token_ids[:at], logprobs) for each, logprobs in ((one, mine), (other, theirs))]
    is_explained = again == [one.token_ids[at], other.token_ids[at]]
    if is_greedy:
        is_explained = (
            is_explained
            and min(apart_in(each, one.token_ids[at], other.token_ids[at]) for each in (mine, theirs)) < CLOSE
        )
    if not is_explained:
        drawn = (one.token_ids[at], other.token_ids[at])
        print(
            f"token {at} of {asked}: {drawn}, again {again}; likeliest {mine.token_ids[:5]} {mine.values[:5]}, "
            f"{theirs.token_ids[:5]} {theirs.values[:5]}; own {mine.own}, {theirs.own}; noise {noise}"
        )
    return Difference(is_greedy, noise, is_explained)


def apart_in(listed: TokenLogprobs, first: int, second: int) -> float:
    """Return the difference of the log-probabilities of two tokens."""
    values = dict(zip(listed.token_ids, listed.values, strict=True))
    return abs(values.get(first, float("-inf")) - values.get(second, float("inf")))


def redrawn(
    model: Model, asked: tuple[list[int], dict[str, Any]], before: Sequence[int], logprobs: TokenLogprobs
) -> int:
    """Return the token that a sampler of this request draws after these tokens, from the most likely tokens."""
    prompt, options = asked
    sampler = Sampler(SamplingParams(**options), model)
    sampler.accept_prompt(prompt)
    for token in before:
        sampler.accept(token)
    logits = np.full(model.n_vocab, -np.inf, dtype=np.float32)
    logits[list(logprobs.token_ids)] = logprobs.values
    return sampler.sample(logits)


def main() -> None:
    """Parse the command line and run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("overhead", "restart", "kills", "all"), default="all")
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--between", type=float, nargs=2, default=(0.2, 1.2), help="seconds from one kill to the next")
    options = parser.parse_args()
    print(f"paceline {paceline.__version__}, {options.model.name}", flush=True)
    if options.part in ("overhead", "all"):
        overhead(options.model, options.streams, options.tokens, options.pairs)
    if options.part in ("restart", "all"):
        restart(options.model, 5)
    if options.part in ("kills", "all"):
        kills(options.model, options.kills, options.tokens, tuple(options.between))


if __name__ == "__main__":
    main()
