"""Loads damaged GGUF files and counts the outcomes: `python -m tests.fuzz.fuzz_gguf --count 5000 --seed 1`.

Every file is loaded, given a context and run for a few tokens in a process of its own. Success and typed errors are expected;
faults are printed with the damage, and make the exit code 1. `--keep DIR` keeps their files.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from tests.fuzz.document import Document
from tests.fuzz.mutations import damage, sweep
from tests.fuzz.outcomes import Outcome, report, run_forked
from tests.native.architecture_files import known_architectures

from paceline.runtime import Context, Embedder, MemoryClass, Model
from paceline.runtime import model as model_module
from paceline.testing.models import KINDS, write_model


def use(path: Path, *, checked: bool) -> None:
    """Use a model as a user does: load it, make a context, compute a few tokens."""
    if not checked:
        model_module.check_gguf = lambda *_: None  # type: ignore[assignment]
    with Model.load(path) as model:
        token_ids = [token % max(1, model.n_vocab) for token in (1, 2, 3, 4)]
        if model.memory_class is MemoryClass.NONE or model.metadata.get("general.architecture") == "bert":
            with Embedder(model, n_threads=1, max_tokens=min(32, model.n_ctx_train)) as embedder:
                embedder.embed([token_ids])
            return
        with Context(model, n_ctx=256, n_batch=64, n_threads=1) as context:
            if model.has_encoder:
                context.encode(token_ids)
            context.decode(token_ids)
            context.logits(3)
            context.decode(token_ids[:1])


def fuzz(seed: int, count: int, folder: Path, *, checked: bool = True) -> Iterator[tuple[int, str, Path, Outcome]]:
    """`count` damaged files, each with a number, its damage, its path (until the next file) and its outcome."""
    bases = [Document.read(write_model(folder / f"{kind}.gguf", spec)) for kind, spec in KINDS.items()]
    path = folder / "damaged.gguf"
    for number in range(count):
        data, words = damage(Random(f"{seed}/{number}"), bases)
        path.write_bytes(data)
        yield number, words, path, run_forked(lambda: use(path, checked=checked))


def sweep_all(folder: Path, kinds: Iterable[str], *, checked: bool = True) -> Iterator[tuple[int, str, Path, Outcome]]:
    """Every single change of `sweep` to these kinds of models, numbered."""
    path = folder / "damaged.gguf"
    bases = {kind: Document.read(write_model(folder / f"{kind}.gguf", KINDS[kind])) for kind in kinds}
    changes = ((kind, data, words) for kind, base in bases.items() for data, words in sweep(base))
    for number, (kind, data, words) in enumerate(changes):
        path.write_bytes(data)
        yield number, f"{kind}: {words}", path, run_forked(lambda: use(path, checked=checked))


def renamed(folder: Path, kinds: Iterable[str], *, checked: bool = True) -> Iterator[tuple[int, str, Path, Outcome]]:
    """These kinds of models under the name of every architecture that llama.cpp knows, numbered."""
    path = folder / "renamed.gguf"
    cases = [(kind, name) for kind in kinds for name in known_architectures()]
    for number, (kind, name) in enumerate(cases):
        spec = KINDS[kind]
        write_model(path, type(spec.__class__.__name__, (type(spec),), {"architecture": name})())
        yield number, f"{kind} as {name}", path, run_forked(lambda: use(path, checked=checked))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the files of faults")
    parser.add_argument(
        "--sweep", action="store_true", help="instead: every single change in turn, a few thousand files"
    )
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="with --sweep, --names: these kinds alone")
    parser.add_argument("--names", action="store_true", help="instead: files under the names of all architectures")
    parser.add_argument("--unchecked", action="store_true", help="without paceline's own check in front")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checked = not options.unchecked
        if options.sweep:
            cases = sweep_all(Path(folder), options.kind or KINDS, checked=checked)
        elif options.names:
            cases = renamed(Path(folder), options.kind or KINDS, checked=checked)
        else:
            cases = fuzz(options.seed, options.count, Path(folder), checked=checked)
        return report(options.seed, _kept(cases, options.seed, options.keep))


def _kept(
    cases: Iterable[tuple[int, str, Path, Outcome]], seed: int, folder: Path | None
) -> Iterator[tuple[int, str, Outcome]]:
    """The cases without their files; files of faults are copied to `folder`."""
    for number, words, path, outcome in cases:
        if folder is not None and outcome.is_fault:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{seed}-{number}.gguf").write_bytes(path.read_bytes())
        yield number, words, outcome


if __name__ == "__main__":
    raise SystemExit(main())
