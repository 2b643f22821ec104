"""The expected cost of transfers, and the share of it that a tick may do."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.kv_cache import Load, Save, TransferOutput
from paceline.kv_cache.offload import BLOCK_TOKENS, TransferCost
from paceline.testing.fake_backend import FakeState


def save(num_tokens: int) -> Save:
    return Save(0, 10, 10 + num_tokens, ("all",), b"")


def load(num_tokens: int) -> Load:
    return Load(0, FakeState(0, ()), 0, num_tokens)


def moved(cost: TransferCost, *operations: Save | Load, saving_s: float = 0.0, loading_s: float = 0.0) -> None:
    saved: Any = [
        (operation, FakeState(0, size=12 * (operation.end - operation.start)))
        for operation in operations
        if isinstance(operation, Save)
    ]
    cost.observe(operations, TransferOutput(saved=saved, saving_s=saving_s, loading_s=loading_s))


def test_before_anything_was_moved_a_tick_moves_one_piece() -> None:
    """The expected time of that piece is zero."""
    cost = TransferCost(0.25)
    assert cost.seconds([save(100), load(100)]) == 0
    assert cost.idle_tokens(is_generating=True) == cost.pressure_tokens(is_generating=True) == BLOCK_TOKENS


def test_saves_and_loads_are_learnt_apart() -> None:
    """Each by its own tokens and seconds; later moves count for more than earlier ones."""
    cost = TransferCost(0.25)
    moved(cost, save(100), load(10), saving_s=0.1, loading_s=0.001)
    assert cost.seconds([save(200)]) == pytest.approx(0.2)
    assert cost.seconds([load(200)]) == pytest.approx(0.02)
    assert cost.seconds([save(100), load(100)]) == pytest.approx(0.11)
    moved(cost, save(100), saving_s=0.2)
    assert cost.seconds([save(100)]) == pytest.approx(0.13)
    assert cost.seconds([load(100)]) == pytest.approx(0.01)


def test_saving_is_cheap_at_a_fiftieth_of_computing() -> None:
    """And for the first four saves, which show its cost."""
    cost = TransferCost(0.25)
    assert cost.token_bytes == 0
    for _ in range(4):
        assert cost.is_saving_cheap(1e-9)
        moved(cost, save(100), saving_s=0.1)
    assert cost.is_saving_cheap(0.051)
    assert not cost.is_saving_cheap(0.049)
    assert cost.token_bytes == 12


@pytest.mark.parametrize("slow", [0, 3, 9])
def test_a_save_that_takes_ten_times_as_long_does_not_make_saving_dear(slow: int) -> None:
    """Also if it was the first; without further saves it would never be corrected."""
    cost = TransferCost(0.25)
    for number in range(12):
        moved(cost, save(100), saving_s=1.0 if number == slow else 0.1)
        assert cost.is_saving_cheap(0.051)


def test_saving_is_not_cheap_while_it_fails() -> None:
    """Until one succeeds again, which memory that runs out asks for in any case."""
    cost = TransferCost(0.25)
    cost.observe([save(100)], TransferOutput())
    assert not cost.is_saving_cheap(1.0)
    moved(cost, load(100), loading_s=0.1)
    assert not cost.is_saving_cheap(1.0)
    moved(cost, save(100), saving_s=0.1)
    assert cost.is_saving_cheap(1.0)


def test_a_tick_moves_what_fits_its_share() -> None:
    """A tenth of the inter-token time if no request waits for it, half if a request does, or may come meanwhile."""
    cost = TransferCost(0.2)
    moved(cost, save(1000), saving_s=0.1)
    assert cost.idle_tokens(is_generating=True) == 200
    assert cost.pressure_tokens(is_generating=True) == 1000
    assert cost.idle_tokens(is_generating=False) == 1000
    assert cost.pressure_tokens(is_generating=False) > 10**6


@pytest.mark.parametrize(("token_s", "to_tidy"), [(1.0, 32), (1e-9, BLOCK_TOKENS), (0.0, BLOCK_TOKENS)])
def test_a_piece_has_bounds(token_s: float, to_tidy: int) -> None:
    """However slow or fast cost is, or the clock stands."""
    cost = TransferCost(0.2)
    moved(cost, save(10), saving_s=10 * token_s)
    assert cost.idle_tokens(is_generating=True) == to_tidy
