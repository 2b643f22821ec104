"""Walks of a JSON schema: its objects, references, patterns, and the objects that describe one value. Pure; any thread."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any, Final
from urllib.parse import quote, unquote

from paceline.errors import GrammarError, PacelineError

Schema = dict[str, Any]
Resolve = Callable[[str], Any]
"""Returns the target of a `$ref`; None if there is none."""
Definition = tuple[int, frozenset[str]]
"""How deep a definition nests by itself, and the names that it refers to."""
Check = Callable[[Mapping[str, Any]], object]
"""Raises `GrammarError` for a schema that cannot be enforced."""

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE: Final = ("items", "additionalItems", "additionalProperties")
NUMBER_KEYWORDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ANNOTATIONS: Final = frozenset(
    (
        "title description default examples example deprecated readOnly writeOnly $comment contentEncoding contentMediaType "
        "contentSchema $vocabulary nullable discriminator xml externalDocs"  # the last four are OpenAPI's
    ).split()
)
"""Keywords that say nothing about which values are valid; so does every name that begins with x-."""
STANDARD_FORMATS: Final = frozenset(
    (
        "date-time time date duration email idn-email hostname idn-hostname ipv4 ipv6 uuid uri uri-reference iri iri-reference "
        "uri-template json-pointer relative-json-pointer regex"
    ).split()
)
"""Formats that JSON Schema defines; any other name has no meaning there, and describes."""
NO_LIMIT: Final[Mapping[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": ({}, True, {"type": "string"}),
    "unevaluatedProperties": ({}, True),
    "unevaluatedItems": ({}, True),
    "not": (False,),
}
"""Values with which a keyword restricts nothing."""
MAX_CHECKS: Final = 500
"""How many schemas are checked to relax a schema that does not pass, or several schemas with one budget."""
MAX_OPTIONAL: Final = 2_000
"""The most groups and quantifiers of a pattern: memory grows with the square of consecutive parts that may match nothing."""
_MAX_REPEATED: Final = 20_000
_MAX_REFERENCES: Final = 100  # that lead from one to the next
_MAX_STEPS: Final = 20_000
_MAX_COMPARED: Final = 200_000  # objects and properties that are looked at to compare the alternatives of one schema
_MAX_DEPTH: Final = 6  # of the properties that are compared
MAX_PAIRS: Final = 10_000
"""Pairs of alternatives of a oneOf that are compared with each other."""
_FIRST: Final = {"$defs": 0, "definitions": 0, "type": 1}  # references need their targets, and most keywords a type
_POINTER: Final = re.compile(r"^json_schema: (?:#[^:]*: )?")
_OF_OBJECTS: Final = frozenset(("properties", "patternProperties", "additionalProperties"))
_OF_ARRAYS: Final = frozenset(("prefixItems", "items", "additionalItems"))
_TOKEN: Final = re.compile(
    r"""\\[pPxuU]\{[^}]*(?:\}|\Z) | \\. | \[\^?\]?(?:\\.|[^\\\]])*(?:\]|\Z) | \{\d*(?:,\d*)?\} | .""",
    re.DOTALL | re.VERBOSE,
)
_COUNT: Final = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_ABSENT: Final[dict[str, str]] = {
    "look-around": r"\(\?<?[=!]",
    "a back reference": r"\\(?:[1-9]|k<)",
    "a word boundary": r"\\[bB]",
}
_FLAGS: Final = re.compile(r"\(\?[a-zA-Z-]+[:)]")


# ---- schema objects


def escaped(name: str) -> str:
    """Escape a name for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def children_of(keyword: str, value: Any) -> list[tuple[str | int | None, Any]]:
    """Return the schemas in a keyword's value, each with its name or index; None: the value itself is the schema."""
    if keyword in MAPS and isinstance(value, dict):
        return list(value.items())
    if keyword in LISTS and isinstance(value, list):
        return list(enumerate(value))
    return [(None, value)] if keyword in SINGLE and isinstance(value, dict) else []


def pointer_to(path: str, *names: str | int | None) -> str:
    """Return the pointer of a part of the schema at `path`. None adds nothing to the pointer."""
    return path + "".join(f"/{escaped(str(name))}" for name in names if name is not None)


