"""Draws along drafts have the distribution of the model: a chi-square test against its own probabilities."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.exact import EXACT
from tests.native.conftest import TinyModels

from paceline import LLM
from paceline.speculation.depth_chooser import DepthChooser

pytestmark = pytest.mark.native

PROMPT = (72, 101, 108, 108, 111)
TOKENS = tuple(range(97, 103))
SAMPLING: dict[str, Any] = {"temperature": 1.0, "samplers": (), "allowed_token_ids": TOKENS, "ignore_eos": True}
NUM_REQUESTS, NUM_CHOICES = 48, 64
NUM_DRAWN = 4
LEAST_EXPECTED = 5.0  # draws of a token, below which chi-square is no measure: such tokens count together

Probabilities = Mapping[int, float]


class Likely:
    """Proposes the model's most likely tokens, which it draws about half of the time."""

    def __init__(self, of_contexts: Mapping[tuple[int, ...], Probabilities]) -> None:
        self._next = {context: max(found, key=found.__getitem__) for context, found in of_contexts.items()}
        self._known: dict[int, tuple[int, ...]] = {}

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        self._known[key] = tuple(token_ids[len(PROMPT) :])

    def propose(self, key: int, max_tokens: int) -> list[int]:
        path = self._known[key]
        while len(path) - len(self._known[key]) < max_tokens and path in self._next:
            path = (*path, self._next[path])
        return list(path[len(self._known[key]) :])

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        self._known[key] += tuple(token_ids)

    def rollback(self, key: int, num_tokens: int) -> None:
        pass

    def end(self, key: int) -> None:
        del self._known[key]


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence gets three drafts, whatever they cost."""

    def choose(
        self: Any, candidates: Sequence[tuple[float, int]], rows: Any, num_cells: int, most: int, num_ticks: int
    ) -> list[int]:
        return [min(cap, 3, most // len(candidates)) for _, cap in candidates]

    monkeypatch.setattr(DepthChooser, "choose", choose)


def probabilities(llm: LLM, context: Sequence[int]) -> Probabilities:
    """Return the model's probabilities of the next token, among the allowed tokens."""
    options = {**SAMPLING, "logprobs": len(TOKENS), "logprobs_mode": "sampled"}
    (token,) = llm.generate([*PROMPT, *context], max_tokens=1, **options).choices[0].logprobs or ()
    found = {token_id: math.exp(value) for token_id, value in zip(token.token_ids, token.values, strict=True)}
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-3)
    return found


def chi_square(counts: Mapping[int, int], expected: Probabilities) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom."""
    total = sum(counts.values())
    bins = [(counts.get(token, 0), total * p) for token, p in expected.items() if total * p >= LEAST_EXPECTED]
    rest = (total - sum(count for count, _ in bins), total - sum(mean for _, mean in bins))
    bins += [rest] if rest[1] > LEAST_EXPECTED else []
    return sum((count - mean) ** 2 / mean for count, mean in bins), len(bins) - 1


def bound(degrees: int) -> float:
    """Return the value that chi-square exceeds with a probability of 1 in 10,000 (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


@pytest.mark.usefixtures("deep")
def test_tokens_along_drafts_have_the_models_distribution(tiny_models: TinyModels) -> None:
    """At the first draft, after a right draft, after two, and after a wrong draft, at which the next pass goes on."""
    options: dict[str, Any] = {"num_slots": 32, "n_ctx": 4096, **EXACT}
    contexts = [item for size in range(NUM_DRAWN) for item in itertools.product(TOKENS, repeat=size)]
    with LLM(tiny_models("llama"), **options) as plain:
        expected = {context: probabilities(plain, context) for context in contexts}
    drafter = Likely(expected)
    with LLM(tiny_models("llama"), speculation=drafter, **options) as llm:
        drawn: list[tuple[int, ...]] = []
        num_drafted = num_accepted = 0
        for seed in range(NUM_REQUESTS):
            found = llm.generate(list(PROMPT), n=NUM_CHOICES, seed=seed, max_tokens=NUM_DRAWN, **SAMPLING)
            drawn += [tuple(choice.token_ids) for choice in found.choices]
            num_drafted, num_accepted = (
                num_drafted + found.usage.draft_tokens,
                num_accepted + found.usage.accepted_tokens,
            )
    assert 0.25 < num_accepted / num_drafted < 0.75
    num_tested = Counter[str]()
    sums = [0.0, 0.0, 0]  # of all contexts: as drawn, as it would be with wrong drafts accepted, degrees of freedom
    for context in contexts:
        counts = Counter(ids[len(context)] for ids in drawn if ids[: len(context)] == context)
        statistic, degrees = chi_square(counts, expected[context])
        if sum(counts.values()) < 100 or not degrees:
            continue
        assert statistic < bound(degrees), context
        # The prompt's pass draws the first token of the answer; drafts follow it.
        num_right = sum(drafter._next[context[:size]] == context[size] for size in range(1, len(context)))
        where = "the prompt" if not context else "a wrong one" if num_right < len(context) - 1 else f"{num_right} right"
        num_tested[where] += 1
        likely = drafter._next[context]
        shifted = {token: 0.9 * p + 0.1 * (token == likely) for token, p in expected[context].items()}
        sums = [sums[0] + statistic, sums[1] + chi_square(counts, shifted)[0], sums[2] + degrees]
    assert num_tested.keys() == {"the prompt", "0 right", "1 right", "2 right", "a wrong one"}
    assert sums[0] < bound(int(sums[2]))
    assert sums[1] > bound(int(sums[2]))  # the test sees one wrong draft in ten that is accepted
