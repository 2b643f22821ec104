"""Rewrites keywords that llguidance lacks into keywords that it enforces. Pure; any thread.

No rewrite allows a value that the keyword forbids: `oneOf` becomes `anyOf` if its schemas exclude each other, `propertyNames`
becomes `properties` if it lists the names, and formats of pydantic become patterns. See `docs/adr/0029-constraints.md`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import combinations, islice
from typing import Any, Final

from paceline.constraints.same_value import with_included

Schema = dict[str, Any]
Resolve = Callable[[str], Any]
Share = Callable[[Schema, str | None], Schema]
Steps = Iterator[int]
"""The steps that are left for comparing alternatives; one for each object or property that is looked at."""

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_PAIRS: Final = 10_000  # alternatives of a oneOf that are compared with each other
_MAX_DEPTH: Final = 6  # of the properties that are compared
MAX_STEPS: Final = 200_000  # of comparing the alternatives of one schema
_EXCLUSIVE: Final = {"exclusiveMinimum": ("minimum", 1e-9), "exclusiveMaximum": ("maximum", -1e-9)}
_MAX_EXACT: Final = 2**20  # numbers up to which a bound can be moved by 1e-9
_LARGEST: Final = 9_999_999_999_999_998  # integer of 16 digits that a float has exactly

_HEX: Final = "[0-9a-fA-F]"
_IPV4: Final = r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_MONTHS: Final = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_YEAR: Final = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH: Final = "(?:0[48]|[2468][048]|[13579][26])"  # 04 to 96
DATE_PATTERN: Final = f"(?:{_YEAR}-(?:{_MONTHS})|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
"""Days of the calendar from the year 1 to 9999, as validators accept them."""
TIME_PATTERN: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
"""Times of a day with an offset, without leap seconds."""
_DATE_PATTERNS: Final = {
    "date": f"^{DATE_PATTERN}$",
    "time": f"^{TIME_PATTERN}$",
    "date-time": f"^{DATE_PATTERN}[Tt]{TIME_PATTERN}$",
}
FORMAT_PATTERNS: Final[dict[str, str]] = {
    **{
        f"uuid{version}": rf"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"
        for version in (1, 3, 4, 5, 6, 7, 8)
    },
    "base64": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64url": r"^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$",
    "ipv4interface": rf"^{_IPV4}/(?:[12]?[0-9]|3[0-2])$",
    "ipvanyaddress": rf"^{_IPV4}$",
    "ipvanyinterface": rf"^{_IPV4}/(?:[12]?[0-9]|3[0-2])$",
}
"""Formats that pydantic names and JSON Schema does not, as patterns."""
_NAME_PATTERNS: Final[dict[str, str]] = {
    **FORMAT_PATTERNS,
    "uuid": rf"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "date": _DATE_PATTERNS["date"],
}
_DECIMAL: Final = re.compile(  # the patterns that pydantic 2.10 to 2.13 writes for Decimal
    r"""\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*
    (?:
        (?P<any>\\d\*\\\.\?\\d\*\$)
      | \\d\*\\\.\?\\d\{0,(?P<places>\d{1,4})\}0\*\$
      | \(\?:\\d\{0,(?P<whole>\d{1,4})\}\|\(\?=\[\\d\.\]\{1,\d{1,4}\}0\*\$\)
        (?: \\d\{0,\d{1,4}\}\\\.\\d\{0,(?P<both>\d{1,4})\}0\*\$ | \\d\*\\\.\\d\*0\*\$ ) \)
    )""",
    re.VERBOSE,
)


def rewritten(node: Schema, resolve: Resolve, share: Share, steps: Steps, *, is_shown: bool = False) -> Schema:
    """Return an object of a schema in which the keywords that llguidance lacks are written with others, if they can be.

    Args:
        node: The object. Objects within it are not looked at.
        resolve: Returns the schema that a `$ref` names.
        share: Takes an object of the schema and the name of a property, or None; returns a reference to a definition of the
            object, in which that property is required.
        steps: The steps that are left. When none is left, a `oneOf` stays.
        is_shown: Whether the schema is shown to a model. Formats of dates and times, and multiples without bounds, then stay.
    """
    changed = dict(node) if is_shown else _with_real_dates(node)
    if isinstance(changed.get("oneOf"), list):
        changed = _without_one_of(changed, resolve, share, steps)
    if "propertyNames" in changed:
        changed = _without_property_names(changed, resolve, share)
    if changed.get("uniqueItems") is True and _is_number(changed.get("maxItems")) and changed["maxItems"] <= 1:
        del changed["uniqueItems"]
    if "pattern" not in changed and str(changed.get("format")) in FORMAT_PATTERNS:
        changed["pattern"] = FORMAT_PATTERNS[changed.pop("format")]
    if isinstance(changed.get("pattern"), str):
        changed["pattern"] = _decimal_pattern(changed["pattern"]) or changed["pattern"]
    changed = _with_exact_bounds(changed)
    return changed if is_shown else _with_bounded_multiples(changed)


def _with_real_dates(node: Schema) -> Schema:
    """Return an object of a schema with a pattern in place of a format of dates or times.

    The formats as llguidance has them allow the year 0000, February 29 of any year, and the second 60.
    """
    pattern = _DATE_PATTERNS.get(str(node.get("format")))
    if pattern is None:
        return node
    changed = {keyword: value for keyword, value in node.items() if keyword != "format"}
    if "pattern" not in changed:
        return {**changed, "pattern": pattern}
    others = changed.get("allOf", [])
    return {**changed, "allOf": [*others, {"pattern": pattern}]} if isinstance(others, list) else node


def _without_one_of(node: Schema, resolve: Resolve, share: Share, steps: Steps) -> Schema:
    described = node.get("discriminator")
    name = described.get("propertyName") if isinstance(described, dict) else None
    targets = _discriminated(node["oneOf"], name, resolve, steps)
    alternatives = [
        one if target is None else {**target, "required": [*target.get("required", []), name]}
        for one, target in zip(node["oneOf"], targets, strict=True)
    ]
    if not _exclude_each_other(alternatives, resolve, steps):
        return node
    choices = [
        one if target is None else share(target, name) for one, target in zip(node["oneOf"], targets, strict=True)
    ]
    changed = {keyword: value for keyword, value in node.items() if keyword != "oneOf"}
    if "anyOf" not in changed:
        return {**changed, "anyOf": choices}
    others = changed.get("allOf", [])
    return {**changed, "allOf": [*others, {"anyOf": choices}]} if isinstance(others, list) else node


def _discriminated(alternatives: list[Any], name: Any, resolve: Resolve, steps: Steps) -> list[Schema | None]:
    """Return the object of each alternative in which the property of a discriminator has to be required; None for others.

    Without that property no alternative is chosen, so it is required in all alternatives, or in none of them.
    """
    found = [_optional_in(alternative, name, resolve) for alternative in alternatives]
    for alternative, target in zip(alternatives, found, strict=True):
        if target is None and isinstance(alternative, dict):
            group = with_included([alternative], resolve)
            is_required = any(name in _required(node) for node in group)
            if not _spend(steps, len(group)) or ("object" in types_of(group) and not is_required):
                return [None] * len(alternatives)
    return found


def _spend(steps: Steps, count: int) -> bool:
    """Take a number of steps; return whether that many were left."""
    return sum(1 for _ in islice(steps, count)) == count


def _optional_in(alternative: Any, name: Any, resolve: Resolve) -> Schema | None:
    """Return the object that an alternative is or refers to, if a property of that name is optional in it."""
    found = alternative
    if isinstance(alternative, dict) and alternative.keys() == {"$ref"} and isinstance(alternative["$ref"], str):
        found = resolve(alternative["$ref"])
    if not isinstance(name, str) or not isinstance(found, dict) or "$defs" in found:
        return None
    properties, required = found.get("properties"), found.get("required", [])
    is_optional = isinstance(properties, dict) and name in properties and isinstance(required, list)
    return found if is_optional and name not in required else None


def _exclude_each_other(alternatives: list[Any], resolve: Resolve, steps: Steps) -> bool:
    """Return whether no value satisfies two of the alternatives."""
    if not all(isinstance(alternative, dict) for alternative in alternatives):
        return False
    if _are_distinct([_values([alternative]) for alternative in alternatives]):
        return True
    groups = []
    for alternative in alternatives:
        groups.append(with_included([alternative], resolve))
        if not _spend(steps, len(groups[-1])):
            return False
    if _are_told_apart(groups, steps):
        return True
    if len(groups) * (len(groups) - 1) // 2 > _MAX_PAIRS:
        return False
    return all(_groups_exclude(first, second, resolve, steps, _MAX_DEPTH) for first, second in combinations(groups, 2))


def _are_distinct(listed: list[set[str] | None]) -> bool:
    """Return whether all are sets of values, and no value is in two of them."""
    known = [values for values in listed if values is not None]
    return len(known) == len(listed) and sum(map(len, known)) == len(set[str]().union(*known))


def _are_told_apart(groups: list[list[Schema]], steps: Steps) -> bool:
    """Return whether all are objects that require a property with other constants in each."""
    if any(types_of(group) != {"object"} for group in groups):
        return False
    names = set[str].intersection(*({name for one in group for name in _required(one)} for group in groups))
    return any(
        _spend(steps, len(groups)) and _are_distinct([_values(_of_property(group, name)) for group in groups])
        for name in sorted(names)
    )


def _groups_exclude(first: list[Schema], second: list[Schema], resolve: Resolve, steps: Steps, depth: int) -> bool:
    """Return whether no value satisfies both groups of schemas."""
    if depth == 0 or not _spend(steps, len(first) + len(second)):
        return False
    if any(_all_choices_exclude(*pair, resolve, steps, depth) for pair in ((first, second), (second, first))):
        return True
    values, others = _values(first), _values(second)
    if values is not None and others is not None:
        return not values & others
    common = types_of(first) & types_of(second)
    return not common or (common == {"object"} and _properties_exclude(first, second, resolve, steps, depth))


def _all_choices_exclude(group: list[Schema], other: list[Schema], resolve: Resolve, steps: Steps, depth: int) -> bool:
    """Return whether the group has alternatives, and each of them excludes the other group."""
    for one in group:
        rest = [{**one, "anyOf": None, "oneOf": None} if node is one else node for node in group]
        for choices in (one.get("anyOf"), one.get("oneOf")):
            if isinstance(choices, list) and all(
                isinstance(choice, dict)
                and _groups_exclude(with_included([*rest, choice], resolve), other, resolve, steps, depth - 1)
                for choice in choices
            ):
                return True
    return False


def _properties_exclude(first: list[Schema], second: list[Schema], resolve: Resolve, steps: Steps, depth: int) -> bool:
    """Return whether a property that one of two groups of objects requires can have no value that both allow."""
    for name in sorted({name for one in (*first, *second) for name in _required(one)}):
        if not _spend(steps, len(first) + len(second)):
            return False
        if _forbids(first, name) or _forbids(second, name):
            return True
        mine, theirs = _of_property(first, name), _of_property(second, name)
        if mine and theirs:
            mine, theirs = with_included(mine, resolve), with_included(theirs, resolve)
            if _groups_exclude(mine, theirs, resolve, steps, depth - 1):
                return True
    return False


def _forbids(group: list[Schema], name: str) -> bool:
    """Return whether one of the schemas has no property of a name, and allows no others than it has."""
    return any(
        one.get("additionalProperties") is False
        and "patternProperties" not in one
        and isinstance(one.get("properties", {}), dict)
        and name not in one.get("properties", {})
        for one in group
    )


def _of_property(group: list[Schema], name: str) -> list[Schema]:
    named = [one["properties"] for one in group if isinstance(one.get("properties"), dict)]
    return [one[name] for one in named if isinstance(one.get(name), dict)]


def _required(node: Schema) -> Iterator[str]:
    required = node.get("required")
    yield from (name for name in required if isinstance(name, str)) if isinstance(required, list) else ()


def _values(group: list[Schema]) -> set[str] | None:
    """Return the values that const and enum list, each as a text that equal values share; None if neither is there."""
    found: set[str] | None = None
    for one in group:
        for values in ([one["const"]] if "const" in one else None, one.get("enum")):
            if isinstance(values, list):
                keys = {json.dumps(_normal(value), sort_keys=True) for value in values}
                found = keys if found is None else found & keys
    return found


def types_of(group: list[Schema]) -> set[str]:
    """Return the types that all of the schemas allow. A number that is an integer has the type integer alone."""
    found = set(TYPES)
    for one in group:
        given = one.get("type")
        if isinstance(given, (str, list)):
            named = {given} if isinstance(given, str) else {name for name in given if isinstance(name, str)}
            found &= named | ({"integer"} if "number" in named else set())
        listed = [one["const"]] if "const" in one else one.get("enum")
        if isinstance(listed, list):
            found &= {_type_of(value) for value in listed}
    return found


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _normal(value: Any) -> Any:
    """Return a value in which equal numbers are written alike."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normal(one) for one in value]
    return {name: _normal(one) for name, one in value.items()} if isinstance(value, dict) else value


