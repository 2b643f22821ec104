"""Read the text of a flag into a value: numbers, switches, lists, texts. Errors name the flag. Pure; any thread.

Numbers are plain ASCII digits. Other forms that Python accepts (1_000, blanks, other scripts) are errors.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from paceline import validation
from paceline.errors import InvalidParams
from paceline.hub import ModelReference, check_file, is_reference, parse_hub_reference, parse_reference
from paceline.sampling_table import SAMPLER_LETTERS, SAMPLER_NAMES, SAMPLERS

Reader = Callable[[str, str], Any]
"""Takes the flag's name for messages and the text; returns the value or raises `InvalidParams`."""


class Unset:
    """The value of a flag that leaves its setting at the default."""

    def __repr__(self) -> str:
        return "automatic"


UNSET: Final = Unset()


TRUE: Final = frozenset({"on", "enabled", "true", "1"})
FALSE: Final = frozenset({"off", "disabled", "false", "0"})
AUTO: Final = frozenset({"auto", "-1"})

_HOST = re.compile(r"(?:\*\.)?[\w-]+(?:\.[\w-]+)*\.?", re.ASCII)
_ORIGIN = re.compile(r"https?://(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?/?", re.ASCII)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_COMMAND_R_ROLES = "{'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}"
NAMED_TEMPLATES: Final = {  # of llama-server's built-in names
    "chatml": "chatml",  # llama.cpp's own
    "llama3": (
        "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
        "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "command-r": (
        f"{{% set roles = {_COMMAND_R_ROLES} %}}{{% for message in messages if message['role'] in roles %}}"
        "{{ '<|START_OF_TURN_TOKEN|><|' + roles[message['role']] + '_TOKEN|>' + message['content'] | trim "
        "+ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
    ),
}
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
_INT32 = 2**31 - 1
_MAX_LIST = 2**17  # characters, as many as the csv module takes


def integer(low: int | None = None, high: int = _INT32, *, hint: str | None = None) -> Reader:
    """Return a reader of whole numbers in [low, high]."""

    def read(label: str, text: str) -> int:
        return validation.integer(label, int(text) if _INTEGER.fullmatch(text) else text, low, high, hint)

    return read


def automatic_below(least: int, high: int = _INT32) -> Reader:
    """Return a reader of whole numbers from `least` on; a smaller one, or "auto", is `UNSET`."""

    def read(label: str, text: str) -> int | Unset:
        if text == "auto":
            return UNSET
        value: int = integer(None, high)(label, text)
        return UNSET if value < least else value

    return read


def number(low: float | None = None, high: float | None = None, *, above: float | None = None) -> Reader:
    """Return a reader of finite numbers within bounds."""

    def read(label: str, text: str) -> float:
        value = float(text) if _NUMBER.fullmatch(text) else text
        return validation.number(label, value, low, high, above=above)

    return read


def negative_is_automatic(label: str, text: str) -> float | Unset:
    """Read a number; a negative one, from -1 on, is `UNSET`."""
    value: float = number(-1)(label, text)
    return UNSET if value < 0 else value


def seconds(word: str, off: object, high: float = 1e9) -> Reader:
    """Return a reader of a number of seconds above 0; -1, which messages call `word`, gives `off`."""

    def read(label: str, text: str) -> object:
        value: float = number(-1, high)(label, text)
        if value <= 0 and value != -1:
            raise InvalidParams(f"{label} must be a number of seconds > 0, or -1 for {word}, not {value:g}")
        return off if value == -1 else float(value)

    return read


def layers(label: str, text: str) -> int | Unset:
    """Read a whole number, auto or all: -1 is automatic and less is all, as in llama-server. Ours is -1 for all."""
    if text in ("auto", "all"):
        return UNSET if text == "auto" else -1
    value: int = integer(-(2**31))(label, text)
    return UNSET if value == -1 else max(value, -1)


def switch(label: str, text: str) -> bool:
    """Read llama-server's spellings of true and false."""
    if text in TRUE or text in FALSE:
        return text in TRUE
    raise InvalidParams(f"{label} must be on or off (or true, false, 1, 0), not {_shown(text)}")


def on_off_auto(label: str, text: str) -> str:
    """Read on, off or auto in any of llama-server's spellings."""
    for name, spellings in (("on", TRUE), ("off", FALSE), ("auto", AUTO)):
        if text in spellings:
            return name
    raise InvalidParams(f"{label} must be on, off or auto, not {_shown(text)}")


def one_of(options: Collection[str] | Mapping[str, Any]) -> Reader:
    """Return a reader of a word among `options`; a mapping translates it."""

    def read(label: str, text: str) -> Any:
        name = validation.choice(label, text, options)
        return options[name] if isinstance(options, Mapping) else name

    return read


def text(label: str, text: str) -> str:
    """Read any text that UTF-8 can encode."""
    return validation.text(label, text)


