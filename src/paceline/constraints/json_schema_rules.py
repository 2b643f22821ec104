"""Prepares a JSON schema for llguidance: drops what restricts nothing, and refuses what it would not enforce.

llguidance refuses keywords of the standard that it does not implement, and ignores names that it does not know; the latter,
and a few combinations that it follows only in part, are refused here, each by its name and JSON pointer. Pure; any thread.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Container, Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from typing import Any, Final

from paceline.constraints.nesting import reference_resolver, schema_nesting
from paceline.constraints.pattern_rules import is_too_large, unsupported_syntax
from paceline.constraints.same_value import TooManyGroups, groups_of_one_value
from paceline.constraints.schema_rewrites import MAX_STEPS, TYPES, rewritten
from paceline.errors import GrammarError

Schema = dict[str, Any]
_Reasons = Iterator[tuple[str, str]]  # keywords that would not be enforced, and why not

_MAX_PATTERNS: Final = 16  # in one allOf
_MAX_PROPERTIES: Final = 1000  # of an object that may have others
_MAX_OPTIONAL: Final = 1000  # of an object: compiling takes time with the square of their number
_EXCLUSIVE: Final = ("exclusiveMinimum", "exclusiveMaximum")
_BOUNDS: Final = ("minimum", "maximum", *_EXCLUSIVE)
_OF_NUMBERS: Final = (*_BOUNDS, "multipleOf", "const", "enum")
MAX_DIGITS: Final = 16
"""Digits of a generated number before the point, and after it, if the schema has no longer number."""
_MAX_NESTING: Final = 400  # through references; some 1500 overflow the native stack

ANNOTATIONS: Final = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"),
        *("contentEncoding", "contentMediaType", "contentSchema", "$vocabulary"),
        *("nullable", "discriminator", "xml", "externalDocs"),  # OpenAPI's; they allow more, or describe
    )
)
"""What says nothing about which values are valid; so does every name that begins with x-."""

_ENFORCED: Final = frozenset(
    (
        *("$schema", "$id", "id", "$ref", "$defs", "definitions", "$anchor", "type", "enum", "const"),
        *("allOf", "anyOf", "oneOf", "items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format"),
    )
)
_UNENFORCED: Final = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    )
)
_NO_LIMIT: Final[Mapping[str, tuple[Any, ...]]] = {  # values with which a keyword restricts nothing
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": ({}, True, {"type": "string"}),
    "unevaluatedProperties": ({}, True),
    "unevaluatedItems": ({}, True),
    "not": (False,),
    "$recursiveAnchor": (False,),
}
FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_STANDARD_FORMATS: Final = FORMATS | frozenset(
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex"),
    )
)
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE: Final = ("items", "additionalItems", "additionalProperties")
_COMBINING: Final = frozenset(("anyOf", "oneOf", "$ref"))
_OF_OBJECTS: Final = frozenset(("properties", "required", "additionalProperties", "patternProperties", "maxProperties"))
_HOW_TO_TELL_APART: Final = (
    "a value may satisfy more than one of the schemas, which is not ruled out; use anyOf, or require a property that has another "
    "const in each"
)
_ESCAPED: Final = frozenset("\b\f\n\r\t")  # control characters that have an escape of one letter


def prepared_schema(text: str) -> str:
    """Return the JSON text of an equivalent schema that llguidance enforces whole, or refuses.

    Raises `GrammarError`, which names the keyword and where it stands as a JSON pointer.
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
            _check_exclusive("#", group)
    except TooManyGroups:
        _check_exclusive("#", [node for _, node in schema_objects("#", prepared)])
    if not any(_is_combined(node) for _, node in schema_objects("#", prepared)):
        for _, node in schema_objects("#", prepared):
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
    """Return the digits that a generated number may have before the point, and after it.

    These are `MAX_DIGITS`, as in llama.cpp, or one more than the longest number of the schema has.
    """
    numbers = (
        number
        for _, node in schema_objects("#", schema)
        for keyword in _OF_NUMBERS
        if keyword in node
        for number in _numbers_in(node[keyword])
    )
    parts = (part for number in numbers for part in f"{abs(Decimal(str(number))):f}".split("."))
    longest = max(map(len, parts), default=0)
    return max(MAX_DIGITS, longest + 1 if longest >= MAX_DIGITS else 0)


