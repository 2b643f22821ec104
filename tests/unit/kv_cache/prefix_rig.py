"""A world for tests of prefix caching: its computed, shared, evicted and preempted tokens, and the cost of saving."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.engine_world import Outcome, World

from paceline.observability.metrics import Instrument
from paceline.scheduling.records import TickRecord
from paceline.streaming import FinishReason
from paceline.testing.fake_backend import FakeState

STATES = ["sliding_window", "hybrid"]  # cells, and a state beside them
WHOLE = ["recurrent", "compressed"]
UNCUT = [*STATES, *WHOLE]
KINDS = ["attention", *UNCUT]
TOKEN_BYTES = 8  # of the fake's saved tokens


class Recorder(Instrument):
    """Records the scheduler's reports of memory."""

    def __init__(self) -> None:
        self.computed: Counter[int] = Counter()
        self.prefilled: Counter[int] = Counter()
        self.shared: list[tuple[int, int, int, str]] = []
        self.unstable: list[tuple[int, int, int]] = []
        self.evicted_tokens: Counter[str] = Counter()
        self.num_preempted = 0

    def tick_finished(self, record: TickRecord) -> None:
        for row in record.rows:
            self.computed[row.key] += row.num_tokens
            self.prefilled[row.key] += row.num_tokens - row.num_decode

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:
        self.shared.append((key, choice, num_tokens, source))

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        self.unstable.append((key, num_cached, num_matched))

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        self.evicted_tokens[source] += num_tokens

    def preempted(self, key: int, choice: int, num_computed_tokens: int, now_s: float) -> None:
        self.num_preempted += 1


class Rig(World):
    """A world with a recorder, large ticks and many cells, unless options say otherwise."""

    def __init__(self, *, limits: dict[str, Any] | None = None, **options: Any) -> None:
        self.recorder = Recorder()
        wide = {"n_batch": 512, "chunk_size": 512, "host_bytes": 1_000_000}
        super().__init__(
            instruments=(self.recorder,), limits={**wide, **(limits or {})}, **{"num_cells": 4096, **options}
        )

    def ask(self, prompt: str | list[int], num_tokens: int = 1, **options: Any) -> Outcome:
        """A request that ends with exactly so many tokens, run to its end."""
        outcome = self.begin(prompt, num_tokens, **options)
        self.run()
        assert outcome.last(0).finish_reason is FinishReason.LENGTH
        return outcome

    def begin(self, prompt: str | list[int], num_tokens: int = 1, **options: Any) -> Outcome:
        return self.submit(prompt, max_tokens=num_tokens, ignore_eos=True, **options)

    def computed(self, outcome: Outcome) -> int:
        return self.recorder.computed[outcome.request.key]

    def shared(self, outcome: Outcome, choice: int = 0) -> list[tuple[int, str]]:
        key = outcome.request.key
        return [(count, source) for k, c, count, source in self.recorder.shared if (k, c) == (key, choice)]

    def check_output_as_alone(self, *outcomes: Outcome) -> None:
        """Each ended by itself, with the output of the same request in a world of its own."""
        for outcome in outcomes:
            request = outcome.request
            options: dict[str, Any] = {"max_tokens": request.params.max_tokens, "n": request.params.n}
            other = self.alone(request.prompt, ignore_eos=True, **options)
            for choice in range(request.params.n):
                assert outcome.token_ids(choice) == other.token_ids(choice)


class KnownCost:
    """A tick of 10 ms, and so much for each cell that a token attends to. idle_cell_s: as a calibration measures it."""

    def __init__(self, per_cell_s: float, idle_cell_s: float = 0.0) -> None:
        self.per_cell_s, self.idle_cell_s = per_cell_s, idle_cell_s

    def seconds(self, num_tokens: int, num_cells: int, num_outputs: int = 1) -> float:
        return 0.01 + num_tokens * num_cells * self.per_cell_s

    def observe(self, num_tokens: int, num_cells: int, seconds: float, num_outputs: int = 1) -> None:
        """It knows."""


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens that begin like no others of another seed."""
    return [(seed * 31 + 7 * place * place + place) % 250 for place in range(length)]


def operations_of(world: Rig, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that is carried out from now on."""
    done: list[Any] = []
    carry_out = world.executor._carry_out

    def note(operation: Any, output: Any) -> None:
        done.append(operation)
        carry_out(operation, output)

    monkeypatch.setattr(world.executor, "_carry_out", note)
    return done


def slow_saves(world: Rig, monkeypatch: pytest.MonkeyPatch, token_s: float = 0.001) -> list[int]:
    """Make a token take so long to save from now on; return a list of how many are saved, tick by tick."""
    save, tick, counts = world.backend.save, world.engine.tick, [0]

    def save_slowly(seq_id: int, start: int, end: int) -> FakeState:
        world.clock.advance(token_s * (end - start))
        counts[-1] += end - start
        return save(seq_id, start, end)

    def count(*_: Any) -> Any:
        counts.append(0)
        return tick()

    monkeypatch.setattr(world.backend, "save", save_slowly)
    monkeypatch.setattr(world.engine, "tick", count)
    return counts


def learn_to_save(world: Rig) -> None:
    """Let it learn the cost of saving."""
    world.ask(text(40, 99))
    world.export(text(40, 99))
    world.run()
