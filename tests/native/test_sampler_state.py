"""Continuing another sampler: rebuilt from the tokens, cloned, or restored from bytes."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest

from paceline.errors import InvalidType, StateError
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler
from paceline.sampling_table import SAMPLERS

N = 32000
PROMPT = (1, 5, 9, 5, 9, 300, 301, 300)
# What a sampler can be rebuilt with from its tokens alone.
REBUILDABLE: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 0, "typical_p": 0.9},
    {"top_n_sigma": 1.5},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1, "penalty_last_n": 4},
    {"repeat_penalty": 1.3, "penalty_last_n": -1},
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 0.8, "dry_penalty_last_n": -1},
    {"dynatemp_range": 0.5},
    {"grammar": 'root ::= [^"]* "\\""'},
    {"bad_words": ("the of", "a")},
    {"min_tokens": 6, "stop_token_ids": (4,)},
    {"logit_bias": {4: 3.0}},
    {"samplers": SAMPLERS},
    {"samplers": (*SAMPLERS[:9], "infill")},
]
# What needs its state.
STATEFUL: list[dict[str, Any]] = [
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_eta": 0.3},
    {"samplers": ("top_k", "adaptive_p"), "adaptive_target": 0.3, "adaptive_decay": 0.8},
]


def rows(count: int, seed: int = 0) -> list[np.ndarray]:
    """Rows of which a few tokens have nearly all, as models' rows are, so that histories matter."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        logits = rng.normal(size=N).astype(np.float32)
        logits[rng.choice(40, 12, replace=False) + 290] += 9
        result.append(logits)
    return result


def go_on(sampler: Sampler, logits: list[np.ndarray]) -> list[int]:
    tokens = []
    for logit in logits:
        tokens.append(sampler.sample(logit))
        sampler.accept(tokens[-1])
    return tokens


