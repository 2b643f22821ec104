"""Passes that are timed for the cost model: their rows, their time, and that they leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from paceline.cost_model import MeasuredPass
from paceline.demo import demo_model_path
from paceline.engine import engine_factory
from paceline.engine.arguments import engine_arguments
from paceline.engine.engine_factory import Calibration, build
from paceline.errors import Aborted, DecodeError
from paceline.runtime import Context
from paceline.runtime.step import StepRow


@contextmanager
def calibrated(num_slots: int) -> Iterator[tuple[Calibration, Context, list[Sequence[MeasuredPass]]]]:
    """A calibration on the demo model, and its passes."""
    learned: list[Sequence[MeasuredPass]] = []

    def learn(passes: Sequence[MeasuredPass], _: float) -> None:
        learned.append(passes)

    built = build(demo_model_path(), engine_arguments({"num_slots": num_slots, "n_ctx": 4096}))
    assert built.context is not None
    try:
        yield Calibration(built.context, built.model, num_slots, learn), built.context, learned
    finally:
        built.context.close()
        built.model.close()


@pytest.mark.parametrize(("num_slots", "most_rows"), [(1, 1), (3, 3), (16, 8)])
def test_passes_are_measured_and_leave_the_context_empty(num_slots: int, most_rows: int) -> None:
    """One decoding row, then as many as slots up to eight, then pieces of a prompt, none smaller than the last."""
    with calibrated(num_slots) as (passes, context, learned):
        passes.begin()
        while passes.step():
            pass
        passes.end()
        (measured,) = learned
        rows = [step.num_tokens for step in measured if step.num_outputs]
        pieces = [step.num_tokens for step in measured if not step.num_outputs]
        assert rows == sorted({1, most_rows})
        assert [step.num_outputs for step in measured] == rows + [0] * len(pieces)
        assert pieces == sorted(pieces)
        assert pieces
        assert all(step.seconds > 0 and step.num_cells == step.num_tokens for step in measured)
        assert all(context.positions(seq_id) is None for seq_id in range(context.n_seq_max))


def test_a_start_makes_only_passes_that_are_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is too slow for a second one it warms up; nothing is learned before something was measured."""
    monkeypatch.setattr(engine_factory, "_START_S", 0.0)
    with calibrated(4) as (passes, _, learned):
        passes.begin()
        passes.end()
        assert learned == []
    with calibrated(4) as (passes, _, learned):
        passes.begin()
        assert passes.step()
        passes.end()
        assert [value.num_tokens for value in learned[0]] == [1]


@pytest.mark.parametrize(
    ("error", "num_warnings"), [(Aborted("closed"), 0), (DecodeError("no"), 1), (MemoryError(), 1)]
)
def test_a_stepthat_fails_ends_a_calibration(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, num_warnings: int
) -> None:
    """Earlier measurements count; a failure is logged, the end of the engine is not."""
    monkeypatch.setattr(engine_factory, "_START_S", 0.0)
    with calibrated(4) as (passes, _, learned):
        passes.begin()
        assert passes.step()

        def failing(self: Context, rows: object) -> None:
            raise error

        monkeypatch.setattr(Context, "step", failing)
        assert not passes.step()
        passes.end()
        assert [len(value) for value in learned] == [1]
    warnings = [
        record for record in caplog.records if (record.name, record.levelname) == ("paceline.engine", "WARNING")
    ]
    assert len(warnings) == num_warnings


def test_values_that_cannot_be_learned_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's thread, on which an idle engine ends its calibration, goes on."""

    def failing(measured: object, idle_cell_s: float) -> None:
        raise ZeroDivisionError

    with calibrated(4) as (passes, _, _):
        monkeypatch.setattr(passes, "_learn", failing)
        passes.begin()
        while passes.step():
            pass
        passes.end()
    (warning,) = (
        record for record in caplog.records if (record.name, record.levelname) == ("paceline.engine", "WARNING")
    )
    assert "cannot be learned" in warning.message and warning.exc_info is not None


class SlowAttention:
    """A clock that a pass advances by 1 ms, and by each row and cell in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cell_s: float) -> None:
        self.now_s, self.num_idle, self._cell_s, step = 0.0, 0, cell_s, Context.step
        monkeypatch.setattr(engine_factory.time, "perf_counter", lambda: self.now_s)

        def slow_step(context: Context, rows: Sequence[StepRow]) -> object:
            output = step(context, rows)
            held = [context.positions(seq_id) for seq_id in range(context.n_seq_max)]
            num_cells = sum(positions.last + 1 for positions in held if positions is not None)
            self.num_idle = max(self.num_idle, num_cells - sum(len(row.token_ids) for row in rows))
            self.now_s += 0.001 + cell_s * len(rows) * num_cells
            return output

        monkeypatch.setattr(Context, "step", slow_step)


@pytest.mark.parametrize(("num_slots", "cell_s", "num_idle"), [(8, 40e-9, 2048), (1, 400e-9, 2048), (8, 5e-9, 2048)])
def test_the_cost_of_an_idle_cell_is_measured_if_it_is_large_enough(
    monkeypatch: pytest.MonkeyPatch, num_slots: int, cell_s: float, num_idle: int
) -> None:
    """Half of the cells are idle beside a decoding pass that becomes slower by a tenth; less may be chance, and counts as 0."""
    clock = SlowAttention(monkeypatch, cell_s)
    costs: list[float] = []
    with calibrated(num_slots) as (passes, context, _):
        monkeypatch.setattr(passes, "_learn", lambda _, idle_cell_s: costs.append(idle_cell_s))
        passes.begin()
        while passes.step():
            pass
        passes.end()
        assert clock.num_idle == num_idle
        assert all(context.positions(seq_id) is None for seq_id in range(context.n_seq_max))
    assert costs == [pytest.approx(cell_s) if cell_s > 5e-9 else 0.0]


def test_a_start_that_is_too_short_does_not_measure_idle_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does a calibration that the first request ends before."""
    clock = SlowAttention(monkeypatch, 40e-9)
    monkeypatch.setattr(engine_factory, "_START_S", 0.008)
    costs: list[float] = []
    with calibrated(8) as (passes, _, _):
        monkeypatch.setattr(passes, "_learn", lambda _, idle_cell_s: costs.append(idle_cell_s))
        passes.begin()
        passes.end()
    assert clock.num_idle == 0
    assert costs == [0.0]
