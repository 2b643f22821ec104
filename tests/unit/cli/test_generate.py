"""One generation: text, finish reason, usage."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.cli.texts import Generated, collect, positions_needed, summary, usage_record
from paceline.streaming import FinishReason, StreamChunk, Usage

USAGE = Usage(prompt_tokens=100, completion_tokens=11, prefill_s=0.5, decode_s=2.0)


def chunk(index: int, text: str, *token_ids: int) -> StreamChunk:
    return StreamChunk(index=index, text=text, token_ids=token_ids)


def last(reason: FinishReason, text: str = "", *token_ids: int, stop: str | int | None = None) -> StreamChunk:
    return StreamChunk(index=9, text=text, token_ids=token_ids, finish_reason=reason, stop=stop, usage=USAGE)


def test_text_is_shown_as_it_comes_and_kept() -> None:
    """Each piece of text is shown once, the last chunk's as well; together they are the text."""
    shown: list[str] = []
    chunks = [chunk(0, "a", 1), chunk(1, "", 2), chunk(2, "🙂", 3), last(FinishReason.LENGTH, "b", 4)]
    completion = collect(chunks, shown.append)
    assert shown == ["a", "🙂", "b"]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("a🙂b", (1, 2, 3, 4), "length")


def test_nothing_needs_to_be_shown() -> None:
    """Without a function that shows it the text is the same."""
    assert collect([chunk(0, "a", 1), last(FinishReason.STOP, "b")], None).text == "ab"


def test_what_ended_generation_is_reported() -> None:
    """The stop string, or the id of the end-of-generation token."""
    assert collect([last(FinishReason.STOP, stop="END")], None).stop == "END"
    assert collect([last(FinishReason.STOP, stop=2)], None).stop == 2


def test_a_stream_that_breaks_off_is_no_completion() -> None:
    """Every stream ends with a terminal chunk; one that does not is our own error."""
    for chunks in ([], [chunk(0, "a", 1)]):
        with pytest.raises(AssertionError, match="terminal chunk"):
            collect(chunks, None)


def generated(**changes: object) -> Generated:
    facts = {"text": "x", "token_ids": (1,) * 11, "finish_reason": "stop", "stop": 2, "usage": USAGE}
    return Generated(**(facts | changes))  # type: ignore[arg-type]


def usage(**changes: object) -> Usage:
    return dataclasses.replace(USAGE, **changes)  # type: ignore[arg-type]


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
    line = summary(generated(finish_reason=reason, stop="END"), load_s=0, seed=1)
    assert f" | {words} | " in line


def test_no_speed_is_made_up() -> None:
    """Without a second token there is no speed of decoding, without a first none of the prompt."""
    one = generated(usage=usage(prompt_tokens=1, completion_tokens=1, decode_s=0.001))
    assert one.tokens_per_s is None
    assert summary(one, load_s=0, seed=1).startswith("1 token | prompt 1 token, 2.0 tok/s | ")
    none = generated(usage=usage(prompt_tokens=5, completion_tokens=0, decode_s=0.0))
    assert summary(none, load_s=0, seed=1).startswith("0 tokens | prompt 5 tokens | ")


def test_usage_has_counts_and_seconds() -> None:
    """The numbers for programs are the summary's, not rounded."""
    assert usage_record(generated(), load_s=0.25) == {
        "prompt_tokens": 100, "completion_tokens": 11, "load_s": 0.25, "prefill_s": 0.5, "decode_s": 2.0,
        "tokens_per_s": 5.0,
    }  # fmt: skip


def test_a_completion_without_limit_needs_room_for_the_prompt_and_a_token() -> None:
    """A limit sets the size of the context; without one the prompt does."""
    assert positions_needed([1, 2], 10) == 12
    assert positions_needed([1, 2], None) == 3
