"""Any options, any logits: the samplers agree with the reference, and no text at all breaks a grammar's checks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tests.sampling_reference import Logits, Reference, softmax

from paceline.errors import GrammarError, InvalidParams, SamplingError
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler
from paceline.sampling_table import DEFAULT_SAMPLERS

N = 32000
QUIET = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

unit = st.floats(0, 1, width=32)
logits_of_some = st.dictionaries(
    st.integers(0, N - 1), st.floats(-20, 20, width=32), min_size=1, max_size=40
)  # others are -inf
options_of_any_kind = st.fixed_dictionaries(
    {
        "samplers": st.permutations(DEFAULT_SAMPLERS).flatmap(
            lambda order: st.integers(0, 9).map(lambda n: tuple(order[:n]))
        )
    },
    optional={
        "top_k": st.integers(-1, 50),
        "top_p": unit,
        "min_p": unit,
        "typical_p": unit,
        "top_n_sigma": st.floats(-1, 4, width=32),
        "xtc_probability": unit,
        "xtc_threshold": unit,
        "temperature": st.floats(0.0625, 4, width=32),
        "dynatemp_range": st.floats(0, 2, width=32),
        "repeat_penalty": st.floats(0.5, 2, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "penalty_last_n": st.integers(-1, 12),
        "dry_multiplier": st.floats(0, 2, width=32),
        "seed": st.integers(0, 2**64 - 1),
    },
)


def row(logits: Logits) -> np.ndarray:
    values = np.full(N, -np.inf, dtype=np.float32)
    values[list(logits)] = list(logits.values())
    return values


@QUIET
@given(logits=logits_of_some, options=options_of_any_kind, history=st.lists(st.integers(0, 7), max_size=20))
def test_any_chain_agrees_with_the_reference(
    vocabulary: Model, logits: Logits, options: dict[str, Any], history: list[int]
) -> None:
    """Distribution and draw are the reference's, unless a decision is so close that rounding makes it."""
    params = SamplingParams(**{"seed": 1, "logprobs_mode": "sampled", "dry_sequence_breakers": (), **options})
    tokens = sorted(logits)
    accepted = [tokens[i % len(tokens)] for i in history]
    reference = Reference(params, accepted)
    changed = reference.apply(logits)
    assume(reference.margin > 1e-4)
    sampler = Sampler(params, vocabulary)
    sampler.accept_prompt(accepted)
    token, found = sampler.sample_with_logprobs(row(logits), k=N)
    probabilities = {entry.token_id: math.exp(entry.logprob) for entry in found.top}
    wanted = {token: p for token, p in softmax(changed).items() if p > 1e-30}
    assert probabilities.keys() >= wanted.keys()
    assert all(probabilities[token] == pytest.approx(p, rel=5e-3, abs=1e-6) for token, p in wanted.items())
    assert token in logits
    assert params.seed is not None


@QUIET
@given(
    logits=st.dictionaries(st.integers(0, N - 1), st.floats(width=32), min_size=1, max_size=20),
    options=options_of_any_kind,
    mirostat=st.integers(0, 2),
)
@example(logits={0: -(2.0**127)}, options={"samplers": ("penalties",), "repeat_penalty": 2.0}, mirostat=0)
def test_any_row_gives_a_token_or_a_typed_error(
    vocabulary: Model, logits: Logits, options: dict[str, Any], mirostat: int
) -> None:
    """Logits of any size, NaN and infinities included, never give anything but a possible token or SamplingError."""
    sampler = Sampler(SamplingParams(**{"seed": 1, **options, "mirostat": mirostat}), vocabulary)
    for _ in range(3):
        try:
            token = sampler.sample(row(logits))
        except SamplingError:
            bad = [value for value in logits.values() if math.isnan(value) or value == math.inf]
            assert bad or all(value == -math.inf for value in logits.values())
            return
        assert logits[token] > -math.inf
        sampler.accept(token)


parts = st.sampled_from(
    [
        *('"a"', '"bc"', "[a-z]", '[^"]', "[^é]", "[]", '""', "<[5]>", "!<[7]>", ".", "root", "x", "y", "é"),
        *("(", ")", "|", "*", "+", "?", "{2}", "{0,3}", "{1,}", "{0}", "{", "}", "\\", '"', "\0"),
        *(" ", "\n", " ::= ", "\nx ::= ", "\ny ::= ", "#c\n"),
    ]
)


@QUIET
@given(text=st.one_of(st.lists(parts, max_size=25).map(lambda some: "root ::= " + "".join(some)), st.text(max_size=60)))
def test_any_text_is_a_grammar_that_works_or_a_typed_error(vocabulary: Model, text: str) -> None:
    """For any text, a sampler with acceptable tokens results, or GrammarError."""
    try:
        sampler = Sampler(SamplingParams(seed=1, grammar=text), vocabulary)
    except (GrammarError, InvalidParams):
        return
    for seed in range(3):
        try:
            token = sampler.sample((np.random.default_rng(seed).normal(size=N)).astype(np.float32))
        except SamplingError:
            return
        sampler.accept(token)


@QUIET
@given(data=st.binary(max_size=200))
def test_any_bytes_are_no_state(vocabulary: Model, data: bytes) -> None:
    """Bytes that no sampler saved are refused."""
    from paceline.errors import StateError

    sampler = Sampler(SamplingParams(seed=1), vocabulary)
    with pytest.raises(StateError):
        sampler.restore(data)
