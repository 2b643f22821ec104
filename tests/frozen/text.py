"""Turn responses into text that is the same on every machine and readable in a review."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from paceline import __version__

NUMBER = "<number>"
_BODY, _EVENT = 120, 280  # characters of a line, the latter in a stream
_MEASURED = re.compile(
    r'("(?:[a-z_]+_(?:ms|at|per_second|duration)|created|total_bytes|logprob|prob|score|relevance_score)"\s*:\s*)'
    r"-?\d[\d.eE+-]*"
)
_FRACTION = re.compile(r"(?<=[:,\[ ])-?\d+(?:\.\d{5,}(?:e[+-]?\d+)?|(?:\.\d+)?e[+-]?\d+)(?=[,\]}])")
_BASE64 = re.compile(r'("embedding":)"[\w+/=]+"')
_TIME = re.compile(r"\b20\d\d-\d\d-\d\dT[\d:.]+(?:Z|\+00:00)")
_VERSION = re.compile(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])")
_ID = re.compile(r"(?<=[\"_-])(?=[a-zA-Z]*\d)(?:[0-9a-f]{12,64}|[0-9a-zA-Z]{24,40})(?=[\"_\s>])")


class Normaliser:
    """Replaces the values of one response by placeholders. Equal ids get equal numbers."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> str:
        """Replace ids, times, speeds, probabilities and versions in the text of JSON or headers."""
        text = _MEASURED.sub(rf'\1"{NUMBER}"', text)
        text = _FRACTION.sub(f'"{NUMBER}"', text)
        text = _BASE64.sub(r'\1"<base64>"', text)
        text = _VERSION.sub("<version>", _TIME.sub("<time>", text))
        return _ID.sub(lambda found: f"<id {self._ids.setdefault(found[0], len(self._ids) + 1)}>", text)


def body_lines(text: str, normalise: Normaliser) -> Iterator[str]:
    """Yield the lines of a response's body. JSON is laid out over several lines, and marked if it was not compact."""
    for line in normalise(text).split("\n"):
        prefix = "data: " if line.startswith("data: ") else ""
        try:
            value = json.loads(line.removeprefix(prefix))
        except ValueError:
            yield line
            continue
        if isinstance(value, dict) and "model_info" in value:
            value["model_info"] = dict(
                sorted(value["model_info"].items())
            )  # a file's metadata, in the order of a hash table
        is_compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False) == line.removeprefix(prefix)
        yield prefix + ("" if is_compact else "(not compact) ") + laid_out(value, _EVENT if "\n" in text else _BODY)


def laid_out(value: Any, width: int, indent: int = 0) -> str:
    """Return JSON in lines of at most `width` characters. Members keep their order."""
    if isinstance(value, list) and len(value) > 8 and all(item == NUMBER or isinstance(item, float) for item in value):
        return f'"<{len(value)} numbers>"'
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or len(flat) + indent <= width:
        return flat
    inner = "\n" + " " * (indent + 2)
    if isinstance(value, list):
        return (
            f"[{inner}" + f",{inner}".join(laid_out(item, width, indent + 2) for item in value) + f"\n{' ' * indent}]"
        )
    members = (f"{json.dumps(name)}: {laid_out(member, width, indent + 2)}" for name, member in value.items())
    return f"{{{inner}" + f",{inner}".join(members) + f"\n{' ' * indent}}}"
