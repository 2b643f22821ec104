"""The requests of a demo: from a JSON file or from the lists here, each checked before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import validation
from paceline.cli.inputs import STDIN, stdin_text, text_file
from paceline.errors import InvalidParams, InvalidType
from paceline.params import FIELDS, SamplingParams
from paceline.request import OPTION_NAMES, RequestOptions

_NAME = "--requests"
_SEEDS = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """One request. number: from 1. options: keywords of `LLM.stream`, each checked."""

    number: int
    prompt: str | tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def num_choices(self) -> int:
        """Choices of the prompt."""
        count: int = self.options.get("n", 1)
        return count

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of a choice; None: until the context is full."""
        limit: int | None = self.options.get("max_tokens", SamplingParams().max_tokens)
        return limit


def read_requests(path: Path) -> list[DemoRequest]:
    """Read the requests of a file, "-" for stdin: a JSON list of prompts, or of objects of a prompt and options.

    Raises `InvalidParams`, which names the request and its field.
    """
    name, text = _source(path)
    try:
        items = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise InvalidParams(f"{name} is not valid JSON: {error}") from None
    if not isinstance(items, list):
        raise InvalidParams(f"{name} must be a list of prompts or of objects with a prompt, not {_kind(items)}")
    if not items:
        raise InvalidParams(f"{name} is an empty list; give it at least one request")
    return requests_of(items, name)


def requests_of(items: Iterable[Any], name: str) -> list[DemoRequest]:
    """Parse a list of requests. name: what error messages call the list."""
    return [_request(item, number, f"{name}, request {number}") for number, item in enumerate(items, start=1)]


def limited(requests: Sequence[DemoRequest], max_tokens: int | None) -> list[DemoRequest]:
    """Limit every choice to so many tokens; None changes nothing."""
    if max_tokens is None:
        return list(requests)
    limit = validation.integer("max_tokens", max_tokens, 0)
    return [
        _with(one, "max_tokens", limit if one.max_tokens is None else min(one.max_tokens, limit)) for one in requests
    ]


def seeded(requests: Sequence[DemoRequest], seed: int) -> list[DemoRequest]:
    """Give every request without a seed one of its own: the first request this one, the next the next."""
    return [
        one if one.options.get("seed") is not None else _with(one, "seed", (seed + one.number - 1) % _SEEDS)
        for one in requests
    ]


def buffered(requests: Sequence[DemoRequest], max_buffered_tokens: int) -> list[DemoRequest]:
    """Give every request without a limit of unread tokens this one."""
    return [
        one
        if one.options.get("max_buffered_tokens") is not None
        else _with(one, "max_buffered_tokens", max_buffered_tokens)
        for one in requests
    ]


def _with(request: DemoRequest, name: str, value: int) -> DemoRequest:
    return DemoRequest(number=request.number, prompt=request.prompt, options={**request.options, name: value})


def _source(path: Path) -> tuple[str, str]:
    if str(path) == STDIN:
        return f"{_NAME} -", stdin_text()
    return f"{_NAME} {path}", text_file(_NAME, path)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; refuse a key that occurs twice."""
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
    """Convert the keys of `logit_bias`, texts in JSON, to token ids."""
    if key != "logit_bias" or not isinstance(value, Mapping):
        return value
    return {int(token) if token.isdecimal() else token: bias for token, bias in value.items()}


def _kind(value: object) -> str:
    """Name the type of a JSON value."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# What the demo model was trained on begins an answer after a thought, which may be empty.
_ANSWER = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    },
}
_TOOLS = (
    "# Tools\n\nYou can call the functions below. Each line is the JSON description of one function:\n"
    f"<tools>\n{json.dumps(_WEATHER)}\n</tools>\n\n"
    "To call a function, write its name and its arguments as JSON between tags:\n"
    '<tool_call>\n{"name": "function-name", "arguments": {"argument": "value"}}\n</tool_call>'
)


def _chat(question: str, system: str = "") -> str:
    """Render the first turn of a conversation in ChatML, as the demo model was trained."""
    before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{before}<|im_start|>user\n{question}<|im_end|>\n{_ANSWER}"


def _ask(question: str, system: str = "", **options: Any) -> Mapping[str, Any]:
    return {"prompt": _chat(question, system), "parse_special": True, "temperature": 0, **options}


FOR_DEMO_MODEL: Final[tuple[Mapping[str, Any], ...]] = (
    {"prompt": "Once upon a time", "max_tokens": 220, "echo": True},
    _ask("Tell me a story about a fox.", temperature=0.7, max_tokens=220),
    _ask("Where does Wilma live?", max_tokens=60),
    _ask("What is the job of Gilda?", "Talk like a pirate.", max_tokens=60),
    _ask("What is the weather like in Oslo?", _TOOLS, max_tokens=80),
    {"prompt": "A little bear", "n": 2, "max_tokens": 160, "echo": True},
    _ask("Describe Tessa.", max_tokens=120),
    {"prompt": "One cold morning, an old owl", "max_tokens": 200, "echo": True},
)
"""Stories, a question about the model's small world, a system prompt, a tool call, two choices of one prompt."""

FOR_ANY_MODEL: Final[tuple[Mapping[str, Any], ...]] = (
    {"prompt": "Once upon a time", "max_tokens": 200, "echo": True},
    {"prompt": "The three most important things about a garden are", "max_tokens": 120, "echo": True},
    {"prompt": "Question: What is the capital of France?\nAnswer:", "max_tokens": 24, "stop": ["\n"], "temperature": 0},
    {"prompt": "def fibonacci(n: int) -> int:\n", "max_tokens": 120, "temperature": 0.2, "echo": True},
    {"prompt": "Dear neighbour,\n\nI am writing to you because", "max_tokens": 160, "echo": True},
    {"prompt": "A haiku about rain:\n", "max_tokens": 60, "n": 2},
    {"prompt": "Monday, Tuesday, Wednesday,", "max_tokens": 30, "temperature": 0, "echo": True},
    {"prompt": "It was a dark and stormy night, and", "max_tokens": 200, "echo": True},
)
"""Texts to go on from, for models whose manner of conversation is not known here."""
