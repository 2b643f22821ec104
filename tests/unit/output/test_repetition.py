"""Loops: a choice ends when its last tokens are one n-gram over and over."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_world import World

from paceline.output import RepetitionDetector
from paceline.streaming import FinishReason


def first_end(tokens: list[int], num_tokens: int) -> int | None:
    """Return the number of tokens after which a detector ends a choice; None: it does not."""
    detector = RepetitionDetector(num_tokens)
    return next((count for count, token in enumerate(tokens, 1) if detector.is_repeating(token)), None)


def is_loop(tokens: list[int], num_tokens: int) -> bool:
    """As the detector's definition says, by comparing token by token."""
    num_tokens = max(3, num_tokens)
    for period in range(1, num_tokens // 3 + 1):
        if len(tokens) >= num_tokens + period and tokens[-num_tokens:] == tokens[-num_tokens - period : -period]:
            return True
    return False


@pytest.mark.parametrize("period", [1, 2, 7, 20])
def test_an_ngram_over_and_over_ends_a_choice(period: int) -> None:
    """After the tokens that the setting asks for, rounded up to eight; what came before does not matter."""
    chance = random.Random(3)
    prefix = [chance.randrange(50_000) for _ in range(301)]
    ngram = [chance.randrange(50_000) for _ in range(period)]
    end = first_end(prefix + ngram * 200, 60)
    assert end is not None
    assert 301 + 60 + period <= end < 301 + 60 + period + 8 + 1


def test_text_without_loops_goes_on() -> None:
    """Three times the same n-gram, or other tokens between equal ones, are no loop."""
    chance = random.Random(3)
    ngram = [chance.randrange(50_000) for _ in range(21)]
    assert first_end([*range(100), *ngram * 3, *range(200, 400)], 60) is None
    assert first_end([token for number in range(300) for token in (5, 6, 7, number)], 60) is None
    assert first_end(ngram * 100, 60) is None  # 21 tokens are more than a third
    assert first_end([0x01010101, 0x01010100] * 20 + list(range(200)), 60) is None


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2), max_size=300), st.integers(1, 30))
def test_the_fast_way_equals_the_naive_one(tokens: list[int], num_tokens: int) -> None:
    """At every eighth token."""
    expected = next((n for n in range(8, len(tokens) + 1, 8) if is_loop(tokens[:n], num_tokens)), None)
    assert first_end(tokens, num_tokens) == expected


def test_a_choice_ends_with_its_reason_and_all_of_its_text() -> None:
    """Other choices go on; without the option, or with an end of its own before, nothing changes."""
    world = World(num_cells=2000, limits={"max_positions": 500})
    loop = [97, 98, 99] * 60
    ended = world.submit("abc", script=loop, max_tokens=180, max_repetition=24)
    off = world.submit("abc", script=loop, max_tokens=180)
    short = world.submit("abc", script=loop, max_tokens=20, max_repetition=24)
    world.run()
    assert ended.reason() is FinishReason.REPETITION
    assert ended.text() == ("abc" * 60)[: len(ended.token_ids())]
    assert len(ended.token_ids()) == 32
    assert (off.reason(), len(off.token_ids())) == (FinishReason.LENGTH, 180)
    assert short.reason() is FinishReason.LENGTH


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_two_or_three_equal_tokens_are_no_loop(num_tokens: int) -> None:
    """An n-gram comes at least four times, however small the number is."""
    assert first_end([5, 6, 7, 8, 9, 11, 11, 11], num_tokens) is None
    assert first_end([5, 6, 7, 8, 11, 11, 11, 11], num_tokens) == 8


def test_a_loop_ends_no_choice_before_its_least_number_of_tokens() -> None:
    """The choice ends at the first check after that."""
    world = World(num_cells=2000, limits={"max_positions": 500})
    outcome = world.submit("abc", script=[97, 98, 99] * 60, max_tokens=180, min_tokens=100, max_repetition=24)
    world.run()
    assert (outcome.reason(), len(outcome.token_ids())) == (FinishReason.REPETITION, 104)


def test_a_loop_is_found_after_a_preemption() -> None:
    """As late as without one."""
    world = World(limits={"num_slots": 2, "max_positions": 200}, num_cells=600)
    looping = world.submit("abc", script=[97, 98] * 60, max_tokens=100, max_repetition=24, tenant="a")
    other = world.submit("abc", script=[97, 98] * 60, max_tokens=100, max_repetition=24, tenant="a")
    world.tick(10)
    world.submit("xyz", max_tokens=2, tenant="b")
    world.run()
    assert other.request.sequences[0].num_preempted == 1
    assert len(looping.token_ids()) == len(other.token_ids()) == 32
