"""Prompt lookup: which tokens it proposes, and when none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.engine_world import World

from paceline.errors import InvalidParams, InvalidType
from paceline.speculation.drafter import Drafter
from paceline.speculation.drafters.ngram import NgramDrafter
from paceline.speculation.named_drafter import check_drafter_name, resolve_drafter


def proposed(tokens: Sequence[int], most: int = 8, **options: Any) -> list[int]:
    drafter = NgramDrafter(**{"size_n": 2, **options})
    drafter.begin(1, tokens)
    return drafter.propose(1, most)


def test_what_followed_the_last_tokens_is_proposed() -> None:
    """As it was when they came last, and no more than is asked for."""
    assert proposed([1, 2, 3, 4, 9, 1, 2]) == [3, 4, 9, 1, 2, 3, 4, 9]
    assert proposed([1, 2, 3, 4, 9, 1, 2], 2) == [3, 4]
    assert proposed([1, 2, 3, 1, 2, 5, 6, 1, 2], 2) == [5, 6]
    assert proposed([1, 2, 3, 4, 9, 1, 2], size_m=1) == [3]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3], [2, 1, 3, 1, 2]])
def test_without_an_earlier_occurrence_nothing_is_proposed(tokens: list[int]) -> None:
    """Nor of the last tokens themselves."""
    assert proposed(tokens) == []


def test_text_that_goes_round_is_followed_round() -> None:
    """An occurrence that overlaps the end has few tokens behind it."""
    assert proposed([7, 1, 1, 1]) == [1] * 8
    assert proposed([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_min_hits_counts_earlier_occurrences() -> None:
    """A single occurrence may be chance."""
    assert proposed([1, 2, 3, 1, 2], min_hits=2) == []
    assert proposed([1, 2, 3, 1, 2, 4, 1, 2], 1, min_hits=2) == [4]


def test_what_is_observed_is_looked_up_too() -> None:
    """The sequence grows by its generated tokens; a rollback changes nothing."""
    drafter = NgramDrafter(size_n=2)
    drafter.begin(1, [1, 2, 3])
    drafter.begin(2, [9, 9])
    drafter.observe(1, [4, 1, 2])
    assert drafter.propose(1, 2) == [3, 4]
    drafter.rollback(1, 2)
    drafter.observe(1, [3])
    assert drafter.propose(1, 2) == [4, 1]
    drafter.end(1)
    assert drafter.propose(2, 2) == []


def test_lookup_agrees_with_a_search() -> None:
    """On random tokens of a small vocabulary, in pieces of any size."""
    source = random.Random(1)
    for _ in range(50):
        size = source.randint(1, 4)
        drafter = NgramDrafter(size_n=size)
        tokens = [source.randrange(3) for _ in range(source.randint(1, 30))]
        drafter.begin(1, tokens)
        for _ in range(20):
            more = [source.randrange(3) for _ in range(source.randint(1, 3))]
            tokens += more
            drafter.observe(1, more)
            last = tokens[-size:]
            ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == last]
            found = drafter.propose(1, 4)
            if not ends or len(tokens) < size:
                assert found == []
            else:
                period = tokens[ends[-1] :]
                assert found == [period[index % len(period)] for index in range(4)]


def test_a_long_prompt_is_indexed_in_pieces() -> None:
    """No call takes long; the prompt's end is known after some."""
    drafter = NgramDrafter(size_n=2)
    tokens = [*range(10_000), 9_000, 9_001]
    drafter.begin(1, tokens)
    found = [drafter.propose(1, 1) for _ in range(4)]
    assert found == [[], [], [9_002], [9_002]]


@pytest.mark.parametrize(
    "options", [{"size_n": 0}, {"size_n": 65}, {"size_m": 0}, {"min_hits": 0}, {"size_n": "4"}, {"size_m": 1.5}]
)
def test_wrong_sizes_are_refused(options: dict[str, Any]) -> None:
    """By name and range."""
    with pytest.raises((InvalidParams, InvalidType), match=next(iter(options))):
        NgramDrafter(**options)


@pytest.mark.parametrize("value", ["ngram", "ngram:size_n=3,size_m=8", {"name": "ngram", "min_hits": 2}])
def test_a_name_leads_to_a_drafter(value: Any) -> None:
    """With its options, as text or as a mapping."""
    check_drafter_name(value)
    assert isinstance(resolve_drafter(value), NgramDrafter)


def test_a_drafter_of_the_user_is_named_or_given() -> None:
    """As module:attr, which may be a class with options, or as an object."""
    named = resolve_drafter("paceline.speculation.drafters.ngram:NgramDrafter")
    assert isinstance(named, NgramDrafter)
    assert isinstance(named, Drafter)
    assert resolve_drafter(named) is named
    assert resolve_drafter({"name": "paceline:NgramDrafter", "size_n": 3}) is not None
    assert resolve_drafter(None) is None


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        ("ngrm", InvalidParams, "ngram"),
        ("ngram:size=3", InvalidType, "size_n"),
        ("ngram:size_n=x", InvalidType, "size_n"),
        ("ngram:size_n=99", InvalidParams, "size_n"),
        ("no_module:Drafter", InvalidParams, "cannot be loaded"),
        ({"size_n": 3}, InvalidParams, "name"),
        (NgramDrafter, InvalidType, "NgramDrafter()"),
        (3, InvalidType, "begin"),
        ("paceline.demo:demo_model_path", InvalidType, "begin"),
    ],
)
def test_invalid_drafter_is_refused(value: Any, kind: type[Exception], says: str) -> None:
    """With the option's name and the allowed values."""
    with pytest.raises(kind, match=says.replace("()", r"\(\)")) as error:
        resolve_drafter(value)
    assert "speculation" in str(error.value)


def test_repeated_text_is_accepted() -> None:
    """On a sequence that repeats its prompt, most drafts are right and few passes are needed."""
    line = [*b"the quick brown fox jumps over the lazy dog. "]
    world = World(drafter=NgramDrafter(), num_cells=400, eos_every=10**9)
    outcome = world.submit(line * 2, script=line * 3, max_tokens=len(line) * 3)
    world.run()
    assert outcome.token_ids() == line * 3
    assert outcome.terminal is not None and outcome.terminal.usage is not None
    assert outcome.terminal.usage.accepted_tokens > len(line) * 2
    assert world.backend.num_passes < len(line)
