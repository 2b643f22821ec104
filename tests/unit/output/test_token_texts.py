"""Which bytes and which texts tokens are shown with."""

from collections import UserList

import pytest

from paceline.output import TokenTexts, Vocabulary
from paceline.request import RequestOptions


def test_texts_are_made_once_each_when_first_needed() -> None:
    """A token that a model has not raises as its bytes would."""

    class Counted(UserList[bytes]):
        asked = 0

        def __getitem__(self, index: int) -> bytes:
            Counted.asked += 1
            return super().__getitem__(index)

    texts = TokenTexts(Counted([b"a", "\u00e9".encode(), b"\xc3"]))
    assert Counted.asked == 0
    assert [texts[case] for case in (1, 2, 1, 2)] == ["\u00e9", None, "\u00e9", None]
    assert Counted.asked == 2
    with pytest.raises(IndexError):
        texts[3]


def test_preserved_tokens_are_text_and_other_control_tokens_are_not() -> None:
    """In the bytes and in the texts of the whole vocabulary, which stays as it is; the tables are made once."""
    pieces = (b"a", b"", b"", b"\xc3")
    vocabulary = Vocabulary(pieces, (b"a", b"<x>", b"<y>", b"\xc3"), frozenset())
    shown, texts = vocabulary.shown(RequestOptions(preserved_tokens=(2,)))
    assert tuple(shown) == (b"a", b"", b"<y>", b"\xc3")
    assert [texts[token_id] for token_id in range(4)] == ["a", "", "<y>", None]
    assert vocabulary.shown(RequestOptions(preserved_tokens=(2,)))[0] is shown
    plain, texts = vocabulary.shown(RequestOptions())
    assert plain is pieces
    assert [texts[token_id] for token_id in range(4)] == ["a", "", "", None]
    assert vocabulary.shown(RequestOptions(special=True, preserved_tokens=(2,)))[0] is vocabulary.pieces_special
    for first in range(20):  # more combinations than are kept
        vocabulary.shown(RequestOptions(preserved_tokens=tuple(range(first % 4))))
    assert tuple(vocabulary.shown(RequestOptions(preserved_tokens=(1, 2)))[0]) == (b"a", b"<x>", b"<y>", b"\xc3")
