"""The shapes that llama-server takes for a prompt, as token ids. Tokenising takes time: not for the event loop."""

from __future__ import annotations

from typing import Any

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.runtime import Tokenizer

_SHAPES = "a text, a list of token ids and texts, or an object with prompt_string"


def all_prompts(
    tokenizer: Tokenizer, name: str, value: Any, *, add_special: bool = True, parse_special: bool = True
) -> list[list[int]]:
    """The token ids of one prompt or of each of several. A list is several prompts unless there is a number in it.

    add_special, parse_special: as in `Tokenizer.encode`; llama-server does both.

    Raises `InvalidParams` where there is none, `InvalidType` for another shape, and what tokenising raises.
    """
    if is_several(value):
        if not value:
            raise InvalidParams(f"{name} must not be an empty list; give it a text or token ids")
        named = [(f"{name}[{index}]", one) for index, one in enumerate(value)]
    else:
        named = [(name, value)]
    return [
        _one_prompt(tokenizer, each, one, add_special=add_special, parse_special=parse_special) for each, one in named
    ]


def is_several(value: object) -> bool:
    """Whether it is a list of prompts, where `all_prompts` is asked."""
    return isinstance(value, list) and not any(_is_number(one) for one in value)


def _one_prompt(tokenizer: Tokenizer, name: str, value: Any, *, add_special: bool, parse_special: bool) -> list[int]:
    if isinstance(value, dict) and "prompt_string" in value:
        if value.get("multimodal_data"):
            raise Unsupported(f"{name} has multimodal_data, and this model reads texts only")
        value = value["prompt_string"]
    ids = mixed_ids(tokenizer, name, value, add_special=add_special, parse_special=parse_special)
    if not ids:
        raise InvalidParams(f"{name} has no tokens; give it a word to go on from")
    return ids


def mixed_ids(tokenizer: Tokenizer, name: str, value: Any, *, add_special: bool, parse_special: bool) -> list[int]:
    """The ids of a text, or of texts and ids in a list. Special tokens go before a text that comes first, only."""
    if isinstance(value, str):
        return tokenizer.encode(validation.text(name, value), add_special=add_special, parse_special=parse_special)
    if not isinstance(value, list):
        raise InvalidType(f"{name} must be {_SHAPES}, not {type(value).__name__}")
    if not any(isinstance(one, str) for one in value):
        return validation.token_ids(name, value, tokenizer.n_vocab)
    ids: list[int] = []
    for index, one in enumerate(value):
        ids += _part(tokenizer, f"{name}[{index}]", one, add_special and index == 0, parse_special)
    return ids


def _part(tokenizer: Tokenizer, name: str, value: Any, add_special: bool, parse_special: bool) -> list[int]:
    if isinstance(value, str):
        return tokenizer.encode(validation.text(name, value), add_special=add_special, parse_special=parse_special)
    hint = f"the vocabulary has {tokenizer.n_vocab} tokens"
    return [validation.integer(name, value, 0, tokenizer.n_vocab - 1, hint)]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