def refusal(path: str, keyword: str, reason: str, *inside: str | int) -> GrammarError:
    """Return the error about a keyword, or about a part of its value that names and indices lead to."""
    return GrammarError(f"json_schema: {pointer_to(path, keyword, *inside)}: {reason}")


def rebuilt(node: Mapping[str, Any], visit: Callable[[str, str | int | None, Any], Any]) -> Schema:
    """Return a schema object in which `visit` has replaced the schemas directly within it.

    `visit` takes a keyword, the name or index of a schema in its value (None: the value is the schema), and the schema.
    """
    copied: Schema = dict(node)
    for keyword, value in node.items():
        visited = {name: visit(keyword, name, child) for name, child in children_of(keyword, value)}
        if visited:
            copied[keyword] = visited if isinstance(value, dict) else list(visited.values())
        if None in visited:
            copied[keyword] = visited[None]
    return copied


def schema_objects(path: str, node: Any) -> Iterator[tuple[str, Schema]]:
    """Yield every schema object with its pointer, from the root down."""
    if isinstance(node, dict):
        yield path, node
        for keyword in node:
            for name, child in children_of(keyword, node[keyword]):
                yield from schema_objects(pointer_to(path, keyword, name), child)


def type_of(value: Any) -> str:
    """Return the JSON type of a value. A float without a fraction is an integer."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array"}
    return names.get(type(value), "object")


def key_of(value: Any) -> str:
    """Return a text that only equal JSON values share."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normal(item) for item in value]
    return {name: _normal(member) for name, member in value.items()} if isinstance(value, dict) else value


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number, and no boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- references


def reference_resolver(schema: Mapping[str, Any]) -> Resolve:
    """Return a function that returns the target of a `$ref`; None if there is none."""
    anchors = _anchors(schema)
    return lambda reference: _target(schema, anchors, _decoded(reference))


def _anchors(schema: Any) -> dict[str, Any]:
    found, todo = {}, [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict) and isinstance(node.get("$anchor"), str):
            found[node["$anchor"]] = node
        todo += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return found


def _decoded(reference: str) -> str:
    return "#" + unquote(reference.partition("#")[2])


