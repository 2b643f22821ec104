"""Types as schemas, and generated JSON as their instances."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import pydantic
import pytest

from paceline.chat_client.response_models import ResponseModel
from paceline.errors import InvalidParams, InvalidType


class Kind(enum.Enum):
    FOX = "fox"
    BEAR = "bear"


@dataclass
class Animal:
    name: str
    kind: Kind


class Toy(TypedDict):
    title: str
    price: NotRequired[float]


class Box(TypedDict, total=False):
    toys: list[Toy]


class Cat(pydantic.BaseModel):
    type: Literal["cat"]
    title: str = pydantic.Field(title="not for the model")


class Dog(pydantic.BaseModel):
    type: Literal["dog"]


class Pet(pydantic.BaseModel):
    animal: Cat | Dog = pydantic.Field(discriminator="type")
    friends: list[Pet] = []


@pytest.mark.parametrize(
    ("kind", "text", "instance"),
    [
        (Animal, '{"name": "Ivy", "kind": "fox"}', Animal("Ivy", Kind.FOX)),
        (Toy, '{"title": "ball"}', {"title": "ball"}),
        (Box, '{"toys": [{"title": "kite", "price": 2}]}', {"toys": [{"title": "kite", "price": 2.0}]}),
        (Pet, '{"animal": {"type": "dog"}}', Pet(animal=Dog(type="dog"))),
        (list[Animal], '[{"name": "Ivy", "kind": "bear"}]', [Animal("Ivy", Kind.BEAR)]),
        (int, "3", 3),
    ],
)
def test_json_becomes_an_instance(kind: Any, text: str, instance: object) -> None:
    """Of pydantic models, dataclasses, TypedDicts of the standard library, and plain types."""
    assert ResponseModel(kind).parse(text) == instance


def test_schemas_are_closed_and_have_no_words_for_readers() -> None:
    """An object has its own properties and no others; a property may be called title."""
    schema = ResponseModel(Pet).json_schema
    cat = schema["$defs"]["Cat"]
    assert cat["additionalProperties"] is False
    assert cat["properties"]["title"] == {"type": "string"}
    assert "discriminator" not in str(schema)


def test_a_mapping_of_any_names_stays_open() -> None:
    """Only objects with properties are closed."""
    assert ResponseModel(dict[str, int]).json_schema == {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize("text", ["", "{", '{"name": "Ivy"}', '{"name": "Ivy", "kind": "owl"}', "null"])
def test_other_text_is_refused(text: str) -> None:
    """As a ValueError."""
    with pytest.raises(ValueError, match="Animal"):
        ResponseModel(Animal).parse(text)


def test_what_is_no_type_is_refused() -> None:
    """With the name of the option."""
    with pytest.raises(InvalidParams, match="response_model"):
        ResponseModel(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="response_model must be a type"):
        ResponseModel(lambda: 3)  # type: ignore[arg-type]
