"""A router's side of the digests: how much of a prompt each replica has.

An index from hashes to the set of replicas that have them, as the bits of a number, so that a lookup costs as much for a
hundred replicas as for one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from paceline.cluster.digest_update import DigestUpdate, check_update, unpack_hashes
from paceline.errors import InvalidParams
from paceline.kv_cache import MAX_DIGEST_PREFIXES


class _Cached:
    """What one replica has, and what it is about to have.

    expected: the hashes of prompts that were sent there, with the time by which they are computed, the earliest first.
    """

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.epoch: int | None = None
        self.version = 0
        self.hashes: set[int] = set()
        self.expected: OrderedDict[int, float] = OrderedDict()


class PrefixIndex:
    """The digests of all replicas. max_expected: hashes of a replica that are only expected; the oldest are forgotten."""

    def __init__(self, max_expected: int) -> None:
        self._max_expected = max_expected
        self._replicas: dict[str, _Cached] = {}
        self._holders: dict[int, int] = {}

    def apply(self, replica_id: str, update: DigestUpdate) -> bool:
        """Apply an update; False where one before it was missed, and a snapshot is needed: then the old digest stays.

        An update that is older than what is known changes nothing. Raises `InvalidParams` for one that no publisher makes;
        that changes nothing either.
        """
        check_update(update)
        added, removed = unpack_hashes("added", update.added), unpack_hashes("removed", update.removed)
        cached = self._replica(replica_id)
        is_same_life = update.epoch == cached.epoch
        if is_same_life and update.version <= cached.version:
            return True
        if not (update.is_snapshot or (is_same_life and update.base == cached.version)):
            return False
        kept = cached.hashes if update.base is not None else set()
        hashes = kept.difference(removed).union(added)
        if len(hashes) > MAX_DIGEST_PREFIXES:
            raise InvalidParams(f"the digest of replica {replica_id!r} has more than {MAX_DIGEST_PREFIXES} prefixes")
        if not is_same_life:  # the cache of another life is gone
            self._forget(cached, list(cached.expected))
        self._replace(cached, hashes)
        cached.epoch, cached.version = update.epoch, update.version
        return True

    def expect(self, replica_id: str, hashes: Iterable[int], due_s: float) -> None:
        """Take these hashes for cached until the replica's report of that time can have them."""
        cached = self._replica(replica_id)
        for one in hashes:
            cached.expected[one] = due_s
            cached.expected.move_to_end(one)
            self._holders[one] = self._holders.get(one, 0) | cached.bit
        num_over = len(cached.expected) - self._max_expected
        if num_over > 0:
            self._forget(cached, list(cached.expected)[:num_over])

    def settle(self, replica_id: str, now_s: float) -> None:
        """Stop expecting what a report of that time has, or has not."""
        cached = self._replica(replica_id)
        self._forget(cached, [one for one, due_s in cached.expected.items() if due_s <= now_s])

    def matched_blocks(self, hashes: Sequence[int], replica_ids: Iterable[str]) -> dict[str, int]:
        """Return how many blocks of a prompt the replicas have; those that have none are left out."""
        wanted = {cached.bit: one for one in replica_ids if (cached := self._replicas.get(one)) is not None}
        left, found = sum(wanted), {}
        for num_blocks in range(len(hashes), 0, -1):
            here = self._holders.get(hashes[num_blocks - 1], 0) & left
            left ^= here
            while here:
                bit = here & -here
                found[wanted[bit]] = num_blocks
                here ^= bit
            if not left:
                break
        return found

    def remove(self, replica_id: str) -> None:
        """Forget a replica."""
        cached = self._replicas.get(replica_id)
        if cached is not None:
            self._forget(cached, list(cached.expected))
            self._replace(cached, set())
            del self._replicas[replica_id]

    def _replica(self, replica_id: str) -> _Cached:
        cached = self._replicas.get(replica_id)
        if cached is None:
            taken = {one.bit for one in self._replicas.values()}
            bit = next(1 << place for place in range(len(taken) + 1) if 1 << place not in taken)
            cached = self._replicas[replica_id] = _Cached(bit)
        return cached

    def _replace(self, cached: _Cached, hashes: set[int]) -> None:
        gone, new = cached.hashes - hashes, hashes - cached.hashes
        cached.hashes = hashes
        for one in new:
            self._holders[one] = self._holders.get(one, 0) | cached.bit
        for one in gone:
            if one not in cached.expected:
                self._clear(one, cached.bit)

    def _forget(self, cached: _Cached, hashes: list[int]) -> None:
        for one in hashes:
            del cached.expected[one]
            if one not in cached.hashes:
                self._clear(one, cached.bit)

    def _clear(self, hash_: int, bit: int) -> None:
        holders = self._holders[hash_] & ~bit
        if holders:
            self._holders[hash_] = holders
        else:
            del self._holders[hash_]
