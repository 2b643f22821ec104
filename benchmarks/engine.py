"""The cost of the engine, and its promises: latency beside prefill, and prompt cancellation.

python -m benchmarks.engine [--part decode|split|gap|cancel]

decode  tokens/s of the engine against a bare loop over `Context.step`, at several batch sizes, in interleaved pairs; and
        the engine thread's own CPU time a tick, outside of native calls.
split   the bare loop with a pool of cells for each sequence against one pool for all.
gap     four streams decode while a long prompt arrives: the time between their tokens against itl_target_ms, and the
        long prompt's time to first token against its time alone.
cancel  ticks from a cancel to a free slot.

Every figure is a ratio within one run, a median of several; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import paceline
from benchmarks.model import half_billion
from paceline import LLM, Context, Instrument, Model, Sampler, SamplingParams, _native
from paceline.runtime import StepRow
from paceline.scheduling.records import TickRecord

PROMPT_TOKENS = 32
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)


class Ticks(Instrument):
    """Records of all ticks; reports when enough of them only decoded a full batch."""

    def __init__(self, batch: int = 0, wanted: int = 0) -> None:
        self.records: list[TickRecord] = []
        self.full: list[TickRecord] = []
        self.is_enough = threading.Event()
        self._batch, self._wanted = batch, wanted

    def tick_finished(self, record: TickRecord) -> None:
        self.records.append(record)
        if self._wanted and record.num_decode == self._batch and record.num_prefill == 0:
            self.full.append(record)
            if len(self.full) == self._wanted:
                self.is_enough.set()


@dataclass
class NativeTime:
    """The thread's CPU seconds when each native step began and ended."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def own_ms(self, last: int) -> float:
        """Median CPU milliseconds from the end of a call to the start of the next, over recent calls."""
        between = [start - end for end, start in zip(self.ends, self.starts[1:], strict=False)]
        return 1000 * statistics.median(between[-last:])


@contextmanager
def native_time() -> Iterator[NativeTime]:
    """Watches the native call of a tick."""
    spent, calls = NativeTime(), {name: getattr(_native, name) for name in ("step", "plain_step")}

    def timed(call: Any) -> Any:
        def called(*arguments: object, **options: object) -> object:
            spent.starts.append(time.thread_time())
            try:
                return call(*arguments, **options)
            finally:
                spent.ends.append(time.thread_time())

        return called

    for name, call in calls.items():
        setattr(_native, name, timed(call))
    try:
        yield spent
    finally:
        for name, call in calls.items():
            setattr(_native, name, call)


def prompts(count: int, length: int, n_vocab: int) -> list[list[int]]:
    """Different for each, and the same in every run."""
    return [[(7919 * (row + 1) + 31 * column) % (n_vocab - 1000) for column in range(length)] for row in range(count)]


# ---- decode


def bare_loop(model: Model, batch: int, num_ticks: int, **options: Any) -> float:
    """Tokens a second of the simplest loop over the same core."""
    ids = prompts(batch, PROMPT_TOKENS, model.n_vocab)
    with Context(model, n_ctx=8192, n_seq_max=batch, **options) as context:
        samplers = [Sampler(ENDLESS, model) for _ in range(batch)]
        last = []
        for row in range(batch):
            samplers[row].accept_prompt(ids[row])
            first = StepRow(seq_id=row, position=0, token_ids=ids[row], samplers=(samplers[row],))
            last.append(context.step([first]).rows[0].draws[0].token_ids[0])
        periods = []
        for tick in range(num_ticks):
            start = time.perf_counter()
            rows = [
                StepRow(seq_id=r, position=PROMPT_TOKENS + tick, token_ids=[last[r]], samplers=(samplers[r],))
                for r in range(batch)
            ]
            last = [row.draws[0].token_ids[0] for row in context.step(rows).rows]
            periods.append(time.perf_counter() - start)
    return batch / statistics.median(periods[2:])


