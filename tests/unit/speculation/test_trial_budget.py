"""The time that trials may cost: saving, spending, and a small limit on savings."""

from __future__ import annotations

import pytest

from paceline.speculation.cost import TrialBudget


def spent_budget() -> TrialBudget:
    """Return a budget without its initial savings."""
    budget = TrialBudget()
    budget.pass_time(1.0)
    budget.spend(budget.saved_s)
    return budget


def test_a_part_of_the_time_is_put_aside_and_spent() -> None:
    """Three thousandths of it; the gain of a trial does not count."""
    budget = spent_budget()
    assert budget.affords(0.0)
    assert not budget.affords(0.001)
    budget.pass_time(10.0)
    assert budget.saved_s == pytest.approx(0.03)
    assert budget.affords(0.029)
    budget.spend(0.02)
    budget.spend(-5.0)
    assert budget.saved_s == pytest.approx(0.01)
    assert not budget.affords(0.011)


def test_a_trial_that_took_longer_than_known_is_paid_back_before_the_next() -> None:
    """Until then not even one that should cost nothing is made."""
    budget = spent_budget()
    budget.spend(0.04)
    assert not budget.affords(0.0)
    budget.pass_time(13.0)
    assert not budget.affords(0.0)
    budget.pass_time(0.5)  # 0.0405 of 0.04
    assert budget.affords(0.0)


def test_an_hour_without_trials_pays_for_few() -> None:
    """Except for one that takes longer, which is saved for, a minute at most."""
    budget = spent_budget()
    budget.pass_time(3600.0)
    assert budget.saved_s == pytest.approx(0.1)
    assert not budget.affords(2.0)
    budget.pass_time(3600.0)
    assert budget.affords(2.0)
    budget.spend(2.0)
    budget.pass_time(3600.0)
    assert budget.saved_s == pytest.approx(0.1)
    assert not budget.affords(1000.0)
    budget.pass_time(1e6)
    assert budget.saved_s == pytest.approx(60.0)


@pytest.mark.parametrize(("tick_s", "expected_s"), [(0.5, 0.03), (0.0004, 0.0032)])
def test_the_first_trial_need_not_be_saved_for(tick_s: float, expected_s: float) -> None:
    """So that short loads learn something, too; little if ticks are short, as it is their time. Once."""
    budget = TrialBudget()
    budget.pass_time(0.0)
    assert budget.saved_s == 0.0
    for _ in range(2):
        budget.pass_time(tick_s)
        assert budget.saved_s == pytest.approx(expected_s + 0.003 * tick_s)
        expected_s += 0.003 * tick_s
