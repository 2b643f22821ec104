"""From what a caller calls a prompt to token ids that fit. Any thread but the engine's: tokenising takes time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, PromptTooLong
from paceline.params import SamplingParams
from paceline.request import RequestOptions, Truncate

if TYPE_CHECKING:  # what checks and cuts needs no compiled core
    from paceline.runtime import Tokenizer

Prompt = str | Sequence[int]


def is_batch(prompts: object) -> bool:
    """Whether this is a list of prompts and not one: of texts, or of lists of ids."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return False
    return len(prompts) == 0 or not isinstance(prompts[0], Integral)


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, options: RequestOptions) -> list[int]:
    """Return the token ids of a prompt. Raises `InvalidParams` for an empty one and for ids that the vocabulary has not."""
    if isinstance(prompt, (bytes, bytearray)):
        raise InvalidType("prompt must be a str or token ids, not bytes; decode it")
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special=options.add_special, parse_special=options.parse_special)
    else:
        ids = validation.token_ids("prompt", prompt, tokenizer.n_vocab)
    if not ids:
        raise InvalidParams("the prompt has no tokens; give it a word to go on from, or the vocabulary's bos token")
    return ids


def check_list(name: str, values: object) -> None:
    """Raise `InvalidType` for what is no list of texts; a single text is none, though Python iterates over its characters."""
    if isinstance(values, (str, bytes, bytearray, memoryview)) or not isinstance(values, Iterable):
        kind = type(values).__name__
        raise InvalidType(f"{name} must be a list of texts, not {kind}; make a list of a single one, and decode bytes")


def embedding_ids(name: str, text: Prompt, tokenizer: Tokenizer, options: RequestOptions) -> list[int]:
    """Return the token ids of a text to be embedded. Raises `InvalidParams` for one without tokens and for unknown ids."""
    if isinstance(text, str):
        validation.text(name, text)
        ids = tokenizer.encode(text, add_special=options.add_special, parse_special=options.parse_special)
    else:
        ids = validation.token_ids(name, text, tokenizer.n_vocab)
    if not ids:
        raise InvalidParams(f"{name} has no tokens, and nothing has no embedding")
    return ids


def embedding_texts(texts: Sequence[Prompt], tokenizer: Tokenizer, options: RequestOptions) -> list[list[int]]:
    """Return the token ids of texts to be embedded. Raises as `check_list` and `embedding_ids`."""
    check_list("texts", texts)
    return [embedding_ids(f"texts[{index}]", text, tokenizer, options) for index, text in enumerate(texts)]


def fitted(
    ids: list[int], params: SamplingParams, options: RequestOptions, max_positions: int, bos: int | None
) -> list[int]:
    """Return the ids, cut where they are more than fit and the request says how.

    A prompt needs one position a token; one that fits is never cut. One that is cut leaves room for max_tokens, or, where
    that is None or more than half of the positions, for as much as half of them. A bos token in front stays. Raises
    `PromptTooLong`.
    """
    if len(ids) <= max_positions:
        return ids
    if options.truncate is None:
        raise PromptTooLong(
            f"the prompt has {len(ids)} tokens, and a sequence can have {max_positions}; shorten it, raise n_ctx, "
            'or say truncate="left", "right" or "middle"',
            len(ids),
            max_positions,
        )
    half = max_positions // 2
    answer = half if params.max_tokens is None else min(params.max_tokens, half)
    return truncated(ids, max(1, max_positions - answer), options.truncate, keep=int(ids[0] == bos))


def truncated(ids: list[int], room: int, side: Truncate, *, keep: int = 0) -> list[int]:
    """At most `room` of the ids; the first `keep` of them stay where the room allows it."""
    if len(ids) <= room:
        return ids
    keep = min(keep, room - 1)
    if side == "right":
        return ids[:room]
    if side == "left":
        return ids[:keep] + ids[len(ids) - (room - keep) :]
    head = max(keep, room // 2)
    return ids[:head] + ids[len(ids) - (room - head) :]
