"""Prompt lookup: proposes the tokens that followed the last tokens at their earlier occurrence. Pure Python, no model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from paceline import validation

_INDEXED_AT_ONCE = 4096  # n-grams in a call: all of a long prompt would delay a tick by milliseconds
_MOST = 64


class NgramDrafter:
    """Looks up the last `size_n` tokens in the sequence's own tokens, and proposes the tokens after their last occurrence.

    Good for output that repeats its prompt: code that is edited, documents that are quoted, JSON. If the occurrence overlaps the
    end, as in text that goes round in circles, the proposal goes round too.

    size_n: tokens that have to match; size_m: most tokens of a proposal; min_hits: earlier occurrences that a proposal needs.
    Raises `InvalidParams` for values outside of 1 to 64, and for a min_hits below 1.
    """

    def __init__(self, *, size_n: int = 4, size_m: int = 48, min_hits: int = 1) -> None:
        self._size_n = validation.integer("size_n", size_n, 1, _MOST)
        self._size_m = validation.integer("size_m", size_m, 1, _MOST)
        self._min_hits = validation.integer("min_hits", min_hits, 1)
        self._histories: dict[int, History] = {}

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        self._histories[key] = History(token_ids, self._size_n)

    def propose(self, key: int, max_tokens: int) -> list[int]:
        """See `Drafter`."""
        history = self._histories[key]
        history.index()
        found = history.find(self._min_hits)
        if found is None:
            return []
        tokens = history.going_on(found, min(max_tokens, self._size_m))
        end = next((index for index, token in enumerate(tokens) if token < 0), None)  # cells of an image
        return tokens[:end]

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        self._histories[key].tokens.extend(token_ids)

    def rollback(self, key: int, num_tokens: int) -> None:
        """See `Drafter`; proposals leave nothing behind."""

    def end(self, key: int) -> None:
        """See `Drafter`."""
        del self._histories[key]


class History:
    """The tokens of a sequence, and the last place of each of its n-grams."""

    __slots__ = ("_ends", "_hits", "_next", "_size", "tokens")

    def __init__(self, token_ids: Sequence[int], size: int) -> None:
        self.tokens = array("i", token_ids)
        self._size, self._next = size, size  # the end of the next n-gram to be indexed
        self._ends: dict[int, int] = {}  # by hash
        self._hits: dict[int, int] = {}

    def index(self) -> None:
        """Index n-grams that a token follows, few enough to delay no tick."""
        tokens, size = self.tokens, self._size
        end = min(len(tokens), self._next + _INDEXED_AT_ONCE)
        for at in range(self._next, end):
            ngram = hash(tokens[at - size : at].tobytes())
            self._ends[ngram] = at
            self._hits[ngram] = self._hits.get(ngram, 0) + 1
        self._next = max(self._next, end)

    def find(self, min_hits: int) -> int | None:
        """Return the place after the last earlier occurrence of the last tokens; None if they came less than min_hits times."""
        last = self.tokens[-self._size :].tobytes()
        ngram = hash(last)
        at = self._ends.get(ngram)
        if at is None or self._hits[ngram] < min_hits or self.tokens[at - self._size : at].tobytes() != last:
            return None
        return at

    def going_on(self, at: int, num_tokens: int) -> list[int]:
        """Return the tokens from a place on, and at their end again from that place."""
        tokens = self.tokens
        period = len(tokens) - at
        if period >= num_tokens:
            return tokens[at : at + num_tokens].tolist()
        return [tokens[at + index % period] for index in range(num_tokens)]
