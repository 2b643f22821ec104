"""The cost of constraints: time to compile schemas, and tokens per second of 16 streams, 8 of them with a JSON schema.

python -m benchmarks.constraints [--pairs 10] [--small]

Each pair runs the same 16 greedy streams twice, without and with the schema for half of them, in changing order, on an
engine that is warm; the figure is the median of the quotients. The schema wants more items than there are tokens, so that no
stream ends early: ticks with fewer rows make fewer tokens per second, which has nothing to do with masks. --small takes a random
Llama of 50 million parameters and 299 tokens, with short passes.

The cost of a mask, on two cores of a shared machine: with 152k tokens it is filled in 0.05 ms (median; 0.15 ms at the 90th
percentile), a draw under it takes 0.13 ms instead of 0.10 ms, and a tick with masks 0.5 to 0.8 ms more between passes, in
Python. With passes of 180 ms that is less than the noise (median 1.045 of 8 pairs, 0.92 to 1.29); with the
22 ms of --small the quotient was 0.90 and 0.91 in two runs of 10 pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from typing import Any

from benchmarks.batching import small
from benchmarks.model import half_billion
from paceline import LLM
from paceline.constraints import ConstraintCompiler
from paceline.engine.llama_backend import token_table
from paceline.params import SamplingParams

NUM_STREAMS, NUM_TOKENS = 16, 64
ENDLESS = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    "minItems": NUM_TOKENS,
}


def schemas(count: int) -> list[dict[str, Any]]:
    """Return schemas of growing size, each new to a compiler."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 1000},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 10},
        {"type": "string", "format": "date-time"},
    ]
    return [
        {
            "type": "object",
            "properties": {f"p{number}_{at}": kinds[(number + at) % len(kinds)] for at in range(1 + number % 30)},
            "required": [f"p{number}_0"],
        }
        for number in range(count)
    ]


def compile_times(compiler: ConstraintCompiler, count: int = 200) -> list[float]:
    """Return the seconds that each schema takes, sorted."""
    times = []
    for schema in schemas(count):
        params = SamplingParams(json_schema=schema)
        start = time.perf_counter()
        compiler.compile(params)
        times.append(time.perf_counter() - start)
    return sorted(times)


def tokens_per_s(llm: LLM, num_constrained: int) -> float:
    """Run the streams at once and return the tokens of all of them per second."""
    counts = [0] * NUM_STREAMS

    def read(index: int) -> None:
        options: dict[str, Any] = {"json_schema": ENDLESS} if index < num_constrained else {}
        with llm.stream(
            f"{index} Once upon a time",
            max_tokens=NUM_TOKENS,
            temperature=0,
            ignore_eos=True,
            cache_prompt=False,
            **options,
        ) as stream:
            counts[index] = sum(len(chunk.token_ids) for chunk in stream)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(NUM_STREAMS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken_s = time.perf_counter() - start
    if set(counts) != {NUM_TOKENS}:
        raise SystemExit(f"every stream must have {NUM_TOKENS} tokens, not {counts}")
    return sum(counts) / taken_s


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    print("load average", *[f"{load:.1f}" for load in os.getloadavg()])
    path = small() if options.small else half_billion(None)
    with LLM(path, num_slots=NUM_STREAMS, n_ctx=NUM_STREAMS * 256) as llm:
        start = time.perf_counter()
        compiler = ConstraintCompiler(token_table(llm.tokenizer))
        compiler.compile(SamplingParams(json_schema=True))
        print(
            f"the first schema, with the vocabulary of {llm.tokenizer.n_vocab} tokens: {time.perf_counter() - start:.2f} s"
        )
        times = compile_times(compiler)
        print(f"compile: p50 {times[len(times) // 2] * 1e3:.1f} ms, p99 {times[int(len(times) * 0.99)] * 1e3:.1f} ms")
        tokens_per_s(llm, NUM_STREAMS // 2)
        ratios = []
        for number in range(options.pairs):
            order = (0, NUM_STREAMS // 2) if number % 2 else (NUM_STREAMS // 2, 0)
            found = {constrained: tokens_per_s(llm, constrained) for constrained in order}
            ratios.append(found[NUM_STREAMS // 2] / found[0])
            print(f"none {found[0]:.1f} tok/s, 8 of 16 {found[NUM_STREAMS // 2]:.1f} tok/s, {ratios[-1]:.3f}")
        print(f"median {statistics.median(ratios):.3f} of {options.pairs} pairs")
    print("load average", *[f"{load:.1f}" for load in os.getloadavg()])


if __name__ == "__main__":
    main()
