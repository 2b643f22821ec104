"""Reports of tokens: log-probabilities, OpenAI's `usage`, llama-server's `timings`. Pure; one thread at a time.

OpenAI: columns for completions, a record per token for chats; in columns, bytes that are no UTF-8 by themselves are
spelled as `bytes:` and hexadecimal digits. llama-server: `completion_probabilities`. JSON has no infinity: a
probability of zero is reported as the lowest number that each API uses.
"""

from __future__ import annotations

import codecs
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.runtime import Tokenizer
from paceline.streaming import StreamChunk, TokenLogprobs, Usage

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
    """A likely token at a position of a chat completion."""

    token: str
    logprob: float
    bytes: Sequence[int]


class ChatLogprob(TopLogprob):
    """One token of a chat completion."""

    top_logprobs: list[TopLogprob]


class LogprobColumnsBuilder:
    """Builds the columns of one choice chunk by chunk, with the offset of each token in its text."""

    def __init__(self, text_pieces: Pieces, token_pieces: Pieces, num_top: int) -> None:
        """Begin a text. text_pieces: the bytes of every token as in the text; token_pieces: control tokens have bytes, too."""
        self._text_pieces, self._token_pieces, self._num_top = text_pieces, token_pieces, num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], columns: LogprobColumns | None = None
    ) -> LogprobColumns:
        """Add the next tokens to columns, by default empty ones, and return the columns."""
        columns = LogprobColumns() if columns is None else columns
        for token, scored in zip(ids, logprobs, strict=True):
            columns.tokens.append(spelling(self._token_pieces[token]))
            columns.token_logprobs.append(None if scored is None else finite(scored.own))
            columns.top_logprobs.append(None if scored is None else self._top(token, scored))
            columns.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(self._text_pieces[token]))
        return columns

    def end_prompt(self) -> None:
        """Finish the prompt's text: an incomplete character at its end stays incomplete."""
        self._offset += len(self._decoder.decode(b"", final=True))
        self._decoder.reset()

    def _top(self, token: int, scored: TokenLogprobs) -> dict[str, float]:
        """Map texts to log-probabilities, including the drawn token. Of two tokens with the same text the likelier counts."""
        top: dict[str, float] = {}
        for other, value in zip(scored.token_ids[: self._num_top], scored.values, strict=False):
            top.setdefault(spelling(self._token_pieces[other]), finite(value))
        top.setdefault(spelling(self._token_pieces[token]), finite(scored.own))
        return top


def chat_logprobs(logprobs: Sequence[TokenLogprobs], num_top: int) -> list[ChatLogprob]:
    """Return one record per token."""
    return [
        ChatLogprob(
            scored.token.text,
            finite(scored.own),
            scored.token.bytes,
            [TopLogprob(token.text, finite(value), token.bytes) for token, value in scored.top[:num_top]],
        )
        for scored in logprobs
    ]


