"""One choice's drawn tokens to text, stops, log-probabilities and chunks: what vLLM calls the output processor.

Runs on the engine's thread. Decides whether a token ends the choice before it turns bytes into text, so that what was
held back leaves with the last chunk on every path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.errors import PacelineError
from paceline.output.text_pipe import TextPiece, TextPipe
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.streaming.chunk import FinishReason, StreamChunk, TokenLogprobs

_NO_LIMIT = 2**63


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of a model's tokens, without and with the text of control tokens, and its end-of-generation tokens."""

    pieces: Sequence[bytes]
    pieces_special: Sequence[bytes]
    eog_ids: frozenset[int]

    @cached_property
    def texts(self) -> Sequence[str | None]:
        """The text of every token that is text by itself; None for parts of characters. Made once, when first needed."""
        return [_text(piece) for piece in self.pieces]

    @cached_property
    def texts_special(self) -> Sequence[str | None]:
        """As `texts`, with control tokens."""
        return [_text(piece) for piece in self.pieces_special]


def _text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class OutputProcessor:
    """Takes one drawn token after the other; `chunk` returns what came since. interval: tokens that a chunk needs."""

    __slots__ = (
        "_armed", "_choice", "_ends", "_has_stops", "_held", "_ids", "_is_plain", "_logprobs", "_max_tokens",
        "_min_tokens", "_num_emitted", "_pipe", "_stop_ids", "_stopping_pipe", "_texts", "_texts_by_id",
        "interval", "num_generated", "prompt_logprobs", "stop", "stop_token_ids",
    )  # fmt: skip

    def __init__(
        self, params: SamplingParams, vocabulary: Vocabulary, choice: int, options: RequestOptions, echo: str
    ) -> None:
        self._choice = choice
        self.interval = options.interval
        special = options.special
        pieces = vocabulary.pieces_special if special else vocabulary.pieces
        # Without stop strings a token that is text by itself needs no pipe, as long as the pipe holds nothing back.
        self._texts_by_id = vocabulary.texts_special if special else vocabulary.texts
        self._has_stops = bool(params.stop)
        self._is_plain = not self._has_stops
        self._ends = frozenset() if params.ignore_eos else vocabulary.eog_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._max_tokens = _NO_LIMIT if params.max_tokens is None else params.max_tokens
        self._armed = self._min_tokens == 0
        self._stopping_pipe = TextPipe(pieces, params.stop)  # made here, since many stops take time
        self._pipe = self._stopping_pipe if self._armed else TextPipe(pieces)
        self._ids: list[int] = []
        self._texts: list[str] = [echo] if echo else []
        self._logprobs: list[TokenLogprobs] = []
        self._held: deque[TokenLogprobs] = deque()
        self._num_emitted = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_generated = 0
        self.stop: str | int | None = None
        self.stop_token_ids: tuple[int, ...] = ()

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        """Take the next token; return the finish reason where it is the last."""
        self.num_generated += 1
        if token_id in self._ends or token_id in self._stop_ids:
            self.stop, self.stop_token_ids = token_id, (token_id,)
            return FinishReason.END if token_id in self._ends else FinishReason.STOP
        if not self._armed and self.num_generated > self._min_tokens:
            self._arm()
        if self._is_plain and (text := self._texts_by_id[token_id]) is not None:
            self._ids.append(token_id)
            self._texts.append(text)
            if logprobs is not None:
                self._logprobs.append(logprobs)
        elif self._push(token_id, logprobs):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_generated >= self._max_tokens else None

    def _push(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Take the next token by way of the text pipe; return whether a stop string is complete."""
        pipe = self._pipe
        if logprobs is not None:
            self._held.append(logprobs)
        self._add(pipe.push(token_id))
        self._is_plain = not self._has_stops and pipe.is_empty
        return pipe.match is not None

    def finish(self) -> bool:
        """Flush what was held back, however the choice ended; return whether a stop string is complete."""
        self._add(self._pipe.finish())
        match = self._pipe.match
        if match is None:
            return False
        # An end-of-generation token within a stop belongs to the stop.
        self.stop, self.stop_token_ids = match.stop, match.token_ids + self.stop_token_ids
        return True

    def resume(self, token_ids: Sequence[int], num_told: int | None, untold: Sequence[TokenLogprobs]) -> None:
        """Resume where another processor of these tokens stood; call it before anything else. See `GenerationState`."""
        for token_id in token_ids[:num_told] if num_told is not None else ():
            self.take(token_id, None)
        num_held = 0
        if num_told is not None:
            self._num_emitted = len(self._ids)
            self._ids, self._texts = [], []
            num_held = num_told - self._num_emitted
        self._held.extend(untold[:num_held])
        for index, token_id in enumerate(token_ids[num_told or 0 :], num_held):
            self.take(token_id, untold[index] if index < len(untold) else None)

    def latest_logprobs(self, count: int) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of the last tokens that are in no chunk yet, at most `count`."""
        held = list(self._held)[-count:] if count else []
        rest = count - len(held)
        return (*(self._logprobs[-rest:] if rest else ()), *held)

    def chunk(self) -> StreamChunk | None:
        """Return what came since the last chunk; None where that is nothing, or fewer tokens than the interval."""
        if len(self._ids) < self.interval and not (self.interval == 1 and (self._texts or self.prompt_logprobs)):
            return None
        ids, text = tuple(self._ids), "".join(self._texts)
        chunk = StreamChunk(
            index=self._num_emitted,
            token_ids=ids,
            text=text,
            logprobs=tuple(self._logprobs),
            choice=self._choice,
            prompt_logprobs=tuple(self.prompt_logprobs),
        )
        self._num_emitted += len(ids)
        self._ids, self._texts, self._logprobs, self.prompt_logprobs = [], [], [], []
        return chunk

    def last_chunk(self, reason: FinishReason, error: PacelineError | None) -> StreamChunk:
        """Return the chunk that ends the choice, with all that is left; call `finish` before."""
        return StreamChunk(
            index=self._num_emitted,
            token_ids=tuple(self._ids),
            text="".join(self._texts),
            logprobs=tuple(self._logprobs),
            choice=self._choice,
            prompt_logprobs=tuple(self.prompt_logprobs),
            finish_reason=reason,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            error=error,
        )

    def _arm(self) -> None:
        """Begin to look for stop strings: min_tokens are reached; no earlier token can be part of one."""
        self._stopping_pipe.go_on_from(self._pipe)
        self._pipe = self._stopping_pipe
        self._armed = True

    def _add(self, piece: TextPiece) -> None:
        if piece.token_ids:
            self._ids += piece.token_ids
            if self._held:
                self._logprobs += [self._held.popleft() for _ in piece.token_ids]
        if piece.text:
            self._texts.append(piece.text)
