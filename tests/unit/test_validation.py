"""The checks of single values: accepted and refused values, and the messages."""

from __future__ import annotations

import array
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import validation
from paceline.errors import InvalidParams, InvalidType


class NamedFile:
    """Stands for a path, as the entries of a folder do."""

    def __fspath__(self) -> str:
        return "a/b"


@pytest.mark.parametrize("value", [0, 3, 10, np.int32(3), np.uint8(10), np.int64(0)])
def test_integer_returns_a_plain_int(value: Any) -> None:
    """Python's and NumPy's integers come back as int, both bounds included."""
    result = validation.integer("top_k", value, 0, 10)
    assert result == value and type(result) is int


@pytest.mark.parametrize("value", [True, False, np.True_, 1.0, np.float32(1), "1", None, [1], 1j])
def test_integer_refuses_other_types(value: Any) -> None:
    """A bool, a float, a string or nothing at all is no integer, and the error is a TypeError too."""
    with pytest.raises(InvalidType, match=r"^top_k must be an integer >= 0 and <= 10, not ") as caught:
        validation.integer("top_k", value, 0, 10)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("value", [-1, 11, 2**80, pytest.param(10**6000, id="6000 digits"), np.int64(-1)])
def test_integer_refuses_values_out_of_range(value: Any) -> None:
    """A value outside of the bounds is refused, however large, and is no wrong type."""
    with pytest.raises(InvalidParams, match=r"^top_k must be an integer >= 0 and <= 10, not ") as caught:
        validation.integer("top_k", value, 0, 10)
    assert not isinstance(caught.value, InvalidType)


def test_integer_without_bounds_takes_any() -> None:
    """Bounds that are not given do not bound."""
    assert validation.integer("seed", -(2**100)) == -(2**100)


def test_hint_ends_the_message() -> None:
    """The way out that the caller of the check knows stands at the end."""
    with pytest.raises(InvalidParams, match=r"^n_ctx must be an integer >= 1, not 0; leave it out for 4096$"):
        validation.integer("n_ctx", 0, 1, hint="leave it out for 4096")


@pytest.mark.parametrize("value", [0, 0.5, 1, np.float32(0.5), np.int8(1), Fraction(1, 3)])
def test_number_returns_a_plain_float(value: Any) -> None:
    """Every real number in range comes back as float, both bounds included."""
    result = validation.number("top_p", value, 0, 1)
    assert result == float(value) and type(result) is float


@pytest.mark.parametrize("value", [True, np.True_, "0.5", None, 1j, [0.5]])
def test_number_refuses_other_types(value: Any) -> None:
    """A bool or a string is no number."""
    with pytest.raises(InvalidType, match=r"^top_p must be a finite number >= 0 and <= 1, not "):
        validation.number("top_p", value, 0, 1)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, -math.inf, np.float32("nan"), 10**400])
def test_number_refuses_what_is_out_of_range_or_not_finite(value: Any) -> None:
    """NaN, infinities and integers too large for a float are refused like any value out of range."""
    with pytest.raises(InvalidParams, match=r"^top_p must be a finite number >= 0 and <= 1, not ") as caught:
        validation.number("top_p", value, 0, 1)
    assert not isinstance(caught.value, InvalidType)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_number_without_bounds_must_still_be_finite(value: Any) -> None:
    """No bounds still refuse infinite values and NaN."""
    with pytest.raises(InvalidParams, match=r"^bias must be a finite number, not "):
        validation.number("bias", value)


@pytest.mark.parametrize("value", [1e300, -1e300, 3.41e38, 10**39])
def test_number_refuses_what_32_bits_would_make_infinite(value: Any) -> None:
    """A number that the native core would read as an infinity is refused, bounds or not, with the reason."""
    for bounds in ((), (0,)):
        with pytest.raises(InvalidParams, match=r"^scale must be a finite number.* it has 32 bits"):
            validation.number("scale", value, *bounds)
    assert validation.number("scale", 3.4e38) == 3.4e38


def test_number_keeps_open_bounds_in_32_bits() -> None:
    """A value that would be rounded onto an open bound is outside."""
    for value in (1e-60, 1 - 1e-12):
        with pytest.raises(InvalidParams, match="^x must be a finite number > 0 and < 1"):
            validation.number("x", value, above=0, below=1)
    assert validation.number("x", 1e-60, 0, 1) == 1e-60


def test_number_distinguishes_open_and_closed_bounds() -> None:
    """`above` and `below` exclude the bound itself, `low` and `high` include it."""
    assert validation.number("x", 0.5, above=0, below=1) == 0.5
    for value in (0, 1):
        with pytest.raises(InvalidParams, match=rf"^x must be a finite number > 0 and < 1, not {value}$"):
            validation.number("x", value, above=0, below=1)


