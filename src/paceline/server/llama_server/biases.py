"""llama-server's forms of logit_bias: pairs or an object, tokens by id or by text, `false` for never."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.runtime import Tokenizer

_MOST = 2**16
NEVER = -1e6
"""The bias that stands for minus infinity: no logit makes up for it."""


def biases(tokenizer: Tokenizer, value: list[Any] | dict[str, Any] | None, warnings: list[str]) -> dict[int, float]:
    """Token ids to what is added to their logits; several for one token add up.

    What llama-server skips (entries of another shape, ids that the vocabulary has not) is skipped, and named in `warnings`.
    """
    if value is not None and not isinstance(value, (list, dict)):
        raise InvalidType(f"logit_bias must be a list of pairs or an object, not {type(value).__name__}")
    if value is not None and len(value) > _MOST:
        raise InvalidParams(f"logit_bias must have at most {_MOST} entries, not {len(value)}")
    found: dict[int, float] = {}
    for token, bias in _entries(value or [], warnings):
        number = NEVER if bias is False else bias
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            warnings.append(f"logit_bias: {bias!r:.60} is neither a number nor false, and was ignored")
            continue
        amount = validation.number("logit_bias", number, NEVER, -NEVER)
        for token_id in _ids(tokenizer, token, warnings):
            found[token_id] = max(NEVER, min(-NEVER, found.get(token_id, 0.0) + amount))
    return found


def shown(found: Iterable[tuple[int, float]]) -> list[dict[str, Any]]:
    """As `generation_settings` has them; never is null."""
    return [{"bias": None if bias <= NEVER else bias, "token": token} for token, bias in found]


def _entries(value: list[Any] | dict[str, Any], warnings: list[str]) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from ((_number_in(key), bias) for key, bias in value.items())
        return
    for entry in value:
        if isinstance(entry, list) and len(entry) == 2:
            yield entry[0], entry[1]
        else:
            warnings.append(f"logit_bias: {entry!r:.60} is no pair of a token and a bias, and was ignored")


def _number_in(key: str) -> int | str:
    return int(key) if key.isascii() and key.removeprefix("-").isdigit() and len(key) < 12 else key


def _ids(tokenizer: Tokenizer, token: Any, warnings: list[str]) -> list[int]:
    if isinstance(token, str):
        return tokenizer.encode(validation.text("logit_bias", token), add_special=False)
    if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < tokenizer.n_vocab:
        return [token]
    warnings.append(f"logit_bias: {token!r:.60} is no token of the vocabulary, and was ignored")
    return []
