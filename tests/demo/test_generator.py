"""The engine that measures the demo models."""

from __future__ import annotations

import pytest

from demo_model.fmt import Chat, Message, prompt
from demo_model.generator import PacelineGenerator, Sampling
from paceline.demo import demo_model_path

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def engine() -> PacelineGenerator:
    return PacelineGenerator(demo_model_path())


def test_a_completion_ends_before_its_end_token(engine: PacelineGenerator) -> None:
    out = engine.generate(prompt(Chat([Message("user", "Hello!")])), 60)
    assert out.ended
    assert out.text
    assert "<|" not in out.text


def test_a_cut_completion_has_not_ended(engine: PacelineGenerator) -> None:
    out = engine.generate("Once upon a time", 5)
    assert (len(out.tokens), out.ended) == (5, False)


def test_special_tokens_of_a_prompt_are_read_as_such(engine: PacelineGenerator) -> None:
    assert len(engine.encode("<|im_start|><|im_end|>")) == 2


def test_one_seed_gives_one_story(engine: PacelineGenerator) -> None:
    first, again, other = (engine.generate("Once", 40, Sampling(0.8, seed=seed)).text for seed in (1, 1, 2))
    assert first == again != other


def test_next_tokens_match_greedy_generation(engine: PacelineGenerator) -> None:
    start = engine.encode("Once upon a time")
    out = engine.generate("Once upon a time", 12)
    assert engine.next_tokens(start + out.tokens)[len(start) - 1 : -1] == out.tokens
