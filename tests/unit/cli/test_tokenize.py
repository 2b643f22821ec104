"""How tokens are shown."""

from __future__ import annotations

import pytest

from paceline.cli.texts import _format, _parse_ids, _shown_bytes, _token_record
from paceline.errors import InvalidParams


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b" the", '" the"'),
        (b"\n\t\\", r'"\n\t\\"'),
        (b'"', r'"\""'),
        ("é🙂".encode(), '"é🙂"'),
        (b"\xf0\x9f", r'"\xf0\x9f"'),
        (b"a\x1b\x00", r'"a\x1b\x00"'),
        ("\u200b".encode(), r'"\xe2\x80\x8b"'),
        (b"", '""'),
    ],
)
def test_everything_in_a_piece_can_be_seen(data: bytes, shown: str) -> None:
    """Text is shown unchanged, and invisible characters are escaped."""
    assert _shown_bytes(data) == shown


def test_a_record_has_no_text_where_bytes_are_none() -> None:
    """Half a character is bytes, not a wrong text."""
    assert _token_record(5, b"\xc3\xa9") == {"id": 5, "text": "é", "bytes": [0xC3, 0xA9]}
    assert _token_record(6, b"\xc3") == {"id": 6, "text": None, "bytes": [0xC3]}


@pytest.mark.parametrize("text", ["1 2 3", "1,2,3", "[1, 2, 3]", " 1\n2\n3\n"])
def test_ids_are_read_in_the_forms_people_have_them(text: str) -> None:
    """Blanks, commas and brackets are all the same."""
    assert _parse_ids(text) == [1, 2, 3]


def test_invalid_id_is_refused() -> None:
    """The message shows the given value."""
    with pytest.raises(InvalidParams, match=r"whole numbers, not '1 two'"):
        _parse_ids("1 two")


def test_two_forms_of_output_exclude_each_other() -> None:
    """The message names both."""
    with pytest.raises(InvalidParams, match="--ids and --json exclude each other"):
        _format(decode=False, ids=True, pieces=False, count=False, as_json=True)