def some_text(label: str, text: str) -> str:
    """Read a text that is not blank."""
    if not text.strip():
        raise InvalidParams(f"{label} is empty; give it a value or leave it out")
    return validation.text(label, text)


def path(label: str, text: str) -> Path:
    """Read a path."""
    if "\0" in some_text(label, text):
        raise InvalidParams(f"{label} has a NUL character, which no path can have")
    return Path(os.path.expanduser(text))  # noqa: PTH111 - pathlib's raises for an unknown user


def model(label: str, text: str) -> Path | ModelReference:
    """Read a path, or the name of a model that has a scheme."""
    if is_reference(some_text(label, text)):
        return parse_reference(text, name=label)
    return path(label, text)


def repository(label: str, text: str) -> ModelReference:
    """Read a repository of the hub, with a quantisation if it has one."""
    return parse_hub_reference(some_text(label, text), name=label)


def repository_file(label: str, text: str) -> str:
    """Read the path of a file in a repository."""
    return check_file(some_text(label, text), label) or ""


def url(label: str, text: str) -> ModelReference:
    """Read the URL of a GGUF file."""
    if not text.lower().startswith(("http://", "https://")):
        raise InvalidParams(f"{label} must be a URL that begins with http:// or https://, not {_shown(text)}")
    return parse_reference(text, name=label)


def items(label: str, text: str) -> tuple[str, ...]:
    """Read a list between commas, trimmed; an item with a comma stands in double quotes."""
    validation.text(label, text)
    if len(text) > _MAX_LIST:
        raise InvalidParams(f"{label} must have at most {_MAX_LIST} characters, not {len(text)}")
    try:
        rows = list(csv.reader([text]))
    except csv.Error:
        raise InvalidParams(f"{label} must be one line of values between commas") from None
    return tuple(item.strip() for row in rows for item in row if item.strip())


def some_items(label: str, text: str) -> tuple[str, ...]:
    """Read a list like `items` with at least one item."""
    found = items(label, text)
    if not found:
        raise InvalidParams(f"{label} names nothing; give it a value or leave it out")
    return found


def many(read: Reader) -> Reader:
    """Return a reader of values between commas, at least one."""
    return lambda label, text: tuple(read(label, item) for item in some_items(label, text))


def one_text(label: str, text: str) -> tuple[str, ...]:
    """Read a text, possibly blank, of a flag that may be repeated."""
    if not text:
        raise InvalidParams(f"{label} is empty; give it a value or leave it out")
    return (validation.text(label, text),)


def named_paths(label: str, text: str) -> tuple[tuple[str, Path], ...]:
    """Read NAME=PATH between commas, or one JSON object with name and path, as vLLM takes it."""
    if text.lstrip().startswith("{"):
        given = json_object(label, text)
        unknown = given.keys() - {"name", "path", "base_model_name"}
        if unknown or not all(isinstance(given.get(name), str) for name in ("name", "path")):
            raise InvalidParams(f'{label} must have the texts "name" and "path", not {_shown(text)}')
        return (_named(label, f"{given['name']}={given['path']}"),)
    return tuple(_named(label, item) for item in some_items(label, text))


def shares(label: str, text: str) -> tuple[float, ...]:
    """Read numbers between commas or slashes."""
    return tuple(number(0)(label, item) for item in re.split("[,/]+", text))


