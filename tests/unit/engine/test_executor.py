"""Passes that fail are tried in halves; only the row at fault gets the error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.backend import Executor, as_paceline_error
from paceline.errors import Aborted, DecodeError, EngineError, NoKvSlot, PacelineError
from paceline.kv_cache import Copy, Load, LoadState, Remove, Save
from paceline.request import RequestOptions
from paceline.scheduling.records import EmbeddingItem, EmbeddingPlan, EmbeddingRequest, StepPlan
from paceline.sequence import Row, RowOutput
from paceline.testing.fake_backend import ManualClock

Step = Callable[[list[int]], None]


class Recording:
    """A backend that records its calls, and raises exceptions set by a test."""

    def __init__(self, step: Step = lambda names: None) -> None:
        self.calls: list[Any] = []
        self._step = step

    def step(self, rows: Sequence[Row], lora: Any) -> list[RowOutput]:
        names = [int(row.position) for row in rows]
        self.calls.append(names)
        self._step(names)
        return [RowOutput(token_ids=(name,)) for name in names]

    def embed(self, texts: list[list[int]], pooling: str | None) -> list[Any]:
        names = [text[0] for text in texts]
        self.calls.append(names)
        self._step(names)
        return [float(name) for name in names]

    def copy(self, from_seq_id: int, to_seq_id: int, num_tokens: int) -> None:
        self.calls.append(("copy", from_seq_id, to_seq_id, num_tokens))
        if to_seq_id == 9:
            raise RuntimeError("no copy")

    def remove(self, seq_id: int) -> None:
        self.calls.append(("remove", seq_id))


def row(name: int, seq_id: int = 0) -> Row:
    sequence: Any = SimpleNamespace(seq_id=seq_id)
    return Row(sequence, name, [1], True, [], None)


def ran(step: Step, num_rows: int) -> tuple[Recording, list[RowOutput], int]:
    backend = Recording(step)
    output = Executor(backend, ManualClock()).run(StepPlan([], [row(name) for name in range(num_rows)]))  # type: ignore[arg-type]
    return backend, output.rows, output.num_passes


def poison(*bad: int) -> Step:
    def step(names: list[int]) -> None:
        if set(bad) & set(names):
            raise DecodeError(f"{names}")

    return step


def test_a_pass_that_succeeds_is_made_once() -> None:
    """All rows in one call, in order."""
    backend, rows, num_passes = ran(lambda names: None, 5)
    assert backend.calls == [[0, 1, 2, 3, 4]]
    assert num_passes == 1
    assert [row.token_ids for row in rows] == [(0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize("bad", [(0,), (4,), (7,), (0, 7), (2, 3), tuple(range(8))])
def test_each_culprit_is_found_and_only_culprits_fail(bad: tuple[int, ...]) -> None:
    """Rows come back in their order, sound rows computed exactly once, poisonous rows with their error."""
    backend, rows, num_passes = ran(poison(*bad), 8)
    assert [isinstance(row.error, DecodeError) and not row.computed for row in rows] == [i in bad for i in range(8)]
    assert [row.token_ids for index, row in enumerate(rows) if index not in bad] == [
        (index,) for index in range(8) if index not in bad
    ]
    kept = [names for names in backend.calls if not set(names) & set(bad)]
    assert sorted(itertools.chain(*kept)) == [index for index in range(8) if index not in bad]
    assert num_passes == len(backend.calls)


def test_an_aborted_pass_is_not_tried_again() -> None:
    """Every row gets the error, nothing is split: a caller that aborts does not want the other half either."""

    def step(names: list[int]) -> None:
        raise Aborted("stop")

    backend, rows, _ = ran(step, 4)
    assert len(backend.calls) == 1
    assert all(isinstance(row.error, Aborted) and not row.computed for row in rows)


def test_too_little_memory_for_all_is_enough_for_some() -> None:
    """A pass without enough cells is made in parts; only rows that still do not fit come back with NoKvSlot."""
    free = [5]

    def step(names: list[int]) -> None:
        if len(names) > free[0]:
            raise NoKvSlot("full")
        free[0] -= len(names)

    _, rows, _ = ran(step, 8)
    assert [row.computed for row in rows] == [True] * 5 + [False] * 3


def test_a_foreign_error_is_carried() -> None:
    """A foreign exception becomes an EngineError with the cause; our own exceptions are unchanged."""
    ours = DecodeError("ours")
    assert as_paceline_error(ours) is ours
    wrapped = as_paceline_error(ZeroDivisionError("theirs"))
    assert type(wrapped) is EngineError
    assert str(wrapped) == "ZeroDivisionError: theirs"
    assert isinstance(wrapped.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_passes(error: type[BaseException]) -> None:
    """Only exceptions are failures of a pass."""

    def step(names: list[int]) -> None:
        raise error

    with pytest.raises(error):
        ran(step, 2)


def test_operations_come_first_and_in_order() -> None:
    """The memory is made ready before the pass, by its operations in order."""
    backend = Recording()
    plan = StepPlan([Remove(3), Copy(1, 3, 7), Remove(1)], [row(0)])
    Executor(backend, ManualClock()).run(plan)  # type: ignore[arg-type]
    assert backend.calls == [("remove", 3), ("copy", 1, 3, 7), ("remove", 1), [0]]


def test_a_copy_that_fails_is_its_sequences_alone() -> None:
    """Its row is not computed and has the error; the others are."""
    backend = Recording()
    plan = StepPlan([Copy(1, 9, 7)], [row(0), row(1, 9), row(2)])
    output = Executor(backend, ManualClock()).run(plan)  # type: ignore[arg-type]
    assert backend.calls[-1] == [0, 2]
    assert [row.computed for row in output.rows] == [True, False, True]
    assert str(output.rows[1].error) == "RuntimeError: no copy"
    assert output.transfers is not None
    assert output.transfers.failed_seq_ids == {9}
    alone = Executor(backend, ManualClock()).run(StepPlan([Copy(1, 9, 7)], [row(1, 9)]))  # type: ignore[arg-type]
    assert [row.computed for row in alone.rows] == [False]
    assert alone.num_passes == 0


def test_the_load_that_failed_is_reported_and_none_behind_it() -> None:
    """Later operations on the same sequence id fail because of it, for any reason."""

    class Broken(Recording):
        def load(self, seq_id: int, data: Any, start: int, end: int) -> None:
            raise MemoryError("no memory")

        load_state = load

    loads = [Copy(1, 9, 7), Load(9, "a", 7, 8), Load(2, "b", 0, 5), LoadState(2, "c", 5), LoadState(3, "d", 5)]
    output = Executor(Broken(), ManualClock()).run(StepPlan(loads, []))  # type: ignore[arg-type]
    assert output.transfers is not None
    assert output.transfers.failed_loads == [loads[2], loads[4]]


def test_a_save_that_fails_is_logged_once_and_the_pass_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is saved, no request fails, and the log is not filled with repeats."""

    class Full(Recording):
        def save(self, seq_id: int, start: int, end: int) -> Any:
            if start == 5:
                return "saved"
            raise MemoryError("no memory")

    executor = Executor(Full(), ManualClock())  # type: ignore[arg-type]
    saves = [Save(1, start, end, (), b"") for start, end in ((0, 5), (5, 7))]
    for _ in range(2):
        output = executor.run(StepPlan([*saves], [row(0)]))
        assert output.transfers is not None
        assert [data for _, data in output.transfers.saved] == ["saved"]
        assert [row.computed for row in output.rows] == [True]
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("paceline.engine", "WARNING")
    assert "5 tokens could not be saved" in record.message and "no memory" in caplog.text


