"""paceline's attention kernel for the CPU against llama.cpp's.

python -m benchmarks.attention [--part operation|model] [--model FILE] [--threads N]

operation  one operation, with heads as in common models, for one token, for prompts, and for streams with cells one after
           another (own) or, as after decoding together, interleaved; drafts: four tokens of each stream.
model      a prompt's tokens/s in ticks of 64 and of 512 tokens, and tokens/s of streams, at several lengths of context.

Ratios within one run, interleaved, medians; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.model import half_billion
from paceline import Context, Model
from paceline.runtime.attention import Kernel, SingleAttention, use_kernel

Traffic = Literal["of a prompt", "streams, own", "streams, between", "drafts, between"]

# query heads, heads of keys, width of a head
HEADS = {
    "Qwen2 0.5B": (14, 2, 64),
    "Llama 8B": (32, 8, 128),
    "Gemma 2B": (8, 1, 256),
    "two to a key": (32, 16, 128),
    "no shared heads": (16, 16, 64),
    "Phi 2": (32, 32, 80),
    "demo model": (8, 4, 32),
    "DeepSeek 2 Lite": (16, 1, 576),
}
_CASES: tuple[tuple[int, Traffic], ...] = (
    (1, "of a prompt"),
    (8, "of a prompt"),
    (8, "streams, own"),
    (8, "streams, between"),
    (32, "streams, own"),
    (32, "streams, between"),
    (16, "drafts, between"),
    (64, "of a prompt"),
    (512, "of a prompt"),
)
KERNELS: tuple[Kernel, Kernel] = ("llama.cpp", "paceline")


def operation_pass(heads: tuple[int, int, int], num_tokens: int, num_cells: int, traffic: Traffic) -> SingleAttention:
    """Return the case of a prompt's tokens behind all cells, or of one token for each of several sequences."""
    num_heads, num_kv_heads, dim = heads
    rng = np.random.default_rng(0)
    token, cell = np.arange(num_tokens)[:, None], np.arange(num_cells)[None, :]
    seen = {
        "of a prompt": cell <= num_cells - num_tokens + token,
        "streams, own": cell * num_tokens // num_cells == token,
        "streams, between": cell % num_tokens == token,
        "drafts, between": cell % max(1, num_tokens // 4) == token // 4,
    }[traffic]
    return SingleAttention(
        queries=rng.normal(size=(1, num_tokens, num_heads, dim)).astype(np.float32),
        keys=rng.normal(size=(1, num_cells, num_kv_heads, dim)).astype(np.float16),
        values=rng.normal(size=(1, num_cells, num_kv_heads, dim)).astype(np.float16),
        mask=np.where(seen, np.float16(0), np.float16(-np.inf))[None],
        scale=dim**-0.5,
    )


def compared(measure: Callable[[], float], pairs: int) -> tuple[float, float, list[float]]:
    """Medians with each kernel, in the order of KERNELS, and the ratios of the pairs, sorted."""
    rows = []
    for pair in range(pairs + 1):
        found = {}
        for kernel in KERNELS if pair % 2 else KERNELS[::-1]:
            use_kernel(kernel)
            found[kernel] = measure()
        rows.append((found["llama.cpp"], found["paceline"]))
    rows = rows[1:]  # the first one warms up
    ratios = sorted(theirs / ours for theirs, ours in rows)
    return statistics.median(row[0] for row in rows), statistics.median(row[1] for row in rows), ratios


def print_comparison(what: str, unit: float, theirs: float, ours: float, ratios: list[float]) -> None:
    """Print one line of a comparison; unit: how many units are a second."""
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    print(
        f"{what:58s} llama.cpp {theirs * unit:9.3f}, paceline {ours * unit:9.3f} ms: {spread} times as fast", flush=True
    )


def operations(n_threads: int, pairs: int) -> None:
    """Milliseconds of one operation."""
    for name, heads in HEADS.items():
        for num_cells in (512, 3072, 8192):
            for num_tokens, traffic in _CASES:
                one = operation_pass(heads, num_tokens, num_cells, traffic)
                found = compared(partial(operation_seconds, one, n_threads), pairs)
                print_comparison(f"{name}, {num_cells} cells, {num_tokens} {traffic}", 1000, *found)


def operation_seconds(one: SingleAttention, n_threads: int) -> float:
    """Return the best time of three, in seconds."""
    return min(one.run(n_threads=n_threads, times=3)[1])


def prompt_seconds(context: Context, depth: int, num_tokens: int) -> float:
    """One pass of so many tokens of a prompt behind `depth` cells."""
    context.remove(0, depth)
    start = time.perf_counter()
    context.decode([17] * num_tokens)
    return time.perf_counter() - start


def models(path: Path, n_threads: int, pairs: int) -> None:
    """Milliseconds of a pass of the model."""
    with Model.load(path) as model:
        for depth in (512, 1500, 2900, 7900):
            for num_tokens in (1, 64, 512):
                with Context(
                    model, flash_attn="on", n_ctx=depth + 1024, n_batch=512, n_ubatch=512, n_threads=n_threads
                ) as context:
                    for start in range(0, depth, 512):
                        context.decode([17] * min(512, depth - start))
                    found = compared(partial(prompt_seconds, context, depth, num_tokens), pairs)
                print_comparison(f"{num_tokens} tokens behind {depth} cells", 1000, *found)


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["operation", "model", "all"], default="all")
    parser.add_argument(
        "--model", type=Path, default=None, help="GGUF file; without it a random one of half a billion weights"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.part in ("operation", "all"):
        operations(arguments.threads, arguments.pairs)
    if arguments.part in ("model", "all"):
        models(arguments.model or half_billion(None), arguments.threads, arguments.pairs)


if __name__ == "__main__":
    main()
