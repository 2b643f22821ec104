"""Parts of tools' schemas that cannot be enforced, and parts that stand for themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from paceline.constraints.schema_walk import MAX_CHECKS, part_of, relaxed
from paceline.errors import GrammarError


def test_several_schemas_share_a_budget_of_checks() -> None:
    """Schemas that pass need none of it, also when it is spent."""
    checked: list[Mapping[str, Any]] = []

    def check(schema: Mapping[str, Any]) -> None:
        checked.append(schema)
        if any("pattern" in part for part in schema.get("properties", {}).values()):
            raise GrammarError("json_schema: #/properties: a pattern")

    bad = {"type": "object", "properties": {f"p{number}": {"pattern": "x"} for number in range(100)}}
    good = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    budget = iter(range(MAX_CHECKS))
    first = relaxed(bad, check, budget)
    assert first[0]["properties"] == {f"p{number}": {} for number in range(100)}
    assert [pointer for pointer, _ in first[1]] == [f"#/properties/p{number}/pattern" for number in range(100)]
    last = [relaxed(bad, check, budget) for _ in range(9)][-1]
    assert "too many parts" in last[1][0][1]
    assert len(checked) == MAX_CHECKS + 10
    assert relaxed(good, check, budget) == (good, ())


WHOLE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a/b c": {"type": "integer"},
        "kind": {"$ref": "#/$defs/kind"},
        "kids": {"type": "array", "items": {"$ref": "#"}},
        "same": {"$ref": "#/properties/a~1b%20c"},
        "$ref": {"const": "#"},
    },
    "$defs": {"kind": {"enum": ["x"]}},
}


@pytest.mark.parametrize("name", ["a/b c", "kind", "$ref"])
def test_a_part_with_references_to_definitions_keeps_them_alone(name: str) -> None:
    """Parts shared by all go along."""
    part = WHOLE["properties"][name]
    assert part_of(WHOLE, part, "#") == {"$defs": WHOLE["$defs"], **part}


def test_a_part_with_other_references_has_the_whole_with_it() -> None:
    """So that a reference to the root is no reference to the part."""
    found = part_of(WHOLE, WHOLE["properties"]["kids"], "#/properties/kids")
    whole = found["$defs"]["whole"]
    assert found["$ref"] == "#/$defs/whole/properties/kids"
    assert whole["properties"]["kids"]["items"] == {"$ref": "#/$defs/whole"}
    assert whole["properties"]["kind"] == {"$ref": "#/$defs/whole/$defs/kind"}
    assert whole["properties"]["same"] == {"$ref": "#/$defs/whole/properties/a~1b%20c"}
    assert whole["properties"]["$ref"] == {"const": "#"}
    assert WHOLE["properties"]["kids"]["items"] == {"$ref": "#"}
