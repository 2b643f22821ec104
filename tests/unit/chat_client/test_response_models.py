"""Types as schemas, and generated JSON as their instances."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import ipaddress
import json
import random
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypedDict, TypeVar
from uuid import UUID

import msgspec
import numpy as np
import pydantic
import pytest
from tests.unit.constraints.byte_table import TABLE
from tests.unit.constraints.schema_suite import writes

from paceline.chat_client.response_models import ResponseModel
from paceline.constraints import Constraint, ConstraintCompiler
from paceline.errors import InvalidParams, InvalidType
from paceline.params import SamplingParams
from paceline.runtime.sampler import grammar_of_schema


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


class Export(pydantic.BaseModel):
    format: str
    default: dt.date
    examples: list[dt.date]


@pytest.mark.parametrize("limits", [{"max_digits": 400}, {"lt": Decimal("1e400")}])
def test_limits_that_no_float_has_are_left_out(limits: dict[str, Any]) -> None:
    """They are checked when the reply is parsed."""
    assert ResponseModel(Annotated[Decimal, pydantic.Field(**limits)]).json_schema == {"type": "number"}


def test_fields_may_have_the_names_of_keywords() -> None:
    """They are no keywords: the schemas of their values are narrowed as others are."""
    properties = ResponseModel(Export).json_schema["properties"]
    assert properties["format"] == {"type": "string"}
    assert properties["default"] == properties["examples"]["items"] and "pattern" in properties["default"]


def test_a_mapping_of_any_names_stays_open() -> None:
    """Only objects with properties are closed."""
    assert ResponseModel(dict[str, int]).json_schema == {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize("text", ["", "{", '{"name": "Ivy"}', '{"name": "Ivy", "kind": "owl"}', "null"])
def test_other_text_is_refused(text: str) -> None:
    """As a ValueError."""
    with pytest.raises(ValueError, match="Animal"):
        ResponseModel(Animal).parse(text)


def test_invalid_type_is_refused() -> None:
    """With the name of the option."""
    with pytest.raises(InvalidParams, match="response_model"):
        ResponseModel(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="response_model must be a type"):
        ResponseModel(lambda: 3)  # type: ignore[arg-type]

    with pytest.raises(
        InvalidType, match=r"must be a type, not \{'type': 'object'\}; a JSON schema is passed as json_schema"
    ):
        ResponseModel({"type": "object"})  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="must be a type, not 'Animal'"):
        ResponseModel("Animal")  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="must be a type, not Cat"):
        ResponseModel(Cat(type="cat", title="x"))  # type: ignore[arg-type]


class Point(msgspec.Struct):
    x: int


@pytest.mark.parametrize("kind", [Point, list[Point], dict[str, Point]])
def test_a_type_that_pydantic_does_not_know_is_refused_with_types_that_it_does(kind: Any) -> None:
    """Without pydantic's advice about a model's configuration, which would not help."""
    with pytest.raises(InvalidParams, match="Point'>; use pydantic models, dataclasses, TypedDicts and plain types$"):
        ResponseModel(kind)


class Aliased(pydantic.BaseModel):
    a: int = pydantic.Field(alias="A")
    b: int = pydantic.Field(validation_alias="B", serialization_alias="c")
    d: int = pydantic.Field(validation_alias=pydantic.AliasChoices(pydantic.AliasPath("x", 0), "D"))


class ReadFromWithin(pydantic.BaseModel):
    a: int = pydantic.Field(validation_alias=pydantic.AliasPath("x", "y"))


class ReadByNameToo(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    a: int = pydantic.Field(validation_alias=pydantic.AliasPath("x", "y"))


def test_properties_have_the_names_that_are_read() -> None:
    """An alias for validation, not the alias for serialization. A path into another value is no name."""
    assert list(ResponseModel(Aliased).json_schema["properties"]) == ["A", "B", "D"]
    assert ResponseModel(Aliased).parse('{"A": 1, "B": 2, "D": 3}').d == 3
    assert ResponseModel(ReadByNameToo).parse('{"a": 1}').a == 1
    with pytest.raises(InvalidParams, match=r"ReadFromWithin: the alias AliasPath\('x', 'y'\)"):
        ResponseModel(ReadFromWithin)


COMPILER = ConstraintCompiler(TABLE)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Box2(NamedTuple):
    width: int
    label: str


class Leaf(pydantic.BaseModel):
    t: Literal["leaf"] = "leaf"
    value: int


class Branch(pydantic.BaseModel):
    t: Literal["branch"] = "branch"
    parts: list[Annotated[Leaf | Branch, pydantic.Field(discriminator="t")]] = []


class Reading(pydantic.BaseModel):
    value: Annotated[float, pydantic.Field(gt=0, lt=0.5)]
    limit: Annotated[int, pydantic.Field(ge=0, multiple_of=5)] | None = None


T = TypeVar("T")
Numbers = pydantic.RootModel[list[int]]


class Pair(pydantic.BaseModel, Generic[T]):
    first: T
    rest: list[T] = []


@dataclass
class Held(Generic[T]):
    item: T


@dataclass(slots=True)
class Slotted:
    a: int
    b: str = "b"


class Area(pydantic.BaseModel):
    side: int

    @pydantic.computed_field
    def area(self) -> int:
        return self.side**2


class Nothing(pydantic.BaseModel):
    pass


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


Email = Annotated[
    str, pydantic.WithJsonSchema({"type": "string", "format": "email"})
]  # the schema of pydantic's EmailStr
Overlapping = Annotated[
    Annotated[Leaf, pydantic.Tag("leaf")] | Annotated[Reading, pydantic.Tag("reading")],
    pydantic.Discriminator(lambda found: "leaf" if "t" in found else "reading"),
]
IMPOSSIBLE: dict[str, tuple[Any, list[str], list[str]]] = {  # types, texts of instances, texts that cannot come
    "Decimal": (Decimal, ["1.25", "-3"], ['"abc"', '"1"', "null"]),
    "bounded Decimal": (
        pydantic.condecimal(max_digits=5, decimal_places=2, gt=Decimal(0)),
        ["0.01", "999.99"],
        ["0", "-1", "1000", "1.001"],
    ),
    "set": (set[int], ["[]", "[1,2]"], ['["a"]', "1"]),
    "frozenset": (frozenset[Kind], ['["fox"]'], ['["owl"]']),
    "conlist": (pydantic.conlist(int, min_length=1, max_length=2), ["[1]", "[1,2]"], ["[]", "[1,2,3]"]),
    "email": (Email, ['"a.b@example.org"'], ['"a"', '"a@b"', '"@b.org"', '"a@b..org"']),
    "HttpUrl": (pydantic.HttpUrl, ['"https://example.org/a?b=c#d"'], ['"ftp://example.org"', '"a:"', '"https://"']),
    "AnyUrl": (pydantic.AnyUrl, ['"http://example.org:80/"'], ['"x"']),
    "FileUrl": (pydantic.FileUrl, ['"file:///tmp/a"'], ['"https://a.org"']),
    "PostgresDsn": (pydantic.PostgresDsn, ['"postgres://me:secret@db.org:5432/app"'], ['"mysql://db.org/app"']),
    "datetime": (
        dt.datetime,
        ['"2024-02-29T12:00:00Z"', '"2026-01-31T23:59:59.5+01:00"'],
        ['"2023-02-29T12:00:00Z"', '"2026-01-31"', '"2026-01-31T23:59:60Z"', '"0000-01-01T00:00:00Z"'],
    ),
    "NaiveDatetime": (pydantic.NaiveDatetime, ['"2026-01-31T23:59:59"'], ['"2026-01-31T23:59:59Z"']),
    "date": (dt.date, ['"2024-02-29"'], ['"2100-02-29"', '"2024-04-31"']),
    "time": (dt.time, ['"23:59:59"'], ['"24:00:00"']),
    "timedelta": (dt.timedelta, ['"P1DT2H3M"', '"PT5S"'], ['"P"', '"PT"', '"1"']),
    "UUID": (UUID, ['"01234567-89ab-cdef-0123-456789abcdef"'], ['"01234567"']),
    "UUID4": (pydantic.UUID4, ['"01234567-89ab-4def-8123-456789abcdef"'], ['"01234567-89ab-1def-8123-456789abcdef"']),
    "dict of Enum": (dict[Kind, int], ["{}", '{"fox":1,"bear":2}'], ['{"owl":1}', '{"fox":"a"}']),
    "dict of Literal": (dict[Literal["a", "b"], float], ['{"b":0.5}'], ['{"c":1}']),
    "dict of IntEnum": (dict[Level, int], ['{"1":5,"2":6}'], ['{"3":5}', '{"LOW":5}']),
    "dict of int": (dict[int, str], ['{"-5":"a"}'], ['{"a":"a"}', '{"01":"a"}']),
    "dict of date": (dict[dt.date, int], ['{"2024-02-29":1}'], ['{"2023-02-29":1}']),
    "dict of text": (dict[pydantic.constr(pattern="^[a-z]+$"), int], ['{"ab":1}'], ['{"AB":1}']),  # type: ignore[misc]
    "discriminated": (Pet, ['{"animal":{"type":"dog"}}'], ['{"animal":{"type":"owl"}}', '{"animal":{}}']),
    "recursive": (
        Branch,
        ['{"t":"branch","parts":[{"t":"leaf","value":1},{"t":"branch","parts":[]}]}', "{}"],
        ['{"t":"branch","parts":[{"t":"twig"}]}', '{"t":"branch","parts":[{"value":1}]}'],
    ),
    "Optional": (int | None, ["1", "null"], ['"a"']),
    "tuple": (tuple[int, str], ['[1,"a"]'], ["[1]", '["a",1]', '[1,"a",2]']),
    "NamedTuple": (Box2, ['[1,"a"]'], ["[1]"]),
    "bounds": (Reading, ['{"value":0.25,"limit":10}'], ['{"value":0}', '{"value":0.5}', '{"value":0.1,"limit":7}']),
    "Literal": (Literal["a", 1] | None, ['"a"', "1", "null"], ["2"]),
    "Base64Bytes": (pydantic.Base64Bytes, ['"aGk="'], ['"aGk"', '"a b="']),
    "IPv4Network": (ipaddress.IPv4Network, ['"10.0.0.0/8"'], ['"10.0.0.1/8"', '"x"']),
    "IPvAnyAddress": (pydantic.IPvAnyAddress, ['"10.0.0.1"'], ['"x"']),
    "complex": (complex, ['"1+2j"'], ['"x"']),
    "deque": (collections.deque[int], ["[1]"], ['["a"]']),
    "IntEnum": (Level, ["1", "2"], ["3", '"LOW"', '"1"']),
    "mixed Literal": (Literal["a", 1, True], ['"a"', "1", "true"], ["false", "2", '"1"']),
    "bytes": (bytes, ['"a b"'], ["1"]),
    "IPv4Address": (ipaddress.IPv4Address, ['"10.0.0.1"'], ['"10.0.0.256"', '"x"']),
    "dict of Any": (dict[str, Any], ['{"a":[1,{"b":null}]}'], ["[]", "1"]),
    "dict": (dict, ['{"a":"b"}'], ["[]"]),
    "list": (list, ['[1,"a"]'], ["{}"]),
    "Any": (Any, ["null", '{"a":1}'], ["x"]),
    "RootModel": (Numbers, ["[1,2]"], ['{"root":[1]}', '["a"]']),
    "generic": (
        Pair[Pair[int]],
        ['{"first":{"first":1,"rest":[]},"rest":[]}'],
        ['{"first":1}', '{"first":{"first":"a"}}'],
    ),
    "generic dataclass": (Held[int], ['{"item":1}'], ['{"item":"a"}']),
    "dataclass with slots": (Slotted, ['{"a":1}', '{"a":1,"b":"x"}'], ['{"b":"x"}', '{"a":1,"c":1}']),
    "computed field": (Area, ['{"side":3}'], ['{"side":3,"area":9}']),
    "union": (Cat | Slotted, ['{"type":"cat","title":"x"}', '{"a":1}'], ['{"type":"dog"}', "{}"]),
    "empty": (Nothing, ["{}"], ['{"a":1}', "null"]),
    "extra": (Open, ['{"a":1}', '{"a":1,"b":"x"}'], ['{"b":"x"}', '{"a":"x"}']),
}


def constraint_of(kind: Any) -> tuple[ResponseModel[Any], Constraint]:
    model = ResponseModel(kind)
    constraint = COMPILER.compile(SamplingParams(json_schema=model.json_schema))
    assert constraint is not None
    return model, constraint


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_invalid_instance_cannot_be_generated(name: str) -> None:
    """Texts of instances can, and parse."""
    kind, instances, others = IMPOSSIBLE[name]
    model, constraint = constraint_of(kind)
    for text in instances:
        model.parse(text)
        assert writes(constraint.copy(), text), text
    for text in others:
        assert not writes(constraint.copy(), text), text


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_random_texts_of_a_schema_are_instances(name: str) -> None:
    """Random characters that the constraint allows, mostly characters that end something."""
    model, constraint = constraint_of(IMPOSSIBLE[name][0])
    num_ended = 0
    for seed in range(15):
        text = generated(constraint.copy(), random.Random(seed))
        if text is not None and "e" not in re.sub('"[^"]*"', "", text):  # no exponents, which may be beyond a float
            num_ended += 1
            model.parse(text)
    assert num_ended >= 5


def generated(constraint: Constraint, rng: random.Random) -> str | None:
    words, text = np.zeros((TABLE_SIZE + 31) // 32, dtype=np.uint32), bytearray()
    for _ in range(200):
        if constraint.is_complete or (constraint.may_end and rng.random() < 0.4):
            return text.decode()
        constraint.fill_mask(words)
        allowed = [byte for byte in range(33, 127) if words[byte >> 5] >> (byte & 31) & 1 and chr(byte) != "E"]
        if not allowed and constraint.may_end:
            return text.decode()
        closing = [byte for byte in allowed if chr(byte) in '"}]']
        byte = rng.choice(closing if closing and len(text) > 25 and rng.random() < 0.6 else allowed)
        constraint.accept(byte)
        text.append(byte)
    return None


TABLE_SIZE = len(TABLE.pieces)


@pytest.mark.parametrize(
    ("kind", "instance", "other"),
    [
        (pydantic.conset(int, min_length=2), "[1,2]", "[1,1]"),
        (pydantic.Json[list[int]], '"[1]"', '"x"'),
        (pydantic.PastDate, '"2000-01-01"', '"9000-01-01"'),
        (Annotated[str, pydantic.Field(json_schema_extra={"not": {"const": "a"}, "hint": "b"})], '"b"', "1"),
        (re.Pattern, '"a+"', '"("'),
        (Overlapping, '{"t":"leaf","value":1}', '{"value":5}'),
    ],
)
def test_values_that_cannot_be_enforced_are_parsed_afterwards(kind: Any, instance: str, other: str) -> None:
    """The schema compiles without it."""
    model, constraint = constraint_of(kind)
    assert writes(constraint.copy(), instance)
    model.parse(instance)
    with pytest.raises(ValueError, match="error"):
        model.parse(other)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_grammars_of_chat_formats_enforce_a_part(name: str) -> None:
    """Beside tools every type can be asked for."""
    schema = ResponseModel(IMPOSSIBLE[name][0]).schema_in_chat_grammars
    assert grammar_of_schema(json.dumps(schema))
