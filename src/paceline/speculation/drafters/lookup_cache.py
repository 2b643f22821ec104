"""llama.cpp's lookup caches: the counts of the tokens that followed each n-gram, in memory and as a file. Pure.

A file is a sequence of records of 32-bit integers in the machine's byte order, without a header:

    token x 4 (-1 after shorter n-grams) | number of followers | (token, count) x number
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidParams

NGRAM_MAX: Final = 4
_NO_TOKEN: Final = -1
_HEAD: Final = NGRAM_MAX + 1  # words of a record before its followers
_WORD: Final = 4
_WORD_BITS: Final = 32
_MOST_COUNT: Final = 2**31 - 1

Ints = NDArray[np.int32]

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Followers:
    """The most frequent follower of each n-gram of one size, with its count. total: count of all followers.

    ngrams: int32 (n, size); tokens: int32 (n,); best, total: int64 (n,).
    """

    ngrams: Ints
    tokens: Ints
    best: Counts
    total: Counts


class LookupCache:
    """N-grams of 1 to 4 tokens with their followers and counts, each pair once, in order.

    ngrams: int32 (n, 4), -1 after shorter ones. tokens: int32 (n,), the followers. counts: int64 (n,), of each pair.
    """

    def __init__(self, ngrams: Ints, tokens: Ints, counts: Counts) -> None:
        places = [ngrams[:, place].astype(np.int64) - _NO_TOKEN for place in range(NGRAM_MAX)]
        order = np.lexsort((tokens, places[2] << _WORD_BITS | places[3], places[0] << _WORD_BITS | places[1]))
        ngrams, tokens, counts = ngrams[order], tokens[order], counts[order]
        begins = _begins(np.column_stack((ngrams, tokens)))
        self.ngrams, self.tokens = ngrams[begins], tokens[begins]
        self.counts: Counts = np.minimum(np.add.reduceat(counts, begins), _MOST_COUNT) if len(begins) else counts

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def empty(cls) -> Self:
        """Return a cache without n-grams."""
        return cls(np.zeros((0, NGRAM_MAX), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int64))

    @classmethod
    def parse(cls, data: bytes, name: str) -> Self:
        """Read the bytes of a file. Raises `InvalidParams` with its name and the first wrong byte."""
        if len(data) % _WORD:
            raise _damaged(name, len(data) - len(data) % _WORD, "it ends within a number")
        words = np.frombuffer(data, np.int32)
        begins = np.array(_records(memoryview(data).cast("i"), name), np.int64)
        numbers = np.diff(np.r_[begins, len(words)]).astype(np.int64)
        heads = words[begins[:, None] + np.arange(NGRAM_MAX)].reshape(-1, NGRAM_MAX)
        _check_ngrams(heads, begins, name)
        is_head = np.zeros(len(words), np.bool_)
        is_head[(begins[:, None] + np.arange(_HEAD)).ravel()] = True
        pairs = words[~is_head].reshape(-1, 2)
        wrong = np.flatnonzero((pairs[:, 0] < 0) | (pairs[:, 1] < 1))
        if len(wrong):
            token, count = pairs[wrong[0]].tolist()
            at = int(np.flatnonzero(~is_head)[2 * wrong[0]]) * _WORD
            raise _damaged(name, at, f"token {token} is said to have followed {count} times")
        return cls(np.repeat(heads, (numbers - _HEAD) // 2, axis=0), pairs[:, 0].copy(), pairs[:, 1].astype(np.int64))

    @classmethod
    def counted(cls, tokens: Ints, is_new: NDArray[np.bool_]) -> Self:
        """Count the n-grams of 1 to 4 tokens before each new token. A negative token separates tokens that are no neighbours."""
        found = []
        for size in range(1, NGRAM_MAX + 1):
            num = len(tokens) - size
            if num < 1:
                break
            windows = np.full((num, NGRAM_MAX + 1), _NO_TOKEN, np.int32)
            for place in range(size):
                windows[:, place] = tokens[place : place + num]
            windows[:, NGRAM_MAX] = tokens[size:]
            is_whole = (windows[:, :size] >= 0).all(axis=1) & (windows[:, NGRAM_MAX] >= 0)
            found.append(windows[is_whole & is_new[size:]])
        if not found:
            return cls.empty()
        rows = np.concatenate(found)
        return cls(rows[:, :NGRAM_MAX], rows[:, NGRAM_MAX], np.ones(len(rows), np.int64))

    def merged(self, other: LookupCache) -> LookupCache:
        """Return the sum of both."""
        return LookupCache(
            np.concatenate((self.ngrams, other.ngrams)),
            np.concatenate((self.tokens, other.tokens)),
            np.concatenate((self.counts, other.counts)),
        )

    def most_frequent(self, num_pairs: int) -> LookupCache:
        """Return the pairs with the highest counts, at most `num_pairs`."""
        if len(self) <= num_pairs:
            return self
        kept = np.sort(np.argsort(-self.counts, kind="stable")[:num_pairs])
        return LookupCache(self.ngrams[kept], self.tokens[kept], self.counts[kept])

    def check_fits(self, n_vocab: int, name: str) -> None:
        """Raise `InvalidParams` if it has tokens beyond a vocabulary of this size."""
        highest = max(int(self.ngrams.max(initial=-1)), int(self.tokens.max(initial=-1)))
        if highest >= n_vocab:
            raise InvalidParams(
                f"{name} has token {highest}, and the model's vocabulary has {n_vocab}: it was made with another model; give "
                "this model's, or leave it out"
            )

    def followers(self, size: int) -> Followers:
        """Return the most frequent follower of each n-gram of a size."""
        rows = np.flatnonzero((self.ngrams >= 0).sum(axis=1) == size)
        ngrams, tokens, counts = self.ngrams[rows], self.tokens[rows], self.counts[rows]
        begins = _begins(ngrams)
        if not len(begins):
            return Followers(ngrams[:, :size], tokens, counts, counts)
        group_of = np.repeat(np.arange(len(begins)), np.diff(np.r_[begins, len(rows)]))
        best = np.zeros(len(begins), np.int64)
        ascending = np.argsort(counts, kind="stable")
        best[group_of[ascending]] = ascending  # the last one stays, with the highest count
        return Followers(ngrams[begins, :size], tokens[best], counts[best], np.add.reduceat(counts, begins))

    def to_bytes(self) -> bytes:
        """Return the bytes of a file."""
        begins = _begins(self.ngrams)
        numbers = np.diff(np.r_[begins, len(self)])
        words = np.zeros(_HEAD * len(begins) + 2 * len(self), np.int32)
        heads = _HEAD * np.arange(len(begins)) + 2 * begins
        words[heads[:, None] + np.arange(NGRAM_MAX)] = self.ngrams[begins]
        words[heads + NGRAM_MAX] = numbers
        pairs = _HEAD * (np.repeat(np.arange(len(begins)), numbers) + 1) + 2 * np.arange(len(self))
        words[pairs], words[pairs + 1] = self.tokens, self.counts
        return words.tobytes()


def _begins(rows: Ints) -> NDArray[np.intp]:
    """Return the places at which sorted rows change."""
    return np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)][: len(rows)])


def _records(words: memoryview[int], name: str) -> array[int]:
    """Return the places at which records begin, in words."""
    begins, at, end = array("q"), 0, len(words)
    while at < end:
        number = words[at + NGRAM_MAX] if at + NGRAM_MAX < end else 0
        following = at + _HEAD + 2 * number
        if number < 1 or following > end:
            reason = (
                f"an n-gram is said to have {number} followers" if at + NGRAM_MAX < end else "it ends within an n-gram"
            )
            raise _damaged(
                name, at * _WORD, reason if number < 1 else f"it ends before the {number} followers of an n-gram"
            )
        begins.append(at)
        at = following
    return begins


def _check_ngrams(heads: Ints, begins: Counts, name: str) -> None:
    is_wrong = (heads < _NO_TOKEN).any(axis=1) | (heads[:, 0] < 0)
    for place, following in pairwise(range(NGRAM_MAX)):
        is_wrong |= (heads[:, place] < 0) & (heads[:, following] >= 0)
    wrong = np.flatnonzero(is_wrong)
    if len(wrong):
        raise _damaged(name, int(begins[wrong[0]]) * _WORD, f"{heads[wrong[0]].tolist()} is no n-gram of 1 to 4 tokens")


def _damaged(name: str, at: int, reason: str) -> InvalidParams:
    return InvalidParams(
        f"{name} is damaged, or no lookup cache of llama.cpp: at byte {at} {reason}; give another one, or leave it out"
    )
