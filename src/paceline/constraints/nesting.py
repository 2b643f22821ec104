"""How deep definitions nest that refer to one another, and how large terminals are. Pure; any thread.

llguidance follows them by recursion on the native stack, whose overflow ends the process, and puts the terminals that a
terminal refers to in their places.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from paceline.constraints.pattern_rules import MAX_OPTIONAL, num_optional

Definition = tuple[int, frozenset[str]]
"""How deep a definition nests by itself, and the names that it refers to."""

_LARK_TOKEN: Final = re.compile(
    r"""(?P<ignored>//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/)"""
    r"|(?P<definition>^[ \t]*[?!]?[A-Za-z_][\w.-]*(?=[^\n:|\"]*:))|(?P<name>[A-Za-z_]\w*(?:-\w+)*)"
    r"|(?P<bracket>[()\[\]{}])|(?P<sign>[?*~])",
    re.MULTILINE,
)


def longest_chain(definitions: Mapping[str, Definition]) -> int:
    """Return an upper bound of the nesting along any chain of references, in time linear in these.

    Definitions that refer to one another in a circle count all together, as they may be followed in any order, each once.
    """
    longest: dict[str, int] = {}
    for circle in _circles({name: references & definitions.keys() for name, (_, references) in definitions.items()}):
        below = (longest[one] for name in circle for one in definitions[name][1] if one in longest)
        depth = sum(definitions[name][0] for name in circle) + max(below, default=0)
        longest.update(dict.fromkeys(circle, depth))
    return max(longest.values(), default=0)


def _circles(references: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected parts of a graph, each after those that it leads to (Tarjan 1972)."""
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
            child = next((one for one in rest if one not in order or one in on_stack), None)
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


def schema_nesting(schema: dict[str, Any]) -> int:
    """Return how deep schema objects nest, counted through references as well."""
    todo, found = ["#"], dict[str, Definition]()
    anchors = _anchors(schema)
    while todo:
        pointer = todo.pop()
        if pointer not in found:
            found[pointer] = _definition(_resolved(schema, anchors, pointer))
            todo += found[pointer][1]
    return longest_chain(found)


def reference_resolver(schema: dict[str, Any]) -> Callable[[str], Any]:
    """Return a function that returns what a `$ref` is of; None if nothing."""
    anchors = _anchors(schema)
    return lambda reference: _resolved(schema, anchors, _pointer(reference))


def _anchors(schema: dict[str, Any]) -> dict[str, Any]:
    return {one["$anchor"]: one for one in _dicts(schema) if isinstance(one.get("$anchor"), str)}


def _pointer(reference: str) -> str:
    return "#" + unquote(reference.partition("#")[2])


def lark_nesting(lark: str) -> int:
    """Return how deep the rules and terminals of a Lark grammar nest."""
    depths: dict[str, int] = {}
    references: dict[str, set[str]] = {}
    current, depth = "", 0
    for match in _LARK_TOKEN.finditer(lark):
        text = match[0].strip(" \t?!")
        match match.lastgroup:
            case "definition":
                current, depth = text.partition(".")[0], 0
                depths.setdefault(current, 1)
            case "name":
                references.setdefault(current, set()).add(text)
            case "bracket":
                depth = max(0, depth + (1 if text in "([{" else -1))
                depths[current] = max(depths.get(current, 1), depth + 1)
    return longest_chain({name: (depths[name], frozenset(references.get(name, ()))) for name in depths})


def has_large_terminal(lark: str) -> bool:
    """Return whether a terminal of a Lark grammar has more than `MAX_OPTIONAL` parts that may match nothing.

    It counts groups, quantifiers, and references to other terminals with the parts of these terminals.
    """
    own, references = Counter[str](), dict[str, Counter[str]]()
    current = ""  # the terminal whose definition it is; empty in a rule
    for match in _LARK_TOKEN.finditer(lark):
        text, kind = match[0].strip(" \t?!"), match.lastgroup
        if kind == "definition":
            name = text.partition(".")[0]
            current = name if _is_terminal(name) else ""
            if current:
                own[current] += 1
                references.setdefault(current, Counter())
        elif kind == "ignored" and text.startswith("/") and not text.startswith("//"):
            if not current and num_optional(text) > MAX_OPTIONAL:
                return True
            own[current] += num_optional(text)
        elif kind == "name" and current and _is_terminal(text):
            references[current][text] += 1
        elif kind == "sign" or match[0] in tuple("([{"):
            own[current] += 1
    sizes: dict[str, int] = {}
    for circle in _circles({name: counts.keys() & references.keys() for name, counts in references.items()}):
        size = sum(own[name] + sum(n * sizes.get(one, 0) for one, n in references[name].items()) for name in circle)
        if size > MAX_OPTIONAL:
            return True
        sizes.update(dict.fromkeys(circle, size))
    return False


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _definition(node: Any) -> Definition:
    depth, references, level = 0, set[str](), [node]
    while level:
        level = [one for one in level if isinstance(one, dict)]
        depth += bool(level)
        for one in level:
            if isinstance(one.get("$ref"), str):
                references.add(_pointer(one["$ref"]))
        level = [child for one in level for child in _parts(one)]
    return depth, frozenset(references)


def _parts(node: dict[str, Any]) -> Iterator[Any]:
    for keyword, value in node.items():
        if keyword in ("$defs", "definitions", "const", "enum"):
            continue
        if keyword in ("properties", "patternProperties") and isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list):
            yield from value
        else:
            yield value


def _resolved(schema: dict[str, Any], anchors: Mapping[str, Any], pointer: str) -> Any:
    """Return what a pointer or an anchor is of; None if nothing."""
    if pointer == "#":
        return schema
    if not pointer.startswith("#/"):
        return anchors.get(pointer[1:])
    node: Any = schema
    for part in pointer[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isascii() and name.isdigit() and len(name) < 10 and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def _dicts(node: Any) -> Iterable[dict[str, Any]]:
    todo = [node]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            yield one
        todo += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