def prompt_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """Return null for the first token, then for each its own and the most likely, by token id."""
    entries: list[dict[str, Any] | None] = [None]
    for scored in logprobs:
        others = [(token, value) for token, value in scored.top if token.id != scored.token.id]
        entries.append(
            {
                str(token.id): {"logprob": finite(value), "decoded_token": token.text}
                for token, value in ((scored.token, scored.own), *others)
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
    """Clip a log-probability to the least number that OpenAI's API uses."""
    return max(value, _OPENAI_MIN_LOGPROB)


_LLAMA_MIN_LOGPROB = -3.4028234663852886e38
"""The log probability of what cannot come: the lowest number of 32 bits, since JSON has no infinities."""


class LlamaLogprobs:
    """Encodes llama-server's `completion_probabilities`. Caches the texts of tokens. Any one thread.

    of_drawn: probabilities after sampling (`prob`, `top_probs`) in place of the model's (`logprob`, `top_logprobs`).
    special: control tokens have text.
    """

    def __init__(self, tokenizer: Tokenizer, of_drawn: bool, special: bool) -> None:
        self._pieces = tokenizer.pieces(special)
        self._of_drawn = of_drawn
        self._texts: dict[int, tuple[str, list[int]]] = {}

    def entries(self, token_ids: Iterable[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Return one entry per token, each with its most likely alternatives."""
        return [self._entry(token, scored) for token, scored in zip(token_ids, logprobs, strict=True)]

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
    """Return text and bytes; an incomplete character at the end is only in the bytes."""
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


class TokenAligner:
    """The generated tokens that no text has been found for yet, by their bytes.

    Marks of the format between two texts belong to neither. A token that lies across two texts counts for the first. A text that
    is not found, because the format escapes it or a character was cut, has no tokens.
    """

    def __init__(self, pieces: Pieces, num_top: int | None = None, max_bytes: int | None = None) -> None:
        """pieces: the bytes of every token. num_top: of log-probabilities, with each token; None: none are reported.

        max_bytes: beyond which tokens are dropped when a text is not found among them; None: none are.
        """
        self._pieces, self._num_top, self._max_bytes = pieces, num_top, max_bytes
        self._bytes = bytearray()
        self._tokens: deque[tuple[int, TokenLogprobs | None]] = deque()  # where it ends, and its logprobs
        self._num_dropped = 0  # bytes that were found or skipped

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add generated tokens. logprobs: one for each, or none."""
        for index, token in enumerate(ids):
            self._bytes += self._pieces[token]
            end = self._num_dropped + len(self._bytes)
            self._tokens.append((end, logprobs[index] if logprobs else None))

    def take(self, text: str) -> tuple[int, list[ChatLogprob]]:
        """Return the number of tokens that make a text, and their log-probabilities. Drops these tokens and all before them."""
        wanted = text.encode()
        at = self._bytes.find(wanted)
        if at < 0 or not wanted:
            if self._max_bytes is not None and len(self._bytes) > self._max_bytes:
                self.clear()
            return 0, []
        start, end = self._num_dropped + at, self._num_dropped + at + len(wanted)
        while self._tokens and self._tokens[0][0] <= start:
            self._tokens.popleft()
        found: list[tuple[int, TokenLogprobs | None]] = []
        while self._tokens and (not found or found[-1][0] < end):
            found.append(self._tokens.popleft())
        del self._bytes[: at + len(wanted)]
        self._num_dropped = end
        scored = [scores for _, scores in found if scores is not None]
        return len(found), [] if self._num_top is None else chat_logprobs(scored, self._num_top)

    def clear(self) -> None:
        """Drop all tokens."""
        self._num_dropped += len(self._bytes)
        self._bytes.clear()
        self._tokens.clear()


def final_timings(usage: Usage, num_predicted: int) -> dict[str, Any]:
    """Return the timings of a finished request. The first token comes with the prompt, so rates count one less."""
    result = timings_body(
        cached=usage.cached_tokens,
        prompt=usage.prompt_tokens - usage.cached_tokens,
        prompt_s=usage.prefill_s,
        predicted=num_predicted,
        predicted_s=usage.decode_s,
    )
    if usage.draft_tokens:
        result |= {"draft_n": usage.draft_tokens, "draft_n_accepted": usage.accepted_tokens}
    return result


def timings_body(*, cached: int, prompt: int, prompt_s: float, predicted: int, predicted_s: float) -> dict[str, Any]:
    """Return llama-server's `timings` from counts and seconds."""
    steps = max(0, predicted - 1)
    return {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": prompt_s * 1000,
        "prompt_per_token_ms": prompt_s * 1000 / prompt if prompt else 0.0,
        "prompt_per_second": prompt / prompt_s if prompt_s > 0 else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_s * 1000,
        "predicted_per_token_ms": predicted_s * 1000 / steps if steps else 0.0,
        "predicted_per_second": steps / predicted_s if predicted_s > 0 else 0.0,
    }


@dataclass(slots=True)
class RunningTimings:
    """Timings of a running request by the server's clock. began_s: when it was submitted.

    Until `during_prefill` has the number of cached tokens, all of the prompt counts as computed.
    """

    clock: Callable[[], float]
    num_prompt: int
    began_s: float
    _cached: int = 0
    _first_s: float | None = None

    def during_prefill(self, processed: int, cached: int, elapsed_s: float) -> dict[str, Any]:
        """Return the timings during prefill: `processed` prompt tokens are in memory, `cached` of them were before."""
        self._cached, self.began_s = cached, self.clock() - elapsed_s
        return timings_body(cached=cached, prompt=processed - cached, prompt_s=elapsed_s, predicted=0, predicted_s=0.0)

    def during_decode(self, num_predicted: int) -> dict[str, Any]:
        """Return the timings after `num_predicted` tokens."""
        now = self.clock()
        self._first_s = now if self._first_s is None else self._first_s
        return timings_body(
            cached=self._cached,
            prompt=self.num_prompt - self._cached,
            prompt_s=self._first_s - self.began_s,
            predicted=num_predicted,
            predicted_s=now - self._first_s,
        )


def usage_body(usages: Sequence[Usage], num_reasoning: int | None = None) -> dict[str, Any]:
    """Return the `usage` of one HTTP request from the usages of its prompts.

    `cached_from` is included if it is the same for all prompts that had cached tokens. num_reasoning: tokens of thinking, in
    chats.
    """
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    sources = {usage.cached_from for usage in usages if usage.cached_from is not None}
    details: dict[str, Any] = {"cached_tokens": sum(usage.cached_tokens for usage in usages)}
    if len(sources) == 1:
        details["cached_from"] = sources.pop()
    body: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
    of_completion = {} if num_reasoning is None else {"reasoning_tokens": num_reasoning}
    drafts = sum(usage.draft_tokens for usage in usages)
    if drafts:
        of_completion |= {
            "draft_tokens": drafts,
            "accepted_draft_tokens": sum(usage.accepted_tokens for usage in usages),
        }
    return body | ({"completion_tokens_details": of_completion} if of_completion else {})