def _without_property_names(node: Schema, resolve: Resolve, share: Share) -> Schema:
    names = node["propertyNames"]
    if isinstance(names, dict) and isinstance(names.get("$ref"), str) and len(names) == 1:
        names = resolve(names["$ref"])
    if not isinstance(names, dict) or names.get("type", "string") != "string" or "patternProperties" in node:
        return node
    restricting = names.keys() & _RESTRICTING
    others, properties = node.get("additionalProperties", True), node.get("properties", {})
    if not isinstance(properties, dict) or names.keys() & _NOT_OF_NAMES:
        return node
    changed = {keyword: value for keyword, value in node.items() if keyword != "propertyNames"}
    if restricting in ({"enum"}, {"const"}):
        listed = names["enum"] if "enum" in names else [names["const"]]
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            return node
        shared = share(others, None) if isinstance(others, dict) else others
        kept = {name: properties.get(name, shared) for name in listed if name in properties or shared is not False}
        return {**changed, "properties": kept, "additionalProperties": False}
    pattern = _name_pattern(names, restricting)
    if pattern is None or properties:
        return node
    return {**changed, "patternProperties": {pattern: others}, "additionalProperties": False}


_RESTRICTING: Final = frozenset(("enum", "const", "pattern", "minLength", "maxLength", "format"))
_NOT_OF_NAMES: Final = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "$ref"))


