"""Which schema objects apply to one value: by allOf, references, alternatives, properties of one name. Pure; any thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

Schema = dict[str, Any]

_MAX_STEPS: Final = 20_000
_OF_OBJECTS: Final = frozenset(("properties", "patternProperties", "additionalProperties"))
_OF_ARRAYS: Final = frozenset(("prefixItems", "items", "additionalItems"))


class TooManyGroups(Exception):
    """The alternatives of a schema multiply."""


def groups_of_one_value(root: Schema, resolve: Callable[[str], Any]) -> Iterator[list[Schema]]:
    """Yield the schema objects that can apply together to one value, for the root and every part of its values.

    Of anyOf and oneOf one alternative at a time, unless several such lists meet. Parts of values that may be the same one count
    as such: all items of an array that several objects describe, and a property beside patterns that its name may match.

    Args:
        root: The schema.
        resolve: Returns what a `$ref` is of; anything but an object where there is nothing.

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


def _alternatives(nodes: list[Schema], resolve: Callable[[str], Any]) -> Iterator[list[Schema]]:
    todo: list[tuple[list[Schema], frozenset[int]]] = [(nodes, frozenset())]
    for _ in range(_MAX_STEPS):
        if not todo:
            return
        given, chosen = todo.pop()
        base = with_included(given, resolve)
        lists = [one[keyword] for one in base for keyword in ("anyOf", "oneOf") if isinstance(one.get(keyword), list)]
        lists = [one for one in lists if id(one) not in chosen]
        chosen |= {id(one) for one in lists}
        if not lists:
            yield base
        elif len(lists) == 1:
            todo += [([*base, one], chosen) for one in lists[0] if isinstance(one, dict)]
        else:
            todo.append(([*base, *(one for some in lists for one in some if isinstance(one, dict))], chosen))
    raise TooManyGroups


def with_included(nodes: list[Schema], resolve: Callable[[str], Any]) -> list[Schema]:
    """Return the schema objects with those that they include."""
    found: dict[int, Schema] = {}
    todo = list(nodes)
    while todo:
        one = todo.pop()
        if id(one) in found:
            continue
        found[id(one)] = one
        included = one.get("allOf")
        more = [*included] if isinstance(included, list) else []
        if isinstance(one.get("$ref"), str):
            more.append(resolve(one["$ref"]))
        todo += [child for child in more if isinstance(child, dict)]
    return list(found.values())


def _parts(group: list[Schema]) -> Iterator[list[Schema]]:
    yield from _properties([one for one in group if one.keys() & _OF_OBJECTS])
    of_arrays = [one for one in group if one.keys() & _OF_ARRAYS]
    items = [child for one in of_arrays for keyword in _OF_ARRAYS for child in _listed(one.get(keyword))]
    if len(of_arrays) > 1:
        yield items
    else:
        yield from ([one] for one in items)


def _properties(group: list[Schema]) -> Iterator[list[Schema]]:
    named = [one["properties"] if isinstance(one.get("properties"), dict) else {} for one in group]
    patterns = [pair for one in group for pair in _patterns(one.get("patternProperties"))]
    for name in {name for one in named for name in one}:
        beside = [one.get("additionalProperties") for one, names in zip(group, named, strict=True) if name not in names]
        matching = [child for pattern, child in patterns if _may_match(pattern, name)]
        yield _dicts([*(one.get(name) for one in named), *matching, *beside])
    others = _dicts([one.get("additionalProperties") for one in group])
    if len(group) > 1:
        yield [*(child for _, child in patterns), *others]
    else:
        yield from ([one] for one in (*(child for _, child in patterns), *others))


def _listed(value: Any) -> list[Schema]:
    return _dicts(value if isinstance(value, list) else [value])


def _patterns(value: Any) -> list[tuple[str, Schema]]:
    return [(key, one) for key, one in value.items() if isinstance(one, dict)] if isinstance(value, dict) else []


def _may_match(pattern: str, name: str) -> bool:
    """Return whether a name may match; any may match a pattern that repeats, whose search may take long."""
    if re.search(r"[*+{?(]", pattern):
        return True
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def _dicts(nodes: list[Any]) -> list[Schema]:
    return [one for one in nodes if isinstance(one, dict)]
