"""What moving is expected to take, and how much of it a tick may do."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.scheduling.moving import Moving
from paceline.scheduling.plan import Load, PlanOutput, Save
from paceline.scheduling.saving import PIECE
from paceline.testing.fake_memory import FakeState


def save(num_tokens: int) -> Save:
    return Save(0, 10, 10 + num_tokens, ("all",), b"", is_whole=False)


def load(num_tokens: int) -> Load:
    nobody: Any = None
    return Load(0, FakeState(0, ()), 0, num_tokens, nobody)


def moved(moving: Moving, *operations: Save | Load, saving_s: float = 0.0, loading_s: float = 0.0) -> None:
    saved: Any = [(one, None) for one in operations if isinstance(one, Save)]
    moving.observe(operations, PlanOutput(saved=saved, saving_s=saving_s, loading_s=loading_s))


def test_before_anything_was_moved_a_tick_moves_one_piece() -> None:
    """And is expected to take no time for it."""
    moving = Moving(0.25)
    assert moving.seconds([save(100), load(100)]) == 0
    assert moving.tokens_to_tidy(is_generating=True) == moving.tokens_for_room(is_generating=True) == PIECE


def test_saves_and_loads_are_learnt_apart() -> None:
    """Each by its own tokens and seconds; later moves count for more than earlier ones."""
    moving = Moving(0.25)
    moved(moving, save(100), load(10), saving_s=0.1, loading_s=0.001)
    assert moving.seconds([save(200)]) == pytest.approx(0.2)
    assert moving.seconds([load(200)]) == pytest.approx(0.02)
    assert moving.seconds([save(100), load(100)]) == pytest.approx(0.11)
    moved(moving, save(100), saving_s=0.2)
    assert moving.seconds([save(100)]) == pytest.approx(0.13)
    assert moving.seconds([load(100)]) == pytest.approx(0.01)


def test_a_tick_moves_what_fits_its_share() -> None:
    """A tenth of the time between two tokens for what is in nobody's way, half of it for who waits; all where nobody waits."""
    moving = Moving(0.2)
    moved(moving, save(1000), saving_s=0.1)
    assert moving.tokens_to_tidy(is_generating=True) == 200
    assert moving.tokens_for_room(is_generating=True) == 1000
    assert moving.tokens_to_tidy(is_generating=False) == 16 * PIECE
    assert moving.tokens_for_room(is_generating=False) > 10**6


@pytest.mark.parametrize(("token_s", "to_tidy"), [(1.0, 32), (1e-9, PIECE), (0.0, PIECE)])
def test_a_piece_has_bounds(token_s: float, to_tidy: int) -> None:
    """However slow or fast moving is, or the clock stands."""
    moving = Moving(0.2)
    moved(moving, save(10), saving_s=10 * token_s)
    assert moving.tokens_to_tidy(is_generating=True) == to_tidy