def _name_pattern(names: Schema, restricting: set[str]) -> str | None:
    if restricting == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    if restricting == {"format"}:
        return _NAME_PATTERNS.get(str(names["format"]))
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if restricting and restricting <= {"minLength", "maxLength"} and all(map(_is_count, (least, most or 0))):
        return rf"^[\s\S]{{{least},{most}}}$"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _decimal_pattern(pattern: str) -> str | None:
    """Return a pattern without look-ahead for numbers that pydantic's pattern of a Decimal allows; None for other patterns."""
    match = _DECIMAL.fullmatch(pattern)
    if match is None:
        return None
    if match["any"]:
        return r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)$"
    if match["places"]:
        return rf"^[+-]?[0-9]+(?:\.[0-9]{{0,{match['places']}}}0*)?$"
    whole = int(match["whole"])
    begin = rf"^[+-]?0*[0-9]{{1,{whole}}}" if whole else "^[+-]?0+"
    return begin + (rf"(?:\.[0-9]{{0,{match['both']}}}0*)?$" if match["both"] else "$")


def _with_exact_bounds(node: Schema) -> Schema:
    """Return the node with exclusive bounds moved by a billionth, if they are integers beside a bound that is none.

    llguidance would let a value at the exclusive bound through.
    """
    bounds = {
        keyword: node[keyword] for keyword in ("minimum", "maximum", *_EXCLUSIVE) if _is_number(node.get(keyword))
    }
    if node.get("type") == "integer" or not any(value % 1 for value in bounds.values()):
        return node
    changed = dict(node)
    for keyword, (inclusive, step) in _EXCLUSIVE.items():
        value = bounds.get(keyword, 0.5)
        if not value % 1 and abs(value) <= _MAX_EXACT and inclusive not in node:
            changed[inclusive] = changed.pop(keyword) + step
    return changed


def _with_bounded_multiples(node: Schema) -> Schema:
    """Return the node with bounds of 16 digits beside multipleOf, if it has none: a multiple may need any number of digits."""
    step = node.get("multipleOf")
    limits = {name: node[name] for name in ("minimum", "maximum", *_EXCLUSIVE) if name in node}
    if not all(map(_is_float, (step, *limits.values()))):
        return node
    most = max(_LARGEST, 9 * max(abs(value) for value in (step, *limits.values())))
    low = {} if {"minimum", "exclusiveMinimum"} & limits.keys() else {"minimum": -most}
    high = {} if {"maximum", "exclusiveMaximum"} & limits.keys() else {"maximum": most}
    return {**node, **low, **high}


def _is_float(value: Any) -> bool:
    try:
        return _is_number(value) and math.isfinite(float(value))
    except OverflowError:
        return False
