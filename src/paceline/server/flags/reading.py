"""How the text of a flag becomes a value: numbers, switches, lists, texts. Each reader names the flag in what it raises.

Pure; any thread. Numbers are plain ASCII digits: what Python would take beyond them (1_000, blanks, other scripts) is refused.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from paceline import validation
from paceline.errors import InvalidParams
from paceline.server.flags.flag import Reader

TRUE: Final = frozenset({"on", "enabled", "true", "1"})
FALSE: Final = frozenset({"off", "disabled", "false", "0"})
AUTO: Final = frozenset({"auto", "-1"})

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
_INT32 = 2**31 - 1
_MAX_LIST = 2**17  # characters, as many as the csv module takes


class Unset:
    """The value of a flag that asks for what holds without it."""

    def __repr__(self) -> str:
        return "automatic"


UNSET: Final = Unset()


def integer(low: int | None = None, high: int = _INT32, *, hint: str | None = None) -> Reader:
    """Whole numbers in [low, high]."""

    def read(label: str, text: str) -> int:
        return validation.integer(label, int(text) if _INTEGER.fullmatch(text) else text, low, high, hint)

    return read


def automatic_below(least: int, high: int = _INT32) -> Reader:
    """Whole numbers from `least` on; a smaller one, or "auto", leaves the choice to the engine."""

    def read(label: str, text: str) -> int | Unset:
        if text == "auto":
            return UNSET
        value: int = integer(None, high)(label, text)
        return UNSET if value < least else value

    return read


def number(low: float | None = None, high: float | None = None, *, above: float | None = None) -> Reader:
    """Finite numbers within bounds."""

    def read(label: str, text: str) -> float:
        value = float(text) if _NUMBER.fullmatch(text) else text
        return validation.number(label, value, low, high, above=above)

    return read


def switch(label: str, text: str) -> bool:
    """What llama-server takes for true and false."""
    if text in TRUE or text in FALSE:
        return text in TRUE
    raise InvalidParams(f"{label} must be on or off (or true, false, 1, 0), not {_shown(text)}")


def on_off_auto(label: str, text: str) -> str:
    """The three of them, in any of llama-server's spellings."""
    for name, spellings in (("on", TRUE), ("off", FALSE), ("auto", AUTO)):
        if text in spellings:
            return name
    raise InvalidParams(f"{label} must be on, off or auto, not {_shown(text)}")


def one_of(options: Collection[str] | Mapping[str, Any]) -> Reader:
    """One of some words; a mapping translates them."""

    def read(label: str, text: str) -> Any:
        name = validation.choice(label, text, options)
        return options[name] if isinstance(options, Mapping) else name

    return read


def text(label: str, text: str) -> str:
    """Any text that UTF-8 can carry."""
    return validation.text(label, text)


def some_text(label: str, text: str) -> str:
    """A text that is not empty, blanks at its ends aside."""
    if not text.strip():
        raise InvalidParams(f"{label} is empty; give it a value or leave it out")
    return validation.text(label, text)


def path(label: str, text: str) -> Path:
    """A path that the system can take."""
    if "\0" in some_text(label, text):
        raise InvalidParams(f"{label} has a NUL character, which no path can have")
    return Path(text)


def on_one_line(given: str | Path) -> str:
    """A text or path for a message: as it is, or in quotes where it has characters that would break a line."""
    text = str(given)
    return text if text.isprintable() else repr(text)


def items(label: str, text: str) -> tuple[str, ...]:
    """What stands between commas, without blanks at the ends; an item with a comma is put in double quotes."""
    validation.text(label, text)
    if len(text) > _MAX_LIST:
        raise InvalidParams(f"{label} must have at most {_MAX_LIST} characters, not {len(text)}")
    try:
        rows = list(csv.reader([text]))
    except csv.Error:
        raise InvalidParams(f"{label} must be one line of values between commas") from None
    return tuple(item.strip() for row in rows for item in row if item.strip())


def some_items(label: str, text: str) -> tuple[str, ...]:
    """As `items`, at least one."""
    found = items(label, text)
    if not found:
        raise InvalidParams(f"{label} names nothing; give it a value or leave it out")
    return found


def paths(label: str, text: str) -> tuple[Path, ...]:
    """Paths between commas."""
    return tuple(path(label, item) for item in some_items(label, text))


def one_text(label: str, text: str) -> tuple[str, ...]:
    """A text, of blanks perhaps, that may be given several times."""
    if not text:
        raise InvalidParams(f"{label} is empty; give it a value or leave it out")
    return (validation.text(label, text),)


def scaled_paths(label: str, text: str) -> tuple[tuple[Path, float], ...]:
    """FILE:SCALE between commas."""
    return tuple(_scaled(label, item) for item in some_items(label, text))


def shares(label: str, text: str) -> tuple[float, ...]:
    """Numbers between commas or slashes."""
    return tuple(number(0)(label, item) for item in re.split("[,/]+", text))


def json_object(label: str, text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(validation.text(label, text))
    except (ValueError, RecursionError) as error:
        raise InvalidParams(f"{label} must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise InvalidParams(f"{label} must be a JSON object, not {_shown(text)}")
    return value


def bias(label: str, text: str) -> tuple[tuple[int, float], ...]:
    """TOKEN+BIAS or TOKEN-BIAS."""
    match = re.fullmatch(r"([0-9]{1,10})([+-].{1,50})", text, re.ASCII | re.DOTALL)
    if match is None:
        raise InvalidParams(f"{label} must be a token id, + or -, and a number, such as 15043+1, not {_shown(text)}")
    return ((integer(0)(label, match[1]), number(-1e6, 1e6)(label, match[2])),)


def metadata(label: str, text: str) -> tuple[tuple[str, bool | int | float | str], ...]:
    """KEY=TYPE:VALUE between commas; the types are int, float, bool and str."""
    return tuple(_override(label, item) for item in some_items(label, text))


def unread(label: str, text: str) -> str:  # noqa: ARG001 - a reader
    """The text as it is, for a flag of whose value nothing follows."""
    return text


def _override(label: str, item: str) -> tuple[str, bool | int | float | str]:
    key, equals, typed = item.partition("=")
    kind, colon, value = typed.partition(":")
    readers: dict[str, Reader] = {"int": integer(-(2**63), 2**63 - 1), "float": number(), "str": text}
    readers["bool"] = one_of({"true": True, "false": False})
    if not (key and equals and colon and kind in readers):
        raise InvalidParams(f"{label} must be KEY=TYPE:VALUE with the type int, float, bool or str, not {_shown(item)}")
    return key, readers[kind](f"{label} {key}", value)


def _scaled(label: str, item: str) -> tuple[Path, float]:
    name, colon, scale = item.rpartition(":")
    if not colon:
        raise InvalidParams(f"{label} must be FILE:SCALE, such as style.gguf:0.5, not {_shown(item)}")
    return path(label, name), number(-1e6, 1e6)(f"{label}: the scale", scale)


def _shown(text: str) -> str:
    return f"{text!r:.80}"
