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
        self._histories: dict[int, _History] = {}

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        self._histories[key] = _History(token_ids, self._size_n)

    def propose(self, key: int, max_tokens: int) -> list[int]:
        tokens = self._histories[key].following(self._min_hits, min(max_tokens, self._size_m))
        end = next((index for index, token in enumerate(tokens) if token < 0), None)  # cells of an image
        return tokens[:end]

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        self._histories[key].tokens.extend(token_ids)

    def rollback(self, key: int, num_tokens: int) -> None:
        """Do nothing: proposals leave nothing behind."""

    def end(self, key: int) -> None:
        del self._histories[key]


class _History:
    """The tokens of a sequence, and the last place of each of its n-grams."""

    __slots__ = ("_ends", "_hits", "_next", "_size", "tokens")

    def __init__(self, token_ids: Sequence[int], size: int) -> None:
        self.tokens = array("i", token_ids)
        self._size, self._next = size, size  # the end of the next n-gram to be indexed
        self._ends: dict[int, int] = {}  # by hash
        self._hits: dict[int, int] = {}

    def following(self, min_hits: int, num_tokens: int) -> list[int]:
        """Return the tokens after the last earlier occurrence of the last n-gram, and at their end again from that place.

        Returns no tokens if the n-gram came less than min_hits times. N-grams with a following token are indexed, few enough at
        once to delay no tick.
        """
        tokens, size = self.tokens, self._size
        end = min(len(tokens), self._next + _INDEXED_AT_ONCE)
        for place in range(self._next, end):
            ngram = hash(tokens[place - size : place].tobytes())
            self._ends[ngram] = place
            self._hits[ngram] = self._hits.get(ngram, 0) + 1
        self._next = max(self._next, end)
        last = tokens[-size:].tobytes()
        at = self._ends.get(hash(last))
        if at is None or self._hits[hash(last)] < min_hits or tokens[at - size : at].tobytes() != last:
            return []
        period = len(tokens) - at
        if period >= num_tokens:
            return tokens[at : at + num_tokens].tolist()
        return [tokens[at + index % period] for index in range(num_tokens)]
