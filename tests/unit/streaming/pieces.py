"""Chunks as an engine makes them, for the tests of channels and streams, and a way to know that a reader waits."""

from __future__ import annotations

import threading

from paceline.errors import PacelineError
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage
from paceline.streaming.sender import Waiters, Waker


def delta(index: int, *tokens: int, choice: int = 0) -> StreamChunk:
    """Tokens with a letter of text and a logprob each."""
    text = "".join(chr(97 + token % 26) for token in tokens)
    logprobs = tuple(TokenLogprobs(-float(token)) for token in tokens)
    return StreamChunk(index=index, token_ids=tokens, text=text, logprobs=logprobs, choice=choice)


def ending(
    index: int,
    reason: FinishReason = FinishReason.LENGTH,
    *tokens: int,
    choice: int = 0,
    error: PacelineError | None = None,
) -> StreamChunk:
    """A last chunk."""
    return StreamChunk(index=index, token_ids=tokens, finish_reason=reason, usage=Usage(), choice=choice, error=error)


class Arrivals(list[Waker]):
    """A list of wakers that sets an event when one is added."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def append(self, waker: Waker) -> None:
        super().append(waker)
        self.came.set()


def arrival(waiters: Waiters) -> threading.Event:
    """An event that is set when the next one waits."""
    waiters.wakers = arrivals = Arrivals()
    return arrivals.came
