"""Log-probabilities in OpenAI's two shapes: columns for completions, a record a token for chat. Pure; any thread.

Tokens are told as their text; where their bytes are no text by themselves, completions spell them as OpenAI does, with
bytes: and their hexadecimal digits, and chat has the bytes beside. A probability of zero is told as -9999.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.streaming import TokenLogprobs

_LEAST = -9999.0  # JSON has no infinity

Pieces = Sequence[bytes]
"""The bytes of every token, by id."""


class Columns(msgspec.Struct):
    """Of completions. The first token of a prompt has no probability: null."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class TopLogprob(msgspec.Struct):
    """Of chat: one of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """Of chat: a token of the answer."""

    top_logprobs: list[TopLogprob]


class ColumnsWriter:
    """Writes the columns of one choice, chunk by chunk; keeps where in its text the next token begins.

    shown: bytes as they are in the text; spelt: with those of control tokens, which name a token that is not in the text.
    num_top: how many of the most likely tokens are told.
    """

    def __init__(self, shown: Pieces, spelt: Pieces, num_top: int) -> None:
        self._shown, self._spelt, self._num_top = shown, spelt, num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Columns:
        """The columns of the next tokens."""
        columns = Columns()
        for token, one in zip(ids, logprobs, strict=True):
            columns.tokens.append(spelling(self._spelt[token]))
            columns.token_logprobs.append(None if one is None else finite(one.own))
            columns.top_logprobs.append(None if one is None else self._top(token, one))
            columns.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(self._shown[token]))
        return columns

    def end_prompt(self) -> None:
        """What comes next is another text: a character that was not finished stays so."""
        self._offset += len(self._decoder.decode(b"", final=True))
        self._decoder.reset()

    def _top(self, token: int, one: TokenLogprobs) -> dict[str, float]:
        """By text. Of two tokens that read the same the likelier counts; the token itself is always there."""
        top: dict[str, float] = {}
        for other, value in zip(one.token_ids[: self._num_top], one.values, strict=False):
            top.setdefault(spelling(self._spelt[other]), finite(value))
        top.setdefault(spelling(self._spelt[token]), finite(one.own))
        return top


def chat_logprobs(
    spelt: Pieces, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> list[ChatLogprob]:
    """The records of tokens."""
    return [
        ChatLogprob(
            *_token(spelt[token], one.own),
            [
                TopLogprob(*_token(spelt[other], value))
                for other, value in zip(one.token_ids[:num_top], one.values, strict=False)
            ],
        )
        for token, one in zip(ids, logprobs, strict=True)
    ]


def prompt_logprobs(
    spelt: Pieces, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """Of a prompt: null for its first token, then by token id the token's own and the most likely."""
    told: list[dict[str, Any] | None] = [None]
    for token, one in zip(ids[1:], logprobs, strict=True):
        values = {token: one.own} | dict(zip(one.token_ids, one.values, strict=True))
        told.append(
            {
                str(other): {"logprob": finite(value), "decoded_token": spelt[other].decode("utf-8", "replace")}
                for other, value in values.items()
            }
        )
    return told


def spelling(piece: bytes) -> str:
    """A token as completions tell it."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(value: float) -> float:
    """A log-probability as JSON can carry it."""
    return max(value, _LEAST)


def _token(piece: bytes, value: float) -> tuple[str, float, list[int]]:
    return piece.decode("utf-8", "replace"), finite(value), list(piece)
