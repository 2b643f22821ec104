"""Drafters that learn n-grams of all requests: `ngram-mod` and `ngram-cache`.

Sequences learn from each other within a namespace. A salt of each namespace, made with a secret, goes into every hash, and tables
keep 32 bits of the hash beside the place: no request finds n-grams of another namespace, nor can it make n-grams that would be
found there.

Hashes are polynomials of the tokens modulo 2 ** 64, the last token with exponent 0, so that they roll on by a token in a
step. Before a hash gives the place of an n-gram, the salt is added and the bits are mixed.
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
    """Return a salt that differs by the size of n-grams, as hashes of all sizes may be small numbers."""
    return (salt + size * _MIXER) & _BITS


def hash_of(tokens: Sequence[int]) -> int:
    """Return the hash of these tokens, equal to that of `window_hashes`."""
    found = 0
    for token in tokens:
        found = (found * _FACTOR + token) & _BITS
    return found


def power_of(size: int) -> int:
    """Return the factor of the first of `size` tokens, for `rolled`."""
    return pow(_FACTOR, size - 1, 2**64)


def rolled(found: int, power: int, first: int, following: int) -> int:
    """Return the hash without its first token and with a following token."""
    return ((found - first * power) * _FACTOR + following) & _BITS


def mixed(found: int, salt: int) -> int:
    """Return a hash with a salt, its bits mixed, equal to that of `mixed_hashes`."""
    found = (found + salt) & _BITS
    for _ in range(2):
        found = ((found ^ found >> _HALF) * _MIXER) & _BITS
    return found ^ found >> _HALF


class LearnedSequence:
    """The tokens of a sequence and the number of learned ones. salt: of its namespace; None if the sequence shares nothing."""

    __slots__ = ("_digest", "has_ended", "is_behind", "num_learned", "salt", "tokens")

    def __init__(self, token_ids: Sequence[int], salt: int | None) -> None:
        self.tokens = array("i", token_ids)
        self.salt = salt
        self.num_learned = self._digest = 0
        self.is_behind = self.has_ended = False

    def leave_queue(self) -> None:
        """Stop learning until there are new tokens. The tokens of an ended sequence are freed."""
        self.is_behind = False
        if self.has_ended:
            self._digest = hash(self.tokens[: self.num_learned].tobytes())
            self.tokens = array("i")

    def goes_on(self, token_ids: Sequence[int], salt: int | None) -> bool:
        """Resume with these tokens if they begin with the tokens learned before the end; return whether they do."""
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
    """A drafter that learns n-grams from all sequences; subclasses keep the tables.

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
        """Begin with a sequence that shares nothing and gets no drafts."""
        self._begin(key, token_ids, None)

    def begin_shared(self, key: int, token_ids: Sequence[int], namespace: Namespace | None) -> None:
        """See `SharingDrafter`."""
        self._begin(key, token_ids, None if namespace is None else self._salt(namespace))

    def propose(self, key: int, max_tokens: int) -> list[int]:
        """See `Drafter`."""
        self._learn_some()
        sequence = self._sequences[key]
        return [] if sequence.salt is None else self._proposal(sequence.tokens, sequence.salt, max_tokens)

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        sequence = self._sequences[key]
        sequence.tokens.extend(token_ids)
        if len(sequence.tokens) - sequence.num_learned >= _TOGETHER:
            self._note(sequence)
        self._learn_some()

    def rollback(self, key: int, num_tokens: int) -> None:  # noqa: B027 - not abstract: there is nothing to do
        """See `Drafter`; proposals leave nothing behind."""

    def end(self, key: int) -> None:
        """Forget a sequence; its remaining tokens are learned."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        if sequence.salt is not None:
            sequence.has_ended = True
            self._ended[key] = sequence
            if len(self._ended) > _MOST_ENDED:
                self._ended.popitem(last=False)
        self._note(sequence)
        self._learn_some()

    @abstractmethod
    def _proposal(self, tokens: array[int], salt: int, max_tokens: int) -> list[int]:
        """Return tokens that may follow."""

    @abstractmethod
    def _learn(self, tokens: NDArray[np.int32], num_known: int, salt: int) -> None:
        """Learn the tokens after the first num_known, which were learned before."""

    def _begin(self, key: int, token_ids: Sequence[int], salt: int | None) -> None:
        sequence = self._ended.pop(key, None)
        if sequence is None or not sequence.goes_on(token_ids, salt):
            sequence = LearnedSequence(token_ids, salt)
        self._sequences[key] = sequence
        self._note(sequence)
        self._learn_some()

    def _note(self, sequence: LearnedSequence) -> None:
        if sequence.salt is None or sequence.is_behind:
            return
        sequence.is_behind = True
        self._behind.append(sequence)
        if len(self._behind) > _MOST_BEHIND:
            self._behind.popleft().leave_queue()

    def _learn_some(self) -> None:
        """Learn a part of the sequence that has waited longest."""
        if not self._behind:
            return
        sequence = self._behind[0]
        assert sequence.salt is not None  # noqa: S101 - others are never noted
        start, end = sequence.num_learned, min(len(sequence.tokens), sequence.num_learned + self._at_once)
        before = max(0, start - self._num_context)
        if end > start:
            self._learn(np.frombuffer(sequence.tokens[before:end], np.int32), start - before, sequence.salt)
            sequence.num_learned = end
        if end == len(sequence.tokens):
            self._behind.popleft().leave_queue()

    def _salt(self, namespace: Namespace) -> int:
        digest = blake2b(repr(namespace).encode(), key=self._secret, digest_size=_SALT_BYTES).digest()
        return int.from_bytes(digest, "little")


class NgramModDrafter(SharedNgrams):
    """Looks up the last `size_n` tokens in the tokens of all requests, and proposes the tokens that followed them, one by one.

    A table of fixed size keeps for each n-gram the token that followed it last; a new n-gram replaces an old one in its place.
    Requests find only n-grams of requests with the same tenant, cache salt and adapters; a request without `cache_prompt` leaves
    and finds nothing. (This is llama.cpp's ngram-mod with a check of the n-grams that are found.)

    size_n: tokens that have to match; size_m: most tokens of a proposal; min_m: fewest tokens of a proposal; table_mib: size
    of the table in MiB, of 131,072 n-grams each. Raises `InvalidParams` for values outside of 1 to 64, for min_m outside of 0
    to size_m and for table_mib outside of 1 to 1024.
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
        """Return the known tokens after these, and append them to the list."""
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
        """Made on first use, so that a drafter that is only named or pickled is small."""
        return FollowerTable(self._num_entries)


class FollowerTable:
    """A token by the hash of the tokens before it. The lower half of a hash is the place; the upper half is checked."""

    def __init__(self, num_entries: int) -> None:
        self._num_entries = num_entries
        self._tags = np.zeros(num_entries, np.uint32)
        self._tokens = np.full(num_entries, _EMPTY, np.int32)
        self._tag_at: Any = self._tags.data  # read a single one faster
        self._token_at: Any = self._tokens.data

    def get(self, found: int) -> int:
        """Return the token; -1 if none is known."""
        at = (found & _LOW) % self._num_entries
        token: int = self._token_at[at]
        return token if self._tag_at[at] == found >> 32 else _EMPTY

    def put(self, hashes: NDArray[np.uint64], tokens: NDArray[np.int32]) -> None:
        """Keep these tokens, the last of several in one place. Negative tokens stand for images and are left out."""
        are_tokens = tokens >= 0
        hashes, tokens = hashes[are_tokens], tokens[are_tokens]
        at = (hashes & np.uint64(_LOW)) % np.uint64(self._num_entries)
        self._tags[at] = (hashes >> np.uint64(32)).astype(np.uint32)
        self._tokens[at] = tokens


class NgramCacheDrafter(SharedNgrams):
    """Counts the tokens that follow each n-gram of 1 to 4 tokens in all requests, and proposes tokens that nearly always follow.

    The longest n-gram that was seen often enough decides: 2 times for 3 or 4 tokens, 3 times for 2, 4 times for one. The token
    must have followed in two of three cases, after a single token in three of four (llama.cpp's strict thresholds for its dynamic
    lookup cache). A table of fixed size keeps for each n-gram its most frequent follower; a new n-gram replaces an old one in its
    place. Requests find only n-grams of requests with the same tenant, cache salt and adapters; a request without `cache_prompt`
    leaves and finds nothing.

    size_m: most tokens of a proposal; table_mib: size of the table in MiB, of 65,536 n-grams each. lookup_cache_static and
    lookup_cache_dynamic: files in llama.cpp's format. The engine reads both and writes the dynamic one. N-grams of 2 tokens
    in the static file are proposed to all requests that share, if nothing else is known; the dynamic file belongs to requests
    without tenant, salt and adapters. Raises `InvalidParams` for a size_m outside of 1 to 64, a table_mib outside of 1 to
    1024, and empty paths.
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
        self._to_save: deque[tuple[NDArray[np.int32], int]] = deque()  # tokens, and the number of them that are not new
        self._num_to_save = 0
        self._size_m = validation.integer("size_m", size_m, 1, _MOST)
        self._num_entries = validation.integer("table_mib", table_mib, 1, 1024) * (2**20 // _CACHE_ENTRY_BYTES)
        super().__init__(_SIZES[0], _CACHE_AT_ONCE)

    def load_static(self, cache: LookupCache) -> int:
        """Propose its n-grams of 2 tokens to all requests that share; return their number. Other n-grams are not used."""
        followers = cache.followers(_STATIC_SIZE)
        num = len(followers.tokens)
        if num:
            self._static = CountTable(_STATIC_LOAD * num)
            self._static.add(*_counts_of(followers, 0))
        return num

    def load_dynamic(self, cache: LookupCache) -> None:
        """Add its counts as if they had been learned from requests without tenant, salt and adapters."""
        for size in _SIZES:
            followers = cache.followers(size)
            if len(followers.tokens):
                self._table.add(*_counts_of(followers, salt_of_size(self._common_salt, size)))

    def learned(self) -> LookupCache:
        """Return counts of the newest tokens of these requests, if there is a file for them. Ends open sequences."""
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
        """Salt of requests without tenant, salt and adapters."""
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
        """Return the token that follows; -1 if none is sure enough."""
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
        """Made on first use, so that a drafter that is only named or pickled is small."""
        return CountTable(self._num_entries)


class CountTable:
    """By the hash of the tokens before: the most frequent token, its count, and the count of all tokens."""

    def __init__(self, num_entries: int) -> None:
        self._num_entries = num_entries
        self._tags = np.zeros(num_entries, np.uint32)
        self._tokens = np.full(num_entries, _EMPTY, np.int32)
        self._best = np.zeros(num_entries, np.uint32)
        self._all = np.zeros(num_entries, np.uint32)
        self._views: Any = [values.data for values in (self._tags, self._tokens, self._best, self._all)]

    def get(self, found: int) -> tuple[int, int, int]:
        """Return the token and the two counts; -1 and zeros if none is known."""
        tags, tokens, best, counted = self._views
        at = (found & _LOW) % self._num_entries
        return (tokens[at], best[at], counted[at]) if tags[at] == found >> 32 else (_EMPTY, 0, 0)

    def count(self, hashes: Hashes, tokens: NDArray[np.int32]) -> None:
        """Count tokens by the hashes of the tokens before them. Negative tokens stand for images and are left out."""
        are_tokens = tokens >= 0
        self.add(*_most_frequent(hashes[are_tokens], tokens[are_tokens]))

    def add(self, found: Hashes, tokens: NDArray[np.int32], num_best: NDArray[Any], num_all: NDArray[Any]) -> None:
        """Add counts: for each hash, given once, its most frequent token, the count of that, and the count of all tokens."""
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
    """Return the arguments of `CountTable.add`; counts above the maximum of a table are scaled down."""
    num, size = followers.ngrams.shape
    hashes = window_hashes(followers.ngrams.ravel(), size)[::size][:num]
    total = np.minimum(followers.total, _MOST_COUNTED)
    best = followers.best * total // followers.total
    return mixed_hashes(hashes, salt), followers.tokens, best.astype(np.uint32), total.astype(np.uint32)


def _most_frequent(
    hashes: Hashes, tokens: NDArray[np.int32]
) -> tuple[Hashes, NDArray[np.int32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Return each hash once, with its most frequent token, the count of that, and the count of all tokens."""
    order = np.lexsort((tokens, hashes))
    hashes, tokens = hashes[order], tokens[order]
    begins = np.flatnonzero(np.r_[True, (hashes[1:] != hashes[:-1]) | (tokens[1:] != tokens[:-1])][: len(hashes)])
    counts = np.diff(np.r_[begins, len(hashes)])
    hashes, tokens = hashes[begins], tokens[begins]  # each pair once
    groups = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]][: len(hashes)])
    group_of = np.repeat(np.arange(len(groups)), np.diff(np.r_[groups, len(hashes)]))
    best = np.zeros(len(groups), np.int64)
    ascending = np.argsort(counts, kind="stable")
    best[group_of[ascending]] = ascending  # the last one stays, with the highest count
    total = np.add.reduceat(counts, groups) if len(groups) else counts
    return hashes[groups], tokens[best], counts[best].astype(np.uint32), total.astype(np.uint32)
