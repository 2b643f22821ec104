"""Prepares a JSON schema for llguidance: rewrites keywords, and refuses keywords that it would not enforce. Pure; any thread.

llguidance refuses keywords of the standard that it does not implement, and ignores names that it does not know. The names, and
a few combinations that it follows only in part, are refused here, each with its keyword and JSON pointer. No rewrite allows a
value that the keyword forbids: `oneOf` becomes `anyOf` if its schemas exclude each other, `propertyNames` becomes `properties`
if it lists the names, and formats of pydantic become patterns. See `docs/adr/0029-constraints.md`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Container, Iterator
from decimal import Decimal
from functools import cached_property
from typing import Any, Final

from paceline.constraints.schema_walk import (
    ANNOTATIONS,
    MAPS,
    NO_LIMIT,
    NUMBER_KEYWORDS,
    SINGLE,
    STANDARD_FORMATS,
    TYPES,
    Exclusion,
    Resolve,
    Schema,
    TooManyGroups,
    children_of,
    groups_of_one_value,
    is_number,
    pattern_problem,
    pointer_to,
    rebuilt,
    reference_resolver,
    refusal,
    required_of,
    schema_nesting,
    schema_objects,
    types_of,
    with_included,
)
from paceline.errors import GrammarError

Share = Callable[[Schema, str | None], Schema]
_Reasons = Iterator[tuple[str, str]]  # keywords that would not be enforced, and why not

_MAX_PATTERNS: Final = 16  # in one allOf
_MAX_PROPERTIES: Final = 1000  # of an object that may have others
_MAX_OPTIONAL: Final = 1000  # of an object: compiling takes time with the square of their number
_BOUNDS: Final = NUMBER_KEYWORDS[:4]
_OF_NUMBERS: Final = (*NUMBER_KEYWORDS, "const", "enum")
MAX_DIGITS: Final = 16
"""Digits of a generated number before the point, and after it, if the schema has no longer number."""
_MAX_NESTING: Final = 400  # through references; some 1500 overflow the native stack

_ENFORCED: Final = frozenset(
    (
        "$schema $id id $ref $defs definitions $anchor type enum const allOf anyOf oneOf items prefixItems additionalItems "
        "minItems maxItems properties patternProperties additionalProperties required minProperties maxProperties minimum "
        "maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern format"
    ).split()
)
_UNENFORCED: Final = frozenset(
    (
        "not if then else contains minContains maxContains uniqueItems propertyNames unevaluatedItems unevaluatedProperties "
        "dependentRequired dependentSchemas dependencies $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor"
    ).split()
)
_NO_LIMIT: Final = {**NO_LIMIT, "$recursiveAnchor": (False,)}
FORMATS: Final = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
_COMBINING: Final = frozenset(("anyOf", "oneOf", "$ref"))
_OF_OBJECTS: Final = frozenset(("properties", "required", "additionalProperties", "patternProperties", "maxProperties"))
_HOW_TO_TELL_APART: Final = (
    "a value may satisfy more than one of the schemas, which is not ruled out; use anyOf, or require a property that has another "
    "const in each"
)
_ESCAPED: Final = frozenset("\b\f\n\r\t")  # control characters that have an escape of one letter
_MOVED: Final = {"exclusiveMinimum": ("minimum", 1e-9), "exclusiveMaximum": ("maximum", -1e-9)}
_MAX_EXACT: Final = 2**20  # numbers up to which a bound can be moved by 1e-9
_LARGEST: Final = 9_999_999_999_999_998  # integer of 16 digits that a float has exactly

_HEX: Final = "[0-9a-fA-F]"
OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"(?:{OCTET}\.){{3}}{OCTET}"
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
_RESTRICTING: Final = frozenset("enum const pattern minLength maxLength format".split())
_NOT_OF_NAMES: Final = frozenset("allOf anyOf oneOf not if $ref".split())
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


def prepared_schema(text: str) -> str:
    """Return the JSON text of an equivalent schema that llguidance enforces whole, or refuses.

    Raises `GrammarError`, which names the keyword and its JSON pointer.
    """
    schema = json.loads(text)
    if schema is False:
        raise GrammarError("json_schema: #: false allows no value; give a schema that some value satisfies")
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise GrammarError(f"json_schema: # must be an object or true, not {type(schema).__name__}")
    prepared = _Preparation(schema).run()
    nesting = schema_nesting(prepared)
    if nesting > _MAX_NESTING:
        raise GrammarError(
            f"json_schema: {place_of(text, ('$ref',))}: schemas nest {nesting} deep through references, and may "
            f"{_MAX_NESTING}; shorten the chain of references"
        )
    try:
        for group in groups_of_one_value(prepared, reference_resolver(prepared)):
            _check_exclusive(group)
    except TooManyGroups:
        _check_exclusive([node for _, node in schema_objects("#", prepared)])
    nodes = [node for _, node in schema_objects("#", prepared)]
    is_combined = any(  # whether an object and another object describe the same value together
        "allOf" in node or (not _COMBINING.isdisjoint(node) and not _OF_OBJECTS.isdisjoint(node)) for node in nodes
    )
    for node in () if is_combined else nodes:
        _close(node)
    return json.dumps(prepared)


def relaxed_schema(schema: Schema, keywords: Container[str] | None = None) -> tuple[Schema, list[str]]:
    """Return a schema without keywords that cannot be enforced, and a sentence for each keyword that was left out.

    Args:
        schema: The schema.
        keywords: Keywords that may be left out; None: all keywords. Others stay, and are refused by `prepared_schema`.

    Raises:
        GrammarError: A keyword has a value of the wrong type.
    """
    preparation = _Preparation(schema, (lambda _: True) if keywords is None else keywords.__contains__)
    return preparation.run(), preparation.left_out


def max_digits(schema: Any) -> int:
    """Return the digits that a generated number may have before and after the point: 16, or more for a schema with more."""
    values = (node.get(keyword) for _, node in schema_objects("#", schema) for keyword in _OF_NUMBERS)
    numbers = (number for value in values for number in _scalars_in(value) if is_number(number))
    parts = (part for number in numbers for part in f"{abs(Decimal(str(number))):f}".split("."))
    longest = max(map(len, parts), default=0)
    return max(MAX_DIGITS, longest + 1 if longest >= MAX_DIGITS else 0)


def place_of(
    text: str, keywords: tuple[str, ...], concerns: Callable[[Schema, str], bool] = lambda _node, _keyword: True
) -> str:
    """Return the JSON pointer of the first of some keywords in the text of a schema; of the schema itself if it has none.

    `concerns` takes an object of the schema and a keyword in it. The first keyword for which it returns True comes first.
    """
    found = [
        (pointer_to(path, keyword), concerns(node, keyword))
        for path, node in schema_objects("#", json.loads(text))
        for keyword in keywords
        if keyword in node
    ]
    return next((path for path, is_meant in found if is_meant), found[0][0] if found else "#")


def _close(node: Schema) -> None:
    """Leave out properties that a schema allows without naming them, as llama.cpp does: models ramble in these."""
    named, required = node.get("properties"), node.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or node.keys() & {"patternProperties"}:
        return
    least = node.get("minProperties", 0)
    if not isinstance(least, (int, float)) or not all(isinstance(name, str) and name in named for name in required):
        return  # also what is malformed, which is refused when it is compiled
    if least <= len(named):
        node.setdefault("additionalProperties", False)


class _Preparation:
    """Rewrites one schema, and leaves out keywords that restrict nothing or may be left out."""

    def __init__(self, root: Schema, leaves_out: Callable[[str], bool] | None = None) -> None:
        """Begin. leaves_out: whether a keyword is left out that cannot be enforced; None: they are refused."""
        self.left_out: list[str] = []
        self._root = root
        self._leaves_out = leaves_out
        self._exclusion = Exclusion(reference_resolver(root))
        self._names: dict[tuple[int, str | None], str] = {}
        self._unfinished: list[tuple[str, str, Schema]] = []

    @cached_property
    def _places(self) -> dict[int, str]:
        return {id(node): path for path, node in schema_objects("#", self._root)}

    def run(self) -> Schema:
        prepared: Schema = self._prepared("#", self._root)
        while self._unfinished:
            name, path, node = self._unfinished.pop()
            prepared.setdefault("$defs", {})[name] = self._prepared(path, node)
        return prepared

    def _prepared(self, path: str, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        _check_types(path, node)
        is_shown = self._leaves_out is not None  # to a model, for which a format says more than its pattern
        if not is_shown:
            _check_values(path, node)
        node = rewritten(node, self._exclusion, self._shared, is_shown=is_shown)
        for keyword, reason in _unenforced(path, node):
            if self._leaves_out is None:
                raise refusal(path, keyword, reason)
            if not self._leaves_out(keyword):
                continue
            self.left_out.append(f"{pointer_to(path, keyword)} is left out: {reason}")
            rest = {name: value for name, value in node.items() if name != keyword}
            node = {**rest, "anyOf": node["oneOf"]} if keyword == "oneOf" and "anyOf" not in node else rest
        if self._leaves_out is None:  # else annotations may be shown to the model
            node = {keyword: value for keyword, value in node.items() if not _says_nothing(keyword, value)}
        return rebuilt(node, lambda keyword, name, child: self._prepared(pointer_to(path, keyword, name), child))

    def _shared(self, node: Schema, required: str | None) -> Schema:
        """Return a reference to a definition of a schema object, which is made once for each name of a required property."""
        known = self._names.get((id(node), required))
        if known is None:
            definitions = self._root.get("$defs", {})
            numbers = itertools.count(len(self._names))
            known = next(name for number in numbers if (name := f"shared-{number}") not in definitions)
            self._names[id(node), required] = known
            more = {} if required is None else {"required": [*node.get("required", []), required]}
            self._unfinished.append((known, self._places.get(id(node), "#"), {**node, **more}))
        return {"$ref": f"#/$defs/{known}"}


def _says_nothing(keyword: str, value: Any) -> bool:
    if keyword in ANNOTATIONS or keyword.startswith("x-"):
        return True
    if keyword == "format":  # others are annotations, such as OpenAPI's int32
        return isinstance(value, str) and value not in STANDARD_FORMATS
    return any(value is free if isinstance(free, bool) else value == free for free in _NO_LIMIT.get(keyword, ()))


def _check_types(path: str, node: Schema) -> None:
    if path == "#" and not isinstance(node.get("$defs", {}), dict):
        raise refusal(path, "$defs", "this must be an object of schemas")
    given = node.get("type", [])
    for name in [given] if isinstance(given, str) else given if isinstance(given, list) else []:
        if name not in TYPES:
            raise refusal(path, "type", f"{name!r:.80} is not a type; types are {', '.join(TYPES)}")


def _check_values(path: str, node: Schema) -> None:
    """Refuse a value of the wrong type. llguidance would refuse it without its place."""
    for keyword, value in node.items():
        expected = next((text for names, text, is_right in _VALUES if keyword in names and not is_right(value)), None)
        if expected is not None:
            raise refusal(path, keyword, f"this must be {expected}, not {json.dumps(value):.80}")
        for name, child in children_of(keyword, value):
            if not isinstance(child, (dict, bool)):
                reason = f"a schema must be an object or a boolean, not {json.dumps(child):.80}"
                raise refusal(path, keyword, reason, *(() if name is None else (name,)))


def _unenforced(path: str, node: Schema) -> Iterator[tuple[str, str]]:
    """Yield each keyword of a schema object that would not be enforced, and why not."""
    for keyword, value in node.items():
        if _says_nothing(keyword, value):
            continue
        if keyword == "format" and isinstance(value, str) and value in STANDARD_FORMATS - FORMATS:
            yield keyword, f"{value!r} is not enforced; formats are {', '.join(sorted(FORMATS))}"
        elif keyword == "oneOf" and isinstance(value, list):
            yield keyword, _HOW_TO_TELL_APART
        elif keyword in _UNENFORCED:
            yield keyword, "this keyword is not enforced; leave it out, or write what it says with others"
        elif keyword not in _ENFORCED:
            yield keyword, "this is no keyword that is known; leave it out, or call it x-... if it only describes"
    yield from _combinations(path, node)
    yield from _exclusive_bounds([node])
    if "prefixItems" in node and isinstance(node.get("items"), list):
        yield "items", "a list is not enforced beside prefixItems"
    yield from _patterns(node)
    properties = node["properties"] if isinstance(node.get("properties"), dict) else {}
    is_open = node.get("additionalProperties", False) is not False or "patternProperties" in node
    if is_open and len(properties) > _MAX_PROPERTIES:
        yield "properties", f"at most {_MAX_PROPERTIES} can be named beside others, not {len(properties)}"
    num_optional = len(properties.keys() - set(required_of(node)))
    if num_optional > _MAX_OPTIONAL:
        yield "properties", f"at most {_MAX_OPTIONAL} can be optional, not {num_optional}; require the others"


def _combinations(path: str, node: Schema) -> _Reasons:
    if path != "#" and isinstance(node.get("$id", node.get("id")), str):
        keyword = "$id" if "$id" in node else "id"
        yield keyword, f"references are looked up from the root alone; leave {keyword} out"
    least, most, required = node.get("minProperties"), node.get("maxProperties"), node.get("required")
    names = {str(name) for name in required} if isinstance(required, list) else set[str]()
    optional = set(node["properties"]) - names if isinstance(node.get("properties"), dict) else set[str]()
    is_open = node.get("additionalProperties", True) is not False or "patternProperties" in node
    if isinstance(least, (int, float)) and least > len(names) + 1:  # a name that comes twice would reach the count
        yield "minProperties", f"it is enforced up to {len(names) + 1} here; require the properties by name"
    elif optional and isinstance(most, (int, float)) and (most != len(names) + 1 or is_open):
        yield "maxProperties", "it is not enforced beside optional properties; require them by name"
    for keyword in ("const", "enum"):
        texts = [text for text in _scalars_in(node.get(keyword)) if isinstance(text, str)]
        if any((char < " " or char == "\x7f") and char not in _ESCAPED for text in texts for char in text):
            yield keyword, "texts with control characters other than \\b, \\f, \\n, \\r and \\t cannot come"
    for keyword in _OF_NUMBERS:
        if not all(map(_is_exact, filter(is_number, _scalars_in(node.get(keyword))))):
            yield keyword, "integers of more than 53 bits would be rounded; leave this out"


def _exclusive_bounds(nodes: list[Schema]) -> _Reasons:
    """Yield an exclusive bound at an integer beside a bound that is no integer: a value at the exclusive bound could come."""
    own = [node for node in nodes if node.get("type") != "integer"]
    bounds = [(keyword, node[keyword]) for node in own for keyword in _BOUNDS if is_number(node.get(keyword))]
    if any(value % 1 for _, value in bounds):
        for keyword, value in bounds:
            if keyword in _MOVED and not value % 1:
                yield keyword, "it is not enforced beside a bound that is no integer; use minimum, maximum"


def _check_exclusive(nodes: list[Schema]) -> None:
    for keyword, reason in _exclusive_bounds(nodes):
        raise refusal("#", keyword, reason)


def _patterns(node: Schema) -> _Reasons:
    """Yield patterns that have another meaning, or would take too long to compile."""
    named = node.get("patternProperties")
    names = named if isinstance(named, dict) else ()  # else refused when it is compiled
    for keyword, text in [("pattern", node.get("pattern")), *(("patternProperties", name) for name in names)]:
        reason = pattern_problem(text) if isinstance(text, str) else None
        if reason:
            yield keyword, reason
            break
    combined = node.get("allOf")
    if isinstance(combined, list):
        patterns = [child for part in combined for _, child in schema_objects("#", part) if "pattern" in child]
        if len(patterns) > _MAX_PATTERNS:
            yield "allOf", f"at most {_MAX_PATTERNS} patterns can be combined, not {len(patterns)}"


_VALUES: Final[tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...]] = (
    (
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        "an integer that is not negative",
        lambda value: is_number(value) and value >= 0 and value % 1 == 0,
    ),
    (("minimum", "maximum"), "a number", is_number),
    (("multipleOf",), "a number above 0", lambda value: is_number(value) and value > 0),
    (MAPS, "an object of schemas", lambda value: isinstance(value, dict)),
    (("allOf", "anyOf", "oneOf", "prefixItems", "required", "enum"), "a list", lambda value: isinstance(value, list)),
    (("pattern", "format", "$ref"), "a text", lambda value: isinstance(value, str)),
    (("type",), "a name of a type or a list of names", lambda value: isinstance(value, (str, list))),
    (SINGLE, "a schema", lambda value: isinstance(value, (dict, bool, list))),
)
"""Keywords, the values that they may have in words, and whether a value is one."""


def _is_exact(value: float) -> bool:
    try:
        return float(value) == value
    except OverflowError:
        return False


def _scalars_in(value: Any) -> Iterator[Any]:
    """Yield the texts, numbers and other scalars in a JSON value, and the names of its objects."""
    if isinstance(value, dict):
        yield from value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _scalars_in(child)
    if not isinstance(value, (dict, list)):
        yield value


# ---- rewrites


def rewritten(node: Schema, exclusion: Exclusion, share: Share, *, is_shown: bool = False) -> Schema:
    """Return an object of a schema in which the keywords that llguidance lacks are written with others, if they can be.

    `share` returns a reference to a definition of an object of the schema. It also takes the name of a property that this
    definition requires, or None. With `is_shown` a model reads the schema: formats of dates and times, and multiples without
    bounds, stay.
    """
    changed = dict(node) if is_shown else _with_real_dates(node)
    if isinstance(changed.get("oneOf"), list):
        changed = _without_one_of(changed, exclusion, share)
    if "propertyNames" in changed:
        changed = _without_property_names(changed, exclusion.resolve, share)
    if changed.get("uniqueItems") is True and is_number(changed.get("maxItems")) and changed["maxItems"] <= 1:
        del changed["uniqueItems"]
    if "pattern" not in changed and str(changed.get("format")) in FORMAT_PATTERNS:
        changed["pattern"] = FORMAT_PATTERNS[changed.pop("format")]
    if isinstance(changed.get("pattern"), str):
        changed["pattern"] = _decimal_pattern(changed["pattern"]) or changed["pattern"]
    changed = _with_exact_bounds(changed)
    return changed if is_shown else _with_bounded_multiples(changed)


def _with_added(node: Schema, keyword: str, value: Any) -> Schema | None:
    """Return an object with another keyword, in an allOf if the object has the keyword; None if its allOf is no list."""
    if keyword not in node:
        return {**node, keyword: value}
    others = node.get("allOf", [])
    return {**node, "allOf": [*others, {keyword: value}]} if isinstance(others, list) else None


def _with_real_dates(node: Schema) -> Schema:
    """Return an object of a schema with a pattern in place of a format of dates or times.

    The formats as llguidance has them allow the year 0000, February 29 of any year, and the second 60.
    """
    pattern = _DATE_PATTERNS.get(str(node.get("format")))
    if pattern is None:
        return node
    return _with_added({name: value for name, value in node.items() if name != "format"}, "pattern", pattern) or node


def _without_one_of(node: Schema, exclusion: Exclusion, share: Share) -> Schema:
    described = node.get("discriminator")
    name = described.get("propertyName") if isinstance(described, dict) else None
    targets = _discriminated(node["oneOf"], name, exclusion)
    alternatives = [
        alternative if target is None else {**target, "required": [*target.get("required", []), name]}
        for alternative, target in zip(node["oneOf"], targets, strict=True)
    ]
    if not exclusion.all_exclude(alternatives):
        return node
    pairs = zip(node["oneOf"], targets, strict=True)
    choices = [alternative if target is None else share(target, name) for alternative, target in pairs]
    return _with_added({name: value for name, value in node.items() if name != "oneOf"}, "anyOf", choices) or node


def _discriminated(alternatives: list[Any], name: Any, exclusion: Exclusion) -> list[Schema | None]:
    """Return the object of each alternative in which the property of a discriminator has to be required; None for others.

    Without that property no alternative is chosen, so it is required in all alternatives, or in none of them.
    """
    found = [_optional_in(alternative, name, exclusion.resolve) for alternative in alternatives]
    for alternative, target in zip(alternatives, found, strict=True):
        if target is None and isinstance(alternative, dict):
            group = with_included([alternative], exclusion.resolve)
            is_required = any(name in required_of(node) for node in group)
            if not exclusion.spend(len(group)) or ("object" in types_of(group) and not is_required):
                return [None] * len(alternatives)
    return found


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
    least, most, pattern = names.get("minLength", 0), names.get("maxLength", ""), names.get("pattern")
    if restricting == {"format"}:
        pattern = _NAME_PATTERNS.get(str(names["format"]))
    elif restricting and restricting <= {"minLength", "maxLength"}:
        are_counts = all(type(count) is int and count >= 0 for count in (least, most or 0))
        pattern = rf"^[\s\S]{{{least},{most}}}$" if are_counts else None
    elif restricting != {"pattern"}:
        return node
    if not isinstance(pattern, str) or properties:
        return node
    return {**changed, "patternProperties": {pattern: others}, "additionalProperties": False}


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
    """Move exclusive bounds by a billionth if they are integers beside another number. llguidance would allow the bound."""
    bounds = {keyword: node[keyword] for keyword in _BOUNDS if is_number(node.get(keyword))}
    changed = dict(node)
    if node.get("type") != "integer" and any(value % 1 for value in bounds.values()):
        for keyword, (inclusive, step) in _MOVED.items():
            value = bounds.get(keyword, 0.5)
            if not value % 1 and abs(value) <= _MAX_EXACT and inclusive not in node:
                changed[inclusive] = changed.pop(keyword) + step
    return changed


def _with_bounded_multiples(node: Schema) -> Schema:
    """Return the node with bounds of 16 digits beside multipleOf, if it has none: a multiple may need any number of digits."""
    step = node.get("multipleOf")
    limits = {name: node[name] for name in _BOUNDS if name in node}
    try:
        is_finite = all(is_number(value) and math.isfinite(float(value)) for value in (step, *limits.values()))
    except OverflowError:
        is_finite = False
    if not is_finite:
        return node
    most = max(_LARGEST, 9 * max(abs(value) for value in (step, *limits.values())))
    low = {} if {"minimum", "exclusiveMinimum"} & limits.keys() else {"minimum": -most}
    high = {} if {"maximum", "exclusiveMaximum"} & limits.keys() else {"maximum": most}
    return {**node, **low, **high}
