"""The savings and the cost of sharing and caching prefixes.

python -m benchmarks.memory [--part forks|shared|turns|half|idle|lookup]

forks   four forks of a running conversation: time to their first tokens against computing its history.
shared  24 requests with a shared prefix, 8 at a time, cold: prompt tokens computed against distinct prompt tokens.
turns   12 conversations of 4 turns on 4 slots, driven by ids: tokens that later turns compute beyond their new tokens.
half    eight requests that each need half of the KV cache: all complete in full.
idle    30,000 idle cached tokens: their cost for a running stream.
lookup  finding a path of 32,768 tokens among 200; and a prompt's beginning among 200 that are in host memory.

Figures are ratios within one run, medians of several for times; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import paceline
from benchmarks.engine import ENDLESS, Ticks
from benchmarks.model import half_billion
from paceline import LLM, Completion, Model
from paceline.cost_model import TickCostModel
from paceline.kv_cache import KVCache, PrefixMatch, pack_tokens
from paceline.kv_cache.radix_tree import RadixTree
from paceline.observability.metrics import Instruments
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.sequence import Request, prefix_namespace
from paceline.testing import FakeBackend
from paceline.testing.fake_backend import limits_of


def prefill_tokens(llm: LLM) -> int:
    """Prompt tokens computed so far."""
    return int(llm.stats().number("paceline_prefill_tokens_total"))


def ids(count: int, seed: int, n_vocab: int) -> list[int]:
    """Return random token ids."""
    source = random.Random(seed)
    return [source.randrange(n_vocab - 1000) for _ in range(count)]


def forks(model: Model, runs: int) -> None:
    """Time a fork of a running request's history against computing another history of its length."""
    ratios = []
    for run in range(runs):
        with LLM(model, num_slots=8, n_ctx=16384) as llm:
            history = ids(3000, run, model.n_vocab)
            running = llm.stream(history, ENDLESS)
            running.get()
            start = time.perf_counter()
            streams = [llm.stream([*history, 100 + fork], ENDLESS) for fork in range(4)]
            for stream in streams:
                stream.get()
            first_tokens_s = time.perf_counter() - start
            for stream in [running, *streams]:
                stream.close()
            running.wait_released()
            alone = llm.generate(
                ids(3000, 1000 + run, model.n_vocab), ENDLESS.replace(max_tokens=1), cache_prompt=False
            )
            history_s = alone.usage.prefill_s
        ratios.append(first_tokens_s / history_s)
        print(
            f"forks: {first_tokens_s:.2f} s for four first tokens, {history_s:.2f} s for the history: {ratios[-1]:.1%}"
        )
    print(f"forks: median {statistics.median(ratios):.1%}", flush=True)


def shared(model: Model) -> None:
    """Count the prompt tokens computed and shared, without times."""
    with LLM(model, num_slots=8, n_ctx=16384) as llm:
        prefix = ids(1024, 1, model.n_vocab)
        each = [[*prefix, *ids(32, 10 + number, model.n_vocab)] for number in range(24)]
        distinct = len(prefix) + 24 * 32
        llm.generate(each, ENDLESS.replace(max_tokens=8))
        computed = prefill_tokens(llm)
    print(f"shared: {computed} prompt tokens computed, {distinct} distinct: {computed / distinct:.3f} x", flush=True)


def turns(model: Model) -> None:
    """Every conversation's next turn is its history, its completion and new tokens."""
    with LLM(model, num_slots=4, n_ctx=8192) as llm:
        histories = [ids(200, number, model.n_vocab) for number in range(12)]
        extra: list[int] = []
        sources: dict[str, int] = {}
        for turn in range(4):
            completions: list[Completion] = llm.generate(histories, ENDLESS.replace(max_tokens=24))
            for number, completion in enumerate(completions):
                if turn:
                    new = 24 + 1  # the new tokens and the last one of the completion, which was drawn and not computed
                    extra.append(completion.usage.prompt_tokens - completion.usage.cached_tokens - new)
                    source = str(completion.usage.cached_from)
                    sources[source] = sources.get(source, 0) + 1
                histories[number] += [*completion.token_ids, *ids(24, 100 * turn + number, model.n_vocab)]
    print(
        f"turns: tokens beyond the new ones: median {statistics.median(extra)}, most {max(extra)}; from {sources}",
        flush=True,
    )


def half(model: Model) -> None:
    """Each with a prompt of a quarter and a completion of a quarter of the cells."""
    with LLM(model, num_slots=8, n_ctx=1024) as llm:
        each = [ids(256, number, model.n_vocab) for number in range(8)]
        completions: list[Completion] = llm.generate(each, ENDLESS.replace(max_tokens=256))
        whole = sum(len(completion.token_ids) == 256 for completion in completions)
        preempted = llm.stats().number("paceline_preemptions_total")
        computed = prefill_tokens(llm)
    print(
        f"half: {whole} of 8 completed in full, {preempted:.0f} preemptions, {computed} of {8 * 256} prompt tokens computed"
    )