def place_of(
    text: str, keywords: tuple[str, ...], concerns: Callable[[Schema, str], bool] = lambda _node, _keyword: True
) -> str:
    """Return the JSON pointer of a keyword in a schema; of the schema itself if it has none of the keywords.

    Args:
        text: The schema.
        keywords: The keywords to look for.
        concerns: Takes an object of the schema and a keyword in it; whether it is the one that is looked for. If none is,
            the first of the keywords in the schema is taken.
    """
    found = [
        (f"{path}/{_escaped(keyword)}", concerns(node, keyword))
        for path, node in schema_objects("#", json.loads(text))
        for keyword in keywords
        if keyword in node
    ]
    return next((path for path, is_meant in found if is_meant), found[0][0] if found else "#")


def schema_objects(path: str, node: Any) -> Iterator[tuple[str, Schema]]:
    """Yield every schema object with its pointer, from the root down."""
    if not isinstance(node, dict):
        return
    yield path, node
    for keyword in node:
        for at, child in _children(path, keyword, node[keyword]):
            yield from schema_objects(at, child)


def _children(path: str, keyword: str, value: Any) -> list[tuple[str, Any]]:
    at = f"{path}/{_escaped(keyword)}"
    if keyword in _MAPS and isinstance(value, dict):
        return [(f"{at}/{_escaped(name)}", child) for name, child in value.items()]
    if keyword in _LISTS and isinstance(value, list):
        return [(f"{at}/{index}", child) for index, child in enumerate(value)]
    return [(at, value)] if keyword in _SINGLE and isinstance(value, dict) else []


def _is_combined(node: Schema) -> bool:
    """Return whether what a schema object says adds to what another one says about the same value."""
    return "allOf" in node or (not _COMBINING.isdisjoint(node) and not _OF_OBJECTS.isdisjoint(node))


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
    """Rewrites one schema, and leaves out what restricts nothing and the keywords that may be left out."""

    def __init__(self, root: Schema, leaves_out: Callable[[str], bool] | None = None) -> None:
        """Begin. leaves_out: whether a keyword is left out that cannot be enforced; None: such keywords are refused."""
        self.left_out: list[str] = []
        self._root = root
        self._leaves_out = leaves_out
        self._resolve = reference_resolver(root)
        self._names: dict[tuple[int, str | None], str] = {}
        self._unfinished: list[tuple[str, str, Schema]] = []
        self._steps = iter(range(MAX_STEPS))

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
        _check_types(path, node, has_values=self._leaves_out is None)
        is_shown = self._leaves_out is not None  # to a model, for which a format says more than its pattern
        node = rewritten(node, self._resolve, self._shared, self._steps, is_shown=is_shown)
        for keyword, reason in _unenforced(path, node):
            if self._leaves_out is None:
                raise _refused(path, keyword, reason)
            if not self._leaves_out(keyword):
                continue
            self.left_out.append(f"{path}/{_escaped(keyword)} is left out: {reason}")
            node = _without(node, keyword)
        found: Schema = {}
        for keyword, value in node.items():
            if _says_nothing(keyword, value):
                if self._leaves_out is not None:  # annotations may be shown to the model
                    found[keyword] = value
                continue
            children = [self._prepared(at, child) for at, child in _children(path, keyword, value)]
            if not children:
                found[keyword] = value
            elif keyword in _MAPS:
                found[keyword] = dict(zip(value, children, strict=True))
            else:
                found[keyword] = children if isinstance(value, list) else children[0]
        return found

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


def _without(node: Schema, keyword: str) -> Schema:
    """Return a schema object without a keyword. The alternatives of a oneOf become those of an anyOf."""
    changed = {name: value for name, value in node.items() if name != keyword}
    if keyword == "oneOf" and "anyOf" not in node:
        changed["anyOf"] = node["oneOf"]
    return changed


def _says_nothing(keyword: str, value: Any) -> bool:
    """Return whether a keyword restricts nothing."""
    if keyword in ANNOTATIONS or keyword.startswith("x-"):
        return True
    if keyword == "format":  # others are annotations, such as OpenAPI's int32
        return isinstance(value, str) and value not in _STANDARD_FORMATS
    return any(value is one if isinstance(one, bool) else value == one for one in _NO_LIMIT.get(keyword, ()))


