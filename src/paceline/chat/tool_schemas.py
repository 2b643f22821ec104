"""Relaxes schemas of tools: finds the smallest parts that cannot be enforced, and leaves them out. Pure; any thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from paceline.errors import GrammarError, PacelineError

Check = Callable[[Mapping[str, Any]], None]
"""Raises `GrammarError` for a schema that cannot be enforced."""

MAX_CHECKS: Final = 500
"""How many schemas are checked to relax one."""

_MAPS: Final = ("$defs", "definitions", "properties", "patternProperties")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE: Final = ("items", "additionalItems", "additionalProperties")
_FIRST: Final = {"$defs": 0, "definitions": 0, "type": 1}  # references need their targets, and most keywords a type
_POINTER: Final = re.compile(r"^json_schema: (?:#[^:]*: )?")


def relaxed(parameters: Mapping[str, Any], check: Check) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Return the schema of a tool's arguments, an object, without the parts that keep it from passing a check.

    Also returns JSON pointer and reason of each of these parts.
    """
    types = parameters.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        return {"type": "object"}, (("#/type", f"arguments are an object, and not {str(types)[:80]!r}"),)
    relaxation = _Relaxation(check)
    return relaxation.run({**parameters, "type": "object"}), tuple(relaxation.removed)


class _Relaxation:
    def __init__(self, check: Check) -> None:
        self.removed: list[tuple[str, str]] = []
        self._check, self._num_left = check, MAX_CHECKS
        self._root: dict[str, Any] = {}

    def run(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        self._fit("#", self._root, "#", dict(schema))
        found: dict[str, Any] = self._root["#"]
        return found

    def _reason(self) -> str | None:
        """Return why the schema so far does not pass; None if it does."""
        if self._num_left == 0:
            return "the schema has too many parts that cannot be enforced"
        self._num_left -= 1
        try:
            self._check(self._root["#"])
        except GrammarError as error:
            return _POINTER.sub("", str(error))
        except PacelineError as error:
            return str(error)
        return None

    def _fit(self, pointer: str, parent: Any, key: str | int, schema: Any) -> None:
        """Put as much of a schema into its place as passes."""
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