def speed(llm: LLM, ticks: Ticks) -> float:
    """Tokens a second of one stream, by the ticks' median."""
    begin = len(ticks.records)
    llm.generate([1, 2, 3], ENDLESS.replace(max_tokens=64), cache_prompt=False)
    starts = [record.start_s for record in ticks.records[begin:]]
    return 1 / statistics.median(after - before for before, after in pairwise(starts))


def idle(model: Model, pairs: int) -> None:
    """One stream beside ten cached prompts of 3,000 tokens, and alone on a second engine, in turns."""
    ratios = []
    filled_ticks, empty_ticks = Ticks(), Ticks()
    with (
        LLM(model, num_slots=4, n_ctx=32768, instruments=(filled_ticks,)) as filled,
        LLM(model, num_slots=4, n_ctx=32768, instruments=(empty_ticks,)) as empty,
    ):
        for number in range(10):
            filled.generate(ids(3000, number, model.n_vocab), ENDLESS.replace(max_tokens=1))
            print(f"idle: {3000 * (number + 1)} tokens cached", end="\r", flush=True)
        speed(filled, filled_ticks)  # idle prefixes move to host memory while a request generates
        for _ in range(pairs):
            ratios.append(speed(filled, filled_ticks) / speed(empty, empty_ticks))
    ratios.sort()
    print(
        f"idle: speed beside 30,000 idle tokens: {statistics.median(ratios):.3f} x ({ratios[0]:.3f}-{ratios[-1]:.3f})"
    )


class Path32k:
    """An owner of a path of 32,768 tokens, all of them computed."""

    seq_id = 1
    num_computed_tokens = 32768


def lookup(_: Model) -> None:
    """200 paths that part from one another all along it."""
    source, tree, owner = random.Random(1), RadixTree(), Path32k()
    base = source.randbytes(4 * 32768)
    for _number in range(200):
        at = 4 * source.randrange(1, 32768)
        end = tree.insert(("all",), base[:at] + source.randbytes(4 * 32768 - at))
        tree.add_owner(owner, end)
    match = tree.match(("all",), base)
    times = []
    for _number in range(200):
        start = time.perf_counter()
        tree.match(("all",), base)
        times.append(time.perf_counter() - start)
    print(f"lookup: {1e6 * statistics.median(times):.0f} us for {match.length} tokens over {len(match.nodes)} nodes")
    placement()


class Blank:
    """Saved cells that are none."""

    nbytes = 0


def placement() -> None:
    """All that a waiting prompt costs before it starts, in a memory as the scheduler has it; nothing is loaded."""
    backend = FakeBackend(num_cells=2**17, num_seq_ids=8)
    limits = limits_of(backend, 8)
    source, cache = random.Random(1), KVCache(limits, Instruments(), TickCostModel())
    base = [source.randrange(250) for _ in range(32769)]
    times = []
    for number in range(200):
        at = source.randrange(1, 32768)
        tokens = pack_tokens([*base[:at], *(source.randrange(250) for _ in range(32768 - at))])
        cache.import_ranges(prefix_namespace(RequestOptions()), tokens, ((0, 32768, Blank()),), float(number))
    for key in range(1, 201):
        request = Request(
            key=key,
            prompt=base,
            params=SamplingParams(),
            options=RequestOptions(),
            samplers=(None,),
            submitted_s=0.0,
            vocabulary=backend.vocabulary,
        )
        start = time.perf_counter()
        found = cache.match(request.sequences[0], 0.0, is_alone=True)
        times.append(time.perf_counter() - start)
        assert isinstance(found, PrefixMatch)
        assert found.num_tokens > 0
    print(
        f"lookup: {1e6 * statistics.median(times):.0f} us to place a prompt of {len(base)} tokens among 200 saved ones"
    )


def main() -> None:
    """Parse the command line and run the parts."""
    parts: dict[str, Callable[[Model], None]] = {
        "forks": lambda model: forks(model, options.runs),
        "shared": shared,
        "turns": turns,
        "half": half,
        "idle": lambda model: idle(model, options.runs),
        "lookup": lookup,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=(*parts, "all"), default="all")
    parser.add_argument("--model", type=Path, help="another GGUF file")
    parser.add_argument("--llama-cpp-source", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    model = Model.load(options.model or half_billion(options.llama_cpp_source))
    print(f"paceline {paceline.__version__}, {model.desc}", flush=True)
    for name, part in parts.items():
        if options.part in (name, "all"):
            part(model)


if __name__ == "__main__":
    main()
