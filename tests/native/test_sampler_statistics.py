"""Draws by the thousand against the distributions they should have. Seeds are fixed: nothing is left to chance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.sampling_reference import Logits, Reference, softmax

from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler

N = 32000
LOGITS: Logits = {3: 2.0, 10: 1.5, 11: 1.5, 400: 0.7, 401: -0.2, 7000: -1.0, 31999: -2.5, 5: 0.1}
OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
DRAWS = 4000


def row(logits: Logits) -> np.ndarray:
    values = np.full(N, -np.inf, dtype=np.float32)
    values[list(logits)] = list(logits.values())
    return values


def chi_square(counts: dict[int, int], probabilities: dict[int, float], draws: int) -> float:
    """Return the statistic, over the bins that are expected at least five times, divided by its degrees of freedom."""
    bins = {token: p * draws for token, p in probabilities.items() if p * draws >= 5}
    return sum((counts.get(token, 0) - wanted) ** 2 / wanted for token, wanted in bins.items()) / max(1, len(bins) - 1)


def count(params: SamplingParams, model: Model, logits: Logits, over: str) -> dict[int, int]:
    """Draw once for each k, seed or choice."""
    counts: dict[int, int] = {}
    values = row(logits)
    sampler = Sampler(params, model)
    for i in range(DRAWS):
        if over == "seed":
            sampler = Sampler(params.replace(seed=i), model)
        elif over == "choice":
            sampler = sampler.clone(choice=i)
        token = sampler.sample(values)
        counts[token] = counts.get(token, 0) + 1
        if over == "k":
            sampler.accept(token)
    return counts


@pytest.mark.parametrize("over", ["k", "choice", "seed"])
def test_draws_have_the_probabilities_of_the_softmax(vocabulary: Model, over: str) -> None:
    """Over k, over choices and over seeds alike, each token comes as often as its probability says."""
    counts = count(SamplingParams(seed=1, **OPEN), vocabulary, LOGITS, over)
    # 2.9 times the degrees of freedom is exceeded by chance once in 200; 0.1 times as rarely fallen below.
    assert 0.1 < chi_square(counts, softmax(LOGITS), DRAWS) < 2.9


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"typical_p": 0.6}],
)
def test_draws_have_the_probabilities_after_the_samplers(vocabulary: Model, options: dict[str, Any]) -> None:
    """Draws are distributed like the reference's, and no cut token comes."""
    params = SamplingParams(seed=2, **{**OPEN, **options})
    wanted = softmax(Reference(params).apply(LOGITS))
    counts = count(params, vocabulary, LOGITS, "k")
    assert counts.keys() <= wanted.keys()
    assert 0.1 < chi_square(counts, wanted, DRAWS) < 2.9