def test_message_reads_as_a_sentence() -> None:
    """The message has the form that the project promises."""
    with pytest.raises(InvalidParams) as caught:
        validation.number("temperature", -1, 0)
    assert str(caught.value) == "temperature must be a finite number >= 0, not -1"


@pytest.mark.parametrize("value", [0, 1, "yes", None, np.True_])
def test_boolean_refuses_what_is_merely_truthy(value: Any) -> None:
    """Only True and False are booleans."""
    assert validation.boolean("echo", True) is True and validation.boolean("echo", False) is False
    with pytest.raises(InvalidType, match=r"^echo must be True or False, not "):
        validation.boolean("echo", value)


def test_text_names_a_lone_surrogate_and_where_it_is() -> None:
    """Text that UTF-8 cannot carry is refused with the position; every other str is taken."""
    assert validation.text("prompt", "a\0é\U0001f600") == "a\0é\U0001f600"
    with pytest.raises(InvalidParams, match=r"^prompt has a lone surrogate \(U\+D83D\) at position 2"):
        validation.text("prompt", "é!\ud83d!")


class Fancy(str):
    """A text with something more."""

    __slots__ = ()


def test_texts_and_choices_come_out_as_plain_str() -> None:
    """Subclasses, NumPy's among them, cannot go to another process."""
    for value in (Fancy("last"), np.str_("last")):
        assert type(validation.text("prompt", value)) is str
        assert type(validation.choice("pooling", value, ("last", "mean"))) is str
        assert validation.text("prompt", value) == "last"


@pytest.mark.parametrize("value", [b"abc", None, 3, ["a"]])
def test_text_refuses_other_types(value: Any) -> None:
    """Bytes are no text."""
    with pytest.raises(InvalidType, match=r"^prompt must be a str, not "):
        validation.text("prompt", value)


def test_choice_suggests_the_nearest_option() -> None:
    """The error for a misspelt option lists all options and suggests the nearest."""
    options = ("mean", "last", "rank")
    assert validation.choice("pooling", "last", options) == "last"
    with pytest.raises(InvalidParams) as caught:
        validation.choice("pooling", "men", options)
    assert str(caught.value) == "pooling must be one of 'mean', 'last', 'rank', not 'men'; did you mean 'mean'?"
    with pytest.raises(InvalidType, match=r"^pooling must be one of"):
        validation.choice("pooling", 3, options)


@pytest.mark.parametrize(
    "values",
    [
        [0, 5, 9],
        (0, 5, 9),
        array.array("i", [0, 5, 9]),
        np.array([0, 5, 9], np.int32),
        np.array([0, 5, 9], np.uint64),
        [np.int64(0), 5, np.int8(9)],
    ],
)
def test_token_ids_returns_a_list_of_plain_ints(values: Any) -> None:
    """Sequences and integer arrays come back as a list of int."""
    result = validation.token_ids("prompt", values, 10)
    assert result == [0, 5, 9] and set(map(type, result)) == {int}


def test_token_ids_returns_a_list_of_its_own() -> None:
    """Later changes of the caller's list do not reach the result."""
    given = [1, 2]
    result = validation.token_ids("prompt", given, 10)
    given.append(99)
    assert result == [1, 2]


def test_token_ids_takes_the_empty_and_ranges() -> None:
    """Nothing, and a range, are sequences of token ids."""
    assert validation.token_ids("prompt", [], 10) == []
    assert validation.token_ids("prompt", np.array([], np.int32), 10) == []
    assert validation.token_ids("prompt", range(3), 10) == [0, 1, 2]


@pytest.mark.parametrize("bad", [-1, 10, 2**40, np.int64(10)])
def test_token_ids_names_index_and_value(bad: Any) -> None:
    """An id that the vocabulary does not have is named with its place."""
    message = rf"^prompt\[1\] must be an integer >= 0 and <= 9, not .*{int(bad)}"
    with pytest.raises(InvalidParams, match=message) as caught:
        validation.token_ids("prompt", [3, bad, 4], 10)
    assert str(caught.value).endswith("the vocabulary has 10 tokens")
    with pytest.raises(InvalidParams, match=r"^prompt\[1\]"):
        validation.token_ids("prompt", np.array([3, int(bad)], np.int64), 10)


