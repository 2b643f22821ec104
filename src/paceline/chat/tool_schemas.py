"""Relaxes schemas of tools: leaves out the smallest parts that cannot be enforced. Pure; any thread."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from paceline.constraints.json_schema_rules import schema_objects
from paceline.errors import GrammarError, PacelineError

Check = Callable[[Mapping[str, Any]], None]
"""Raises `GrammarError` for a schema that cannot be enforced."""

MAX_CHECKS: Final = 500
"""How many schemas are checked to relax one that does not pass, or several with one budget."""

_MAPS: Final = ("$defs", "definitions", "properties", "patternProperties")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE: Final = ("items", "additionalItems", "additionalProperties")
_FIRST: Final = {"$defs": 0, "definitions": 0, "type": 1}  # references need their targets, and most keywords a type
_POINTER: Final = re.compile(r"^json_schema: (?:#[^:]*: )?")


def relaxed(
    parameters: Mapping[str, Any], check: Check, budget: Iterator[int] | None = None
) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Return the schema of a tool's arguments without the parts that do not pass a check.

    Also returns the JSON pointer and the reason of each part that was left out.

    Args:
        parameters: The schema.
        check: Raises for a schema that cannot be enforced.
        budget: Yields an item for each check of a part, and ends when no more may be made; None: `MAX_CHECKS` items.
    """
    types = parameters.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        return {"type": "object"}, (("#/type", f"arguments are an object, and not {str(types)[:80]!r}"),)
    relaxation = _Relaxation(check, iter(range(MAX_CHECKS)) if budget is None else budget)
    return relaxation.run({**parameters, "type": "object"}), tuple(relaxation.removed)


class _Relaxation:
    def __init__(self, check: Check, budget: Iterator[int]) -> None:
        self.removed: list[tuple[str, str]] = []
        self._check, self._budget = check, budget
        self._root: dict[str, Any] = {}

    def run(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        self._root["#"] = dict(schema)
        if self._reason_of_check() is not None:  # the check of a whole schema is not counted
            self._fit("#", self._root, "#", dict(schema))
        found: dict[str, Any] = self._root["#"]
        return found

    def _reason(self) -> str | None:
        """Return why the schema so far does not pass; None if it does."""
        if next(self._budget, None) is None:
            return "the schemas have too many parts that cannot be enforced"
        return self._reason_of_check()

    def _reason_of_check(self) -> str | None:
        try:
            self._check(self._root["#"])
        except GrammarError as error:
            return _POINTER.sub("", str(error))
        except PacelineError as error:
            return str(error)
        return None

    def _fit(self, pointer: str, parent: Any, key: str | int, schema: Any) -> None:
        """Set `parent[key]` to the schema without the parts that do not pass."""
        parent[key] = schema
        reason = self._reason()
        if reason is None:
            return
        parent[key] = {}
        if schema is True:
            return
        if not isinstance(schema, dict):
            self.removed.append((pointer, reason))
            return
        for keyword in sorted(schema, key=lambda name: _FIRST.get(name, 2)):
            self._fit_keyword(f"{pointer}/{escaped(keyword)}", parent[key], keyword, schema[keyword])

    def _fit_keyword(self, pointer: str, node: dict[str, Any], keyword: str, value: Any) -> None:
        node[keyword] = value
        reason = self._reason()
        if reason is None:
            return
        children = _children(keyword, value)
        if children:
            node[keyword] = {key: {} for key, _ in children} if isinstance(value, dict) else [{} for _ in children]
            if keyword in _SINGLE and isinstance(value, dict):
                node[keyword] = {}
            emptied = self._reason()
            if emptied is None:
                for key, child in children:
                    at = pointer if key is None else f"{pointer}/{escaped(str(key))}"
                    self._fit(at, node if key is None else node[keyword], keyword if key is None else key, child)
                return
        del node[keyword]
        if keyword == "oneOf" and "anyOf" not in node:
            self._fit_keyword(pointer, node, "anyOf", value)
        self.removed.append((pointer, reason))


def part_of(root: Mapping[str, Any], schema: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """Return a part of a schema as a schema of its own. Its references keep their targets.

    Args:
        root: The whole schema.
        schema: The part, an object.
        pointer: JSON pointer of the part in the whole.
    """
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    part = {**shared, **schema}
    if all(_leads_to(node.get("$ref"), shared) for _, node in schema_objects("#", part)):
        return part
    moved = json.loads(json.dumps(root))
    for _, node in schema_objects("#", moved):
        reference = node.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            node["$ref"] = f"#/$defs/whole{reference[1:]}"
    return {"$defs": {"whole": moved}, "$ref": f"#/$defs/whole{quote(pointer[1:], safe='/~')}"}


def _leads_to(reference: object, shared: Mapping[str, Any]) -> bool:
    """Return whether a reference leads to a shared definition, or is none."""
    return not isinstance(reference, str) or reference.startswith(tuple(f"#/{name}/" for name in shared))


def escaped(name: str) -> str:
    """Escape a name for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _children(keyword: str, value: Any) -> list[tuple[Any, Any]]:
    """Return the schemas in a keyword's value, each with its key; None: the value is the schema."""
    if keyword in _MAPS and isinstance(value, dict):
        return list(value.items())
    if keyword in _LISTS and isinstance(value, list):
        return list(enumerate(value))
    return [(None, value)] if keyword in _SINGLE and isinstance(value, dict) else []
