"""Closed loops of streams with and without speculation on a clock, with measured costs of passes.

Kernels compute tiles of four rows, so that 8 rows take less than 7, and two take 2.6 times as long as one: a smooth model's
expectations are wrong.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from tests.draft_world import FakeDraftBackend, model_drafter
from tests.engine_world import World

from paceline.cost_model import MeasuredPass
from paceline.sequence import Row
from paceline.speculation.drafters.model_drafter import DraftRow, DraftToken, ModelDrafter
from paceline.testing.fake_backend import ManualClock, mix

NUM_CELLS, NUM_SLOTS = 16_384, 16

# A model of 0.5 B weights in Q8_0, and one with a tenth of them, on two cores with AVX-512: milliseconds of a pass by its rows,
# the logits of all of them computed. _OF_OUTPUTS: which part of it is for the logits.
TARGET_MS = {1: 17.2, 2: 44.3, 3: 57, 4: 63, 5: 83, 6: 91, 7: 98, 8: 71, 10: 94, 12: 85, 14: 114, 16: 90, 18: 119, 20: 114,
             24: 133, 28: 150, 32: 165, 48: 235, 64: 295, 80: 363, 128: 560, 512: 2240}  # fmt: skip
DRAFT_MS = {1: 3.0, 2: 2.7, 3: 3.2, 4: 4, 6: 6, 8: 5.5, 12: 7, 16: 9.5, 32: 17.5, 64: 33, 128: 65, 512: 260}
_OF_OUTPUTS = {"target": 0.27, "draft": 0.85}


def pass_s(times_ms: Mapping[int, float], num_rows: int, num_outputs: int, of_outputs: float) -> float:
    """Seconds of a pass over so many tokens, with the logits of some."""
    whole_s = _interpolated_s(times_ms, num_rows)
    outputs_s = _interpolated_s(times_ms, num_outputs) if num_outputs else 0.0
    return (1 - of_outputs) * whole_s + of_outputs * outputs_s


def _interpolated_s(times_ms: Mapping[int, float], num_rows: int) -> float:
    sizes = list(times_ms)
    index = bisect_left(sizes, num_rows)
    if index == len(sizes):
        return times_ms[sizes[-1]] * num_rows / sizes[-1] / 1000
    above = sizes[index]
    if above == num_rows:
        return times_ms[num_rows] / 1000
    below = sizes[index - 1]
    share = (num_rows - below) / (above - below)
    return (times_ms[below] * (1 - share) + times_ms[above] * share) / 1000


class SetAcceptance(FakeDraftBackend):
    """A draft model that is right with a set probability; each pass takes its time. spent_s: of all of them."""

    def __init__(self, acceptance: float, clock: ManualClock | None) -> None:
        super().__init__(NUM_CELLS, 2 * NUM_SLOTS + 1)
        self._acceptance, self._of = acceptance, clock
        self.spent_s = 0.0

    def step(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        num_tokens = sum(len(row.token_ids) for row in rows)
        if self._of is not None:
            taken_s = pass_s(DRAFT_MS, num_tokens, sum(row.draws for row in rows), _OF_OUTPUTS["draft"])
            self._of.advance(taken_s)
            self.spent_s += taken_s
        return super().step(rows)

    def _compute(self, row: DraftRow) -> DraftToken | None:
        last = self.memory.append(row.seq_id, row.position, row.token_ids)
        if not row.draws:
            return None
        right = self._sampler.draw(last)
        is_right = mix(last + 77) % 1000 < 1000 * self._acceptance
        return DraftToken(right if is_right else (right + 1) % 200, 0.9)


class FreeDrafter:
    """Proposes at no cost, sequence by sequence, like prompt lookup."""

    def __init__(self, acceptance: float) -> None:
        self._inner = model_drafter(SetAcceptance(acceptance, None), n_batch=4096, chunk_size=4096)

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        self._inner.begin(key, token_ids)

    def propose(self, key: int, max_tokens: int) -> list[int]:
        return self._inner.propose(key, min(max_tokens, 48))

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        self._inner.observe(key, token_ids)

    def rollback(self, key: int, num_tokens: int) -> None:
        self._inner.rollback(key, num_tokens)

    def end(self, key: int) -> None:
        self._inner.end(key)


class StreamWorld:
    """An engine that serves closed loops. acceptance: of a draft model; None: without."""

    def __init__(self, acceptance: float | None = None, drafter: Any = None) -> None:
        self._late = _LateClock()
        if acceptance is not None:
            self.drafting = SetAcceptance(acceptance, self._late)
            drafter = model_drafter(self.drafting, n_batch=2048, chunk_size=256)
            assert isinstance(drafter, ModelDrafter)
        limits = {"num_slots": NUM_SLOTS, "n_batch": 2048, "n_ubatch": 512, "chunk_size": 512, "max_positions": 4096,
                  "max_scored": 32, "itl_target_s": 0.25, "max_tick_s": 1.0, "max_drafted": 64, "host_bytes": 0}  # fmt: skip
        self.world = World(drafter=drafter, num_cells=NUM_CELLS, num_seq_ids=2 * NUM_SLOTS + 1, limits=limits)
        self._late.clock = self.world.clock
        self.passes: list[list[Row]] = []
        self.world.backend._begin = self._begin  # type: ignore[method-assign]
        self.world.scheduler.calibrate(
            [
                MeasuredPass(num_tokens, num_tokens, _target_s(num_tokens, num_outputs), num_outputs)
                for num_tokens, num_outputs in ((1, 1), (8, 8), (8, 1), (32, 1), (64, 1))
            ]
        )

    def _begin(self, rows: Sequence[Row], num_tokens: int) -> None:
        self.passes.append(list(rows))
        self.world.clock.advance(_target_s(num_tokens, max(1, sum(row.num_outputs for row in rows))))

    def tokens_per_s(self, width: int, count: int, *, seed: int = 0, interval_s: float = 0.0) -> float:
        """Serve so many requests of 64 and 96 tokens, of which so many are open at once; the first come at this interval."""
        world, source = self.world, random.Random(1000 * seed + width)
        begin_s, num_sent, running = world.clock.now(), 0, []
        while num_sent < count or running:
            while num_sent < count and len(running) < width:
                if num_sent < width and world.clock.now() < begin_s + num_sent * interval_s:
                    break
                prompt = [source.randrange(200) for _ in range(64)]
                running.append(world.submit(prompt, max_tokens=96, ignore_eos=True))
                num_sent += 1
            world.take(world.engine.tick())
            running = [sequence for sequence in running if sequence.terminal is None]
        return count * 96 / (world.clock.now() - begin_s)


class _LateClock(ManualClock):
    """Advances a clock that is made later."""

    clock: ManualClock

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)


def _target_s(num_tokens: int, num_outputs: int) -> float:
    return pass_s(TARGET_MS, num_tokens, num_outputs, _OF_OUTPUTS["target"])
