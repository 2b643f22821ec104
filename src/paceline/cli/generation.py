"""One answer from its first to its last token: text as it comes, why it ended, how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.cli.interrupt import Stop
from paceline.errors import Aborted
from paceline.text import TextPiece, TextPipe

Show = Callable[[str], object] | None
FinishReason = Literal["end", "length", "stop", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What was generated. `token_ids` and `text` end before the stop that matched; times are seconds.

    completion_tokens counts every token that was generated, those of the stop as well. prefill_s goes to the first
    token, decode_s from there to the last, without the time that a slow reader of the text takes.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | None
    completion_tokens: int
    prefill_s: float
    decode_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None where there was no second."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else None


class Answer:
    """Collects the pieces of one answer and shows each as it comes."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def take(self, piece: TextPiece) -> None:
        """Adds what a token brought."""
        self._token_ids += piece.token_ids
        if piece.text:
            self._texts.append(piece.text)
            if self._show is not None:
                self._show(piece.text)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids so far."""
        return tuple(self._token_ids)


class TimedTokens:
    """Passes tokens on and adds up how long they took to come: the first for itself, then the others."""

    def __init__(self, tokens: Iterator[int], clock: Callable[[], float] = time.perf_counter) -> None:
        self._tokens = tokens
        self._clock = clock
        self.count = 0
        self.first_s = 0.0
        self.others_s = 0.0

    def __iter__(self) -> Iterator[int]:
        while True:
            start = self._clock()
            token = next(self._tokens, None)
            elapsed = self._clock() - start
            if self.count == 0:
                self.first_s = elapsed
            if token is None:
                return
            self.others_s += elapsed if self.count else 0.0
            self.count += 1
            yield token


def collect(tokens: Iterator[int], pipe: TextPipe, show: Show, is_full: Callable[[int], bool], stop: Stop) -> Generated:
    """Runs a generation to its end, a stop string or Ctrl-C, whichever comes first; text is whole in every case.

    show: gets the text as it comes, if it is not None. is_full: whether after so many tokens no other was possible.
    """
    timed, answer = TimedTokens(tokens), Answer(show)
    try:
        for token in timed:
            answer.take(pipe.push(token))
            if pipe.match is not None or stop.requested:
                break
    except Aborted:
        if not stop.requested:
            raise
    answer.take(pipe.finish())
    return Generated(
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=_reason(pipe, is_full(timed.count), stop),
        stop=None if pipe.match is None else pipe.match.stop,
        completion_tokens=timed.count,
        prefill_s=timed.first_s,
        decode_s=timed.others_s,
    )


def _reason(pipe: TextPipe, full: bool, stop: Stop) -> FinishReason:
    if stop.requested:
        return "cancelled"
    if pipe.match is not None:
        return "stop"
    return "length" if full else "end"


def summary(generated: Generated, *, prompt_tokens: int, load_s: float, seed: int) -> str:
    """The line of statistics that is shown after the text."""
    parts = [
        _counted(generated.completion_tokens, "token") + _speed(generated.tokens_per_s),
        f"prompt {_counted(prompt_tokens, 'token')}" + _speed(_prompt_speed(generated, prompt_tokens)),
        f"load {load_s:.2f} s",
        _ending(generated),
        f"seed {seed}",
    ]
    return " | ".join(parts)


def _ending(generated: Generated) -> str:
    match generated.finish_reason:
        case "end":
            return "ended by itself"
        case "length":
            return "cut at the limit"
        case "stop":
            return f"stopped at {generated.stop!r}"
        case "cancelled":
            return "interrupted"


def _prompt_speed(generated: Generated, prompt_tokens: int) -> float | None:
    """None where the prompt was not computed to its end, or not at all."""
    return prompt_tokens / generated.prefill_s if generated.completion_tokens and generated.prefill_s > 0 else None


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _speed(tokens_per_s: float | None) -> str:
    if tokens_per_s is None:
        return ""
    return f", {tokens_per_s:.{1 if tokens_per_s < 100 else 0}f} tok/s"


def usage(generated: Generated, *, prompt_tokens: int, load_s: float) -> dict[str, float | int | None]:
    """Counts and times for programs; seconds."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated.completion_tokens,
        "load_s": load_s,
        "prefill_s": generated.prefill_s,
        "decode_s": generated.decode_s,
        "tokens_per_s": generated.tokens_per_s,
    }


def positions_needed(prompt: Sequence[int], max_tokens: int | None) -> int:
    """Cells that the prompt and an answer of full length take; of an answer without a limit, its first token's."""
    return len(prompt) + (1 if max_tokens is None else max_tokens)
