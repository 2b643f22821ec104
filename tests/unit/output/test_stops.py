"""Stop strings in tokens: text that passes, text that is held back, tokens of the stop."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from paceline.errors import InvalidParams, InvalidType
from paceline.output import StopFilter, StopMatch


def test_stops_of_the_most_characters_take_little_memory() -> None:
    """Stops of 4 bytes a character, which share no beginning: about 14 bytes of memory a byte."""
    stops = [chr(0x1F300 + number) + chr(0x1F600) * 63 for number in range(256)]
    gc.collect()
    tracemalloc.start()
    try:
        stop_filter = StopFilter(stops)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 2 << 20
    for stop in stops[:3]:
        assert StopFilter.from_state(stops, [(1, b"a" + stop.encode())]).match == StopMatch(stop, (1,))
    assert stop_filter.push(1, stops[0].encode()[:-1]) == ((), b"")


def test_without_stops_everything_passes_at_once() -> None:
    """No list, or an empty one, holds nothing back."""
    stop_filter = StopFilter()
    assert stop_filter.push(7, b"a\xf0") == ((7,), b"a\xf0")
    assert stop_filter.push(8, b"") == ((8,), b"")
    assert stop_filter.finish() == ((), b"") and stop_filter.match is None


def test_a_stop_across_tokens_is_held_and_taken_out() -> None:
    """Tokens of a possible stop wait; tokens of a real stop are the stop's."""
    stop_filter = StopFilter(["</s>"])
    assert stop_filter.push(1, b"Hi") == ((1,), b"Hi")
    assert stop_filter.push(2, b"<") == ((), b"")
    assert stop_filter.push(3, b"/s") == ((), b"")
    assert stop_filter.match is None
    assert stop_filter.push(4, b"> more") == ((), b"")
    assert stop_filter.match == StopMatch("</s>", (2, 3, 4))
    assert stop_filter.finish() == ((), b"")


def test_what_was_held_passes_when_no_stop_comes_of_it() -> None:
    """A beginning that is not continued leaves with all its tokens."""
    stop_filter = StopFilter(["</s>"])
    stop_filter.push(1, b"<")
    assert stop_filter.push(2, b"/a") == ((1, 2), b"</a")


def test_a_token_in_which_a_stop_begins_is_the_stops_but_its_text_before_is_not() -> None:
    """The text up to the stop is complete although the token it is in is not among the ids."""
    stop_filter = StopFilter(["STOP"])
    assert stop_filter.push(1, b"one") == ((1,), b"one")
    assert stop_filter.push(2, b" two ST") == ((), b" two ")
    assert stop_filter.push(3, b"OP three") == ((), b"")
    assert stop_filter.match == StopMatch("STOP", (2, 3))


def test_a_stop_inside_one_token() -> None:
    """A stop needs no token of its own."""
    stop_filter = StopFilter(["\n\n"])
    assert stop_filter.push(1, b"a\n\nb\n\n") == ((), b"a")
    assert stop_filter.match == StopMatch("\n\n", (1,))


def test_a_token_without_bytes_waits_in_its_place() -> None:
    """A special token that shows no text keeps the order of ids, before or within a possible stop."""
    stop_filter = StopFilter(["ab"])
    assert stop_filter.push(1, b"") == ((1,), b"")
    stop_filter.push(2, b"a")
    assert stop_filter.push(3, b"") == ((), b"")
    assert stop_filter.push(4, b"c") == ((2, 3, 4), b"ac")


@pytest.mark.parametrize("stops", [["bc", "abcd"], ["abcd", "bc"]])
def test_the_match_that_starts_earliest_wins(stops: list[str]) -> None:
    """A stop that is complete waits for one that began before it, whatever the order of the list."""
    stop_filter = StopFilter(stops)
    assert stop_filter.push(1, b"xabc") == ((), b"x") and stop_filter.match is None
    stop_filter.push(2, b"d")
    assert stop_filter.match == StopMatch("abcd", (1, 2))


