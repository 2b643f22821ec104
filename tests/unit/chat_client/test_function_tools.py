"""Python functions as tools: their schemas, and the values that a call's arguments become."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import pytest

from paceline import FunctionTool
from paceline.chat_client.function_tools import Toolbox, parse_docstring
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
    """Objects become dataclasses; missing arguments are left to the function's own default."""
    _, named = FunctionTool.of(forecast).bind('{"city": "Oslo", "near": {"name": "hill"}}')
    assert named == {"city": "Oslo", "near": Place("hill")}
    with pytest.raises(ValueError, match="less than or equal to 7"):
        FunctionTool.of(forecast).bind('{"city": "Oslo", "days": 8}')


def test_any_name_can_be_a_parameter() -> None:
    """Also names that pydantic's models have themselves, and names that begin with an underscore."""

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
    """So is a function with parameters that have no names for the caller."""

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
    """No Args, one line, odd indents: unreadable lines describe nothing."""
    assert parse_docstring("") == ("", {})
    assert parse_docstring("Add.") == ("Add.", {})
    assert parse_docstring("Args:\n    a: One.\n    b (int, optional): Two\n        lines.\n\nNote:\n    c: no")[1] == {
        "a": "One.",
        "b": "Two lines.",
    }
    assert parse_docstring("Do it.\n\nArgs:\nunindented")[1] == {}


NUMPY = """Look up.

By the service.

Parameters
----------
city, town : str
    The name,
    in English.
days : int, optional

    How many.
*more
    Others.

Returns
-------
str
    No parameter.
"""
SPHINX = """Look up.

By the service.

:param city: The name,
    in English.
:param str town: The name, in English.
:type city: str
:param days: How many.
:param \\*more: Others.
:returns: No parameter.
"""


@pytest.mark.parametrize("text", [NUMPY, SPHINX], ids=["numpy", "sphinx"])
def test_docstrings_of_other_styles_describe_parameters(text: str) -> None:
    """Sections and fields are no part of the description."""
    english = "The name, in English."
    assert parse_docstring(text) == (
        "Look up.\n\nBy the service.",
        {"city": english, "town": english, "days": "How many.", "more": "Others."},
    )


def test_words_of_a_text_are_no_sections() -> None:
    """A line with the name of a section needs a colon or an underline; a field needs its colons."""
    text = "Notes\n\nReturns\nparameters: none\n:ref without an end\n---\n  Args:\n  x: y"
    assert parse_docstring(text) == (text, {})


def test_hints_describe_parameters() -> None:
    """A text or a pydantic field within `Annotated`, before the docstring; a field as the default also has the value."""

    def search(
        text: Annotated[str, "The words."],
        limit: Annotated[int, pydantic.Field(description="Most results.", ge=1)] = 3,
        page: int = pydantic.Field(default=4, description="From 1.", le=9),
        words: list[str] = pydantic.Field(default_factory=list),  # noqa: B008 - pydantic's own way
        where: str = "",
    ) -> None:
        """Search.

        Args:
            text: No.
            limit: No.
            page: No.
            words: More words.
            where: The place.
        """

    tool = FunctionTool.of(search)
    properties = tool.parameters["properties"]  # type: ignore[index]
    assert {name: schema["description"] for name, schema in properties.items()} == {
        "text": "The words.",
        "limit": "Most results.",
        "page": "From 1.",
        "words": "More words.",
        "where": "The place.",
    }
    assert (properties["limit"]["minimum"], properties["page"]["maximum"], properties["page"]["default"]) == (1, 9, 4)
    assert tool.parameters["required"] == ["text"]  # type: ignore[index]
    assert tool.bind('{"text": "fox"}') == ((), {"text": "fox", "page": 4, "words": []})
    with pytest.raises(ValueError, match="less than or equal to 9"):
        tool.bind('{"text": "fox", "page": 10}')


def test_names_and_descriptions_of_all_callables() -> None:
    """A partial has its function's, an object its class's, or its call's."""

    class Finder:
        def __init__(self, folder: str = ".") -> None:
            """Open.

            Args:
                folder: Of the files.
            """

        def __call__(self, pattern: str) -> str:
            """Find files.

            Args:
                pattern: With stars.
            """
            return pattern

        @classmethod
        def all(cls, pattern: str) -> str:
            """Find all."""
            return pattern

    partial = FunctionTool.of(functools.partial(functools.partial(forecast, days=2), unit="F"))
    assert (partial.name, partial.description) == ("forecast", "Forecast the weather.\n\nBy the national service.")
    assert partial.parameters["properties"]["days"]["description"] == "How many days."  # type: ignore[index]
    found = FunctionTool.of(Finder())
    assert (found.name, found.description) == ("Finder", "Find files.")
    assert found.parameters["properties"]["pattern"]["description"] == "With stars."  # type: ignore[index]
    made = FunctionTool.of(Finder)
    assert made.parameters["properties"]["folder"]["description"] == "Of the files."  # type: ignore[index]
    cached = functools.lru_cache(Finder().__call__)
    names = [FunctionTool.of(function).name for function in (Finder.all, Finder().all, cached, len, math.sqrt)]
    assert names == ["all", "all", "__call__", "len", "sqrt"]


def test_a_name_that_no_api_takes_is_refused_with_the_way_out() -> None:
    """Derived or given: OpenAI's rule holds for both."""
    way_out = r"FunctionTool.of\(function, name=...\)"
    with pytest.raises(InvalidParams, match=f"^a lambda has no name for the model; give it one: {way_out}"):
        FunctionTool.of(lambda city: city)
    assert FunctionTool.of(lambda city: city, name="city").name == "city"

    def measure(x: int) -> int:
        return x

    measure.__name__ = "größe"

    for name in (None, "", "a b", "a.b", "a" * 65, "ö", 'a"'):
        with pytest.raises(InvalidParams, match=f"1 to 64 ASCII letters, digits, _ and -, not '.*{way_out}"):
            FunctionTool.of(measure, name=name)
    assert FunctionTool.of(measure, name="a" * 64).name == "a" * 64
    with pytest.raises(InvalidType, match="name"):
        FunctionTool.of(measure, name=3)  # type: ignore[arg-type]


def test_two_functions_of_one_name_are_refused_with_the_way_out() -> None:
    """Methods of two objects, for example."""
    with pytest.raises(InvalidParams, match=r"two tools have the name 'forecast'.*FunctionTool.of"):
        Toolbox([forecast, functools.partial(forecast, days=2)])
    assert len(Toolbox([forecast, FunctionTool.of(functools.partial(forecast, days=2), name="two_days")]).tools) == 2


def test_a_function_chooses_its_tool() -> None:
    """Also if the tool has another name than the function, and for a partial."""
    partial = functools.partial(forecast, days=2)
    toolbox = Toolbox([FunctionTool.of(forecast, name="weather"), FunctionTool.of(partial, name="two_days")])
    assert [toolbox.name_of(function) for function in (forecast, partial)] == ["weather", "two_days"]


def test_an_infinite_default_is_no_json() -> None:
    """It stays out of the schema, which clients parse."""

    def wait(seconds: float = math.inf) -> None: ...

    assert FunctionTool.of(wait).parameters["properties"] == {"seconds": {"type": "number"}}  # type: ignore[index]
