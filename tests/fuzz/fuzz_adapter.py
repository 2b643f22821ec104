"""Loads damaged LoRA adapters: `python -m tests.fuzz.fuzz_adapter --count 1000 --seed 1`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

from tests.fuzz.document import Document
from tests.fuzz.mutations import damage
from tests.fuzz.outcomes import Outcome, report, run_forked

from paceline.runtime import Context, Model
from paceline.testing.models import KINDS, write_lora, write_model

BASES = ("llama", "gemma3", "falcon-h1")


def use(model: Model, path: Path) -> None:
    """Load an adapter and compute with it."""
    adapter = model.load_adapter(path)
    with Context(model, n_ctx=256, n_batch=64, n_threads=1) as context:
        context.set_adapters({adapter: 1.0})
        context.decode([1, 2, 3])
        context.logits(2)


def fuzz(seed: int, count: int, folder: Path) -> Iterator[tuple[int, str, Outcome]]:
    """`count` damaged adapters, each with a number, its damage, and its outcome."""
    models = {kind: Model.load(write_model(folder / f"{kind}.gguf", KINDS[kind])) for kind in BASES}
    documents = {kind: Document.read(write_lora(folder / "lora.gguf", KINDS[kind])) for kind in BASES}
    path = folder / "damaged.gguf"
    for number in range(count):
        random = Random(f"{seed}/{number}")
        kind = random.choice(BASES)
        data, words = damage(random, [documents[kind]])
        path.write_bytes(data)
        yield number, words, run_forked(partial(use, models[kind], path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return report(options.seed, fuzz(options.seed, options.count, Path(folder)))


if __name__ == "__main__":
    raise SystemExit(main())
