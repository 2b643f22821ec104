"""Restores damaged states of sequences: `python -m tests.fuzz.fuzz_state --count 2000 --seed 1`.

The frame around a state is made anew each time, so its checksum is right and llama.cpp's own reader gets the damage.
Afterwards the sequence must be usable: continued after a restore, emptied and used anew in every case.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from tests.fuzz.mutations import NUMBERS
from tests.fuzz.outcomes import Outcome, report, run_forked

from paceline.errors import StateError
from paceline.runtime import Context, Model
from paceline.runtime.sequence_state import SequenceState
from paceline.testing.models import KINDS, write_model

STATEFUL = ("llama", "gemma3", "gemma4", "mamba", "rwkv7", "falcon-h1", "lfm2")
PROMPT = [10, 20, 30, 40, 50, 60, 70]


def damage(random: Random, payload: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], str]:
    """A changed copy of a state, and a description of the change. Most of the damage hits the sizes and counts."""
    data = bytearray(payload.tobytes())
    choice = random.randrange(8)
    head = random.choice((64, 256, len(data)))
    at = random.randrange(min(head, len(data)) // 4) * 4
    if choice == 0:
        data, words = data[: random.randrange(len(data))], "cut off"
    elif choice == 1:
        data, words = bytearray(random.randbytes(random.choice((0, 1, 8, 100, len(data))))), "random bytes"
    elif choice == 2:
        data, words = data + random.randbytes(random.randrange(1, 100)), "bytes added"
    elif choice == 3:
        count = random.randrange(1, 64)
        del data[at : at + count]
        words = f"{count} bytes missing at {at}"
    elif choice == 4:
        for _ in range(random.choice((1, 2, 8))):
            data[random.randrange(min(head, len(data)))] ^= 1 << random.randrange(8)
        words = f"bits flipped in the first {head}"
    else:
        width = random.choice((4, 4, 8))
        number = random.choice((*NUMBERS, 4, 6, 8, 64)) & (2 ** (8 * width) - 1)
        data[at : at + width] = number.to_bytes(width, "little")
        words = f"{number} over {width} bytes at {at}"
    return np.frombuffer(bytes(data), dtype=np.uint8), words


def use(model: Model, seed: str, unified: bool, partial: bool) -> None:
    """Save a sequence, restore a damaged copy of it into another one, and go on with that."""
    random = Random(seed)
    with Context(model, n_ctx=256, n_batch=64, n_seq_max=3, n_threads=1, kv_unified=unified) as context:
        context.decode(PROMPT)
        state = SequenceState.from_bytes(context.save_sequence(0, partial=partial), context.fingerprint)
        payload, _ = damage(random, state.payload)
        kind = random.random() < 0.5 if partial else False
        frame = SequenceState(
            context.fingerprint, (), kind, random.choice((state.last, -1, 3, 10**6)), payload
        ).to_bytes()
        target = random.choice((0, 1))
        with suppress(StateError):
            context.load_sequence(target, frame)
        positions = context.positions(target)
        if positions is not None and positions.last < 200:
            context.decode([1, 2, 3], seq_ids=target)
            context.logits(2)
        context.remove(target)
        context.decode(PROMPT, seq_ids=target)
        context.logits(len(PROMPT) - 1)


def fuzz(seed: int, count: int, folder: Path) -> Iterator[tuple[int, str, Outcome]]:
    """`count` damaged states, each with a number, its damage, and its outcome."""
    models = {kind: Model.load(write_model(folder / f"{kind}.gguf", KINDS[kind])) for kind in STATEFUL}
    for number in range(count):
        name = f"{seed}/{number}"
        random = Random(name + "/kind")
        kind, unified, partial = random.choice(STATEFUL), random.random() < 0.7, random.random() < 0.2
        words = f"{kind}{'' if unified else ', not unified'}{', partial' if partial else ''}"
        outcome = run_forked(functools.partial(use, models[kind], name, unified, partial))
        yield number, words, outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = fuzz(options.seed, options.count, Path(folder))
        return report(options.seed, cases)


if __name__ == "__main__":
    raise SystemExit(main())
