"""Several models on a budget for two: requests lost, memory beyond the budget, and how long the first token takes.

python -m benchmarks.manager [--part load|first-token] [--models FILE FILE FILE] [--seconds 600]

load         three models, a budget for the two largest, and clients that stream, complete, leave and idle at random. Every
             request must end as it would alone; the memory of the process tree is sampled throughout.
first-token  from asking for a model to its first token: cold (file not in the page cache), warm, and loaded.

Without --models, three random models of 130 to 260 MB are written to a temporary folder, or with --demo three copies of the
demo model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import tree
from paceline import AsyncLLM, AsyncModelManager, ModelEntry, demo_model_path
from paceline.model_manager.engine_loader import AsyncLLMLoader
from paceline.streaming import FinishReason
from paceline.testing.models import LlamaSpec, write_model

OPTIONS: dict[str, Any] = {"num_slots": 4, "n_ctx": 4096}
SHAPE: dict[str, Any] = {"n_embd": 1024, "n_head": 16, "n_head_kv": 4, "n_ff": 4096, "n_ctx_train": 8192}
SAMPLE_S = 0.1
MIB = 1 << 20


def tree_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants; pages that several of them map count once."""
    total = 0
    for item in tree(pid):
        with suppress(OSError, StopIteration):  # it has ended
            text = Path(f"/proc/{item}/smaps_rollup").read_text(encoding="ascii")
            total += next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))
    return total


class MemorySampler(threading.Thread):
    """Samples the memory of this process and its descendants."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base = tree_bytes(os.getpid())
        self.samples: list[int] = []
        self._ending = threading.Event()

    def run(self) -> None:
        while not self._ending.wait(SAMPLE_S):
            self.samples.append(tree_bytes(os.getpid()))

    def end(self) -> None:
        self._ending.set()
        self.join()


@dataclass
class Tally:
    """The outcomes of requests."""

    counts: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def entries(paths: Sequence[Path]) -> list[ModelEntry]:
    """Return one entry a file."""
    return [ModelEntry(name=f"m{index}", model=path, options=OPTIONS) for index, path in enumerate(paths)]


async def needs(models: Sequence[ModelEntry]) -> list[int]:
    """Return the bytes that each model needs of a memory budget."""
    loader = AsyncLLMLoader()
    prepared = [await loader.prepare(entry, threading.Event(), budget=1 << 62) for entry in models]
    return [model.needed_bytes or 0 for model in prepared]


async def client(models: AsyncModelManager, tally: Tally, rng: random.Random, until_s: float) -> None:
    """Ask one model after another."""
    while time.monotonic() < until_s:
        name = rng.choices(models.names(), weights=(5, 3, 2))[0]
        kind = rng.choice(("stream", "stream", "complete", "leave"))
        prompt = [rng.randrange(5, 256) for _ in range(rng.choice((8, 64, 256)))]
        num_tokens = rng.choice((8, 32, 64))
        began = time.monotonic()
        try:
            async with models.use(name) as llm:
                tally.waits_s.append(time.monotonic() - began)
                await one_request(llm, kind, prompt, num_tokens)
        except Exception as error:  # noqa: BLE001 - every one is a lost request
            tally.lost.append(f"{name} {kind}: {error!r}")
        else:
            tally.counts[f"{name} {kind}"] += 1
        await asyncio.sleep(rng.expovariate(2.0))


async def one_request(llm: AsyncLLM, kind: str, prompt: list[int], num_tokens: int) -> None:
    """Run one request, and check that it is complete."""
    options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}
    if kind == "complete":
        found = await llm.generate(prompt, **options)
        assert len(found.token_ids) == num_tokens
        return
    got, reason = 0, None
    async with llm.stream(prompt, **options) as stream:
        async for chunk in stream:
            got += len(chunk.token_ids)
            reason = chunk.finish_reason
            if kind == "leave":
                return
    assert (got, reason) == (num_tokens, FinishReason.LENGTH), (got, reason)


async def load(paths: Sequence[Path], seconds: float, num_clients: int, patience_s: float) -> None:
    """Run the mixed load."""
    models = entries(paths)
    needed = await needs(models)
    budget = sum(sorted(needed)[-2:])
    print(
        f"needs {', '.join(f'{need / MIB:.0f}' for need in needed)} MiB, budget {budget / MIB:.0f} MiB, {seconds:g} s"
    )
    tally, sampler = Tally(), MemorySampler()
    sampler.start()
    loads: Counter[str] = Counter()
    async with AsyncModelManager(models, memory_budget=budget, patience_s=patience_s) as manager:

        async def count_loads() -> None:
            async with manager.subscribe() as events:
                before: dict[str, str] = {}
                async for status in events:
                    if status.state == "loaded" and before.get(status.name) != "loaded":
                        loads[status.name] += 1
                    before[status.name] = status.state

        counting = asyncio.create_task(count_loads())
        until_s = time.monotonic() + seconds
        clients = [client(manager, tally, random.Random(seed), until_s) for seed in range(num_clients)]
        await asyncio.gather(*clients)
    await counting
    sampler.end()
    peak = max(sampler.samples) - sampler.base
    print(f"{sum(tally.counts.values())} requests: {dict(sorted(tally.counts.items()))}")
    print(f"{len(tally.lost)} lost {tally.lost[:5]}; loads {dict(sorted(loads.items()))}")
    print(
        f"waits for a model: median {statistics.median(tally.waits_s):.2f} s, longest {max(tally.waits_s):.2f} s; "
        f"peak memory {peak / MIB:.0f} MiB beyond this process's {sampler.base / MIB:.0f} MiB, {peak / budget:.3f} of the budget"
    )


async def first_token(paths: Sequence[Path], runs: int) -> None:
    """Measure from asking for a model to its first token."""
    for path in paths:
        found: dict[str, list[float]] = {"cold": [], "warm": [], "loaded": []}
        for _ in range(runs):
            async with AsyncModelManager([ModelEntry(name="m", model=path, options=OPTIONS)]) as manager:
                for kind, times in found.items():
                    if kind == "cold":
                        drop_from_page_cache(path)
                    if kind != "loaded":
                        await manager.unload("m")
                    began = time.monotonic()
                    async with manager.use("m") as llm, llm.stream([5, 6, 7], max_tokens=1, ignore_eos=True) as stream:
                        async for _chunk in stream:
                            break
                    times.append(time.monotonic() - began)
        medians = ", ".join(f"{kind} {statistics.median(times):.3f} s" for kind, times in found.items())
        print(f"{path.name}: first token {medians}")


def drop_from_page_cache(path: Path) -> None:
    """Ask the system to forget the pages of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def files(given: Sequence[Path], *, is_demo: bool) -> Iterator[list[Path]]:
    """Give the models' files."""
    if given:
        yield list(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"model{index}.gguf" for index in range(3)]
        for index, path in enumerate(paths):
            if is_demo:
                shutil.copy(demo_model_path(), path)
            else:
                write_model(path, LlamaSpec(**SHAPE, n_layer=8 + 4 * index), seed=index, weights="Q8_0")
        yield paths


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("load", "first-token"))
    parser.add_argument("--models", type=Path, nargs=3, default=())
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--patience", type=float, default=5.0)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    with files(given.models, is_demo=given.demo) as paths:
        if given.part in (None, "load"):
            asyncio.run(load(paths, given.seconds, given.clients, given.patience))
        if given.part in (None, "first-token"):
            asyncio.run(first_token(paths, given.runs))


if __name__ == "__main__":
    main()
