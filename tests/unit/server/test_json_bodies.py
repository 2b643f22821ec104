"""How JSON bodies are decoded: strictly, and no more of them than can mean something."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server import json_bodies
from paceline.server.api_errors import ApiException
from paceline.server.json_bodies import decode_json, encode_in_parts


@pytest.fixture(autouse=True)
def few(monkeypatch: Any) -> None:
    """Limits that a test can reach."""
    for name, number in (("_SMALL", 10), ("_MAX_PARTS", 20), ("_MAX_VALUES", 40), ("_MAX_FIELDS", 5)):
        monkeypatch.setattr(json_bodies, name, number)


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": [5] * 40},
        {"prompt": ["a,"] * 39 + [5]},
        {"prompt": "a, " * 1000},
        {"prompt": 'a", "' * 1000},
        {"prompt": "\\" * 1001 + "," * 100},
        {"prompt": ['"' * 7 + "," * 100, ",\n\\" * 100], "b": ",,,,"},
    ],
)
def test_what_is_not_too_much_is_read(value: Any) -> None:
    """Commas within texts do not count, whatever stands around them."""
    assert decode_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [%b5]}' % (b"5," * 40),
        b'{"prompt": [%b5]}' % (b'"a",' * 40),
        b'{"prompt": ["a", %b5]}' % (b"5," * 39),
        b'{"prompt": "%b", "b": [%b1]}' % (b'a\\"' * 9, b"1," * 40),
        b'{"prompt": [%b%b]}' % (b'""' * 200, b"," * 41),
    ],
)
def test_more_values_than_a_body_can_mean_are_refused(body: bytes) -> None:
    """Before they are decoded."""
    with pytest.raises(ApiException, match="more than 40 values"):
        decode_json(body)


def test_more_lists_objects_and_fields_than_a_body_can_mean_are_refused() -> None:
    """Before they are decoded, or if only an object shows how many it has."""
    for body in (b"[[]" * 11, b'{"a":{"b":' * 7):
        with pytest.raises(ApiException, match="the limit of 20"):
            decode_json(body)
    with pytest.raises(ApiException, match="the limit of 5"):
        decode_json(b'{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}')


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'"\\ud800"', b"NaN", b"[" * 100_000])
def test_invalid_json_is_refused_as_such(body: bytes, monkeypatch: Any) -> None:
    """In a way that routes know."""
    monkeypatch.setattr(json_bodies, "_MAX_PARTS", 10**6)
    with pytest.raises(json.JSONDecodeError):
        decode_json(body)


class Pair(msgspec.Struct):
    """A record with members that may be left out."""

    a: Any
    b: Any = msgspec.UNSET


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-9, 9),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=5),
        st.builds(Pair, inner, st.one_of(st.just(msgspec.UNSET), inner)),
    ),
    max_leaves=40,
)


@given(VALUES, st.integers(1, 8))
def test_a_value_is_the_same_however_small_its_parts_are(value: Any, size: int) -> None:
    """Records, objects, lists and texts at any depth; members that are left out stay out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bodies, "_PART", size)
        patch.setattr(json_bodies, "_MANY_MEMBERS", size // 2)
        assert encode_in_parts(value) == msgspec.json.encode(value)


def test_no_part_is_much_larger_than_the_others() -> None:
    """While one is encoded, no other thread runs."""
    entry = {str(token): {"logprob": -1.0, "decoded_token": "a"} for token in range(1000)}
    columns = Pair([dict.fromkeys(map(str, range(1000)), -0.5)] * 50, ["a"] * 5000)
    sizes = [
        len(part)
        for part in json_bodies._parts({"choices": [{"prompt_logprobs": [None] + [entry] * 50}], "c": columns})
    ]
    assert max(sizes) < 50_000 < sum(sizes) / 40
