"""Loops of a small model at temperature 0 end by `max_repetition`."""

from __future__ import annotations

from tests.real_models.conftest import RealModel

import paceline

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
LOOPS = ("The list of all numbers: 1, 1, 1,", "0 0 0 0 0 0", "What is your name? " * 3)
STORY = "Once upon a time"


def test_loops_of_a_greedy_model_end_and_a_story_goes_on(real_model: RealModel) -> None:
    """At least two of three prompts end in a loop, and none of them long after 64 tokens of it."""
    with paceline.LLM(real_model(MODEL), n_ctx=4096, num_slots=4, n_threads=1) as llm:
        options = {"temperature": 0, "max_tokens": 300, "ignore_eos": True, "max_repetition": 64}
        *loops, story = llm.generate([*LOOPS, STORY], **options)
    for each in loops:
        print(f"{each.finish_reason}, {len(each.token_ids)} tokens, ...{each.text[-60:]!r}")
    found = [each for each in loops if each.finish_reason == "repetition"]
    assert len(found) >= 2
    assert all(64 < len(each.token_ids) < 300 for each in found)
    assert story.finish_reason == "length"
