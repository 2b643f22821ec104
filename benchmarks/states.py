"""The savings and the cost of checkpoints on models with memory that cannot be cut.

python -m benchmarks.states [--model gemma3-270m|gemma3-1b|lfm2-350m|lfm2-1.2b|falcon-h1|granite4-tiny]
                            [--part shared|prefill|decode|forks|turns]

shared   16 requests with 1,024 tokens in common, 8 at a time: seconds, and prompt tokens computed.
prefill  prompts of 2,048 tokens with checkpoints, and without the cache, in turns: ratio of their speeds, passes of each.
decode   8 streams without anything in common, with the cache and without, in turns: ratio of their speeds.
forks    a fork of a running conversation of 3,000 tokens: time to its first token, against computing its history.
turns    12 conversations of 4 turns on 4 slots: seconds, and prompt tokens computed.

The models have random weights in the named shapes, Q8_0, with the vocabulary of Qwen 2. Figures are of one run each; medians
for ratios. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.engine import ENDLESS
from benchmarks.state_models import MODELS, model_file
from paceline import LLM, Completion, Model, StreamChunk
from paceline.observability.metrics import Instrument
from paceline.scheduling.records import TickRecord


def ids(count: int, seed: int, n_vocab: int) -> list[int]:
    """Return random token ids."""
    chosen = random.Random(seed)
    return [chosen.randrange(n_vocab - 1000) for _ in range(count)]


def computed(llm: LLM) -> int:
    """Return the number of prompt tokens computed so far."""
    return int(llm.stats().number("paceline_prefill_tokens_total"))


def shared(model: Model) -> None:
    """Time requests with a common beginning, cold."""
    with LLM(model, num_slots=8, n_ctx=16384) as llm:
        prefix = ids(1024, 1, model.n_vocab)
        prompts = [[*prefix, *ids(32, 10 + number, model.n_vocab)] for number in range(16)]
        start = time.perf_counter()
        llm.generate(prompts, ENDLESS.replace(max_tokens=32))
        took_s = time.perf_counter() - start
        print(f"shared: {took_s:.1f} s, {computed(llm)} prompt tokens computed, {1024 + 16 * 32} distinct", flush=True)


class PassSums(Instrument):
    """Sums up the passes since `begin`: their number, and the seconds that the engine took outside of them."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all records."""
        self.num_passes, self.own_s = 0, 0.0

    def tick_finished(self, record: TickRecord) -> None:
        """Add a pass."""
        self.num_passes += 1
        self.own_s += record.own_s


def prefill(model: Model, pairs: int = 4) -> None:
    """Compare the time to a prompt's first token with checkpoints and without, and show the parts of the difference."""
    ratios, sums = [], PassSums()
    with LLM(model, num_slots=1, n_ctx=8192, instruments=[sums]) as llm:
        llm.generate(ids(600, 99, model.n_vocab), ENDLESS.replace(max_tokens=1))  # learns what saving takes
        for pair in range(pairs):
            took: dict[bool, float] = {}
            for number, caches in enumerate((pair % 2 == 0, pair % 2 == 1)):
                sums.begin()
                prompt = ids(2048, 10 * pair + number, model.n_vocab)
                one: Completion = llm.generate(prompt, ENDLESS.replace(max_tokens=1), cache_prompt=caches)
                took[caches] = one.usage.prefill_s
                name = "with checkpoints" if caches else "without"
                print(
                    f"prefill: {took[caches]:.2f} s {name}, {sums.num_passes} passes, {sums.own_s:.3f} s outside of them",
                    flush=True,
                )
            ratios.append(took[False] / took[True])
    print(
        f"prefill: {statistics.median(ratios):.3f} of the speed without ({min(ratios):.3f}-{max(ratios):.3f})",
        flush=True,
    )


def decode(model: Model, pairs: int = 3) -> None:
    """Compare the speed of streams that share nothing, with the cache and without."""
    ratios = []
    with LLM(model, num_slots=8, n_ctx=8192) as llm:
        for pair in range(pairs):
            took: dict[bool, float] = {}
            for number, caches in enumerate((pair % 2 == 0, pair % 2 == 1)):
                prompts = [ids(40, 1000 * pair + 100 * number + i, model.n_vocab) for i in range(8)]
                found: list[Completion] = llm.generate(prompts, ENDLESS.replace(max_tokens=96), cache_prompt=caches)
                took[caches] = statistics.median([completion.usage.decode_s for completion in found])
            ratios.append(took[False] / took[True])
    print(
        f"decode: {statistics.median(ratios):.3f} of the speed without ({min(ratios):.3f}-{max(ratios):.3f})",
        flush=True,
    )


def forks(model: Model) -> None:
    """Time a fork of a running conversation against computing its history."""
    with LLM(model, num_slots=4, n_ctx=16384) as llm:
        history = ids(3000, 1, model.n_vocab)
        running = llm.stream(history, ENDLESS.replace(max_tokens=1000))
        generated: list[int] = []
        while len(generated) < 8:
            chunk = running.get()
            assert isinstance(chunk, StreamChunk)
            generated += chunk.token_ids
        start = time.perf_counter()
        stream = llm.stream([*history, *ids(8, 7, model.n_vocab)], ENDLESS.replace(max_tokens=1))
        stream.get()
        first_s = time.perf_counter() - start
        running.close()
        stream.close()
        alone = llm.generate(ids(3008, 2, model.n_vocab), ENDLESS.replace(max_tokens=1), cache_prompt=False)
    print(
        f"forks: first token after {first_s:.3f} s, {first_s / alone.usage.prefill_s:.1%} of computing it", flush=True
    )


def turns(model: Model) -> None:
    """Time conversations of several turns on fewer slots."""
    with LLM(model, num_slots=4, n_ctx=8192) as llm:
        system = ids(200, 1, model.n_vocab)
        histories = [[*system, *ids(40, 10 + number, model.n_vocab)] for number in range(12)]
        start = time.perf_counter()
        for turn in range(4):
            found: list[Completion] = llm.generate(histories, ENDLESS.replace(max_tokens=24))
            for number, completion in enumerate(found):
                histories[number] += [*completion.token_ids, *ids(24, 100 * turn + number, model.n_vocab)]
        took_s = time.perf_counter() - start
        print(f"turns: {took_s:.1f} s, {computed(llm)} prompt tokens computed", flush=True)


PARTS: dict[str, Callable[[Model], None]] = {
    "shared": shared,
    "prefill": prefill,
    "decode": decode,
    "forks": forks,
    "turns": turns,
}


def main() -> None:
    """Run the parts that were asked for on the models that were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--llama-cpp-source", type=Path)
    parser.add_argument("--write-only", action="store_true", help="write the models' files and stop")
    arguments = parser.parse_args()
    for name in arguments.model or ["gemma3-270m", "lfm2-350m", "falcon-h1"]:
        path = model_file(name, arguments.llama_cpp_source)
        if arguments.write_only:
            continue
        print(name, flush=True)
        with Model.load(path) as model:
            for part in arguments.part or list(PARTS):
                PARTS[part](model)


if __name__ == "__main__":
    main()
