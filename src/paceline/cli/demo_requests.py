"""The requests of a demo: from a JSON file or from our own list, each checked before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import validation
from paceline.cli import reading
from paceline.errors import InvalidParams, InvalidType
from paceline.params import FIELDS, SamplingParams
from paceline.request import OPTION_NAMES, RequestOptions

_NAME = "--requests"
_SEEDS = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """One request. number: from 1. options: keywords of `LLM.stream`, checked one by one."""

    number: int
    prompt: str | tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def num_choices(self) -> int:
        """How many answers it wants."""
        count: int = self.options.get("n", 1)
        return count

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of an answer; None until the context is full."""
        limit: int | None = self.options.get("max_tokens", SamplingParams().max_tokens)
        return limit


def read_requests(path: Path) -> list[DemoRequest]:
    """The requests of a file, "-" for stdin: a JSON list of prompts, or of objects of a prompt and options.

    Raises `InvalidParams` for whatever is wrong with it, and names the request and its field.
    """
    name, text = _source(path)
    try:
        items = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise InvalidParams(f"{name} is no JSON: {error}") from None
    if not isinstance(items, list):
        raise InvalidParams(f"{name} must be a list of prompts or of objects with a prompt, not {_kind(items)}")
    if not items:
        raise InvalidParams(f"{name} has no requests; give it one at least")
    return requests_of(items, name)


def requests_of(items: Iterable[Any], name: str) -> list[DemoRequest]:
    """The requests of a list; name: what errors call it."""
    return [_request(item, number, f"{name}, request {number}") for number, item in enumerate(items, start=1)]


def limited(requests: Sequence[DemoRequest], max_tokens: int | None) -> list[DemoRequest]:
    """The same with answers of at most so many tokens; None leaves them as they are."""
    if max_tokens is None:
        return list(requests)
    limit = validation.integer("max_tokens", max_tokens, 0)
    return [
        _with(one, "max_tokens", limit if one.max_tokens is None else min(one.max_tokens, limit)) for one in requests
    ]


def seeded(requests: Sequence[DemoRequest], seed: int) -> list[DemoRequest]:
    """The same, each with a seed of its own where it says none: the first one this, the next one the next."""
    return [
        one if one.options.get("seed") is not None else _with(one, "seed", (seed + one.number - 1) % _SEEDS)
        for one in requests
    ]


def buffered(requests: Sequence[DemoRequest], max_buffered_tokens: int) -> list[DemoRequest]:
    """The same, each with this limit of tokens that its reader leaves waiting, where it says none."""
    return [
        one
        if one.options.get("max_buffered_tokens") is not None
        else _with(one, "max_buffered_tokens", max_buffered_tokens)
        for one in requests
    ]


def _with(request: DemoRequest, name: str, value: int) -> DemoRequest:
    return DemoRequest(number=request.number, prompt=request.prompt, options={**request.options, name: value})


def _source(path: Path) -> tuple[str, str]:
    if str(path) == reading.STDIN:
        return f"{_NAME} -", reading.stdin_text()
    return f"{_NAME} {path}", reading.text_file(_NAME, path)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that comes twice has no meaning."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


def _request(item: Any, number: int, name: str) -> DemoRequest:
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, Mapping):
        raise InvalidType(f"{name} must be a prompt or an object with a prompt, not {_kind(item)}")
    if "prompt" not in item:
        raise InvalidParams(f"{name} has no prompt")
    options = {key: _value(key, value) for key, value in item.items() if key != "prompt"}
    try:
        validation.reject_unknown(options, {*FIELDS, *OPTION_NAMES}, "SamplingParams and RequestOptions")
        SamplingParams(**{key: value for key, value in options.items() if key in FIELDS})
        RequestOptions(**{key: value for key, value in options.items() if key in OPTION_NAMES})
        return DemoRequest(number=number, prompt=_prompt(item["prompt"]), options=options)
    except InvalidParams as error:
        raise type(error)(f"{name}: {error}") from None


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return validation.text("prompt", prompt)
    if not isinstance(prompt, Sequence):
        raise InvalidType(f"prompt must be a text or a list of token ids, not {_kind(prompt)}")
    return tuple(validation.token_ids("prompt", prompt, 2**31))


def _value(key: str, value: Any) -> Any:
    """The keys of a JSON object are texts, and those of logit_bias mean token ids."""
    if key != "logit_bias" or not isinstance(value, Mapping):
        return value
    return {int(token) if token.isdecimal() else token: bias for token, bias in value.items()}


def _kind(value: object) -> str:
    """What a JSON value is called."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
