"""The output of a choice: its ends, and the time at which text is shown."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.output import OutputProcessor, Vocabulary
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.streaming import FinishReason, TokenLogprobs, TokenText

PIECES = (*(bytes([byte]) for byte in range(256)), b"", b"\xc3\xa9")
VOCABULARY = Vocabulary(PIECES, (*PIECES[:256], b"<eos>", PIECES[257]), frozenset({256}))


def processor(*, special: bool = False, echo: str = "", **params: Any) -> OutputProcessor:
    return OutputProcessor(SamplingParams(**params), VOCABULARY, 0, RequestOptions(special=special), echo)


def take(one: OutputProcessor, data: bytes | list[int]) -> list[FinishReason | None]:
    return [one.take(token, None) for token in data]


def test_tokens_are_shown_as_they_come() -> None:
    """Every token's text is in the chunk after it; the index counts the tokens."""
    one = processor()
    assert one.chunk() is None
    take(one, b"ab")
    chunk = one.chunk()
    assert chunk is not None
    assert (chunk.index, chunk.token_ids, chunk.text, chunk.finish_reason) == (0, (97, 98), "ab", None)
    assert one.chunk() is None
    take(one, b"c")
    chunk = one.chunk()
    assert chunk is not None
    assert (chunk.index, chunk.text) == (2, "c")


def test_an_unfinished_character_waits_and_comes_with_the_end() -> None:
    """Its ids go out at once; its text when it is whole, or as U+FFFD in the end."""
    one = processor()
    take(one, b"\xf0\x9f\x99")
    chunk = one.chunk()
    assert chunk is not None
    assert (chunk.token_ids, chunk.text) == ((0xF0, 0x9F, 0x99), "")
    assert not one.finish()
    last = one.last_chunk(FinishReason.CANCELLED, None)
    assert (last.index, last.token_ids, last.text) == (3, (), "\ufffd")


@pytest.mark.parametrize(
    ("params", "data", "reasons"),
    [
        ({"max_tokens": 2}, b"ab", [None, FinishReason.LENGTH]),
        ({}, [97, 256], [None, FinishReason.STOP]),
        ({"ignore_eos": True}, [97, 256], [None, None]),
        ({"stop_token_ids": [98]}, b"ab", [None, FinishReason.STOP]),
        ({"stop": ["b"]}, b"ab", [None, FinishReason.STOP]),
        ({"max_tokens": 1}, [256], [FinishReason.STOP]),
        ({"max_tokens": 2, "stop": ["ab"]}, b"ab", [None, FinishReason.STOP]),
        ({"stop_token_ids": [256]}, [256], [FinishReason.STOP]),
    ],
)
def test_why_a_token_is_the_last(params: dict[str, Any], data: Any, reasons: list[FinishReason | None]) -> None:
    """The end, a stop, or the length, which is the weakest."""
    assert take(processor(**params), data) == reasons


def test_a_stop_that_is_complete_at_the_end_counts() -> None:
    """One that a longer stop might have displaced stands when nothing more comes."""
    one = processor(stop=["bc", "abcd"])
    take(one, b"xabc")
    assert one.finish()
    assert (one.stop, one.stop_token_ids) == ("bc", (98, 99))
    last = one.last_chunk(FinishReason.STOP, None)
    assert (last.text, last.token_ids) == ("xa", (120, 97))


def test_an_end_within_a_held_back_stop_gives_everything_back() -> None:
    """A stop that was begun and not completed is text like any other."""
    one = processor(stop=["###"])
    assert take(one, b"a##")[-1] is None
    chunk = one.chunk()
    assert chunk is not None
    assert chunk.text == "a"
    assert one.take(256, None) is FinishReason.STOP
    assert not one.finish()
    last = one.last_chunk(FinishReason.STOP, None)
    assert (last.text, last.token_ids, last.stop, last.stop_token_ids) == ("##", (35, 35), 256, (256,))


def test_an_end_behind_a_complete_stop_is_part_of_it() -> None:
    """All tokens of the sequence are in token_ids or in stop_token_ids."""
    one = processor(stop=["bc", "abcd"])
    take(one, [97, 98, 99, 256])
    assert one.finish()
    assert (one.stop, one.stop_token_ids) == ("bc", (98, 99, 256))


def test_logprobs_go_out_with_their_tokens() -> None:
    """Held-back tokens keep their logprobs; a stop's are dropped with it."""
    one = processor(stop=["bx"], logprobs=0)
    for token in b"abc":
        one.take(token, TokenLogprobs(-float(token)))
        chunk = one.chunk()
        assert chunk is None or [entry.own for entry in chunk.logprobs] == [-float(t) for t in chunk.token_ids]
    for token in b"bx":
        one.take(token, TokenLogprobs(-float(token)))
    one.finish()
    last = one.last_chunk(FinishReason.STOP, None)
    assert (last.token_ids, last.logprobs) == ((), ())


def test_logprobs_have_the_texts_of_their_tokens() -> None:
    """Of the token itself and of the most likely tokens; control tokens have text, and parts of characters have bytes."""
    one = processor(logprobs=2)
    one.take(0xC3, TokenLogprobs(-1.0, (97, 256), (-0.5, -1.0)))
    one.add_prompt_logprobs([98, 99], [TokenLogprobs(-2.0), TokenLogprobs(-3.0)])
    chunk = one.chunk()
    assert chunk is not None
    (scored,) = chunk.logprobs
    assert scored.token == TokenText(0xC3, "\ufffd", (0xC3,))
    assert scored.top == ((TokenText(97, "a", (97,)), -0.5), (TokenText(256, "<eos>", tuple(b"<eos>")), -1.0))
    assert [(entry.token.text, entry.own) for entry in chunk.prompt_logprobs] == [("b", -2.0), ("c", -3.0)]


def test_stops_are_armed_after_min_tokens_within_a_character() -> None:
    """A character that began before min_tokens is shown whole, and no stop is seen in it."""
    one = processor(stop=["\u00e9", "b"], min_tokens=1)
    assert take(one, b"\xc3\xa9a") == [None, None, None]
    chunk = one.chunk()
    assert chunk is not None
    assert chunk.text == "\u00e9a"
    assert one.take(257, None) is FinishReason.STOP
    assert one.finish()
    assert one.stop == "\u00e9"


def test_echo_comes_first_and_once() -> None:
    """The prompt's text is in the first chunk, or in the last if nothing else came."""
    one = processor(echo="prompt ")
    take(one, b"a")
    chunk = one.chunk()
    assert chunk is not None
    assert chunk.text == "prompt a"
    assert processor(echo="prompt").last_chunk(FinishReason.CANCELLED, None).text == "prompt"


def test_control_tokens_show_where_asked_for() -> None:
    """`special` chooses the pieces."""
    one = processor(special=True, ignore_eos=True)
    take(one, [97, 256])
    chunk = one.chunk()
    assert chunk is not None
    assert chunk.text == "a<eos>"


def test_chunks_have_as_many_tokens_as_the_interval() -> None:
    """No chunk has fewer; the last chunk has whatever is left (edge rule 20)."""
    output = OutputProcessor(SamplingParams(), VOCABULARY, 0, RequestOptions(interval=3), "")
    sizes = []
    for _ in range(7):
        output.take(97, None)
        chunk = output.chunk()
        sizes.append(0 if chunk is None else len(chunk.token_ids))
    output.finish()
    last = output.last_chunk(FinishReason.CANCELLED, None)
    assert (sizes, last.token_ids, last.index, last.text) == ([0, 0, 3, 0, 0, 3, 0], (97,), 6, "a")
