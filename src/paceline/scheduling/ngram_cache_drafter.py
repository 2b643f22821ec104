"""Counts of what follows short n-grams in all sequences: proposed where it nearly always does."""

from __future__ import annotations

from array import array
from collections import deque
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import validation
from paceline.errors import InvalidParams
from paceline.request import RequestOptions
from paceline.scheduling.lookup_cache import Followers, LookupCache
from paceline.scheduling.ngram_hashes import Hashes, hash_of, mixed, mixed_hashes, salt_of_size, window_hashes
from paceline.scheduling.sequence import prefix_namespace
from paceline.scheduling.shared_ngrams import SharedNgrams

_SIZES = (4, 3, 2, 1)
_LEAST_COUNT = {1: 4, 2: 3, 3: 2, 4: 2}
_LEAST_PERCENT = {1: 75, 2: 66, 3: 66, 4: 66}
_AT_ONCE = 2048
_MOST = 64
_MOST_COUNTED = 1023  # then all counts of an n-gram are halved, so that what is new counts
_ENTRY_BYTES = 16
_EMPTY = -1
_LOW = 0xFFFFFFFF
_STATIC_SIZE, _STATIC_COUNT, _STATIC_PERCENT = 2, 2, 50  # llama.cpp's lax thresholds
_STATIC_LOAD = 2  # entries for each n-gram of a static cache
_MOST_TO_SAVE = 1 << 18  # newest tokens of which n-grams are counted for a file


