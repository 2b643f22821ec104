"""Hashes of n-grams, of many at once and rolled on by a token. Pure arithmetic modulo 2 ** 64.

A polynomial of the tokens, the last one with exponent 0, is rolled on in a step. Before it says where an n-gram is kept, a salt
is added and the bits are mixed.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import validation
from paceline.errors import InvalidParams
from paceline.request import RequestOptions
from paceline.sequence import prefix_namespace
from paceline.speculation.drafters.lookup_cache import Followers, LookupCache

Hashes = NDArray[np.uint64]
_FACTOR = 0x9E3779B97F4A7C15  # odd; 2 ** 64 over the golden ratio
_MIXER = 0xD6E8FEB86659FD93  # odd, with as many ones as zeros
_BITS = 0xFFFFFFFFFFFFFFFF
_HALF = 32

Namespace = tuple[object, ...]
_TOGETHER = 32  # new tokens of a sequence that are learned at once, as a call of NumPy takes as long for one
_MOST_BEHIND = 64  # sequences with more than is learned in a call; of more the oldest is left
_MOST_ENDED = 1024  # that may go on: preempted ones do, and at `end` look like those that do not
_SECRET_BYTES = 16
_SALT_BYTES = 8
_MOD_AT_ONCE = 8192
_MOST = 64
_MOD_ENTRY_BYTES = 8
_EMPTY = -1
_LOW = 0xFFFFFFFF
_SIZES = (4, 3, 2, 1)
_LEAST_COUNT = {1: 4, 2: 3, 3: 2, 4: 2}
_LEAST_PERCENT = {1: 75, 2: 66, 3: 66, 4: 66}
_CACHE_AT_ONCE = 2048
_MOST_COUNTED = 1023  # then all counts of an n-gram are halved, so that what is new counts
_CACHE_ENTRY_BYTES = 16
_STATIC_SIZE, _STATIC_COUNT, _STATIC_PERCENT = 2, 2, 50  # llama.cpp's lax thresholds
_STATIC_LOAD = 2  # entries for each n-gram of a static cache
_MOST_TO_SAVE = 1 << 18  # newest tokens of which n-grams are counted for a file


def window_hashes(tokens: NDArray[np.int32], size: int) -> Hashes:
    """Return the hash of every run of `size` tokens, in order."""
    plain: Hashes = tokens.astype(np.int64).view(np.uint64)
    num_windows = len(tokens) - size + 1
    hashes = np.zeros(max(0, num_windows), np.uint64)
    factor = np.uint64(_FACTOR)
    for start in range(size if num_windows > 0 else 0):
        hashes *= factor
        hashes += plain[start : start + num_windows]
    return hashes


def mixed_hashes(hashes: Hashes, salt: int) -> Hashes:
    """Return the hashes with a salt, their bits mixed."""
    found: Any = hashes + np.uint64(salt)
    for _ in range(2):
        found ^= found >> np.uint64(_HALF)
        found *= np.uint64(_MIXER)
    found ^= found >> np.uint64(_HALF)
    return found  # type: ignore[no-any-return]


def salt_of_size(salt: int, size: int) -> int:
    """Return a salt that is another one for n-grams of each size, whose hashes are small numbers alike."""
    return (salt + size * _MIXER) & _BITS


def hash_of(tokens: Sequence[int]) -> int:
    """Return the hash of these tokens, as `window_hashes` has it."""
    found = 0
    for token in tokens:
        found = (found * _FACTOR + token) & _BITS
    return found


def power_of(size: int) -> int:
    """Return what the first of `size` tokens is multiplied by, which `rolled` takes."""
    return pow(_FACTOR, size - 1, 2**64)


def rolled(found: int, power: int, first: int, following: int) -> int:
    """Return the hash without its first token and with one that follows."""
    return ((found - first * power) * _FACTOR + following) & _BITS


def mixed(found: int, salt: int) -> int:
    """Return a hash with a salt, its bits mixed, as `mixed_hashes` has it."""
    found = (found + salt) & _BITS
    for _ in range(2):
        found = ((found ^ found >> _HALF) * _MIXER) & _BITS
    return found ^ found >> _HALF


class LearnedSequence:
    """The tokens of a sequence, and how many of them are learned. salt: of its namespace; None where nothing is shared."""

    __slots__ = ("_digest", "has_ended", "is_behind", "num_learned", "salt", "tokens")

    def __init__(self, token_ids: Sequence[int], salt: int | None) -> None:
        self.tokens = array("i", token_ids)
        self.salt = salt
        self.num_learned = self._digest = 0
        self.is_behind = self.has_ended = False

    def leave_queue(self) -> None:
        """Be learned no further until there are new tokens. If it has ended, its tokens are freed."""
        self.is_behind = False
        if self.has_ended:
            self._digest = hash(self.tokens[: self.num_learned].tobytes())
            self.tokens = array("i")

    def goes_on(self, token_ids: Sequence[int], salt: int | None) -> bool:
        """Take these tokens as its own, if they begin with those that were learned before it ended; return whether they do."""
        tokens = array("i", token_ids)
        learned = tokens[: self.num_learned]
        is_same = (
            learned == self.tokens[: self.num_learned] if self.is_behind else hash(learned.tobytes()) == self._digest
        )
        if salt != self.salt or not is_same:
            return False
        self.tokens, self.has_ended = tokens, False
        return True


class SharedNgrams(ABC):
    """A drafter that learns from sequences for those that follow; the tables are its heirs'.

    num_context: tokens before a token that are learned with it. at_once: most tokens that a call learns, so that a long prompt
    delays no tick.
    """

    def __init__(self, num_context: int, at_once: int) -> None:
        self._num_context, self._at_once = num_context, at_once
        self._secret = os.urandom(_SECRET_BYTES)
        self._sequences: dict[int, LearnedSequence] = {}
        self._behind: deque[LearnedSequence] = deque()
        self._ended: OrderedDict[int, LearnedSequence] = OrderedDict()  # the oldest first

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        """Begin with a sequence that shares nothing, and gets no drafts."""
        self._begin(key, token_ids, None)

    def begin_shared(self, key: int, token_ids: Sequence[int], namespace: Namespace | None) -> None:
        """See `SharingDrafter`."""
        self._begin(key, token_ids, None if namespace is None else self._salt(namespace))

    def propose(self, key: int, max_tokens: int) -> list[int]:
        """See `Drafter`."""
        self._learn_some()
        one = self._sequences[key]
        return [] if one.salt is None else self._proposal(one.tokens, one.salt, max_tokens)

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        one = self._sequences[key]
        one.tokens.extend(token_ids)
        if len(one.tokens) - one.num_learned >= _TOGETHER:
            self._note(one)
        self._learn_some()

    def rollback(self, key: int, num_tokens: int) -> None:  # noqa: B027 - not abstract: there is nothing to do
        """See `Drafter`; proposals leave nothing behind."""

    def end(self, key: int) -> None:
        """See `Drafter`. What is left of it to learn is learned."""
        one = self._sequences.pop(key, None)
        if one is None:
            return
        if one.salt is not None:
            one.has_ended = True
            self._ended[key] = one
            if len(self._ended) > _MOST_ENDED:
                self._ended.popitem(last=False)
        self._note(one)
        self._learn_some()

    @abstractmethod
    def _proposal(self, tokens: array[int], salt: int, max_tokens: int) -> list[int]:
        """Return what may follow the tokens."""

    @abstractmethod
    def _learn(self, tokens: NDArray[np.int32], num_known: int, salt: int) -> None:
        """Learn the tokens behind the first num_known, which were learned before."""

    def _begin(self, key: int, token_ids: Sequence[int], salt: int | None) -> None:
        one = self._ended.pop(key, None)
        if one is None or not one.goes_on(token_ids, salt):
            one = LearnedSequence(token_ids, salt)
        self._sequences[key] = one
        self._note(one)
        self._learn_some()

    def _note(self, one: LearnedSequence) -> None:
        if one.salt is None or one.is_behind:
            return
        one.is_behind = True
        self._behind.append(one)
        if len(self._behind) > _MOST_BEHIND:
            self._behind.popleft().leave_queue()

    def _learn_some(self) -> None:
        """Learn of the sequence that has waited longest."""
        if not self._behind:
            return
        one = self._behind[0]
        assert one.salt is not None  # noqa: S101 - others are never noted
        start, end = one.num_learned, min(len(one.tokens), one.num_learned + self._at_once)
        before = max(0, start - self._num_context)
        if end > start:
            self._learn(np.frombuffer(one.tokens[before:end], np.int32), start - before, one.salt)
            one.num_learned = end
        if end == len(one.tokens):
            self._behind.popleft().leave_queue()

    def _salt(self, namespace: Namespace) -> int:
        digest = blake2b(repr(namespace).encode(), key=self._secret, digest_size=_SALT_BYTES).digest()
        return int.from_bytes(digest, "little")


class NgramModDrafter(SharedNgrams):
    """Looks up the last `size_n` tokens among those of all requests so far, and proposes what followed, token by token.

    A table of fixed size keeps for each n-gram the token that followed it last; a new one takes the place of one that is in its
    way. Requests find only what those of the same tenant, cache salt and adapters have left; one without `cache_prompt` leaves
    and finds nothing. (llama.cpp's ngram-mod, but that it checks what it finds.)

    size_n: tokens that have to match; size_m: most tokens of a proposal; min_m: tokens that have to be known to follow, else
    none are proposed; table_mib: size of the table in MiB, of 131,072 n-grams each. Raises `InvalidParams` for other values
    than 1 to 64, of min_m 0 to size_m, of table_mib 1 to 1024.
    """

    def __init__(self, *, size_n: int = 12, size_m: int = 48, min_m: int = 1, table_mib: int = 16) -> None:
        self._size_n = validation.integer("size_n", size_n, 1, _MOST)
        self._size_m = validation.integer("size_m", size_m, 1, _MOST)
        self._min_m = validation.integer("min_m", min_m, 0, self._size_m)
        self._num_entries = validation.integer("table_mib", table_mib, 1, 1024) * (2**20 // _MOD_ENTRY_BYTES)
        self._power = power_of(self._size_n)
        super().__init__(self._size_n, _MOD_AT_ONCE)

    def _proposal(self, tokens: array[int], salt: int, max_tokens: int) -> list[int]:
        most = min(max_tokens, self._size_m)
        found = self._following(tokens[-self._size_n :].tolist(), salt, max(most, self._min_m))
        return found[:most] if len(found) >= self._min_m else []

    def _following(self, window: list[int], salt: int, num_tokens: int) -> list[int]:
        """Return the tokens behind these, as far as they are known; the list grows by them meanwhile."""
        table, size = self._table, len(window)
        if size < self._size_n:
            return []
        found = hash_of(window)
        for first in range(num_tokens):
            token = table.get(mixed(found, salt))
            if token == _EMPTY:
                break
            found = rolled(found, self._power, window[first], token)
            window.append(token)
        return window[size:]

    def _learn(self, tokens: NDArray[np.int32], num_known: int, salt: int) -> None:
        size = self._size_n
        hashes = window_hashes(tokens[:-1], size)
        following = tokens[size:]
        skipped = max(0, num_known - size)  # n-grams of which the following token was learned before
        self._table.put(mixed_hashes(hashes[skipped:], salt), following[skipped:])

    @cached_property
    def _table(self) -> FollowerTable:
        """Made when first needed, so that a drafter that is only named or pickled is small."""
        return FollowerTable(self._num_entries)


class FollowerTable:
    """A token by the hash of what is before it. Where the hash leads it says with its lower half; the upper is checked."""

    def __init__(self, num_entries: int) -> None:
        self._num_entries = num_entries
        self._tags = np.zeros(num_entries, np.uint32)
        self._tokens = np.full(num_entries, _EMPTY, np.int32)
        self._tag_at: Any = self._tags.data  # read a single one faster
        self._token_at: Any = self._tokens.data

    def get(self, found: int) -> int:
        """Return the token; -1 where none is known."""
        at = (found & _LOW) % self._num_entries
        token: int = self._token_at[at]
        return token if self._tag_at[at] == found >> 32 else _EMPTY

    def put(self, hashes: NDArray[np.uint64], tokens: NDArray[np.int32]) -> None:
        """Keep these tokens; of several in the same place the last. Negative ones stand for images and are left out."""
        are_tokens = tokens >= 0
        hashes, tokens = hashes[are_tokens], tokens[are_tokens]
        at = (hashes & np.uint64(_LOW)) % np.uint64(self._num_entries)
        self._tags[at] = (hashes >> np.uint64(32)).astype(np.uint32)
        self._tokens[at] = tokens


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
        self._num_entries = validation.integer("table_mib", table_mib, 1, 1024) * (2**20 // _CACHE_ENTRY_BYTES)
        super().__init__(_SIZES[0], _CACHE_AT_ONCE)

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
