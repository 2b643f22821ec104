"""Python functions as tools: their schemas, and the values that a call's arguments become."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import pytest

from paceline import FunctionTool
from paceline.chat_client.function_tools import parse_docstring
from paceline.errors import InvalidParams, InvalidType

if TYPE_CHECKING:
    from decimal import Decimal


@dataclass
class Place:
    name: str
    height_m: float = 0.0


def forecast(  # noqa: D417 - `near` is left out on purpose
    city: str,
    days: Annotated[int, pydantic.Field(ge=1, le=7)] = 3,
    unit: Literal["C", "F"] = "C",
    near: Place | None = None,
) -> Decimal:
    """Forecast the weather.

    By the national service.

    Args:
        city: The city,
            by its English name.
        days (int): How many days.
        unit: Of temperatures.

    Returns:
        Not the model's business: a number.
    """
    raise NotImplementedError


def test_a_schema_comes_of_signature_hints_and_docstring() -> None:
    """Defaults make parameters optional, `Args:` describes them, a dataclass is a definition, and objects are closed."""
    tool = FunctionTool.of(forecast)
    assert (tool.name, tool.description) == ("forecast", "Forecast the weather.\n\nBy the national service.")
    assert tool.parameters == {
        "$defs": {
            "Place": {
                "properties": {"name": {"type": "string"}, "height_m": {"default": 0.0, "type": "number"}},
                "required": ["name"],
                "type": "object",
                "additionalProperties": False,
            }
        },
        "additionalProperties": False,
        "properties": {
            "city": {"description": "The city, by its English name.", "type": "string"},
            "days": {"default": 3, "description": "How many days.", "maximum": 7, "minimum": 1, "type": "integer"},
            "unit": {"default": "C", "description": "Of temperatures.", "enum": ["C", "F"], "type": "string"},
            "near": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}], "default": None},
        },
        "required": ["city"],
        "type": "object",
    }


def test_arguments_become_values_of_their_types() -> None:
    """Objects become dataclasses; what is left out is left to the function's own default."""
    _, named = FunctionTool.of(forecast).bind('{"city": "Oslo", "near": {"name": "hill"}}')
    assert named == {"city": "Oslo", "near": Place("hill")}
    with pytest.raises(ValueError, match="less than or equal to 7"):
        FunctionTool.of(forecast).bind('{"city": "Oslo", "days": 8}')


def test_any_name_can_be_a_parameter() -> None:
    """Also those that pydantic's models have themselves, and those that begin with an underscore."""

    def odd(schema: int, model_config: int, _hidden: int, title: str, copy: Any = 1) -> None:
        """Be odd."""

    tool = FunctionTool.of(odd)
    assert tool.parameters is not None
    assert list(tool.parameters["properties"]) == ["schema", "model_config", "_hidden", "title", "copy"]
    assert tool.bind('{"schema": 1, "model_config": 2, "_hidden": 3, "title": "x"}')[1] == {
        "schema": 1,
        "model_config": 2,
        "_hidden": 3,
        "title": "x",
    }


def test_methods_partials_and_objects_are_functions() -> None:
    """As is what has parameters without names for the caller."""

    class Shelf:
        def find(self, title: str) -> str:
            """Find a book."""
            return title

        def __call__(self, pages: int) -> int:
            return pages

    def power(base: float, exponent: float, /) -> float:
        return float(base**exponent)

    assert list(FunctionTool.of(Shelf().find).parameters["properties"]) == ["title"]  # type: ignore[index]
    assert FunctionTool.of(Shelf(), name="shelf").name == "shelf"
    partial = FunctionTool.of(functools.partial(forecast, city="Oslo"), name="oslo")
    assert partial.bind('{"days": 2}')[1] == {"days": 2}
    positional, named = FunctionTool.of(power).bind('{"base": 2, "exponent": 3}')
    assert (positional, named) == ((2.0, 3.0), {})


def test_a_default_that_is_no_json_stays_out_of_the_schema() -> None:
    """The function has it all the same."""
    marker = object()

    def search(text: str, where: Any = marker) -> None:
        """Search."""

    tool = FunctionTool.of(search)
    assert tool.parameters is not None
    assert tool.parameters["properties"]["where"] == {}
    assert tool.bind('{"text": "fox"}')[1] == {"text": "fox"}


def test_functions_without_a_schema_are_refused() -> None:
    """With the name of the function and the reason."""

    def many(*words: str) -> None: ...

    def anything(**words: str) -> None: ...

    def strange(where: object = None, what: type[FunctionTool] | None = None) -> None: ...

    def unknown(what: Nothing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for function in (many, anything, unknown):
        with pytest.raises(InvalidParams, match=f"'{function.__name__}'"):
            FunctionTool.of(function)
    with pytest.raises(InvalidType, match="must be a function"):
        FunctionTool.of(3)  # type: ignore[arg-type]


def test_a_docstring_may_have_any_form() -> None:
    """No Args, one line, odd indents: what cannot be read describes nothing."""
    assert parse_docstring("") == ("", {})
    assert parse_docstring("Add.") == ("Add.", {})
    assert parse_docstring("Args:\n    a: One.\n    b (int, optional): Two\n        lines.\n\nNote:\n    c: no")[1] == {
        "a": "One.",
        "b": "Two lines.",
    }
    assert parse_docstring("Do it.\n\nArgs:\nunindented")[1] == {}
