"""One answer: text, reason, numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from paceline.cli.generation import Generated, TimedTokens, collect, positions_needed, summary, usage
from paceline.cli.interrupt import Stop
from paceline.errors import Aborted
from paceline.text import TextPipe

PIECES = (b"a", b"b", b"\xf0\x9f", b"\x99\x82", b"\n")


def answer(
    tokens: Iterator[int] | Sequence[int], stops: Sequence[str] = (), limit: int = 99, stop: Stop | None = None
) -> tuple[Generated, list[str]]:
    shown: list[str] = []
    result = collect(iter(tokens), TextPipe(PIECES, stops), shown.append, lambda count: count >= limit, stop or Stop())
    return result, shown


def test_text_is_shown_as_it_comes_and_kept() -> None:
    """Each whole piece is shown once; together they are the text."""
    result, shown = answer([0, 2, 3, 1])
    assert shown == ["a", "🙂", "b"]
    assert (result.text, result.token_ids, result.finish_reason) == ("a🙂b", (0, 2, 3, 1), "end")


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    """What is held back is shown as a replacement character."""
    assert answer([0, 2])[0].text == "a\ufffd"


def test_a_stop_ends_the_answer_before_it() -> None:
    """The stop is no text, its tokens are counted, and nothing after it is asked for."""
    tokens = iter([0, 1, 4, 0])
    result, shown = answer(tokens, stops=["b\n"])
    assert (result.text, result.token_ids, result.finish_reason, result.stop) == ("a", (0,), "stop", "b\n")
    assert "".join(shown) == "a" and result.completion_tokens == 3 and list(tokens) == [0]


def test_half_a_stop_is_text() -> None:
    """What was held back for a stop that did not come is shown."""
    result, _ = answer([0, 1], stops=["b\n"])
    assert (result.text, result.token_ids, result.finish_reason) == ("ab", (0, 1), "end")


def test_the_limit_is_a_reason_of_its_own() -> None:
    """An answer that could not go on is cut, not ended."""
    assert answer([0, 0], limit=2)[0].finish_reason == "length"
    assert answer([0, 0], limit=3)[0].finish_reason == "end"


def test_an_interrupt_ends_after_the_token_and_keeps_the_text() -> None:
    """No further token is asked for; what is held back comes out."""
    stop = Stop()

    def tokens() -> Iterator[int]:
        yield 0
        stop.request()
        yield 2
        pytest.fail("another token was asked for")

    result, _ = answer(tokens(), stop=stop)
    assert (result.text, result.finish_reason) == ("a\ufffd", "cancelled")


def test_an_aborted_pass_is_an_interrupt_only_when_one_was_asked_for() -> None:
    """`Aborted` ends the answer after Ctrl-C, and is an error otherwise."""
    stop = Stop()

    def tokens() -> Iterator[int]:
        yield 0
        raise Aborted("stopped")

    with pytest.raises(Aborted):
        answer(tokens())
    stop.request()
    result, _ = answer(tokens(), stop=stop)
    assert (result.text, result.finish_reason) == ("a", "cancelled")


def test_times_hold_the_waiting_for_tokens_and_not_the_reader() -> None:
    """The first token's time is its own; the reader's time between tokens counts for nothing."""
    now = iter([0, 5, 100, 101, 200, 202, 300, 303])
    timed = TimedTokens(iter([7, 8, 9]), clock=lambda: next(now))
    assert list(timed) == [7, 8, 9]
    assert (timed.first_s, timed.others_s, timed.count) == (5, 3, 3)


def test_an_answer_of_nothing_still_took_its_prompt() -> None:
    """Where the first token ends the answer, the time goes to the prompt."""
    now = iter([0, 5])
    timed = TimedTokens(iter([]), clock=lambda: next(now))
    assert list(timed) == [] and (timed.first_s, timed.count) == (5, 0)


def generated(**changes: object) -> Generated:
    facts = {
        "text": "x", "token_ids": (1,) * 11, "finish_reason": "end", "stop": None, "completion_tokens": 11,
        "prefill_s": 0.5, "decode_s": 2.0,
    }  # fmt: skip
    return Generated(**(facts | changes))  # type: ignore[arg-type]


def test_the_summary_tells_speed_ending_and_seed() -> None:
    """Speeds are tokens after the first by their time, and the prompt by its own."""
    line = summary(generated(), prompt_tokens=100, load_s=0.25, seed=7)
    assert line == "11 tokens, 5.0 tok/s | prompt 100 tokens, 200 tok/s | load 0.25 s | ended by itself | seed 7"


@pytest.mark.parametrize(
    ("reason", "words"), [("length", "cut at the limit"), ("stop", "stopped at 'END'"), ("cancelled", "interrupted")]
)
def test_the_summary_names_every_ending(reason: str, words: str) -> None:
    """Why it ended is said in words."""
    line = summary(generated(finish_reason=reason, stop="END"), prompt_tokens=1, load_s=0, seed=1)
    assert f" | {words} | " in line


def test_no_speed_is_made_up() -> None:
    """Without a second token there is no speed of decoding, without a first none of the prompt."""
    one = generated(completion_tokens=1, decode_s=0.0)
    assert one.tokens_per_s is None
    assert summary(one, prompt_tokens=1, load_s=0, seed=1).startswith("1 token | prompt 1 token, 2.0 tok/s | ")
    none = generated(completion_tokens=0, decode_s=0.0)
    assert summary(none, prompt_tokens=5, load_s=0, seed=1).startswith("0 tokens | prompt 5 tokens | ")


def test_usage_has_counts_and_seconds() -> None:
    """The numbers for programs are the summary's, not rounded."""
    assert usage(generated(), prompt_tokens=100, load_s=0.25) == {
        "prompt_tokens": 100, "completion_tokens": 11, "load_s": 0.25, "prefill_s": 0.5, "decode_s": 2.0,
        "tokens_per_s": 5.0,
    }  # fmt: skip


def test_an_answer_without_limit_needs_room_for_the_prompt_and_a_token() -> None:
    """A limit says how large the context must be; without one the prompt does."""
    assert positions_needed([1, 2], 10) == 12
    assert positions_needed([1, 2], None) == 3
