"""Engines that share a folder and are killed, while files are torn, damaged, deleted and evicted: every text is right."""

from __future__ import annotations

import os
import random
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.disk_world import DiskRig
from tests.engine_world import Outcome
from tests.unit.kv_cache.prefix_rig import KINDS, text

from paceline.engine import disk_blocks
from paceline.engine.disk_blocks import evict, files_of, remove
from paceline.kv_cache import TOKEN_BYTES, pack_tokens
from paceline.kv_cache.radix_tree import common_prefix_bytes
from paceline.sequence import prefix_namespace

NUM_TOKENS = 5
MODELS = (b"m" * 16, b"n" * 16)


class Killed(Exception):
    """The process ended within a write."""


class Schedule:
    """One random schedule of engines of two models. Texts are compared with those of engines without a disk.

    Attributes:
        num_hits: Prompts that began with tokens from the disk.
    """

    def __init__(self, seed: int, kind: str, folder: Path) -> None:
        self.chance, self.kind, self.folder = random.Random(seed), kind, folder
        self.expected: dict[tuple[Any, ...], list[int]] = {}
        self.asked: defaultdict[tuple[Any, ...], list[list[int]]] = defaultdict(list)
        self.num_hits = 0
        self.engines = [self.start() for _ in range(3)]
        self.open: list[tuple[DiskRig, Outcome]] = []

    def start(self) -> DiskRig:
        chance = self.chance
        return DiskRig(
            self.folder / "kv",
            kind=self.kind,
            num_cells=chance.choice([1200, 4096]),
            limits={
                "host_bytes": chance.choice([9_000, 40_000, 1_000_000, 1_000_000]),
                "num_slots": chance.choice([1, 3]),
            },
            of_store={"max_bytes": chance.choice([30_000, 1 << 30]), "model": chance.choice((MODELS[0], *MODELS))},
            adapters=["a"],
        )

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            step, = self.chance.choices(
                [self.ask, self.tick, self.finish, self.settle, self.kill, self.tear, self.damage, self.vanish, self.evict,
                 self.jump],
                weights=[12, 4, 2, 6, 4, 1, 1, 1, 1, 1],
            )  # fmt: skip
            step()
        self.finish()

    # ---- what callers and time do

    def ask(self) -> None:
        engine, chance = self.chance.choice(self.engines), self.chance
        prompt = text(chance.choice([20, 300, 520, 520]), chance.randrange(2))
        for _ in range(chance.randrange(3)):
            prompt = prompt + text(chance.choice([10, 130, 260]), chance.randrange(3))
        options: dict[str, Any] = {}
        if not chance.randrange(6):
            options = chance.choice([{"tenant": "other"}, {"cache_salt": "s"}, {"lora": (("a", 1.0),)}])
        self.open.append((engine, engine.begin(prompt, NUM_TOKENS, **options)))
        self.asked[self.namespace(*self.open[-1])].append(prompt)

    def tick(self) -> None:
        engine = self.chance.choice(self.engines)
        if self.chance.randrange(2):
            engine.deliver()
        engine.tick(self.chance.randrange(1, 6))

    def finish(self) -> None:
        for engine in self.engines:
            engine.run()
        for engine, outcome in self.open:
            assert outcome.token_ids() == self.alone(outcome)
            for num_tokens, source in engine.shared(outcome):
                if source == "disk":
                    self.num_hits += 1
                    assert self.num_known(engine, outcome) >= num_tokens
        self.open.clear()

    def num_known(self, engine: DiskRig, outcome: Outcome) -> int:
        """Return how many tokens of a prompt the other prompts of its model and namespace have had."""
        request = outcome.request
        others = list(self.asked[self.namespace(engine, outcome)])
        others.remove(list(request.prompt))
        tokens = pack_tokens(list(request.prompt))
        nums = [common_prefix_bytes(pack_tokens(other), tokens, 0) // TOKEN_BYTES for other in others]
        return max(nums, default=0)

    def namespace(self, engine: DiskRig, outcome: Outcome) -> tuple[Any, ...]:
        return (engine.store.folder.model, prefix_namespace(outcome.request.options))

    def alone(self, outcome: Outcome) -> list[int]:
        request = outcome.request
        key = (tuple(request.prompt), request.lora)
        if key not in self.expected:
            world = DiskRig(self.folder / "none", kind=self.kind, adapters=["a"], limits={"host_bytes": 0})
            found = world.begin(list(request.prompt), NUM_TOKENS, lora=request.lora)
            world.run()
            self.expected[key] = found.token_ids()
        return self.expected[key]

    def settle(self) -> None:
        self.finish()
        for engine in self.engines:
            engine.settle()

    def kill(self) -> None:
        """An engine and its open requests are gone at once; another one starts."""
        index = self.chance.randrange(len(self.engines))
        self.open = [(engine, outcome) for engine, outcome in self.open if engine is not self.engines[index]]
        self.engines[index] = self.start()

    def tear(self) -> None:
        """A process is killed while it writes: a part of a file is under the temporary name, or there is all of it."""
        engine, whole = self.chance.choice(self.engines), disk_blocks._write_whole

        def torn(target: Path, parts: Any) -> int:
            data = b"".join(bytes(part) for part in parts)
            if self.chance.randrange(2):
                whole(target, parts)
            else:
                aside = target.with_name(f".1.{self.chance.randrange(9)}.part")
                aside.write_bytes(data[: self.chance.randrange(len(data) + 1)])
            raise Killed

        disk_blocks._write_whole = torn
        try:
            prompt = text(200, self.chance.randrange(50))
            self.asked[self.namespace(engine, engine.begin(prompt, 2))].append(prompt)
            engine.run()
            engine.settle()
        except Killed:
            pass
        finally:
            disk_blocks._write_whole = whole
        self.open = [(other, outcome) for other, outcome in self.open if other is not engine]
        self.engines[self.engines.index(engine)] = self.start()

    # ---- what happens to files

    def damage(self) -> None:
        paths = [file.path for file in files_of(self.folder / "kv")]
        if not paths:
            return
        path, chance = self.chance.choice(sorted(paths)), self.chance
        data = bytearray(path.read_bytes())
        match chance.randrange(4):
            case 0 if data:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            case 1:
                del data[chance.randrange(len(data) + 1) :]
            case 2:
                data[:] = chance.choice(sorted(paths)).read_bytes()
            case _:
                data += b"\0"
        path.write_bytes(data)

    def vanish(self) -> None:
        for file in files_of(self.folder / "kv"):
            if not self.chance.randrange(3):
                file.path.unlink()
        if not self.chance.randrange(4):
            remove(self.folder / "kv", [model.hex() for model in MODELS])

    def evict(self) -> None:
        evict(self.folder / "kv", self.chance.randrange(60_000))

    def jump(self) -> None:
        """The clock was wrong for a while."""
        for file in files_of(self.folder / "kv"):
            if not self.chance.randrange(3):
                when = self.chance.choice([0, 2**33])
                os.utime(file.path, (when, when))


MANY = pytest.param(1000 // len(KINDS), marks=[pytest.mark.full, pytest.mark.timeout(600)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_schedules", [12, MANY])
def test_every_text_is_as_without_a_disk(kind: str, num_schedules: int) -> None:
    num_hits = 0

    @settings(max_examples=num_schedules)
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        nonlocal num_hits
        with tempfile.TemporaryDirectory() as folder:
            schedule = Schedule(seed, kind, Path(folder))
            schedule.run(40)
            num_hits += schedule.num_hits

    check()
    assert num_hits, "no prompt began with tokens from the disk"
