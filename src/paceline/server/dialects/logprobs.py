"""Log-probabilities of tokens in the shapes of both APIs, and chunks split into single tokens. Pure; any one thread.

OpenAI: columns for completions, a record per token for chat; in columns, bytes that are no UTF-8 by themselves are
spelled as `bytes:` and hexadecimal digits. llama-server: `completion_probabilities`. JSON has no infinity: a
probability of zero is reported as the lowest number that each API uses.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from paceline.runtime import Tokenizer
from paceline.streaming import StreamChunk, TokenLogprobs

_OPENAI_MIN_LOGPROB = -9999.0

Pieces = Sequence[bytes]
"""The bytes of every token, by id."""


class LogprobColumns(msgspec.Struct):
    """`logprobs` of a completion. The first token of a prompt has none: null."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position of a chat completion."""

    token: str
    logprob: float
    bytes: Sequence[int]


class ChatLogprob(TopLogprob):
    """One token of a chat completion."""

    top_logprobs: list[TopLogprob]


class LogprobColumnsBuilder:
    """Builds the columns of one choice chunk by chunk, with the offset of each token in its text.

    text_pieces: token bytes as in the text; token_pieces: with those of control tokens. num_top: most likely tokens
    per position.
    """

    def __init__(self, text_pieces: Pieces, token_pieces: Pieces, num_top: int) -> None:
        self._text_pieces, self._token_pieces, self._num_top = text_pieces, token_pieces, num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> LogprobColumns:
        """Return the columns of the next tokens."""
        columns = LogprobColumns()
        for token, one in zip(ids, logprobs, strict=True):
            columns.tokens.append(spelling(self._token_pieces[token]))
            columns.token_logprobs.append(None if one is None else finite(one.own))
            columns.top_logprobs.append(None if one is None else self._top(token, one))
            columns.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(self._text_pieces[token]))
        return columns

    def end_prompt(self) -> None:
        """Finish the prompt's text: an incomplete character at its end stays incomplete."""
        self._offset += len(self._decoder.decode(b"", final=True))
        self._decoder.reset()

    def _top(self, token: int, one: TokenLogprobs) -> dict[str, float]:
        """Map texts to log-probabilities; the drawn token is included.

        Of two tokens with the same text the likelier counts.
        """
        top: dict[str, float] = {}
        for other, value in zip(one.token_ids[: self._num_top], one.values, strict=False):
            top.setdefault(spelling(self._token_pieces[other]), finite(value))
        top.setdefault(spelling(self._token_pieces[token]), finite(one.own))
        return top


def chat_logprobs(logprobs: Sequence[TokenLogprobs], num_top: int) -> list[ChatLogprob]:
    """Return one record per token."""
    return [
        ChatLogprob(
            one.token.text,
            finite(one.own),
            one.token.bytes,
            [TopLogprob(token.text, finite(value), token.bytes) for token, value in one.top[:num_top]],
        )
        for one in logprobs
    ]


def prompt_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """Return null for the first token, then for each its own and the most likely, by token id."""
    entries: list[dict[str, Any] | None] = [None]
    for one in logprobs:
        others = [(token, value) for token, value in one.top if token.id != one.token.id]
        entries.append(
            {
                str(token.id): {"logprob": finite(value), "decoded_token": token.text}
                for token, value in ((one.token, one.own), *others)
            }
        )
    return entries


def spelling(piece: bytes) -> str:
    """Return a token's text for completions; `bytes:` and hexadecimal digits if it is no UTF-8 by itself."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(value: float) -> float:
    """Clip a log-probability to what JSON can carry."""
    return max(value, _OPENAI_MIN_LOGPROB)


_LLAMA_MIN_LOGPROB = -3.4028234663852886e38
"""The log probability of what cannot come: the lowest number of 32 bits, since JSON has no infinities."""


class LlamaLogprobs:
    """Encodes llama-server's `completion_probabilities`. Caches the texts of tokens. Any one thread.

    of_drawn: probabilities after sampling (`prob`, `top_probs`) in place of the model's (`logprob`, `top_logprobs`).
    special: control tokens have text.
    """

    def __init__(self, tokenizer: Tokenizer, *, of_drawn: bool, special: bool = False) -> None:
        self._pieces = tokenizer.pieces(special)
        self._of_drawn = of_drawn
        self._texts: dict[int, tuple[str, list[int]]] = {}

    def entries(self, token_ids: Iterable[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Return one entry per token, each with its most likely alternatives."""
        return [self._entry(token, one) for token, one in zip(token_ids, logprobs, strict=True)]

    def _entry(self, token: int, scored: TokenLogprobs) -> dict[str, Any]:
        others = zip(scored.token_ids, scored.values, strict=True)
        if self._of_drawn:
            return self._token(token, scored.own) | {
                "top_probs": [self._token(other, value) for other, value in others if value > -math.inf]
            }
        return self._token(token, scored.own) | {"top_logprobs": [self._token(other, value) for other, value in others]}

    def _token(self, token: int, value: float) -> dict[str, Any]:
        text_and_bytes = self._texts.get(token)
        if text_and_bytes is None:
            text_and_bytes = self._texts[token] = _text_and_bytes(self._pieces[token])
        text, data = text_and_bytes
        if self._of_drawn:
            return {"id": token, "token": text, "bytes": data, "prob": math.exp(value)}
        return {"id": token, "token": text, "bytes": data, "logprob": max(value, _LLAMA_MIN_LOGPROB)}


def _text_and_bytes(piece: bytes) -> tuple[str, list[int]]:
    """Return text and bytes; an incomplete character at the end is in the bytes only."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(piece), list(piece)


class TokenSplitter:
    """Splits the chunks of one choice into chunks of one token. pieces: the bytes of every token.

    A character belongs to the token that completes it. Text that was held back longer, for a stop that did not come,
    belongs to the last token that arrives with it. The parts joined are the chunks joined.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_due = 0  # complete characters that are in no part yet

    def split(self, chunk: StreamChunk) -> list[StreamChunk]:
        """Return a chunk for each token, without its ending; the chunk itself if it has no token."""
        parts, rest, last = [], chunk.text, len(chunk.token_ids) - 1
        for at, token_id in enumerate(chunk.token_ids):
            self._num_due += len(self._decoder.decode(self._pieces[token_id]))
            text = rest if at == last else rest[: max(0, self._num_due)]
            rest = rest[len(text) :]
            self._num_due -= len(text)
            parts.append(
                StreamChunk(
                    index=chunk.index + at,
                    token_ids=(token_id,),
                    text=text,
                    logprobs=chunk.logprobs[at : at + 1],
                    choice=chunk.choice,
                )
            )
        self._num_due -= len(rest)
        return parts or [chunk]
