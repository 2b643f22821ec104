"""Each sampler, and all in any order, against the slow reference in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.sampling_reference import Logits, Reference, philox, softmax

from paceline import _native
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler
from paceline.sampling_table import DEFAULT_SAMPLERS

N = 32000
OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
LOGITS: Logits = {3: 2.0, 10: 1.5, 11: 1.5, 400: 0.7, 401: -0.2, 7000: -1.0, 31999: -2.5, 5: 0.1}
MANY: Logits = {int(i): float(x) for i, x in enumerate(np.random.default_rng(5).normal(size=N).astype(np.float32) * 2)}


def row(logits: Logits) -> np.ndarray:
    """Return a row in which nothing else can be drawn."""
    values = np.full(N, -np.inf, dtype=np.float32)
    values[list(logits)] = list(logits.values())
    return values


def distribution(sampler: Sampler, logits: Logits) -> dict[int, float]:
    """Return the distribution that the sampler reports to draw from."""
    _, found = sampler.sample_with_logprobs(row(logits), k=N)
    return {entry.token_id: math.exp(entry.logprob) for entry in found.top}


def check(vocabulary: Model, params: SamplingParams, logits: Logits, history: tuple[int, ...] = ()) -> dict[int, float]:
    """Compare distribution and draw with the reference; return the distribution."""
    sampler = Sampler(params, vocabulary)
    sampler.accept_prompt(history)
    reference = Reference(params, history)
    wanted = softmax(reference.apply(logits))
    found = distribution(sampler, logits)
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=1e-4)
    assert sampler.sample(row(logits)) == Reference(params, history).token(logits)
    return found


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 11, "logprobs_mode": "sampled", **OPEN, **options})


def test_philox_matches_the_published_test_vectors() -> None:
    """The generator agrees with the known-answer vectors of its authors."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    vectors = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((ones, ones, ones, ones), (ones, ones)): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (pi, (0xA4093822, 0x299F31D0)): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for (counter, key), expected in vectors.items():
        assert tuple(_native.philox(list(counter), *key)) == expected
        assert philox(counter, key) == expected


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, set(LOGITS)),
        ({"top_k": 3}, {3, 10, 11}),
        ({"top_k": 2}, {3, 10}),
        ({"top_k": 1}, {3}),
        ({"top_p": 0.6}, {3, 10, 11}),
        ({"top_p": 0.0}, {3}),
        ({"min_p": 0.5}, {3, 10, 11}),
        ({"min_p": 1.0}, {3}),
        ({"typical_p": 0.3}, None),
        ({"typical_p": 0.9}, None),
        ({"top_n_sigma": 1.0}, {3, 10, 11, 400}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.2}, set(LOGITS) - {3, 10}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.5}, set(LOGITS)),
        ({"temperature": 0.3}, set(LOGITS)),
        ({"temperature": 3.0}, set(LOGITS)),
        ({"temperature": 1.0, "dynatemp_range": 0.5}, set(LOGITS)),
        ({"temperature": 0.5, "dynatemp_range": 2.0, "dynatemp_exponent": 2.0}, set(LOGITS)),
    ],
)
def test_one_sampler_agrees_with_its_definition(
    vocabulary: Model, options: dict[str, Any], kept: set[int] | None
) -> None:
    """Each sampler alone keeps the tokens and probabilities that its definition says."""
    found = check(vocabulary, params(**options), LOGITS)
    assert kept is None or found.keys() == kept


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 40},
        {"top_k": 2000},
        {"top_p": 0.8},
        {"top_p": 0.9999},
        {"min_p": 0.02},
        {"typical_p": 0.7},
        {"top_n_sigma": 2.0},
        {"temperature": 0.7, "dynatemp_range": 0.3},
        {"top_k": 100, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "temperature": 0.8},
    ],
)
def test_a_whole_vocabulary_agrees_with_the_definition(vocabulary: Model, options: dict[str, Any]) -> None:
    """Shortcuts for large rows change nothing."""
    check(vocabulary, params(**options), MANY)


@pytest.mark.parametrize("first", DEFAULT_SAMPLERS)
def test_any_order_is_followed(vocabulary: Model, first: str) -> None:
    """The samplers act in the order that is asked for, whichever is first."""
    order = (first, *(name for name in reversed(DEFAULT_SAMPLERS) if name != first))
    options: dict[str, Any] = {
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.8,
        "top_n_sigma": 2.5,
        "xtc_probability": 0.6,
        "temperature": 1.3,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.4,
        "dry_multiplier": 0.8,
        "dry_sequence_breakers": (),
    }
    history = (1, 2, 3, 1, 2, 3, 1, 2)
    check(vocabulary, params(samplers=order, **options), MANY, history)


def test_samplers_that_are_not_in_the_order_do_nothing(vocabulary: Model) -> None:
    """An empty order draws from the plain distribution, with any other options."""
    found = check(vocabulary, params(samplers=(), top_k=1, temperature=0.1, min_p=0.9), LOGITS)
    assert found.keys() == LOGITS.keys()


def test_penalties_count_within_their_window(vocabulary: Model) -> None:
    """Repeat, frequency and presence penalties see the last penalty_last_n tokens, prompt included."""
    options = {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.5}
    history = (3, 3, 10, 401, 401, 401)
    plain = check(vocabulary, params(), LOGITS)
    for last_n in (-1, 0, 1, 3, 4, 6, 64):
        found = check(vocabulary, params(penalty_last_n=last_n, **options), LOGITS, history)
        assert (found[401] < plain[401]) == (last_n != 0)


