"""N-grams of all sequences in one table, each with the token that followed it last."""

from __future__ import annotations

from array import array
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import validation
from paceline.scheduling.ngram_hashes import hash_of, mixed, mixed_hashes, power_of, rolled, window_hashes
from paceline.scheduling.shared_ngrams import SharedNgrams

_AT_ONCE = 8192
_MOST = 64
_ENTRY_BYTES = 8
_EMPTY = -1
_LOW = 0xFFFFFFFF


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
        self._num_entries = validation.integer("table_mib", table_mib, 1, 1024) * (2**20 // _ENTRY_BYTES)
        self._power = power_of(self._size_n)
        super().__init__(self._size_n, _AT_ONCE)

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
