"""The time of estimates of a model's memory, and their error against loading.

python -m benchmarks.estimates [MODEL ...]

Without models: the half-billion model of `benchmarks.model`, and from `benchmarks.state_models` models with a sliding window and
with recurrent layers. The header is to take less than 200 ms, a dry run less than a second, and the error is to be below
5 %. Times are the medians of several runs; run it on a quiet machine. The first run, which reads the file from the disk
and imports modules, does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.model import half_billion
from benchmarks.state_models import model_file
from paceline import LLM, estimate_memory
from paceline.runtime import MemoryEstimate, memory_in_use


def timed(estimate: Callable[[], MemoryEstimate], runs: int) -> tuple[MemoryEstimate, float]:
    """Return an estimate and its median time in seconds."""
    found, times = estimate(), []
    for _ in range(runs):
        start = time.perf_counter()
        found = estimate()
        times.append(time.perf_counter() - start)
    return found, statistics.median(times)


def error(found: int | None, taken: int | None) -> str:
    """Return by how much an estimate is wrong."""
    return "no error" if found == taken else f"{((found or 0) - (taken or 0)) / (taken or 1):+.2%}"


def compare(path: Path, num_slots: int, n_ctx: int, runs: int) -> None:
    """Estimate a model, load it, and print times and errors."""
    sizes: dict[str, Any] = {"num_slots": num_slots, "n_ctx": n_ctx}
    header, header_s = timed(lambda: estimate_memory(path, dry_run=False, **sizes), runs)
    plan, plan_s = timed(lambda: estimate_memory(path, **sizes), runs)
    with LLM(path, **sizes) as llm:
        used = memory_in_use(llm._engine._backend._context)  # type: ignore[attr-defined]  # noqa: SLF001
    print(
        f"{path.name}: header {header_s * 1000:.0f} ms (weights {error(header.weights_bytes, used.weights_bytes)}, "
        f"cache {error(header.cache_bytes, used.cache_bytes)}); dry run {plan_s * 1000:.0f} ms "
        f"(buffers {error(plan.compute_bytes, used.compute_bytes)}, all {error(plan.total_bytes, used.total_bytes)} "
        f"of {used.total_bytes / 2**20:,.0f} MiB)",
        flush=True,
    )


def main() -> None:
    """Compare the models of the command line, or three shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--num-slots", type=int, default=4)
    parser.add_argument("--n-ctx", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    models = args.models or [half_billion(None), *(model_file(name, None) for name in ("gemma3-270m", "falcon-h1"))]
    for path in models:
        compare(path, args.num_slots, args.n_ctx, args.runs)


if __name__ == "__main__":
    main()
