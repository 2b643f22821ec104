"""The input of a custom tool, read from pieces of its function's arguments."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.dialects.responses.response_tools import CustomInput, custom_input_of


@given(st.text(), st.booleans(), st.data())
def test_the_pieces_of_an_input_add_up_to_it(text: str, is_ascii: bool, data: st.DataObject) -> None:
    """However the arguments are split, and whichever characters are escaped."""
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    reader, found, rest = CustomInput(), "", arguments
    while rest:
        length = data.draw(st.integers(1, min(7, len(rest))))
        found += reader.feed(rest[:length])
        rest = rest[length:]
    assert reader.finish() == ""
    assert found == reader.text == text == custom_input_of(arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "half', "half"),
        ('{ "input" : "a\\nb\\', "a\nb"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input":""}', ""),
        ("", ""),
        ("{", "{"),
        ('{"other": "x"}', '{"other": "x"}'),
        ("not JSON", "not JSON"),
        ('{"input": "\\ud83d\\ude00"}', "\U0001f600"),
        ('{"input": "\\ud83d!"}', "?!"),
        ('{"input": "\\ud83d\\u0041"}', "?A"),
        ('{"input": "\\ude00"}', "?"),
        ('{"input": "\\ud83d\\ud83d\\ude00"}', "?\U0001f600"),
    ],
)
def test_arguments_that_are_cut_or_of_another_shape_lose_nothing(arguments: str, text: str) -> None:
    """An invalid input is returned as generated; half a pair of surrogates, which UTF-8 cannot carry, is replaced."""
    reader = CustomInput()
    pieces = [reader.feed(character) for character in arguments]
    assert "".join([*pieces, reader.finish()]) == text
    assert custom_input_of(arguments) == text