def _check_types(path: str, node: Schema, *, has_values: bool) -> None:
    """Refuse unknown types and definitions that are no object. has_values: also refuse other values of a wrong type."""
    if path == "#" and not isinstance(node.get("$defs", {}), dict):
        raise _refused(path, "$defs", "this must be an object of schemas")
    given = node.get("type", [])
    for name in [given] if isinstance(given, str) else given if isinstance(given, list) else []:
        if name not in TYPES:
            raise _refused(path, "type", f"{name!r:.80} is not a type; types are {', '.join(TYPES)}")
    if has_values:
        _check_values(path, node)


def _check_values(path: str, node: Schema) -> None:
    """Refuse a keyword whose value has the wrong type, which llguidance would name without its place."""
    for keyword, value in node.items():
        expected = next((text for names, text, is_right in _VALUES if keyword in names and not is_right(value)), None)
        if expected is not None:
            raise _refused(path, keyword, f"this must be {expected}, not {json.dumps(value):.80}")
        children = (
            value.items()
            if keyword in _MAPS
            else enumerate(value)
            if keyword in _LISTS and isinstance(value, list)
            else ()
        )
        for name, child in children:
            if not isinstance(child, (dict, bool)):
                reason = f"a schema must be an object or a boolean, not {json.dumps(child):.80}"
                raise _refused(path, keyword, reason, name)


def _unenforced(path: str, node: Schema) -> Iterator[tuple[str, str]]:
    """Yield each keyword of a schema object that would not be enforced, and why not."""
    for keyword, value in node.items():
        if _says_nothing(keyword, value):
            continue
        if keyword == "format" and isinstance(value, str) and value in _STANDARD_FORMATS - FORMATS:
            yield keyword, f"{value!r} is not enforced; formats are {', '.join(sorted(FORMATS))}"
        elif keyword == "oneOf" and isinstance(value, list):
            yield keyword, _HOW_TO_TELL_APART
        elif keyword in _UNENFORCED:
            yield keyword, "this keyword is not enforced; leave it out, or write what it says with others"
        elif keyword not in _ENFORCED:
            yield keyword, "this is no keyword that is known; leave it out, or call it x-... if it only describes"
    for check in _COMBINATIONS:
        yield from check(path, node)


def _reference(path: str, node: Schema) -> _Reasons:
    if path != "#" and isinstance(node.get("$id", node.get("id")), str):
        keyword = "$id" if "$id" in node else "id"
        yield keyword, f"references are looked up from the root alone; leave {keyword} out"


def _number_of_properties(_: str, node: Schema) -> _Reasons:
    """Yield a count that a name which comes twice would reach, and counts beside optional properties."""
    least, required, named = node.get("minProperties"), node.get("required"), node.get("properties")
    names = {str(name) for name in required} if isinstance(required, list) else set[str]()
    if isinstance(least, (int, float)) and least > len(names) + 1:
        yield "minProperties", f"it is enforced up to {len(names) + 1} here; require the properties by name"
        return
    optional = set(named) - names if isinstance(named, dict) else set[str]()
    is_open = node.get("additionalProperties", True) is not False or "patternProperties" in node
    most = node.get("maxProperties")
    if optional and isinstance(most, (int, float)) and (most != len(names) + 1 or is_open):
        yield "maxProperties", "it is not enforced beside optional properties; require them by name"


def _constants(_: str, node: Schema) -> _Reasons:
    for keyword in ("const", "enum"):
        if keyword in node and any(not _ESCAPED.issuperset(_controls(text)) for text in _texts_in(node[keyword])):
            yield keyword, "texts with control characters other than \\b, \\f, \\n, \\r and \\t cannot come"


def _numbers(_: str, node: Schema) -> _Reasons:
    """Yield numbers that would be rounded."""
    for keyword in _OF_NUMBERS:
        if keyword in node and not all(map(_is_exact, _numbers_in(node[keyword]))):
            yield keyword, "integers of more than 53 bits would be rounded; leave this out"


def _bounds(_: str, node: Schema) -> _Reasons:
    yield from _exclusive_bounds([node])


