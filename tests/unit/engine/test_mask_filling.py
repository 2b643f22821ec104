"""Masks that fail, hang, or outlive their pass: each costs its own row, and one deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.engine import llama_backend
from paceline.engine.llama_backend import ConstrainedSampler, LlamaBackend, MaskFiller
from paceline.errors import DecodeError, PacelineError, SamplingError
from paceline.sequence import Row, RowOutput
from paceline.streaming.chunk import TokenLogprobs


class Own:
    """A constraint that fills its mask only after `go`."""

    is_complete, may_end = False, True

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def fill_mask(self, words: Any) -> bool:
        self.begun.set()
        self.go.wait(20)
        return False

    def accept(self, token_id: int) -> None:
        raise SystemExit

    def copy(self) -> Own:
        return self


@pytest.fixture
def own() -> Iterator[Own]:
    made = Own()
    yield made
    made.go.set()


def exiting(words: Any) -> bool:
    raise SystemExit(1)


def sampler_of(constraint: Any) -> ConstrainedSampler:
    params = SimpleNamespace(grammar=None, grammar_lazy=False)
    return ConstrainedSampler(SimpleNamespace(is_eog=lambda _: False, params=params), constraint)  # type: ignore[arg-type]


def test_a_fill_that_exits_fails_its_slot_and_keeps_the_thread() -> None:
    filler = MaskFiller(1, 32)
    for _ in range(6):  # more often than there are threads
        (job,) = filler.begin([([exiting], 1)])
        assert filler.finish([job], 5)
        assert isinstance(job.error, SystemExit)


def test_finishing_has_one_deadline_for_all_masks(own: Own) -> None:
    """Not a thread for each, and unbegun masks are left out."""
    filler = MaskFiller(1000, 32)
    late: list[int] = []
    jobs = filler.begin([([fill], 1) for fill in [*[own.fill_mask] * 999, lambda _: bool(late.append(1))]])
    begin = time.monotonic()
    assert not filler.finish(jobs, 0.2)
    assert time.monotonic() - begin < 100, "a thousand of them, one after the other, would take 200 s"
    own.go.set()
    time.sleep(0.1)
    assert not late


def test_a_pass_and_its_masks_share_one_deadline(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pass that used up the time limit, a mask that hangs is waited for briefly; the exception of the pass is raised."""
    monkeypatch.setattr(llama_backend, "_MASK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(llama_backend, "_MASK_GRACE_S", 0.1)
    finish, waited_s = MaskFiller.finish, list[float]()
    monkeypatch.setattr(
        MaskFiller, "finish", lambda self, jobs, timeout_s: waited_s.append(timeout_s) or finish(self, jobs, timeout_s)
    )

    def step(*, mask_timeout_s: float, **_: Any) -> None:
        time.sleep(mask_timeout_s)
        raise RuntimeError

    backend = object.__new__(LlamaBackend)
    backend._masks, backend._context = MaskFiller(2, 32), None
    sequence: Any = SimpleNamespace(sampler=sampler_of(own), seq_id=0)
    rows = [Row(sequence, 3, [4], draws=True, targets=[], num_logprobs=None)]
    with pytest.raises(RuntimeError):
        backend._constrained_step(SimpleNamespace(step_columns=step), rows)  # type: ignore[arg-type]
    assert waited_s == [0.1]
    assert backend._masks is None


class SlowAlongDrafts(Own):
    """Fills at once, but for the masks behind drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.is_copy, self.num_filled = False, 0

    def fill_mask(self, words: Any) -> bool:
        self.num_filled += 1
        return super().fill_mask(words) if self.is_copy else False

    def accept(self, token_id: int) -> None:
        pass

    def copy(self) -> SlowAlongDrafts:
        self.ahead = SlowAlongDrafts()
        self.ahead.is_copy, self.ahead.go = True, self.go
        return self.ahead


def test_drafts_whose_masks_take_long_are_left_out_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass begins without them, after the rest of the time limit; no more masks are filled along them."""
    monkeypatch.setattr(llama_backend, "_MASK_TIMEOUT_S", 2.0)
    constraint = SlowAlongDrafts()
    given: list[Any] = []

    def step(*, mask_timeout_s: float, **columns: Any) -> Any:
        given.append((columns, mask_timeout_s))
        constraint.go.set()
        return SimpleNamespace(num_drawn=np.array([1]), token_ids=np.array([5]), errors=[], taken_back=[])

    backend = object.__new__(LlamaBackend)
    backend._masks, backend._context = MaskFiller(8, 32), None
    sequence: Any = SimpleNamespace(sampler=sampler_of(constraint), seq_id=0)
    row = Row(sequence, 3, [4, 5, 6, 7], draws=True, targets=[], num_logprobs=None, num_drafts=3)
    (output,) = backend._constrained_step(SimpleNamespace(step_columns=step), [row])  # type: ignore[arg-type]
    columns, timeout_s = given[0]
    assert (columns["token_ids"], columns["num_drafts"], columns["mask_slots"]) == ([[4]], [0], [(0,)])
    assert (output.token_ids, output.num_verified, output.num_accepted) == ((5,), 0, 0)
    assert output.waited_s >= 0.02
    assert timeout_s <= 2.0 - output.waited_s
    assert constraint.ahead.num_filled == 1


def test_a_constraint_whose_mask_is_still_being_filled_is_not_used_again(own: Own) -> None:
    """The engine runs a pass that failed again, without its rows with constraints in use."""
    sampler = sampler_of(own)
    filler = MaskFiller(1, 32)
    jobs = filler.begin([([sampler.fill_mask], 1)])
    assert own.begun.wait(5)
    with pytest.raises(SamplingError, match="still fills"):
        sampler.fill_mask(filler.slots.words(0))
    own.go.set()
    assert filler.finish(jobs, 5)
    assert not sampler.fill_mask(filler.slots.words(0))


class Counting(Own):
    """Raises at its third token."""

    def __init__(self) -> None:
        super().__init__()
        self.num_accepted = 0

    def accept(self, token_id: int) -> None:
        if self.num_accepted == 2:
            raise ValueError("enough")
        self.num_accepted += 1


def test_tokens_before_the_one_at_which_a_constraint_raises_are_kept() -> None:
    """With their log-probabilities; several are drawn at once with drafts."""
    logprobs = [TokenLogprobs(-float(rank), (), ()) for rank in range(4)]
    output = sampler_of(Counting()).settle(RowOutput((6, 7, 8, 9), logprobs, num_verified=3, num_accepted=3))
    assert (output.token_ids, output.logprobs) == ((6, 7), logprobs[:2])
    assert "enough" in str(output.error)
    assert output.num_accepted == 3  # cells are what they were


@pytest.mark.parametrize(
    ("error", "is_kept"), [(SamplingError("nothing is left"), False), (DecodeError("not taken back"), True)]
)
def test_behind_the_end_of_a_grammar_only_draws_may_fail(error: PacelineError, *, is_kept: bool) -> None:
    """Draws along drafts beyond the end do not count; the changed memory does."""
    params = SimpleNamespace(grammar="root ::= [a]", grammar_lazy=False)
    sampler = SimpleNamespace(is_eog=lambda _: False, params=params, is_complete=True)
    output = ConstrainedSampler(sampler, None).settle(RowOutput((6,), error=error))  # type: ignore[arg-type]
    assert output.error is (error if is_kept else None)


def test_a_constraint_that_exits_when_it_accepts_ends_its_choice(own: Own) -> None:
    assert "SystemExit" in str(sampler_of(own).settle(RowOutput((1,))).error)