def engine_loop(model: Model, batch: int, num_ticks: int) -> tuple[float, float]:
    """Tokens a second of the engine with a channel for each stream, and its own CPU milliseconds a tick."""
    ticks = Ticks(batch, num_ticks)
    # All prompts in the first tick, so that both loops compute with as many cells in use.
    at_once: dict[str, Any] = {"itl_target_ms": 1e6, "max_tick_ms": 1e6}
    with LLM(model, num_slots=batch, n_ctx=8192, instruments=(ticks,), **at_once) as llm, native_time() as native:
        ids = prompts(batch, PROMPT_TOKENS, model.n_vocab)
        streams = [llm.stream(token_id, ENDLESS, interval=1_000_000) for token_id in ids]
        if not ticks.is_enough.wait(600):
            raise SystemExit("the engine did not get that far in ten minutes")
        for stream in streams:
            stream.close()
    full = ticks.full
    periods = [after.start_s - before.start_s for before, after in pairwise(full)]
    return batch / statistics.median(periods[2:]), native.own_ms(num_ticks - 2)


def decode(model: Model, batches: list[int], pairs: int, num_ticks: int) -> None:
    """Interleaved pairs of both loops."""
    print(f"{'batch':>5} {'bare tok/s':>11} {'engine tok/s':>13} {'ratio':>7} {'spread':>15} {'own CPU ms/tick':>16}")
    for batch in batches:
        bare, engine, own = [], [], []
        for pair in range(pairs):
            first = bare_loop(model, batch, num_ticks) if pair % 2 == 0 else None
            speed, cpu = engine_loop(model, batch, num_ticks)
            bare.append(bare_loop(model, batch, num_ticks) if first is None else first)
            engine.append(speed)
            own.append(cpu)
        ratios = sorted(e / b for e, b in zip(engine, bare, strict=True))
        print(
            f"{batch:>5} {statistics.median(bare):>11.1f} {statistics.median(engine):>13.1f} "
            f"{statistics.median(ratios):>7.3f} {ratios[0]:>7.3f}-{ratios[-1]:.3f} {statistics.median(own):>16.3f}",
            flush=True,
        )


# ---- split


def split(model: Model, batches: list[int], pairs: int, num_ticks: int) -> None:
    """Compare a pool of cells for each sequence with one pool for all, without shared prefixes; interleaved."""
    for batch in batches:
        ratios = []
        for pair in range(pairs):
            speeds = {}
            for unified in (pair % 2 == 0, pair % 2 == 1):
                speeds[unified] = bare_loop(model, batch, num_ticks, kv_unified=unified)
            ratios.append(speeds[False] / speeds[True])
        ratios.sort()
        print(
            f"split KV at batch {batch}: {statistics.median(ratios):.3f} x unified ({ratios[0]:.3f}-{ratios[-1]:.3f})",
            flush=True,
        )


# ---- gap


def token_gaps(llm: LLM, ticks: Ticks, long_prompt: list[int], num_streams: int) -> tuple[list[float], float]:
    """Seconds between the tokens of running streams while a long prompt is computed, and its time to first token."""
    running = [llm.stream(ids, ENDLESS) for ids in prompts(num_streams, PROMPT_TOKENS, llm.model.n_vocab)]
    for stream in running:
        for _ in range(4):
            stream.get()
    start = len(ticks.records)
    late = llm.stream(long_prompt, ENDLESS.replace(max_tokens=1), cache_prompt=False)
    chunks = list(late)
    for stream in running:
        stream.close()
        stream.wait_released()
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.ttft_s is not None
    busy = [record for record in ticks.records[start - 1 :] if record.num_decode == num_streams]
    ends = [record.start_s + record.elapsed_s for record in busy]
    while_prefilling = [
        after - before for before, after, record in zip(ends, ends[1:], busy[1:], strict=False) if record.num_prefill
    ]
    return while_prefilling, usage.ttft_s


