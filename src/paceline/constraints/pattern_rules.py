"""Checks regular expressions before they are compiled. Pure; any thread."""

from __future__ import annotations

import re
from typing import Final

_MAX_REPEATED: Final = 20_000
MAX_OPTIONAL: Final = 2_000
"""The most groups and quantifiers of a pattern: memory grows with the square of consecutive parts that may match nothing."""
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


def unsupported_syntax(pattern: str) -> str | None:
    """Return why a pattern would not be enforced as JSON Schema means it; None if it would."""
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
    return None


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
                size = last[-1] * max(1, *(int(one[:9] or 0) for one in counted.groups(default="")))
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


def num_optional(pattern: str) -> int:
    """Return an upper bound of the parts of a pattern that may match nothing: the number of its groups and quantifiers."""
    return sum(match[0][0] in "(?*{" for match in _TOKEN.finditer(pattern))
