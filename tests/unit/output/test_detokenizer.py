"""Bytes to text, piece by piece."""

from __future__ import annotations

import pytest

from paceline.output import Detokenizer


def test_a_character_appears_with_its_last_byte() -> None:
    """Nothing is shown of a character until it is whole."""
    detokenizer = Detokenizer()
    assert [detokenizer.push(bytes([byte])) for byte in "é🙂!".encode()] == ["", "é", "", "", "", "🙂", "!"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"\xf0\x9f\x98", "\ufffd"),
        (b"\xf0\x9f\x98a", "\ufffda"),
        (b"\xed\xa0\x80", "\ufffd" * 3),
        (b"\xc0\xaf", "\ufffd" * 2),
        (b"\xf4\x90\x80\x80", "\ufffd" * 4),
    ],
)
def test_each_invalid_part_becomes_one_replacement(data: bytes, text: str) -> None:
    """One U+FFFD stands for each maximal invalid subpart, also byte by byte."""
    detokenizer = Detokenizer()
    assert "".join(detokenizer.push(bytes([byte])) for byte in data) + detokenizer.finish() == text


def test_finish_makes_it_new() -> None:
    """Held-back bytes leave once, and later bytes are decoded as from the beginning."""
    detokenizer = Detokenizer()
    assert detokenizer.push(b"\xc3") == "" and detokenizer.state() == b"\xc3"
    assert detokenizer.finish() == "\ufffd" and detokenizer.state() == b""
    assert detokenizer.push(b"\xa9") == "\ufffd" and detokenizer.finish() == ""


def test_another_goes_on_from_its_state() -> None:
    """A detokenizer made from the state of another completes that detokenizer's character."""
    first = Detokenizer()
    first.push("x🙂".encode()[:3])
    second = Detokenizer.from_state(first.state())
    assert second.push("🙂".encode()[2:]) == "🙂"