def test_penalties_forget_what_leaves_the_window(vocabulary: Model) -> None:
    """A window of three over a long generation is the last three tokens, however many came before."""
    options = params(penalty_last_n=3, frequency_penalty=0.3, repeat_penalty=1.1)
    sampler = Sampler(options, vocabulary)
    found = [int(token) for token in np.random.default_rng(1).choice(list(LOGITS), 500)]
    for token in found:
        sampler.accept(token)
    assert distribution(sampler, LOGITS) == pytest.approx(softmax(Reference(options, found).apply(LOGITS)), rel=1e-4)


def test_dry_penalizes_what_would_go_on_a_repetition(vocabulary: Model) -> None:
    """DRY takes the more from a token, the longer the repetition is that it would continue."""
    options = params(dry_multiplier=0.8, dry_sequence_breakers=())
    plain = check(vocabulary, params(), LOGITS)
    found = check(vocabulary, options, LOGITS, (3, 10, 400, 5, 3, 10))
    assert found[400] < plain[400]
    assert check(vocabulary, options, LOGITS, (3, 10, 400, 5, 10)) == pytest.approx(plain)


def test_a_sequence_breaker_ends_the_repetition_that_dry_sees(vocabulary: Model) -> None:
    """A repetition does not reach over a sequence breaker."""
    newline = vocabulary.tokenizer.token_id("<0x0A>")
    assert newline is not None
    history = (3, newline, 400, 5, 3, newline)
    with_breaker = Sampler(params(dry_multiplier=0.8), vocabulary)
    with_breaker.accept_prompt(history)
    without = Sampler(params(dry_multiplier=0.8, dry_sequence_breakers=()), vocabulary)
    without.accept_prompt(history)
    assert distribution(with_breaker, LOGITS)[400] > distribution(without, LOGITS)[400]


def test_logit_bias_moves_a_token(vocabulary: Model) -> None:
    """A bias is added to the logit before everything else."""
    found = distribution(Sampler(params(logit_bias={5: 2.5, 3: -1e6}), vocabulary), LOGITS)
    wanted = softmax({**LOGITS, 5: LOGITS[5] + 2.5, 3: -1e6})
    assert found[5] == pytest.approx(wanted[5], rel=1e-4)
    assert found.get(3, 0.0) == 0.0


def test_extreme_numbers_do_no_harm(vocabulary: Model) -> None:
    """The largest and smallest logits and temperatures there are give a token and no NaN."""
    extreme = {1: 3.4e38, 2: -3.4e38, 3: 3.4e38, 4: 0.0, 5: 1e-38}
    every: list[dict[str, Any]] = [
        *({"temperature": value} for value in (1e-45, 1e-30, 1e6)),
        *({"repeat_penalty": value} for value in (1e-6, 1e6)),
        *({"mirostat": version} for version in (1, 2)),
        {"typical_p": 0.5},
        {"top_n_sigma": 1.0},
        {"frequency_penalty": -1e6},
        {"dynatemp_range": 1e6},
        {"dry_multiplier": 1e6, "dry_base": 1e6},
    ]
    for options in every:
        sampler = Sampler(params(**options), vocabulary)
        sampler.accept_prompt((4, 5, 4, 5, 4, 5, 4))
        assert sampler.sample(row(extreme)) in extreme


def test_temperature_zero_takes_the_lowest_of_the_highest(vocabulary: Model) -> None:
    """Greedy is the argmax; among equals the lowest id."""
    sampler = Sampler(params(temperature=0), vocabulary)
    assert sampler.sample(row({9: 1.0, 8: 2.0, 31998: 2.0, 7: 0.0})) == 8


@pytest.mark.parametrize("options", [{"typical_p": 0.1}, {"xtc_probability": 1.0}, {"mirostat": 2}, {"top_k": 1}])
def test_temperature_zero_does_not_care_for_other_samplers(vocabulary: Model, options: dict[str, Any]) -> None:
    """Samplers that could drop the likeliest token have no say at temperature 0."""
    assert Sampler(params(temperature=0, **options), vocabulary).sample(row(LOGITS)) == 3


def test_temperature_zero_heeds_penalties_biases_and_masks(vocabulary: Model) -> None:
    """Greedy is the argmax of the logits after penalties, biases and masks."""
    penalized = Sampler(params(temperature=0, presence_penalty=5.0), vocabulary)
    penalized.accept_prompt((3,))
    assert penalized.sample(row(LOGITS)) == 10
    assert Sampler(params(temperature=0, logit_bias={5: 10.0}), vocabulary).sample(row(LOGITS)) == 5
    mask = np.zeros((N + 31) // 32, dtype=np.uint32)
    mask[400 // 32] = 1 << (400 % 32)
    assert Sampler(params(temperature=0), vocabulary).sample(row(LOGITS), mask) == 400


def test_infill_ends_where_no_token_is_likely(vocabulary: Model) -> None:
    """If the end of the text is likely enough, infill leaves nothing but it."""
    end = vocabulary.tokenizer.eos
    assert end is not None
    options = params(samplers=("top_k", "infill"), top_k=5)
    assert Sampler(options, vocabulary).sample(row({10: 1.0, 11: 0.9, end: 0.5})) == end
    assert Sampler(options, vocabulary).sample(row({10: 9.0, 11: 0.9, end: -20.0})) == 10


def test_infill_gets_nothing_past_a_mask(vocabulary: Model) -> None:
    """Infill puts in the end of the text by itself; if that is forbidden nothing is left, and it reports it."""
    options = params(samplers=("top_k", "infill"), top_k=40, ignore_eos=True)
    sampler = Sampler(options, vocabulary)
    flat = dict.fromkeys(range(300, 340), 0.0)
    with pytest.raises(Exception, match="no token is allowed"):
        sampler.sample(row(flat))
    assert sampler.sample(row({10: 9.0, 11: 0.9})) == 10