def named(options: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("options", options, ids=lambda names: "-".join(map(str, names)) or "default")


@named(REBUILDABLE)
def test_a_sampler_rebuilt_from_its_tokens_goes_on_as_the_first(vocabulary: Model, options: dict[str, Any]) -> None:
    """Rebuilt and given the prompt and each generated token, a sampler draws the same as the first."""
    params = SamplingParams(seed=8, **options)
    first = Sampler(params, vocabulary, choice=2)
    first.accept_prompt(PROMPT)
    generated = go_on(first, rows(12))
    again = Sampler(params, vocabulary, choice=2)
    again.accept_prompt(PROMPT[:3])
    again.accept_prompt(PROMPT[3:])
    for token in generated:
        again.accept(token)
    assert again.num_generated == 12
    assert go_on(again, rows(12, 1)) == go_on(first, rows(12, 1))


@named(REBUILDABLE + STATEFUL)
def test_a_restored_sampler_goes_on_as_the_saved_one(vocabulary: Model, options: dict[str, Any]) -> None:
    """State in bytes carries everything over, also a seed made up and a token drawn and not yet accepted."""
    params = SamplingParams(**options)
    first = Sampler(params, vocabulary, choice=1)
    first.accept_prompt(PROMPT)
    go_on(first, rows(12))
    drawn = first.sample(rows(1, 5)[0])
    other = Sampler(params, vocabulary)
    go_on(other, rows(3, 2))
    other.restore(first.state())
    assert (other.seed, other.choice, other.num_generated) == (first.seed, 1, 12)
    assert other.state() == first.state()
    for sampler in (first, other):
        sampler.accept(drawn)
    assert go_on(other, rows(12, 1)) == go_on(first, rows(12, 1))


@named(REBUILDABLE + STATEFUL)
def test_a_clone_goes_on_alone(vocabulary: Model, options: dict[str, Any]) -> None:
    """A clone draws the same as its original, and neither moves the other."""
    first = Sampler(SamplingParams(seed=8, **options), vocabulary)
    first.accept_prompt(PROMPT)
    go_on(first, rows(8))
    clone = first.clone()
    state = clone.state()
    expected = go_on(first, rows(12, 1))
    assert clone.state() == state
    assert go_on(clone, rows(12, 1)) == expected


@named(REBUILDABLE + STATEFUL)
def test_reset_is_the_beginning(vocabulary: Model, options: dict[str, Any]) -> None:
    """After reset an unseeded sampler too draws the same as at first."""
    sampler = Sampler(SamplingParams(**options), vocabulary)
    state = sampler.state()
    sampler.accept_prompt(PROMPT)
    first = go_on(sampler, rows(10))
    sampler.reset()
    assert sampler.state() == state
    sampler.accept_prompt(PROMPT)
    assert go_on(sampler, rows(10)) == first


@named(STATEFUL)
def test_the_state_is_what_makes_the_difference(vocabulary: Model, options: dict[str, Any]) -> None:
    """Mirostat and adaptive-p move on by their draws, so given the tokens alone their state differs."""
    params = SamplingParams(seed=8, **options)
    first = Sampler(params, vocabulary)
    generated = go_on(first, rows(12))
    again = Sampler(params, vocabulary)
    for token in generated:
        again.accept(token)
    assert again.state() != first.state()


def test_a_clone_with_another_choice_shares_the_past_and_not_the_future(vocabulary: Model) -> None:
    """Clones of one prompt under other choices draw other tokens."""
    first = Sampler(SamplingParams(seed=8, top_k=0, temperature=2.0), vocabulary)
    first.accept_prompt(PROMPT)
    futures = [tuple(go_on(first.clone(choice=choice), rows(6))) for choice in range(4)]
    assert len(set(futures)) == 4
    assert futures[0] == tuple(go_on(first, rows(6)))


def test_sampling_again_before_accepting_changes_no_state(vocabulary: Model) -> None:
    """Mirostat's state moves with accept, however often the token was drawn."""
    often, once = (Sampler(SamplingParams(seed=8, mirostat=2), vocabulary) for _ in range(2))
    for logits in rows(6):
        for _ in range(3):
            often.sample(logits)
        once.sample(logits)
        often.accept(often.sample(logits))
        once.accept(once.sample(logits))
    assert often.state() == once.state()


def test_a_token_of_others_leaves_the_state_of_mirostat(vocabulary: Model) -> None:
    """A token that was not drawn tells nothing about surprise and changes k alone."""
    sampler = Sampler(SamplingParams(seed=8, mirostat=2), vocabulary)
    drawn = sampler.sample(rows(1)[0])
    sampler.accept(drawn + 1)
    other = Sampler(SamplingParams(seed=8, mirostat=2), vocabulary)
    other.accept(drawn + 1)
    assert sampler.state() == other.state()


def test_state_of_other_params_is_refused(vocabulary: Model) -> None:
    """A state goes into a sampler with the same params only; a refused one leaves the sampler alone."""
    sampler = Sampler(SamplingParams(seed=1), vocabulary)
    go_on(sampler, rows(3))
    before = sampler.state()
    for options in ({"temperature": 0.7}, {"logit_bias": {1: 1.0}}, {"grammar": 'root ::= "a"'}, {"bad_words": ("x",)}):
        with pytest.raises(StateError, match="other parameters"):
            sampler.restore(Sampler(SamplingParams(seed=1, **options), vocabulary).state())
    assert sampler.state() == before


def test_damaged_state_is_refused(vocabulary: Model) -> None:
    """No flipped, missing or added byte, and no random bytes, pass as a state; the sampler works on."""
    sampler = Sampler(SamplingParams(seed=1, repeat_penalty=1.1), vocabulary)
    sampler.accept_prompt(PROMPT)
    state = sampler.state()
    rng = random.Random(4)
    damaged = [b"", b"paceSMP", state[:-1], state + b"\0", state[:8], rng.randbytes(len(state)), rng.randbytes(3)]
    for _ in range(200):
        flipped = bytearray(state)
        flipped[rng.randrange(len(state))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    for bytes_ in damaged:
        with pytest.raises(StateError):
            sampler.restore(bytes_)
    assert sampler.state() == state
    assert len(go_on(sampler, rows(3))) == 3


def fnv(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def test_a_forged_state_does_no_harm(vocabulary: Model) -> None:
    """Even with a right checksum, impossible lengths, tokens and numbers are refused, and nothing else breaks."""
    sampler = Sampler(SamplingParams(seed=1, repeat_penalty=1.1, mirostat=0), vocabulary)
    sampler.accept_prompt(PROMPT)
    state = sampler.state()
    rng = random.Random(4)
    refused = 0
    for _ in range(500):
        body = bytearray(state[:-8])
        at = rng.randrange(16, len(body) - 4)
        body[at : at + 4] = rng.choice(
            [rng.randbytes(4), b"\xff" * 4, b"\0" * 4, struct.pack("<i", N), struct.pack("<f", np.nan)]
        )
        try:
            sampler.restore(bytes(body) + struct.pack("<Q", fnv(bytes(body))))
            go_on(sampler, rows(1))
        except StateError:
            refused += 1
    assert refused > 50
    sampler.restore(state)
    assert sampler.state() == state


@pytest.mark.parametrize("state", [None, "text", 5, [1, 2]])
def test_other_types_than_bytes_are_no_state(vocabulary: Model, state: Any) -> None:
    """Only bytes can be restored."""
    with pytest.raises(InvalidType, match="state must be bytes"):
        Sampler(SamplingParams(), vocabulary).restore(state)


def test_a_saved_grammar_goes_on_in_its_middle(vocabulary: Model) -> None:
    """A restored sampler is at the same place of its grammar."""
    params = SamplingParams(seed=1, grammar='root ::= "[" [0-9]{1,3} "]"', temperature=0)
    first = Sampler(params, vocabulary)
    go_on(first, rows(2))
    other = Sampler(params, vocabulary)
    other.restore(first.state())
    assert np.array_equal(other.allowed_mask(), first.allowed_mask())
    assert not np.array_equal(other.allowed_mask(), Sampler(params, vocabulary).allowed_mask())
