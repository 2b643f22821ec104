"""Drafts of a model's own heads, without a model: the calls of the backend, and their time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from tests.drafters import Oracle

from paceline.errors import DecodeError, EngineError, InvalidParams, InvalidType, NoKvSlot, Unsupported
from paceline.speculation.drafter import BatchDrafter
from paceline.speculation.drafters.heads import (
    DFlashDrafter,
    DraftWish,
    Eagle3Drafter,
    HeadsDrafter,
    MtpDrafter,
    attach_heads,
)
from paceline.speculation.named_drafter import draft_heads_of, resolve_drafter


class Heads:
    """Proposes the newest token again; notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[DraftWish], float]] = []

    def __call__(self, wishes: Sequence[DraftWish], p_min: float) -> list[list[int]]:
        self.calls.append((list(wishes), p_min))
        return [[newest] * depth for _, _, newest, depth in wishes]


def drafting() -> tuple[HeadsDrafter, Heads]:
    drafter, heads = MtpDrafter(p_min=0.25), Heads()
    drafter.attach(heads)
    drafter.begin_at(7, [1, 2, 3], 4)
    drafter.begin_at(8, [5], 0)
    return drafter, heads


def test_all_sequences_are_asked_for_in_one_call() -> None:
    """By their ids in memory, with the newest token and its position."""
    drafter, heads = drafting()
    assert drafter.propose_all([(7, 2), (8, 1)]) == [[3, 3], [5]]
    drafter.rollback(7, 1)
    drafter.observe(7, [9, 10])
    assert drafter.propose(7, 1) == [10]
    assert heads.calls == [([(4, 2, 3, 2), (0, 0, 5, 1)], 0.25), ([(4, 4, 10, 1)], 0.25)]


def test_without_cells_there_are_no_drafts_this_once() -> None:
    """Other failures are the caller's to look at."""
    failures: list[Exception] = [NoKvSlot("none are free"), DecodeError("broken")]
    heads, drafter = Heads(), MtpDrafter()

    def draft(wishes: Sequence[DraftWish], p_min: float) -> list[list[int]]:
        if failures:
            raise failures.pop(0)
        return heads(wishes, p_min)

    drafter.attach(draft)
    drafter.begin_at(1, [4], 0)
    drafter.begin_at(2, [5], 1)
    assert drafter.propose_all([(1, 2), (2, 2)]) == [[], []]
    with pytest.raises(DecodeError):
        drafter.propose_all([(1, 2)])
    assert drafter.propose_all([(1, 1), (2, 1)]) == [[4], [5]]


def test_heads_draft_with_a_backend_that_has_them() -> None:
    """Among other drafters; a backend that has none is refused, unless there is nothing to attach."""
    heads, drafter = Heads(), MtpDrafter()
    attach_heads((Oracle(), drafter), SimpleNamespace(draft=heads))
    drafter.begin_at(1, [4], 0)
    assert drafter.propose(1, 2) == [4, 4]
    with pytest.raises(Unsupported, match=r"\(MtpDrafter\) needs a model that has them, and SimpleNamespace has none"):
        attach_heads(MtpDrafter(), SimpleNamespace())
    for none in (None, Oracle(), (Oracle(),)):
        attach_heads(none, SimpleNamespace())


def test_a_sequence_begins_anew_elsewhere() -> None:
    """After a preemption it has another id; a key that ended may be ended again."""
    drafter, heads = drafting()
    drafter.end(7)
    drafter.end(7)
    drafter.begin_at(7, [1, 2, 3, 4], 2)
    drafter.propose(7, 3)
    assert heads.calls[-1][0] == [(2, 3, 4, 3)]


def test_a_drafter_without_heads_says_so() -> None:
    """On a backend that has none; and a sequence needs its id in memory."""
    drafter = MtpDrafter()
    drafter.begin_at(1, [1], 0)
    with pytest.raises(EngineError, match="backend with draft heads"):
        drafter.propose(1, 1)
    with pytest.raises(EngineError, match="begin_at"):
        drafter.begin(1, [1, 2])


def test_they_are_placed_drafters_for_batches() -> None:
    """Others are not."""
    assert isinstance(MtpDrafter(), BatchDrafter)


def test_names_and_options() -> None:
    """Alone, with options, among others; a text, a mapping or a list."""
    mtp = resolve_drafter("mtp:p_min=0.5")
    assert isinstance(mtp, MtpDrafter)
    assert mtp.model is None
    eagle = draft_heads_of(["ngram", {"name": "eagle3", "model": "e.gguf"}])
    assert isinstance(eagle, Eagle3Drafter)
    assert eagle.model == "e.gguf"
    blocks = draft_heads_of("dflash:model=d.gguf,p_min=0.2")
    assert isinstance(blocks, DFlashDrafter)
    assert blocks.drafts_blocks
    assert isinstance(draft_heads_of("ngram,mtp"), MtpDrafter)
    assert draft_heads_of("ngram") is None
    assert draft_heads_of(Oracle()) is None
    assert draft_heads_of(None) is None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("eagle3", "eagle3:model=FILE"),
        ("dflash", "dflash:model=FILE"),
        ("mtp:p_min=1.5", "p_min"),
        ("mtp:p_min=x", "p_min"),
        ({"name": "mtp", "model": 5}, "model"),
        ({"name": "mtp", "model": ""}, "model"),
        ("mtp:depth=3", "depth"),
        ("mtp,eagle3:model=e.gguf", "twice"),
    ],
)
def test_wrong_options_are_refused(value: object, says: str) -> None:
    with pytest.raises((InvalidParams, InvalidType), match=says):
        draft_heads_of(value)


@pytest.mark.parametrize(
    "value", [MtpDrafter(), "paceline.speculation.drafters.heads:MtpDrafter", ["ngram", MtpDrafter()]]
)
def test_draft_heads_go_by_name(value: object) -> None:
    """A model is loaded with them, which an object comes too late for."""
    with pytest.raises(InvalidParams, match="as 'mtp', 'eagle3:model=FILE' or 'dflash:model=FILE'"):
        resolve_drafter(value)  # type: ignore[arg-type]