def test_the_later_start_wins_when_the_earlier_fails() -> None:
    """The waiting stop is the match as soon as the other cannot be completed any more."""
    stop_filter = StopFilter(["bc", "abcd"])
    stop_filter.push(1, b"xabc")
    assert stop_filter.push(2, b"!") == ((), b"a")
    assert stop_filter.match == StopMatch("bc", (1, 2))


def test_the_shorter_wins_also_after_waiting() -> None:
    """A stop that waits for an earlier stop is not replaced by a longer stop with the same start."""
    stop_filter = StopFilter(["bc", "bcd", "abcde"])
    assert stop_filter.push(1, b"abcd!") == ((), b"a")
    assert stop_filter.match == StopMatch("bc", (1,))


def test_the_end_decides_for_a_stop_that_waits() -> None:
    """A sequence that ends in between is stopped by the complete stop."""
    stop_filter = StopFilter(["bc", "abcd"])
    stop_filter.push(1, b"abc")
    assert stop_filter.finish() == ((), b"a")
    assert stop_filter.match == StopMatch("bc", (1,))


@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
def test_of_two_that_start_together_the_shorter_wins(stops: list[str]) -> None:
    """The first complete stop needs no waiting."""
    stop_filter = StopFilter(stops)
    stop_filter.push(1, b"abc")
    assert stop_filter.match == StopMatch("ab", (1,))


def test_the_end_passes_on_what_was_held() -> None:
    """Half a stop at the end is text."""
    stop_filter = StopFilter(["abc"])
    stop_filter.push(1, b"xa")
    stop_filter.push(2, b"b")
    assert stop_filter.finish() == ((1, 2), b"ab")
    assert stop_filter.finish() == ((), b"") and stop_filter.match is None


def test_a_stop_of_many_bytes_is_found_where_characters_are_split() -> None:
    """Tokens may end inside the characters of a stop."""
    stop_filter, text = StopFilter(["終わり🙂"]), "これで終わり🙂です".encode()
    released = b""
    for token_id, byte in enumerate(text):
        released += stop_filter.push(token_id, bytes([byte]))[1]
        if stop_filter.match:
            break
    assert released.decode() == "これで"
    assert stop_filter.match == StopMatch("終わり🙂", tuple(range(9, 9 + len("終わり🙂".encode()))))


def test_nothing_follows_a_match() -> None:
    """Pushing on after the end of a sequence is an error of the program and raises."""
    stop_filter = StopFilter(["a"])
    stop_filter.push(1, b"a")
    with pytest.raises(RuntimeError, match="no token can follow"):
        stop_filter.push(2, b"b")
    assert stop_filter.match == StopMatch("a", (1,))


@pytest.mark.parametrize(
    ("stops", "error", "message"),
    [
        ([""], InvalidParams, r"stop\[0\] must not be empty"),
        (["a", ""], InvalidParams, r"stop\[1\] must not be empty"),
        (["a\ud800"], InvalidParams, r"stop\[0\] has a lone surrogate"),
        ("abc", InvalidType, "stop must be a list of strings, not 'abc'"),
        (3, InvalidType, "stop must be a list of strings, not 3"),
        ([b"a"], InvalidType, r"stop\[0\] must be a str"),
    ],
)
def test_stops_that_are_no_strings_with_text_are_refused(
    stops: list[str], error: type[InvalidParams], message: str
) -> None:
    """The error names the stop by its place."""
    with pytest.raises(error, match=f"^{message}"):
        StopFilter(stops)


def test_long_stops_that_repeat_themselves_take_no_longer() -> None:
    """A stop of a thousand characters in a text that nearly has it everywhere is found at its place."""
    stop_filter = StopFilter(["a" * 1_000 + "b"])
    text, released = "a" * 20_500 + "b", 0
    for token_id, letter in enumerate(text):
        released += len(stop_filter.push(token_id, letter.encode())[1])
    assert released == 19_500
    assert stop_filter.match == StopMatch("a" * 1_000 + "b", tuple(range(19_500, 20_501)))
