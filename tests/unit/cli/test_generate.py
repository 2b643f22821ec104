"""The figures of a completion, for people and for programs."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.cli.texts import completion_record, positions_needed, summary
from paceline.streaming import Usage
from paceline.streaming.chunk import Choice, Completion, FinishReason

USAGE = Usage(prompt_tokens=100, completion_tokens=11, prefill_s=0.5, decode_s=2.0)


def generated(reason: str = "stop", stop: str | int = 2, **usage: float) -> Completion:
    choice = Choice(index=0, text="x", token_ids=(1,) * 11, finish_reason=FinishReason(reason), stop=stop)
    return Completion(choices=(choice,), prompt_token_ids=(), usage=dataclasses.replace(USAGE, **usage))  # type: ignore[arg-type]


def test_the_summary_has_speed_ending_and_seed() -> None:
    """Speeds are tokens after the first by their time, and the prompt by its own."""
    line = summary(generated(), load_s=0.25, seed=7)
    assert line == "11 tokens, 5.0 tok/s | prompt 100 tokens, 200 tok/s | load 0.25 s | ended by itself | seed 7"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("length", "cut at the limit"),
        ("stop", "stopped at 'END'"),
        ("cancelled", "interrupted"),
        ("slow_reader", "slow reader"),
    ],
)
def test_the_summary_names_every_ending(reason: str, words: str) -> None:
    """The finish reason is put into words."""
    line = summary(generated(reason, "END"), load_s=0, seed=1)
    assert f" | {words} | " in line


def test_no_speed_is_made_up() -> None:
    """Without a second token there is no speed of decoding, without a first none of the prompt."""
    one_token = generated(prompt_tokens=1, completion_tokens=1, decode_s=0.001)
    assert completion_record(one_token, load_s=0, seed=1)["usage"]["tokens_per_s"] is None
    assert summary(one_token, load_s=0, seed=1).startswith("1 token | prompt 1 token, 2.0 tok/s | ")
    none = generated(prompt_tokens=5, completion_tokens=0, decode_s=0.0)
    assert summary(none, load_s=0, seed=1).startswith("0 tokens | prompt 5 tokens | ")


def test_the_record_has_counts_and_seconds() -> None:
    """The numbers for programs are the summary's, not rounded."""
    assert completion_record(generated(), load_s=0.25, seed=7) == {
        "text": "x", "token_ids": (1,) * 11, "finish_reason": "stop", "stop": 2, "seed": 7, "usage": {
            "prompt_tokens": 100, "completion_tokens": 11, "load_s": 0.25, "prefill_s": 0.5, "decode_s": 2.0,
            "tokens_per_s": 5.0,
        },
    }  # fmt: skip


def test_a_completion_without_limit_needs_room_for_the_prompt_and_a_token() -> None:
    """A limit sets the size of the context; without one the prompt does."""
    assert positions_needed([1, 2], 10) == 12
    assert positions_needed([1, 2], None) == 3
