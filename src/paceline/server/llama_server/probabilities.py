"""Log probabilities of tokens in the shapes of llama-server's `completion_probabilities`."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.runtime import Tokenizer
from paceline.streaming import TokenLogprobs

LOWEST = -3.4028234663852886e38
"""The log probability of what cannot come: the lowest number of 32 bits, since JSON has no infinities."""


class ProbabilityShapes:
    """of_drawn: probabilities after sampling (`prob`, `top_probs`) in place of the model's (`logprob`, `top_logprobs`).

    Remembers the tokens that it has spelt. For the event loop, or whichever single thread renders.
    """

    def __init__(self, tokenizer: Tokenizer, *, of_drawn: bool) -> None:
        self._pieces = tokenizer.pieces(special=False)
        self._of_drawn = of_drawn
        self._spelt: dict[int, tuple[str, list[int]]] = {}

    def entries(self, token_ids: Iterable[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """One entry a token, each with its most likely alternatives."""
        return [self._entry(token, one) for token, one in zip(token_ids, logprobs, strict=True)]

    def _entry(self, token: int, scored: TokenLogprobs) -> dict[str, Any]:
        others = zip(scored.token_ids, scored.values, strict=True)
        if self._of_drawn:
            return self._token(token, scored.own) | {
                "top_probs": [self._token(other, value) for other, value in others if value > -math.inf]
            }
        return self._token(token, scored.own) | {"top_logprobs": [self._token(other, value) for other, value in others]}

    def _token(self, token: int, value: float) -> dict[str, Any]:
        spelt = self._spelt.get(token)
        if spelt is None:
            spelt = self._spelt[token] = _spelt(self._pieces[token])
        text, data = spelt
        if self._of_drawn:
            return {"id": token, "token": text, "bytes": data, "prob": math.exp(value)}
        return {"id": token, "token": text, "bytes": data, "logprob": max(value, LOWEST)}


def _spelt(piece: bytes) -> tuple[str, list[int]]:
    """Text and bytes; a character that is cut at the end is in the bytes alone."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(piece), list(piece)