@pytest.mark.parametrize("bad", [True, 1.0, "1", None])
def test_token_ids_refuses_items_of_other_types(bad: Any) -> None:
    """An item that is no integer is named with its place, as a type error."""
    with pytest.raises(InvalidType, match=r"^prompt\[2\] must be an integer"):
        validation.token_ids("prompt", [3, 4, bad], 10)


@pytest.mark.parametrize("values", ["12", b"12", 3, None, {1, 2}, iter([1]), memoryview(b"1")])
def test_token_ids_refuses_invalid_sequence_of_integers(values: Any) -> None:
    """Text, bytes, sets and iterators are no sequences of token ids."""
    with pytest.raises(InvalidType, match=r"^prompt must be a sequence of token ids, not "):
        validation.token_ids("prompt", values, 10)


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((1, 3), np.int32), np.zeros(3, bool), np.int32(3)])
def test_token_ids_refuses_arrays_of_another_shape_or_type(values: Any) -> None:
    """Floats, bools, matrices and scalars of NumPy are no token ids."""
    with pytest.raises(InvalidType, match=r"^prompt must be a one-dimensional array of integers, not "):
        validation.token_ids("prompt", values, 10)


@pytest.mark.parametrize("value", ["a/b", Path("a/b"), NamedFile()])
def test_path_takes_texts_and_what_stands_for_a_path(value: Any) -> None:
    """Whatever `open` would take for a name of text."""
    assert validation.path("file", value) == Path("a/b")


@pytest.mark.parametrize("value", [None, 3, b"a", ["a"], True])
def test_path_refuses_other_types(value: Any) -> None:
    """A number would be a file descriptor; bytes are no text."""
    with pytest.raises(InvalidType, match=r"^file must be a path, not "):
        validation.path("file", value)


@pytest.mark.parametrize(("value", "words"), [("a\0b", "NUL"), ("\udc80", "lone surrogate")])
def test_path_refuses_what_no_file_can_be_called(value: str, words: str) -> None:
    """Before the system does, in its words."""
    with pytest.raises(InvalidParams, match=f"^file has a {words}"):
        validation.path("file", value)


def test_instance_returns_the_value_or_names_the_class() -> None:
    """A subclass will do."""
    assert validation.instance("error", InvalidType("x"), InvalidParams).code == InvalidType("x").code
    with pytest.raises(InvalidType, match=r"^error must be an InvalidParams, not 3$"):
        validation.instance("error", 3, InvalidParams)


def test_reject_unknown_suggests_the_nearest_name() -> None:
    """An unknown keyword is a TypeError with a suggestion, or with all that is known."""
    known = ("temperature", "top_k")
    validation.reject_unknown({"top_k": 3}, known)
    with pytest.raises(TypeError, match=r"^unknown option 'temprature'; did you mean 'temperature'\?$"):
        validation.reject_unknown({"top_k": 3, "temprature": 1}, known)
    with pytest.raises(InvalidType, match=r"^unknown option 'zzz'; known are temperature, top_k$"):
        validation.reject_unknown(["zzz"], known)
    with pytest.raises(InvalidType, match=r"^unknown option 'zzz'; there are 2, see SamplingParams$"):
        validation.reject_unknown(["zzz"], known, "SamplingParams")


@pytest.mark.parametrize(
    ("typed", "names", "nearest"),
    [
        ("--prot", ["--prio", "--port", "--props"], "--port"),
        ("tpo_p", ["top_k", "top_p", "typical_p"], "top_p"),
        ("sede", ["send", "seed"], "seed"),
        ("rnu", ["run", "rn"], "run"),
        ("temprature", ["repeat_penalty", "temperature"], "temperature"),
    ],
)
def test_transposed_letters_are_nearer_than_other_letters(typed: str, names: list[str], nearest: str) -> None:
    """A name of the same letters in another order comes first, whatever the order of the names."""
    for known in (names, names[::-1]):
        assert validation.nearest_names(typed, known) == [nearest]


def test_nearest_names_are_similar_and_so_many() -> None:
    """No more than asked for, the nearest first, none that shares too little."""
    names = ["seed", "speed", "need", "top_k"]
    assert validation.nearest_names("seed", names, most=2) == ["seed", "speed"]
    assert validation.nearest_names("zzz", names, most=3) == validation.nearest_names("seed", []) == []


def test_a_long_value_is_cut_in_the_message() -> None:
    """A megabyte in the wrong place makes no megabyte of message, and a failing repr does not replace the error."""

    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(InvalidType) as caught:
        validation.integer("n", "x" * 1_000_000)
    assert len(str(caught.value)) < 200
    with pytest.raises(InvalidType, match=r"not a Silent$"):
        validation.integer("n", Silent())