def test_draws_from_a_whole_vocabulary_are_fair(vocabulary: Model) -> None:
    """If all 32,000 tokens can come, tokens come as often as they should, taken in blocks of ids."""
    sampler = Sampler(SamplingParams(seed=3, **OPEN), vocabulary)
    logits = np.random.default_rng(0).normal(size=N).astype(np.float32)
    weights = np.exp(logits.astype(np.float64))
    wanted = {block: float(p) for block, p in enumerate((weights / weights.sum()).reshape(20, -1).sum(axis=1))}
    counts: dict[int, int] = {}
    for _ in range(1500):
        token = sampler.sample(logits)
        sampler.accept(token)
        counts[token // 1600] = counts.get(token // 1600, 0) + 1
    assert 0.2 < chi_square(counts, wanted, 1500) < 2.1


def test_xtc_tosses_its_coin_as_often_as_asked(vocabulary: Model) -> None:
    """The top choices are excluded with the probability asked for, independently of the draw."""
    options = {**OPEN, "xtc_probability": 0.3, "xtc_threshold": 0.15}
    counts = count(SamplingParams(seed=4, **options), vocabulary, LOGITS, "k")
    plain = softmax(LOGITS)
    kept = softmax({token: logit for token, logit in LOGITS.items() if token not in (3, 10)})
    wanted = {token: 0.7 * plain[token] + 0.3 * kept.get(token, 0.0) for token in LOGITS}
    assert 0.1 < chi_square(counts, wanted, DRAWS) < 2.9


def test_consecutive_draws_do_not_depend_on_each_other(vocabulary: Model) -> None:
    """Pairs of consecutive draws are as frequent as the product of their probabilities."""
    sampler = Sampler(SamplingParams(seed=5, **OPEN), vocabulary)
    logits = {1: 0.0, 2: 0.5, 3: 1.0}
    p = softmax(logits)
    values, counts, last = row(logits), {}, 0
    for _ in range(DRAWS):
        token = sampler.sample(values)
        sampler.accept(token)
        counts[10 * last + token] = counts.get(10 * last + token, 0) + 1
        last = token
    wanted = {10 * a + b: p[a] * p[b] for a in p for b in p}
    assert 0.1 < chi_square(counts, wanted, DRAWS) < 2.9


def test_a_grammar_does_not_bend_the_distribution(vocabulary: Model) -> None:
    """Among the tokens that a grammar allows, each comes with its probability given that it is allowed."""
    letters = {letter: vocabulary.tokenizer.token_id(letter) for letter in "abcdefgh"}
    logits = {token: 0.4 * i for i, token in enumerate(letters.values()) if token is not None}
    sampler = Sampler(SamplingParams(seed=6, grammar="root ::= [aceg]*", **OPEN), vocabulary)
    wanted = softmax(
        {token: logits[token] for letter, token in letters.items() if token is not None and letter in "aceg"}
    )
    counts: dict[int, int] = {}
    for _ in range(DRAWS):
        token = sampler.sample(row(logits))
        sampler.accept(token)
        counts[token] = counts.get(token, 0) + 1
    assert counts.keys() == wanted.keys()
    assert 0.05 < chi_square(counts, wanted, DRAWS) < 4.0


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_the_surprise_near_its_target(vocabulary: Model, version: int) -> None:
    """The mean surprise of the drawn tokens, in bits, comes to mirostat_tau."""
    for target in (2.0, 4.0):
        params = SamplingParams(seed=7, mirostat=version, mirostat_tau=target, temperature=1.0, logprobs_mode="sampled")
        sampler = Sampler(params, vocabulary)
        rng = np.random.default_rng(1)
        surprise = []
        for _ in range(300):
            logits = (rng.normal(size=N) * 2.5).astype(np.float32)
            token, logprobs = sampler.sample_with_logprobs(logits)
            sampler.accept(token)
            surprise.append(-logprobs.chosen.logprob / math.log(2))
        assert np.mean(surprise[100:]) == pytest.approx(target, abs=0.35)


def test_adaptive_p_brings_probabilities_near_its_target(vocabulary: Model) -> None:
    """The tokens drawn have, on average, about the probability asked for."""
    drawn = {}
    for target in (0.2, 0.6):
        params = SamplingParams(seed=7, samplers=("top_k", "adaptive_p"), top_k=20, adaptive_target=target)
        sampler = Sampler(params, vocabulary)
        rng = np.random.default_rng(1)
        probabilities = []
        for _ in range(400):
            logits = {int(token): float(x) for token, x in enumerate(np.sort(rng.normal(size=20) * 2))}
            token = sampler.sample(row(logits))
            sampler.accept(token)
            probabilities.append(softmax(logits)[token])
        drawn[target] = np.mean(probabilities[50:])
    assert drawn[0.2] == pytest.approx(0.2, abs=0.12)
    assert drawn[0.6] > drawn[0.2] + 0.1


@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_the_shortcut_of_the_draw_loses_no_winner(vocabulary: Model, spread: float) -> None:
    """Of many candidates the highest sum of logit and noise wins, however far down its logit was."""
    params = SamplingParams(seed=12, **OPEN)
    rng = np.random.default_rng(2)
    sampler = Sampler(params, vocabulary)
    for k in range(25):
        values = (rng.normal(size=1000) * spread).astype(np.float32)
        logits = {int(token): float(x) for token, x in zip(rng.choice(N, 1000, replace=False), values, strict=True)}
        token = sampler.sample(row(logits))
        assert token == Reference(params, k=k).token(logits)
        sampler.accept(token)