def json_object(label: str, text: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = json.loads(validation.text(label, text))
    except (ValueError, RecursionError) as error:
        raise InvalidParams(f"{label} must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise InvalidParams(f"{label} must be a JSON object, not {_shown(text)}")
    return value


def name_or_table(label: str, text: str) -> str | dict[str, Any]:
    """Read a text that is not blank, or a JSON object."""
    return json_object(label, text) if text.lstrip().startswith("{") else some_text(label, text)


def instruments(label: str, text: str) -> tuple[str, ...]:
    """Read names as MODULE:ATTR between commas."""
    found = some_items(label, text)
    for name in found:
        module, _, attribute = name.partition(":")
        if not module or not attribute:
            raise InvalidParams(f"{label} must be MODULE:ATTR, such as my_package.watching:Slow, not {_shown(name)}")
    return found


def bias(label: str, text: str) -> tuple[tuple[int, float], ...]:
    """Read TOKEN+BIAS or TOKEN-BIAS."""
    match = re.fullmatch(r"([0-9]{1,10})([+-].{1,50})", text, re.ASCII | re.DOTALL)
    if match is None:
        raise InvalidParams(f"{label} must be a token id, + or -, and a number, such as 15043+1, not {_shown(text)}")
    return ((integer(0)(label, match[1]), number(-1e6, 1e6)(label, match[2])),)


def mebibytes(label: str, text: str) -> tuple[int, ...]:
    """Read whole numbers of MiB between commas or slashes, as bytes."""
    return tuple(integer(0, _INT32)(label, item) << 20 for item in re.split("[,/]+", text))


def sampler_names(label: str, text: str) -> tuple[str, ...]:
    """Read samplers between semicolons, spelt with -, _ or neither."""
    names = [name.strip().lower() for name in text.split(";") if name.strip()]
    return tuple(SAMPLER_NAMES.get(name) or validation.choice(label, name, SAMPLERS) for name in names)


def sampler_letters(label: str, text: str) -> tuple[str, ...]:
    """Read samplers by their letters."""
    for letter in text:
        if letter not in SAMPLER_LETTERS:
            raise InvalidParams(
                f"{label} must be of the letters {''.join(sorted(SAMPLER_LETTERS))}, one a sampler, not {text!r:.80}"
            )
    return tuple(SAMPLER_LETTERS[letter] for letter in text)


def host_names(example: str, *, or_any: bool = False) -> Reader:
    """Return a reader of host names between commas, *.name for all below one, and if or_any * for any."""
    tail = ", or *" if or_any else ""
    wanted = f"names such as {example} or *.example.org, without scheme and port, between commas{tail}"
    return _matching(_HOST, wanted, ("*",) if or_any else ())


def origins(label: str, text: str) -> tuple[str, ...]:
    """Read whole origins between commas, localhost for every port of this machine, or * for all."""
    wanted = "origins such as https://page.example or http://192.168.0.7:3000, between commas, localhost, or *"
    return tuple(origin.rstrip("/") for origin in _matching(_ORIGIN, wanted, ("*", "localhost"))(label, text))


def http_names(example: str) -> Reader:
    """Return a reader of HTTP methods or names of headers between commas."""
    return _matching(_TOKEN, f"names between commas, such as {example}, or *")


def _matching(pattern: re.Pattern[str], wanted: str, others: Collection[str] = ()) -> Reader:
    def read(label: str, text: str) -> tuple[str, ...]:
        found = some_items(label, text)
        for name in found:
            if name not in others and not pattern.fullmatch(name):
                raise InvalidParams(f"{label} must be {wanted}, not {name!r:.80}")
        return found

    return read


def route_prefix(label: str, text: str) -> str:
    """Read the prefix of all routes, /word/word, without a slash at its end."""
    trimmed = validation.text(label, text).rstrip("/")
    if trimmed and (not trimmed.startswith("/") or not trimmed.isprintable() or set(trimmed) & set(" ?#%{}\\")):
        raise InvalidParams(f"{label} must begin with a slash and be a plain path, such as /llm, not {text!r:.80}")
    return trimmed


def chat_template(label: str, text: str) -> str:
    """Read Jinja source or a template's name. Of llama-server's names only some are supported."""
    if "{" not in some_text(label, text) and text not in NAMED_TEMPLATES:
        raise InvalidParams(
            f"{label} must be {', '.join(NAMED_TEMPLATES)} or the text of a Jinja template, not {text!r:.80}; other names of "
            "templates are not supported: give the text, or its file to --chat-template-file, or leave it out for the "
            "model's own"
        )
    return NAMED_TEMPLATES.get(text, text)


def unread(label: str, text: str) -> str:  # noqa: ARG001 - a reader
    """Return the text as it is, for a flag without a use for its value."""
    return text


def _override(label: str, item: str) -> tuple[str, bool | int | float | str]:
    key, equals, typed = item.partition("=")
    kind, colon, value = typed.partition(":")
    readers: dict[str, Reader] = {"int": integer(-(2**63), 2**63 - 1), "float": number(), "str": text}
    readers["bool"] = one_of({"true": True, "false": False})
    if not (key and equals and colon and kind in readers):
        raise InvalidParams(f"{label} must be KEY=TYPE:VALUE with the type int, float, bool or str, not {_shown(item)}")
    return key, readers[kind](f"{label} {key}", value)


def _placement(label: str, item: str) -> tuple[str, str]:
    pattern, equals, buffer = item.rpartition("=")
    if not (pattern and equals and buffer):
        raise InvalidParams(f"{label} must be PATTERN=TYPE, such as _exps=CPU, not {_shown(item)}")
    return pattern, buffer


def _named(label: str, item: str) -> tuple[str, Path]:
    name, equals, file = item.partition("=")
    if not (name and equals and file):
        raise InvalidParams(f"{label} must be NAME=FILE, such as sql=sql-lora.gguf, not {_shown(item)}")
    return name, path(label, file)


def _scaled(label: str, item: str) -> tuple[Path, float]:
    name, colon, scale = item.rpartition(":")
    if not colon:
        raise InvalidParams(f"{label} must be FILE:SCALE, such as style.gguf:0.5, not {_shown(item)}")
    return path(label, name), number(-1e6, 1e6)(f"{label}: the scale", scale)


unscaled_paths: Final = many(lambda label, item: (path(label, item), 1.0))
scaled_paths: Final = many(_scaled)
metadata: Final = many(_override)
placements: Final = many(_placement)


def _shown(text: str) -> str:
    return f"{text!r:.80}"
