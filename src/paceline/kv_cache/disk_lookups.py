"""Prefixes on a disk, as the cache sees them: it hands saved ranges to a store, and asks the store for the rest of a prompt.

    host block ──put──> store ──look_up──> DiskLookup ──blocks──> host block ──Load──> cells

What a store finds goes into host memory, and from there to the device as every host block. No call waits for a disk: a sequence
waits for its lookup, and starts without it if the lookup takes longer than computing what it may find.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from paceline.kv_cache.device_cells import CacheSequence, DiskLookup, KVCacheLimits, Save, SaveState
from paceline.kv_cache.offload import MIN_CACHED_TOKENS
from paceline.kv_cache.radix_tree import TOKEN_BYTES, Namespace, SavedState, common_prefix_bytes

DiskBlocks = Sequence[tuple[Save | SaveState, SavedState]]
"""Ranges and states from a disk, in the order of their path, as if they had been saved now."""

_HOST_SHARE = 2  # a lookup reads at most half of host memory
_LEAST_WAIT_S = 0.05  # for lookups of few tokens, and before the cost of a token is known


class DiskStore(Protocol):
    """Keeps saved ranges beyond the life of a process. No call waits for a disk, or fails."""

    def put(self, save: Save | SaveState, data: SavedState) -> None:
        """Keep saved cells or a saved state."""

    def look_up(self, lookup: DiskLookup) -> bool:
        """Begin a search; return False if it is known at once that nothing is there. `KVCache.end_lookup` takes the result."""

    def note_use(self, namespace: Namespace, tokens: bytes) -> None:
        """Mark these tokens as most recently used."""

    def note_unsaved(self) -> None:
        """Note that a cached prefix is on the device alone; the store asks for `KVCache.save_idle` when the engine is idle."""


class DiskLookups:
    """The pending lookups of one cache, and the sequences that wait for them. Without a store nothing waits."""

    def __init__(self, limits: KVCacheLimits, store: DiskStore | None) -> None:
        self._limits, self.store = limits, store if limits.host_bytes else None
        self._pending: list[DiskLookup] = []

    def must_wait(self, sequence: CacheSequence, num_known: int, num_cells: int, token_s: float, now_s: float) -> bool:
        """Return whether a sequence waits for a lookup, after beginning one for it if it had none.

        If another lookup reads the same beginning, the sequence waits for this one first. num_known, num_cells: see
        `DiskLookup`; token_s: seconds to compute a token, 0 if that is not known.
        """
        if self.store is None or not sequence.max_cached_tokens or not sequence.writes_cache:
            return False
        if sequence.lookup is not None:
            return not sequence.lookup.is_done and now_s < sequence.lookup.due_s
        num_missing = sequence.max_cached_tokens - num_known
        if num_missing < MIN_CACHED_TOKENS:
            return False
        tokens = sequence.token_bytes(sequence.max_cached_tokens)
        for lookup in self._pending:
            if lookup.namespace == sequence.namespace:
                num_common = common_prefix_bytes(lookup.tokens, tokens, 0) // TOKEN_BYTES
                if num_common - num_known >= MIN_CACHED_TOKENS:
                    sequence.awaited = lookup
                    return True
        sequence.lookup = sequence.awaited = lookup = DiskLookup(
            namespace=sequence.namespace,
            tokens=tokens,
            num_known=num_known,
            num_cells=num_cells,
            token_s=token_s,
            max_bytes=self._limits.host_bytes // _HOST_SHARE,
            due_s=now_s + max(_LEAST_WAIT_S, num_missing * token_s),
        )
        lookup.is_done = not self.store.look_up(lookup)
        if not lookup.is_done:
            self._pending.append(lookup)
        return not lookup.is_done

    def end(self, lookup: DiskLookup, num_read: int) -> None:
        """Let the sequences start that wait for a lookup."""
        lookup.is_done, lookup.num_read = True, num_read
        if lookup in self._pending:
            self._pending.remove(lookup)

    def end_overdue(self, now_s: float) -> None:
        """Forget the lookups that sequences wait for no longer; what they find still goes into host memory."""
        if self._pending:
            self._pending = [lookup for lookup in self._pending if now_s < lookup.due_s]

    @property
    def next_due_s(self) -> float:
        """When the first waiting sequence starts without its lookup; infinite if none waits."""
        return min([lookup.due_s for lookup in self._pending], default=math.inf)
