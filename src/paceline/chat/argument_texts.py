"""Terminals of a Lark grammar for arguments that are plain text in a call. Pure; any thread."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from paceline.constraints.pattern_rules import is_too_large, unsupported_syntax
from paceline.constraints.schema_rewrites import DATE_PATTERN, TIME_PATTERN

_MAX_LENGTH: Final = 10_000
_MAX_PARTS: Final = 200  # schema objects of one argument
_LIMITS: Final = frozenset(("pattern", "format", "minLength", "maxLength", "enum", "const", "minimum", "maximum"))
_OPEN: Final = "(?s:.*)"
_OCTET: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HOST: Final = (
    r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?){0,8}"
)
_FORMATS: Final[Mapping[str, str]] = {
    "date": DATE_PATTERN,
    "time": TIME_PATTERN,
    "date-time": f"{DATE_PATTERN}[Tt]{TIME_PATTERN}",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9_'+\-]+(?:\.[A-Za-z0-9_'+\-]+){{0,8}}@{_HOST}",
    "uri": r"[A-Za-z][A-Za-z0-9+.\-]*:[A-Za-z0-9\-._~:\/?#\[\]@!$&'()*+,;=%]+",
}
_ANCHOR: Final = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|(?P<anchor>[\^$])|(?P<either>\|)|(?P<open>\()|(?P<close>\))", re.DOTALL
)

Resolve = Callable[[str], Any]


class NotEnforced(Exception):
    """A keyword that plain text cannot be held to; `keyword` is empty for the schema as a whole."""

    def __init__(self, keyword: str, reason: str) -> None:
        super().__init__(reason)
        self.keyword = keyword


def text_terminal(schema: Any, resolve: Resolve, report: Callable[[str, str], None]) -> str | None:
    """Return an expression of the texts that a schema allows; None: any text.

    Args:
        schema: The argument's.
        resolve: Returns the target of a `$ref`.
        report: Takes the keyword and the reason of each part that is not enforced.
    """
    try:
        return _Reader(resolve, report).terminal(schema)
    except NotEnforced as error:
        report(error.keyword, str(error))
        return None


class _Reader:
    """Reads the schema of one argument."""

    def __init__(self, resolve: Resolve, report: Callable[[str, str], None]) -> None:
        self._resolve, self._report, self._num_left = resolve, report, _MAX_PARTS

    def terminal(self, schema: Any) -> str | None:
        node = schema
        while isinstance(node, dict):
            self._num_left -= 1
            if self._num_left < 0:
                raise NotEnforced("", "the argument is plain text with too many alternatives")
            if not isinstance(node.get("$ref"), str):
                break
            node = self._resolve(node["$ref"])
        if not isinstance(node, dict):
            return None
        values = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(values, list) and values:
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return "(" + " | ".join(f"/{quoted_pattern(text)}/" for text in texts) + ")"
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(node.get(keyword), list):
                return self._combined(keyword, node[keyword])
        return _limited(node, self._report)

    def _combined(self, keyword: str, children: list[Any]) -> str | None:
        """Return the expression of a list of schemas. It is None for alternatives if one of them allows any text."""
        found = [self.terminal(child) for child in children]
        if keyword == "allOf":
            return " & ".join(f"({part})" for part in found if part is not None) or None
        return None if None in found else "(" + " | ".join(f"({part})" for part in found) + ")"


def quoted_pattern(text: str) -> str:
    """Return a regular expression of one text."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\u{{{ord(c):x}}}" for c in text)


def _limited(node: Mapping[str, Any], report: Callable[[str, str], None]) -> str | None:
    """Return the expression of a schema object without alternatives."""
    if node.get("type") != "string":
        for keyword in sorted(_LIMITS & node.keys()):
            report(keyword, "in this chat format the argument is plain text, whose type is decided afterwards")
        return None
    parts = []
    for part in (_length, _pattern, _format):
        try:
            found = part(node)
        except NotEnforced as error:
            report(error.keyword, str(error))
        else:
            parts += [] if found is None else [f"/{found}/"]
    return " & ".join(parts) or None


def _length(node: Mapping[str, Any]) -> str | None:
    least, most = node.get("minLength", 0), node.get("maxLength")
    if not isinstance(least, (int, float)) or not isinstance(most, (int, float, type(None))):
        return None
    if least > _MAX_LENGTH:
        raise NotEnforced("minLength", f"lengths of plain text are enforced up to {_MAX_LENGTH}")
    if most is not None and most > _MAX_LENGTH:
        raise NotEnforced("maxLength", f"lengths of plain text are enforced up to {_MAX_LENGTH}")
    if not least and most is None:
        return None
    return f"(?s:.{{{int(least)},{'' if most is None else int(most)}}})"


def _pattern(node: Mapping[str, Any]) -> str | None:
    pattern = node.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        return None
    reason = unsupported_syntax(pattern) or ("it repeats too much" if is_too_large(pattern) else None)
    if reason:
        raise NotEnforced("pattern", reason)
    begins, ends, inner = _without_anchors(pattern)
    inner = inner.replace("/", r"\/") if r"\/" not in inner else inner
    return ("" if begins else _OPEN) + f"(?:{inner})" + ("" if ends else _OPEN)


def _without_anchors(pattern: str) -> tuple[bool, bool, str]:
    begins, ends, depth = False, False, 0
    start, end = 0, len(pattern)
    has_either = False
    for match in _ANCHOR.finditer(pattern):
        depth += bool(match["open"]) - bool(match["close"])
        has_either |= bool(match["either"]) and depth == 0
        if not match["anchor"]:
            continue
        if match[0] == "^" and match.start() == 0:
            begins, start = True, 1
        elif match[0] == "$" and match.end() == len(pattern):
            ends, end = True, match.start()
        else:
            raise NotEnforced("pattern", "in plain text ^ and $ are known at its beginning and its end alone")
    if has_either and (begins or ends):
        raise NotEnforced("pattern", "in plain text ^ and $ are not known beside |; put the alternatives into a group")
    return begins, ends, pattern[start:end]


def _format(node: Mapping[str, Any]) -> str | None:
    name = node.get("format")
    if not isinstance(name, str):
        return None
    if name in ("duration", "ipv6"):
        raise NotEnforced("format", f"{name!r} is not enforced in plain text")
    return _FORMATS.get(name)