def alone(llm: LLM, long_prompt: list[int]) -> float:
    """Return the long prompt's time to first token without other requests."""
    usage = llm.generate(long_prompt, ENDLESS.replace(max_tokens=1), cache_prompt=False).usage
    assert usage.ttft_s is not None
    return usage.ttft_s


def gap(model: Model, length: int, runs: int, flash_attn: Literal["auto", "on", "off"]) -> None:
    """Interleaved: alone, then beside four streams."""
    ticks = Ticks()
    with LLM(model, num_slots=8, n_ctx=8192, instruments=(ticks,), flash_attn=flash_attn) as llm:
        target = llm.limits.itl_target_s
        long_prompt = prompts(9, length, model.n_vocab)[-1]
        print(f"target {target * 1000:.0f} ms; a prompt of {length} tokens beside 4 streams")
        print(
            f"{'p50':>7} {'p99':>7} {'longest':>8} {'p99/target':>11} {'max/target':>11} {'TTFT':>7} {'alone':>7} {'ratio':>6}"
        )
        rows = []
        for _ in range(runs):
            by_itself = alone(llm, long_prompt)
            gaps, ttft = token_gaps(llm, ticks, long_prompt, 4)
            gaps.sort()
            p99 = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
            rows.append((p99 / target, gaps[-1] / target, ttft / by_itself))
            print(
                f"{1000 * statistics.median(gaps):>7.0f} {1000 * p99:>7.0f} {1000 * gaps[-1]:>8.0f} {rows[-1][0]:>11.2f} "
                f"{rows[-1][1]:>11.2f} {ttft:>7.2f} {by_itself:>7.2f} {rows[-1][2]:>6.2f}",
                flush=True,
            )
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(
            f"medians: p99 {medians[0]:.2f} x target, longest {medians[1]:.2f} x target, TTFT {medians[2]:.2f} x alone"
        )


# ---- cancel


class SlotFreed(Instrument):
    """Ticks that were begun before a slot was freed."""

    def __init__(self) -> None:
        self.num_ticks = 0
        self.freed_at: list[int] = []

    def tick_finished(self, record: TickRecord) -> None:
        self.num_ticks = record.index

    def slot_freed(self, *_: object) -> None:
        self.freed_at.append(self.num_ticks)


def cancel(model: Model, runs: int) -> None:
    """Cancel a stream of eight in the middle of a tick, again and again."""
    watch = SlotFreed()
    with LLM(model, num_slots=8, n_ctx=8192, instruments=(watch,)) as llm:
        ticks = []
        for _ in range(runs):
            streams = [llm.stream(ids, ENDLESS) for ids in prompts(8, 16, model.n_vocab)]
            for stream in streams:
                stream.get()
            victim, before = streams[3], watch.num_ticks
            victim.cancel()
            victim.wait_released()
            ticks.append(watch.freed_at[-1] - before)
            for stream in streams:
                stream.close()
                stream.wait_released()
        print(f"ticks that ended between cancel and free slot: median {statistics.median(ticks)}, most {max(ticks)}")


def main() -> None:
    """Parse the command line and run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("decode", "split", "gap", "cancel", "all"), default="all")
    parser.add_argument("--model", type=Path, help="another GGUF file")
    parser.add_argument("--llama-cpp-source", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ticks", type=int, default=48)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=3000)
    parser.add_argument("--flash-attn", choices=("auto", "on", "off"), default="auto", help="of the part gap")
    options = parser.parse_args()
    model = Model.load(options.model or half_billion(options.llama_cpp_source))
    print(f"paceline {paceline.__version__}, {model.desc}", flush=True)
    if options.part in ("decode", "all"):
        decode(model, options.batches, options.pairs, options.ticks)
    if options.part in ("split", "all"):
        split(model, options.batches, options.pairs, options.ticks)
    if options.part in ("gap", "all"):
        gap(model, options.prompt, options.pairs, options.flash_attn)
    if options.part in ("cancel", "all"):
        cancel(model, 10)


if __name__ == "__main__":
    main()