class NgramCacheDrafter(SharedNgrams):
    """Counts which token follows each n-gram of 1 to 4 tokens in all requests so far, and proposes those that nearly always do.

    The longest n-gram decides that was seen often enough: 2 times, of 2 tokens 3, of one 4; the token has to have followed in
    two of three cases, of one token in three of four (llama.cpp's strict thresholds for its dynamic lookup cache). A table of
    fixed size keeps for each n-gram its most frequent follower; a new one takes the place of one that is in its way. Requests
    find only what those of the same tenant, cache salt and adapters have left; one without `cache_prompt` leaves and finds
    nothing.

    size_m: most tokens of a proposal; table_mib: size of the table in MiB, of 65,536 n-grams each. lookup_cache_static and
    lookup_cache_dynamic: files of llama.cpp's format, which the engine reads, and writes the second of. What a static one has
    of 2 tokens is proposed to all requests that share, where nothing else is known; the dynamic one belongs to requests without
    tenant, salt and adapters. Raises `InvalidParams` for other values than 1 to 64, of table_mib 1 to 1024, and for empty paths.
    """

    def __init__(
        self,
        *,
        size_m: int = 8,
        table_mib: int = 32,
        lookup_cache_static: str | None = None,
        lookup_cache_dynamic: str | None = None,
    ) -> None:
        self.lookup_cache_static = _path("lookup_cache_static", lookup_cache_static)
        self.lookup_cache_dynamic = _path("lookup_cache_dynamic", lookup_cache_dynamic)
        self._static: CountTable | None = None
        self._to_save: deque[tuple[NDArray[np.int32], int]] = deque()  # tokens, and how many of them are not new
        self._num_to_save = 0
        self._size_m = validation.integer("size_m", size_m, 1, _MOST)
        self._num_entries = validation.integer("table_mib", table_mib, 1, 1024) * (2**20 // _ENTRY_BYTES)
        super().__init__(_SIZES[0], _AT_ONCE)

    def load_static(self, cache: LookupCache) -> int:
        """Propose what is in it to all that share; return the number of its n-grams of 2 tokens, which are all that is used."""
        followers = cache.followers(_STATIC_SIZE)
        num = len(followers.tokens)
        if num:
            self._static = CountTable(_STATIC_LOAD * num)
            self._static.add(*_counts_of(followers, 0))
        return num

    def load_dynamic(self, cache: LookupCache) -> None:
        """Know its counts as if they had been learned from requests without tenant, salt and adapters."""
        for size in _SIZES:
            followers = cache.followers(size)
            if len(followers.tokens):
                self._table.add(*_counts_of(followers, salt_of_size(self._common_salt, size)))

    def learned(self) -> LookupCache:
        """Return the counts of what was learned from those requests, of the newest tokens, where there is a file for them.

        Ends sequences that are open.
        """
        for key in list(self._sequences):
            self.end(key)
        while self._behind:
            self._learn_some()
        pieces = [np.r_[np.int32(_EMPTY), tokens] for tokens, _ in self._to_save]
        if not pieces:
            return LookupCache.empty()
        is_new = [np.arange(len(tokens) + 1) > num_known for tokens, num_known in self._to_save]
        return LookupCache.counted(np.concatenate(pieces).astype(np.int32), np.concatenate(is_new))

    @cached_property
    def _common_salt(self) -> int:
        """Of requests without tenant, salt and adapters."""
        return self._salt(prefix_namespace(RequestOptions()))

    def _proposal(self, tokens: array[int], salt: int, max_tokens: int) -> list[int]:
        window = tokens[-_SIZES[0] :].tolist()
        size = len(window)
        for _ in range(min(max_tokens, self._size_m)):
            token = self._follower(window[-_SIZES[0] :], salt)
            if token == _EMPTY:
                break
            window.append(token)
        return window[size:]

    def _follower(self, window: list[int], salt: int) -> int:
        """Return what follows these tokens; -1 where that is not sure enough."""
        for size in _SIZES:
            if size <= len(window):
                found = mixed(hash_of(window[-size:]), salt_of_size(salt, size))
                token, num_best, num_all = self._table.get(found)
                if num_all >= _LEAST_COUNT[size] and 100 * num_best >= _LEAST_PERCENT[size] * num_all:
                    return token
        return self._static_follower(window)

    def _static_follower(self, window: list[int]) -> int:
        if self._static is None or len(window) < _STATIC_SIZE:
            return _EMPTY
        found = mixed(hash_of(window[-_STATIC_SIZE:]), 0)
        token, num_best, num_all = self._static.get(found)
        return token if num_all >= _STATIC_COUNT and 100 * num_best >= _STATIC_PERCENT * num_all else _EMPTY

    def _keep_to_save(self, tokens: NDArray[np.int32], num_known: int) -> None:
        self._to_save.append((tokens, num_known))
        self._num_to_save += len(tokens)
        while self._num_to_save > _MOST_TO_SAVE:
            self._num_to_save -= len(self._to_save.popleft()[0])

    def _learn(self, tokens: NDArray[np.int32], num_known: int, salt: int) -> None:
        if self.lookup_cache_dynamic is not None and salt == self._common_salt:
            self._keep_to_save(tokens, num_known)
        hashes, followers = [], []
        for size in _SIZES:
            skipped = max(0, num_known - size)
            hashes.append(mixed_hashes(window_hashes(tokens[:-1], size)[skipped:], salt_of_size(salt, size)))
            followers.append(tokens[size:][skipped:])
        self._table.count(np.concatenate(hashes), np.concatenate(followers))

    @cached_property
    def _table(self) -> CountTable:
        """Made when first needed, so that a drafter that is only named or pickled is small."""
        return CountTable(self._num_entries)


class CountTable:
    """By the hash of what is before: the most frequent token, how often it came, and how often any did."""

    def __init__(self, num_entries: int) -> None:
        self._num_entries = num_entries
        self._tags = np.zeros(num_entries, np.uint32)
        self._tokens = np.full(num_entries, _EMPTY, np.int32)
        self._best = np.zeros(num_entries, np.uint32)
        self._all = np.zeros(num_entries, np.uint32)
        self._views: Any = [one.data for one in (self._tags, self._tokens, self._best, self._all)]

    def get(self, found: int) -> tuple[int, int, int]:
        """Return the token and the two counts; -1 and zeros where none is known."""
        tags, tokens, best, counted = self._views
        at = (found & _LOW) % self._num_entries
        return (tokens[at], best[at], counted[at]) if tags[at] == found >> 32 else (_EMPTY, 0, 0)

    def count(self, hashes: Hashes, tokens: NDArray[np.int32]) -> None:
        """Count tokens behind what these are hashes of. Negative ones stand for images and are left out."""
        are_tokens = tokens >= 0
        self.add(*_most_frequent(hashes[are_tokens], tokens[are_tokens]))

    def add(self, found: Hashes, tokens: NDArray[np.int32], num_best: NDArray[Any], num_all: NDArray[Any]) -> None:
        """Add counts: for each hash, which comes once, its most frequent token, how often that came, and how often any did."""
        at = (found & np.uint64(_LOW)) % np.uint64(self._num_entries)
        tags = (found >> np.uint64(32)).astype(np.uint32)
        is_known = (self._tags[at] == tags) & (self._tokens[at] != _EMPTY)
        is_same = is_known & (self._tokens[at] == tokens)
        stays = is_known & ~is_same & (self._best[at] >= num_best)
        total = num_all + np.where(is_known, self._all[at], 0)
        best = np.where(stays, self._best[at], num_best + np.where(is_same, self._best[at], 0))
        halved = (total > _MOST_COUNTED).astype(np.uint32)
        self._tokens[at] = np.where(stays, self._tokens[at], tokens)
        self._tags[at], self._best[at], self._all[at] = tags, best >> halved, total >> halved


def _path(name: str, value: str | None) -> str | None:
    if value is not None and not validation.text(name, value):
        raise InvalidParams(f"{name} is empty; name a file, or leave it out")
    return value


def _counts_of(followers: Followers, salt: int) -> tuple[Hashes, NDArray[np.int32], NDArray[Any], NDArray[Any]]:
    """Return what `CountTable.add` takes; counts beyond those of a table in the same proportion."""
    num, size = followers.ngrams.shape
    hashes = window_hashes(followers.ngrams.ravel(), size)[::size][:num]
    total = np.minimum(followers.total, _MOST_COUNTED)
    best = followers.best * total // followers.total
    return mixed_hashes(hashes, salt), followers.tokens, best.astype(np.uint32), total.astype(np.uint32)


def _most_frequent(
    hashes: Hashes, tokens: NDArray[np.int32]
) -> tuple[Hashes, NDArray[np.int32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Return each hash once, with its most frequent token, how often that came, and how often any did."""
    order = np.lexsort((tokens, hashes))
    hashes, tokens = hashes[order], tokens[order]
    begins = np.flatnonzero(np.r_[True, (hashes[1:] != hashes[:-1]) | (tokens[1:] != tokens[:-1])][: len(hashes)])
    counts = np.diff(np.r_[begins, len(hashes)])
    hashes, tokens = hashes[begins], tokens[begins]  # each pair once
    groups = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]][: len(hashes)])
    group_of = np.repeat(np.arange(len(groups)), np.diff(np.r_[groups, len(hashes)]))
    best = np.zeros(len(groups), np.int64)
    ascending = np.argsort(counts, kind="stable")
    best[group_of[ascending]] = ascending  # of several the last one stays, with the highest count
    total = np.add.reduceat(counts, groups) if len(groups) else counts
    return hashes[groups], tokens[best], counts[best].astype(np.uint32), total.astype(np.uint32)