def _exclusive_bounds(nodes: list[Schema]) -> _Reasons:
    """Yield an exclusive bound at an integer with one between integers: a value at the exclusive one could come."""
    own = [node for node in nodes if node.get("type") != "integer"]
    bounds = [(keyword, node[keyword]) for node in own for keyword in _BOUNDS if _is_number(node.get(keyword))]
    if any(value % 1 for _, value in bounds):
        for keyword, value in bounds:
            if keyword in _EXCLUSIVE and not value % 1:
                yield keyword, "it is not enforced beside a bound that is no integer; use minimum, maximum"


def _check_exclusive(path: str, nodes: list[Schema]) -> None:
    for keyword, reason in _exclusive_bounds(nodes):
        raise _refused(path, keyword, reason)


def _items(_: str, node: Schema) -> _Reasons:
    if "prefixItems" in node and isinstance(node.get("items"), list):
        yield "items", "a list is not enforced beside prefixItems"


def _patterns(_: str, node: Schema) -> _Reasons:
    """Yield patterns that have another meaning, or would take too long to compile."""
    named = node.get("patternProperties")
    names = named if isinstance(named, dict) else ()  # else refused when it is compiled
    texts = [("pattern", node.get("pattern")), *(("patternProperties", name) for name in names)]
    for keyword, text in texts:
        if isinstance(text, str):
            reason = unsupported_syntax(text) or ("it repeats too much" if is_too_large(text) else None)
            if reason:
                yield keyword, reason
                break
    combined = node.get("allOf")
    if isinstance(combined, list):
        patterns = [one for part in combined for _, one in schema_objects("#", part) if "pattern" in one]
        if len(patterns) > _MAX_PATTERNS:
            yield "allOf", f"at most {_MAX_PATTERNS} patterns can be combined, not {len(patterns)}"


def _size(_: str, node: Schema) -> _Reasons:
    named = node.get("properties")
    is_open = node.get("additionalProperties", False) is not False or "patternProperties" in node
    if is_open and isinstance(named, dict) and len(named) > _MAX_PROPERTIES:
        yield "properties", f"at most {_MAX_PROPERTIES} can be named beside others, not {len(named)}"
    required = {name for name in node.get("required", ()) if isinstance(name, str)}
    num_optional = len(named.keys() - required) if isinstance(named, dict) else 0
    if num_optional > _MAX_OPTIONAL:
        yield "properties", f"at most {_MAX_OPTIONAL} can be optional, not {num_optional}; require the others"


_COMBINATIONS: Final[tuple[Callable[[str, Schema], _Reasons], ...]] = (
    _reference,
    _number_of_properties,
    _constants,
    _numbers,
    _bounds,
    _items,
    _patterns,
    _size,
)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0


_VALUES: Final[tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...]] = (
    (
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        "an integer that is not negative",
        _is_count,
    ),
    (("minimum", "maximum"), "a number", _is_number),
    (("multipleOf",), "a number above 0", lambda value: _is_number(value) and value > 0),
    (_MAPS, "an object of schemas", lambda value: isinstance(value, dict)),
    (("allOf", "anyOf", "oneOf", "prefixItems", "required", "enum"), "a list", lambda value: isinstance(value, list)),
    (("pattern", "format", "$ref"), "a text", lambda value: isinstance(value, str)),
    (("type",), "a name of a type or a list of names", lambda value: isinstance(value, (str, list))),
    (_SINGLE, "a schema", lambda value: isinstance(value, (dict, bool, list))),
)
"""Keywords, the values that they may have in words, and whether a value is one."""


def _is_exact(value: float) -> bool:
    try:
        return float(value) == value
    except OverflowError:
        return False


def _numbers_in(value: Any) -> Iterator[float]:
    if _is_number(value):
        yield value
    elif isinstance(value, (dict, list)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(child)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for child in value.values():
            yield from _texts_in(child)
    elif isinstance(value, list):
        for child in value:
            yield from _texts_in(child)


def _controls(text: str) -> set[str]:
    return {character for character in text if character < " " or character == "\x7f"}


def _escaped(name: str) -> str:
    """Return a name as JSON pointers write it."""
    return name.replace("~", "~0").replace("/", "~1")


def _refused(path: str, keyword: str, reason: str, *inside: object) -> GrammarError:
    """Return the error about a keyword, or about a part of its value that names and indices lead to."""
    place = "".join(f"/{_escaped(str(name))}" for name in (keyword, *inside))
    return GrammarError(f"json_schema: {path}{place}: {reason}")