def _target(schema: Any, anchors: Mapping[str, Any], pointer: str) -> Any:
    if pointer == "#":
        return schema
    if not pointer.startswith("#/"):
        return anchors.get(pointer[1:])
    node = schema
    for part in pointer[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isascii() and name.isdigit() and len(name) < 10 and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def resolved(root: Mapping[str, Any], schema: Any) -> Schema:
    """Return the schema object that a chain of references leads to; an empty one if it leads to none."""
    node, resolve, num_left = schema, None, _MAX_REFERENCES
    while isinstance(node, dict) and isinstance(node.get("$ref"), str) and num_left:
        resolve = resolve or reference_resolver(root)
        node, num_left = resolve(node["$ref"]), num_left - 1
    return node if isinstance(node, dict) else {}


def part_of(root: Mapping[str, Any], schema: Mapping[str, Any], pointer: str) -> Schema:
    """Return a part of a schema, an object at a JSON pointer, as a schema of its own. Its references keep their targets."""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    part = {**shared, **schema}
    targets = tuple(f"#/{name}/" for name in shared)
    references = (node.get("$ref") for _, node in schema_objects("#", part))
    if all(not isinstance(reference, str) or reference.startswith(targets) for reference in references):
        return part
    moved = json.loads(json.dumps(root))
    for _, node in schema_objects("#", moved):
        reference = node.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            node["$ref"] = f"#/$defs/whole{reference[1:]}"
    return {"$defs": {"whole": moved}, "$ref": f"#/$defs/whole{quote(pointer[1:], safe='/~')}"}


# ---- nesting


def schema_nesting(schema: Schema) -> int:
    """Return how deep schema objects nest, counted through references as well."""
    todo, found = ["#"], dict[str, Definition]()
    anchors = _anchors(schema)
    while todo:
        pointer = todo.pop()
        if pointer not in found:
            found[pointer] = _definition(_target(schema, anchors, pointer))
            todo += found[pointer][1]
    return longest_chain(found)


def _definition(node: Any) -> Definition:
    depth, references, level = 0, set[str](), [node]
    while level := [child for child in level if isinstance(child, dict)]:
        depth += 1
        references |= {_decoded(child["$ref"]) for child in level if isinstance(child.get("$ref"), str)}
        parts: list[Any] = []
        for keyword, value in (pair for child in level for pair in child.items()):
            if keyword in ("$defs", "definitions", "const", "enum"):
                continue
            is_map = keyword in ("properties", "patternProperties") and isinstance(value, dict)
            parts += value.values() if is_map else value if isinstance(value, list) else [value]
        level = parts
    return depth, frozenset(references)


def longest_chain(definitions: Mapping[str, Definition]) -> int:
    """Return an upper bound of the nesting along any chain of references, in time linear in these.

    Definitions that refer to one another in a circle count all together, as they may be followed in any order, each once.
    """
    longest: dict[str, int] = {}
    for circle in circles({name: references & definitions.keys() for name, (_, references) in definitions.items()}):
        below = (longest[target] for name in circle for target in definitions[name][1] if target in longest)
        depth = sum(definitions[name][0] for name in circle) + max(below, default=0)
        longest.update(dict.fromkeys(circle, depth))
    return max(longest.values(), default=0)


def circles(references: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected parts of a graph, each after the parts that it leads to (Tarjan 1972)."""
    order: dict[str, int] = {}  # of the first visits
    lowest: dict[str, int] = {}  # the first visited that can be reached, of those on the stack
    stack: list[str] = []
    on_stack: set[str] = set()
    for root in references:
        path = [] if root in order else [(root, iter(references[root]))]
        while path:
            name, rest = path[-1]
            if name not in order:
                order[name] = lowest[name] = len(order)
                stack.append(name)
                on_stack.add(name)
            child = next((target for target in rest if target not in order or target in on_stack), None)
            if child is not None and child not in order:
                path.append((child, iter(references[child])))
            elif child is not None:
                lowest[name] = min(lowest[name], order[child])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[name])
                if lowest[name] == order[name]:
                    circle = [stack.pop()]
                    while circle[-1] != name:
                        circle.append(stack.pop())
                    on_stack.difference_update(circle)
                    yield circle


# ---- schema objects that apply to one value: by allOf, references, alternatives, properties of one name


class TooManyGroups(Exception):
    """The alternatives of a schema multiply."""


def groups_of_one_value(root: Schema, resolve: Resolve) -> Iterator[list[Schema]]:
    """Yield the schema objects that can apply together to one value, for the root and every part of its values.

    Of anyOf and oneOf one alternative at a time, unless several lists meet. Parts of values that may be the same part count as
    the same: all items of an array that several objects describe, and a property beside patterns that may match its name.

    Raises:
        TooManyGroups: There are too many to look at.
    """
    seen, steps = set[frozenset[int]](), 0
    todo = [[root]]
    while todo:
        for group in _alternatives(todo.pop(), resolve):
            steps += len(group)
            if steps > _MAX_STEPS:
                raise TooManyGroups
            key = frozenset(map(id, group))
            if key not in seen:
                seen.add(key)
                yield group
                todo += _parts(group)


def _alternatives(nodes: list[Schema], resolve: Resolve) -> Iterator[list[Schema]]:
    todo: list[tuple[list[Schema], frozenset[int]]] = [(nodes, frozenset())]
    for _ in range(_MAX_STEPS):
        if not todo:
            return
        given, chosen = todo.pop()
        base = with_included(given, resolve)
        values = [node.get(keyword) for node in base for keyword in ("anyOf", "oneOf")]
        lists = [value for value in values if isinstance(value, list) and id(value) not in chosen]
        chosen |= {id(alternatives) for alternatives in lists}
        if not lists:
            yield base
        elif len(lists) == 1:
            todo += [([*base, node], chosen) for node in _schemas(lists[0])]
        else:
            todo.append(([*base, *(node for alternatives in lists for node in _schemas(alternatives))], chosen))
    raise TooManyGroups


def with_included(nodes: list[Schema], resolve: Resolve) -> list[Schema]:
    """Return the schema objects, and the objects that they include by allOf and references."""
    found: dict[int, Schema] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found[id(node)] = node
            included = node.get("allOf")
            target = resolve(node["$ref"]) if isinstance(node.get("$ref"), str) else None
            todo += _schemas([*(included if isinstance(included, list) else ()), target])
    return list(found.values())


def _parts(group: list[Schema]) -> Iterator[list[Schema]]:
    yield from _properties([node for node in group if node.keys() & _OF_OBJECTS])
    of_arrays = [node for node in group if node.keys() & _OF_ARRAYS]
    values = [node.get(keyword) for node in of_arrays for keyword in _OF_ARRAYS]
    items = [child for value in values for child in _schemas(value if isinstance(value, list) else [value])]
    yield from [items] if len(of_arrays) > 1 else ([item] for item in items)


def _properties(group: list[Schema]) -> Iterator[list[Schema]]:
    named, patterns = (
        [node[keyword] if isinstance(node.get(keyword), dict) else {} for node in group]
        for keyword in ("properties", "patternProperties")
    )
    by_pattern = [pair for pairs in patterns for pair in pairs.items() if isinstance(pair[1], dict)]
    others = [node.get("additionalProperties") for node in group]
    for name in {name for names in named for name in names}:
        beside = [child for child, names in zip(others, named, strict=True) if name not in names]
        matching = [child for pattern, child in by_pattern if _may_match(pattern, name)]
        yield _schemas([*(names.get(name) for names in named), *matching, *beside])
    unnamed = [*(child for _, child in by_pattern), *_schemas(others)]
    yield from [unnamed] if len(group) > 1 else ([child] for child in unnamed)


def _schemas(nodes: list[Any]) -> list[Schema]:
    return [node for node in nodes if isinstance(node, dict)]


def _may_match(pattern: str, name: str) -> bool:
    """Return whether a name may match; any may match a pattern that repeats, since its search may take long."""
    try:
        return re.search(r"[*+{?(]", pattern) is not None or re.search(pattern, name) is not None
    except re.error:
        return True


# ---- schemas that exclude each other


class Exclusion:
    """Finds out whether schemas of one document exclude each other. It may find that they do not although they do."""

    def __init__(self, resolve: Resolve) -> None:
        self.resolve = resolve
        self._num_left = _MAX_COMPARED

    def spend(self, count: int) -> bool:
        """Count objects or properties that are looked at; return whether more may be looked at."""
        self._num_left -= count
        return self._num_left >= 0

    def all_exclude(self, alternatives: list[Any]) -> bool:
        """Return whether no value satisfies two of the alternatives."""
        if not all(isinstance(alternative, dict) for alternative in alternatives):
            return False
        if _are_distinct([listed_in([alternative]) for alternative in alternatives]):
            return True
        groups = []
        for alternative in alternatives:
            groups.append(with_included([alternative], self.resolve))
            if not self.spend(len(groups[-1])):
                return False
        if self.are_tagged(groups):
            return True
        is_few = len(groups) * (len(groups) - 1) // 2 <= MAX_PAIRS
        return is_few and all(self.groups_exclude(first, second) for first, second in combinations(groups, 2))

    def are_tagged(self, groups: list[list[Schema]]) -> bool:
        """Return whether all are objects that require a property with other constants in each."""
        if any(types_of(group) != {"object"} for group in groups):
            return False
        names = set[str].intersection(*({name for node in group for name in required_of(node)} for group in groups))
        return any(
            self.spend(len(groups)) and _are_distinct([listed_in(_of_property(group, name)) for group in groups])
            for name in sorted(names)
        )

    def groups_exclude(self, first: list[Schema], second: list[Schema], depth: int = _MAX_DEPTH) -> bool:
        """Return whether no value satisfies both groups of schemas."""
        if depth == 0 or not self.spend(len(first) + len(second)):
            return False
        if self._all_choices_exclude(first, second, depth) or self._all_choices_exclude(second, first, depth):
            return True
        values, others = listed_in(first), listed_in(second)
        if values is not None and others is not None:
            return not values & others
        common = types_of(first) & types_of(second)
        return not common or (common == {"object"} and self._properties_exclude(first, second, depth))

    def _all_choices_exclude(self, group: list[Schema], other: list[Schema], depth: int) -> bool:
        """Return whether the group has alternatives, and each of them excludes the other group."""
        for node in group:
            rest = [{**node, "anyOf": None, "oneOf": None} if part is node else part for part in group]
            for choices in (node.get("anyOf"), node.get("oneOf")):
                if isinstance(choices, list) and all(
                    isinstance(choice, dict)
                    and self.groups_exclude(with_included([*rest, choice], self.resolve), other, depth - 1)
                    for choice in choices
                ):
                    return True
        return False

    def _properties_exclude(self, first: list[Schema], second: list[Schema], depth: int) -> bool:
        """Return whether a property that a group of objects requires can have no value that both groups allow."""
        for name in sorted({name for node in (*first, *second) for name in required_of(node)}):
            if not self.spend(len(first) + len(second)):
                return False
            if _forbids(first, name) or _forbids(second, name):
                return True
            mine, theirs = _of_property(first, name), _of_property(second, name)
            if mine and theirs:
                mine, theirs = with_included(mine, self.resolve), with_included(theirs, self.resolve)
                if self.groups_exclude(mine, theirs, depth - 1):
                    return True
        return False


def _are_distinct(listed: list[set[str] | None]) -> bool:
    """Return whether all are sets of values, and no value is in two of them."""
    known = [values for values in listed if values is not None]
    return len(known) == len(listed) and sum(map(len, known)) == len(set[str]().union(*known))


def _forbids(group: list[Schema], name: str) -> bool:
    closed = [node for node in group if node.get("additionalProperties") is False and "patternProperties" not in node]
    named = (node.get("properties", {}) for node in closed)
    return any(isinstance(properties, dict) and name not in properties for properties in named)


def _of_property(group: list[Schema], name: str) -> list[Schema]:
    named = (node["properties"] for node in group if isinstance(node.get("properties"), dict))
    return [properties[name] for properties in named if isinstance(properties.get(name), dict)]


def required_of(node: Schema) -> list[str]:
    """Return the names of the properties that an object must have."""
    required = node.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def listed_in(group: list[Schema]) -> set[str] | None:
    """Return the values that const and enum of all schemas list, each by its `key_of`; None if they list none."""
    found: set[str] | None = None
    for node in group:
        for values in ([node["const"]] if "const" in node else None, node.get("enum")):
            if isinstance(values, list):
                keys = {key_of(value) for value in values}
                found = keys if found is None else found & keys
    return found


def types_named(given: Any) -> set[str]:
    """Return the types that the value of the keyword type allows. A number may be an integer."""
    names = {given} if isinstance(given, str) else {name for name in given or () if isinstance(name, str)}
    return names | ({"integer"} if "number" in names else set())


def types_of(group: list[Schema]) -> set[str]:
    """Return the types that all of the schemas allow. A number that is an integer has the type integer alone."""
    found = set(TYPES)
    for node in group:
        if isinstance(node.get("type"), (str, list)):
            found &= types_named(node["type"])
        listed = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(listed, list):
            found &= {type_of(value) for value in listed}
    return found


# ---- schemas without the smallest parts that do not pass a check


def relaxed(
    parameters: Mapping[str, Any], check: Check, budget: Iterator[int] | None = None
) -> tuple[Schema, tuple[tuple[str, str], ...]]:
    """Return the schema of an object without the parts that do not pass a check, and the pointer and reason of each part.

    `check` raises for a schema that cannot be enforced. `budget` yields an item for each check of a part; None: `MAX_CHECKS`
    items.
    """
    types = parameters.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        return {"type": "object"}, (("#/type", f"arguments are an object, and not {str(types)[:80]!r}"),)
    left, removed, root = (
        iter(range(MAX_CHECKS)) if budget is None else budget,
        list[tuple[str, str]](),
        dict[str, Any](),
    )

    def reason_of_check() -> str | None:
        try:
            check(root["#"])
        except GrammarError as error:
            return _POINTER.sub("", str(error))
        except PacelineError as error:
            return str(error)
        return None

    def reason() -> str | None:
        """Return why the schema so far does not pass; None if it does."""
        return (
            "the schemas have too many parts that cannot be enforced" if next(left, None) is None else reason_of_check()
        )

    def fit(pointer: str, parent: Any, key: str | int, schema: Any) -> None:
        """Set `parent[key]` to the schema without the parts that do not pass."""
        parent[key] = schema
        if (problem := reason()) is None:
            return
        parent[key] = {}
        if isinstance(schema, dict):
            for keyword in sorted(schema, key=lambda name: _FIRST.get(name, 2)):
                fit_keyword(pointer_to(pointer, keyword), parent[key], keyword, schema[keyword])
        elif schema is not True:
            removed.append((pointer, problem))

    def fit_keyword(pointer: str, node: Schema, keyword: str, value: Any) -> None:
        node[keyword] = value
        if (problem := reason()) is None:
            return
        children = children_of(keyword, value)
        if children:
            names = [name for name, _ in children if name is not None]
            node[keyword] = {name: {} for name in names} if isinstance(value, dict) else [{} for _ in names]
            if reason() is None:
                for name, child in children:
                    parent, key = (node, keyword) if name is None else (node[keyword], name)
                    fit(pointer_to(pointer, name), parent, key, child)
                return
        del node[keyword]
        if keyword == "oneOf" and "anyOf" not in node:
            fit_keyword(pointer, node, "anyOf", value)
        removed.append((pointer, problem))

    root["#"] = {**parameters, "type": "object"}
    if reason_of_check() is not None:  # the check of a whole schema is not counted
        fit("#", root, "#", root["#"])
    return root["#"], tuple(removed)


# ---- regular expressions, before they are compiled


def pattern_problem(pattern: str) -> str | None:
    """Return why a pattern would not be enforced as JSON Schema means it, or is too large; None if neither holds."""
    for match in _TOKEN.finditer(pattern):
        text = match[0]
        if len(text) > 1 and text[0] == "[":
            inside = re.sub(r"\\.", "", text[1:-1], flags=re.DOTALL)
            sign = next((sign for sign in ("[", "&&", "--", "~~") if sign in inside), None)
            if sign is not None:
                return f"{sign} in a class has another meaning here; write it with a backslash"
        begin = pattern[match.start() : match.start() + 4]
        absent = next((name for name, sign in _ABSENT.items() if re.match(sign, begin)), None)
        if absent is not None:
            return f"{absent} is not supported; write what the text looks like from its beginning to its end"
        flags = _FLAGS.match(pattern, match.start()) if text == "(" else None
        if flags is not None:
            return f"flags such as {flags[0]} are not known in JSON Schema; write both cases of a letter as [aA]"
    return "it repeats too much" if is_too_large(pattern) else None


def is_too_large(pattern: str) -> bool:
    """Return whether a pattern has too many groups and quantifiers, or its counted repetitions multiply to too much."""
    if num_optional(pattern) > MAX_OPTIONAL:
        return True
    sizes, last = [0], [0]  # of the open groups, and of the latest atom in each
    for match in _TOKEN.finditer(pattern):
        text = match[0]
        counted = _COUNT.fullmatch(text)
        if text == "(":
            sizes.append(0)
            last.append(0)
        elif counted or text == ")":
            if text == ")" and len(sizes) > 1:
                size = sizes.pop()
                last.pop()
            elif counted:
                size = last[-1] * max(1, *(int(digits[:9] or 0) for digits in counted.groups(default="")))
                sizes[-1] -= last[-1]
            else:
                continue
            sizes[-1] += size
            last[-1] = size
        else:
            sizes[-1] += 1
            last[-1] = 1
        if sizes[-1] > _MAX_REPEATED + len(pattern):
            return True
    return False


def quoted_pattern(text: str) -> str:
    """Return a regular expression of one text."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\u{{{ord(c):x}}}" for c in text)


def num_optional(pattern: str) -> int:
    """Return an upper bound of the parts of a pattern that may match nothing: the number of its groups and quantifiers."""
    return sum(match[0][0] in "(?*{" for match in _TOKEN.finditer(pattern))