def test_a_plan_without_rows_makes_no_pass() -> None:
    """Only its operations are carried out."""
    backend = Recording()
    output = Executor(backend, ManualClock()).run(StepPlan([Remove(0)], []))  # type: ignore[arg-type]
    assert (backend.calls, output.num_passes, output.rows) == ([("remove", 0)], 0, [])


def embedding(num_texts: int, key: int = 1) -> EmbeddingPlan:
    request = EmbeddingRequest(
        key=key, texts=[[name] for name in range(num_texts)], pooling="mean", options=RequestOptions(), submitted_s=0
    )
    return EmbeddingPlan([], [EmbeddingItem(request, index) for index in range(num_texts)], "mean")


class Aborting(Recording):
    """A backend with passes of texts that call a function of a test, and raise if they were aborted meanwhile."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile, self.num_aborts = meanwhile, 0

    def embed(self, texts: list[list[int]], pooling: str | None) -> list[Any]:
        self._meanwhile()
        if self.num_aborts:
            raise Aborted("the pass was aborted")
        return super().embed(texts, pooling)

    def abort_embedding(self) -> None:
        self.num_aborts += 1


@pytest.mark.parametrize(
    ("cancelled", "num_aborts"), [((), 0), ((1,), 0), ((2,), 0), ((1, 1, 7), 0), ((1, 2), 1), ((2, 1, 1), 1)]
)
def test_a_pass_of_texts_is_aborted_when_no_request_wants_it(cancelled: Sequence[int], num_aborts: int) -> None:
    """Not while any of its requests is not cancelled, and not for another request or outside of the pass."""
    plan = EmbeddingPlan([], [*embedding(2, key=1).items, *embedding(1, key=2).items], "mean")

    def cancel() -> None:
        for key in cancelled:
            executor.note_cancelled(key)

    backend = Aborting(cancel)
    executor = Executor(backend, ManualClock())  # type: ignore[arg-type]
    executor.note_cancelled(1)
    output = executor.run(plan)
    executor.note_cancelled(1)
    executor.note_cancelled(2)
    assert backend.num_aborts == num_aborts
    assert [isinstance(error, Aborted) for error in output.errors] == [bool(num_aborts)] * 3
    assert output.num_passes == 1


def test_texts_that_fail_are_found_like_rows() -> None:
    """Each text has its vector or its error, in order."""
    backend = Recording(poison(2))
    output = Executor(backend, ManualClock()).run(embedding(5))  # type: ignore[arg-type]
    assert output.vectors == [0.0, 1.0, None, 3.0, 4.0]
    assert [isinstance(error, PacelineError) for error in output.errors] == [False, False, True, False, False]


def test_an_aborted_embedding_is_not_tried_again() -> None:
    """All its texts get the error."""

    def step(names: list[int]) -> None:
        raise Aborted("stop")

    backend = Recording(step)
    output = Executor(backend, ManualClock()).run(embedding(4))  # type: ignore[arg-type]
    assert len(backend.calls) == 1
    assert all(isinstance(error, Aborted) for error in output.errors)
    assert output.vectors == [None] * 4
