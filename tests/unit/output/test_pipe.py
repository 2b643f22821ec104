"""Token ids to text, with stop strings between."""

from __future__ import annotations

import pytest

from paceline.output import StopMatch, TextPiece, TextPipe

PIECES = (b"Hello", b" wor", b"ld", b"\xf0\x9f", b"\x99\x82", b"", b"<", b"end>", b"\n")


def test_tokens_become_text_as_soon_as_it_is_whole() -> None:
    """Ids leave at once, the text of a character with its last byte."""
    pipe = TextPipe(PIECES)
    assert [pipe.push(token) for token in (0, 3, 4, 5)] == [
        TextPiece((0,), "Hello"), TextPiece((3,), ""), TextPiece((4,), "🙂"), TextPiece((5,), ""),
    ]  # fmt: skip
    assert pipe.finish() == TextPiece((), "") and pipe.match is None


def test_the_text_before_a_stop_is_complete() -> None:
    """Also an unfinished character before the stop is shown, as a replacement."""
    pipe = TextPipe(PIECES, ["<end>"])
    assert [pipe.push(token).text for token in (0, 3, 6, 7)] == ["Hello", "", "", ""]
    assert pipe.match == StopMatch("<end>", (6, 7))
    assert pipe.finish() == TextPiece((), "\ufffd")


def test_the_end_delivers_held_back_text() -> None:
    """A sequence that ends for another reason loses no ids and no text."""
    pipe = TextPipe(PIECES, ["<end>"])
    assert pipe.push(6) == TextPiece((), "")
    assert pipe.finish() == TextPiece((6,), "<")


@pytest.mark.parametrize("cut", range(6))
def test_another_pipe_goes_on_from_its_state(cut: int) -> None:
    """In the middle of a character or of a stop, a pipe made from the state of another gives the same output."""
    stops, ids = ["<end>", "\n<"], [0, 3, 4, 8, 3, 6, 7]
    first = TextPipe(PIECES, stops)
    for token in ids[:cut]:
        first.push(token)
    second = TextPipe.from_state(PIECES, stops, first.state())
    outcomes = []
    for pipe in (first, second):
        pieces = [pipe.push(token) for token in ids[cut:]]
        outcomes.append((pieces, pipe.finish(), pipe.match))
    assert outcomes[0] == outcomes[1] and first.match == StopMatch("<end>", (6, 7))
