"""Prefix digests: hashes of the prompt prefixes that a replica has cached, how they travel, and a router's index of them.

A block's hash is the hash of the whole prefix up to the block's end, together with the adapters, the tenant and the cache salt:
the first 64 bits of the hash that `EngineClient.prefix_digest` returns. A collision costs time and nothing else.

A replica publishes its digest as updates with a version. A router that misses an update keeps the old digest until a snapshot
comes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.kv_cache import MAX_DIGEST_PREFIXES, PrefixDigest, hash_blocks, pack_tokens
from paceline.request import RequestOptions
from paceline.sequence import prefix_namespace

BLOCK_TOKENS: Final = 64
"""Tokens of a block. A prefix is found to within as many; smaller blocks would hardly shorten a tick."""

_HASH_BYTES: Final = 8
_HEADER_BYTES: Final = 64  # an encoded update without its hashes is smaller
_MAX_TOKEN_ID: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The part of a request that a router looks at.

    Attributes:
        num_tokens: Tokens of the prompt.
        hashes: Hashes of the prefixes of whole blocks, shortest first; empty if the request does not use the cache.
    """

    num_tokens: int
    hashes: tuple[int, ...] = ()


def hash_prompt(token_ids: Sequence[int], options: RequestOptions) -> PromptBlocks:
    """Return the length of a prompt and the hashes of its blocks.

    Args:
        token_ids: The ids of the prompt, at least one.
        options: The request's options. Adapters, tenant and cache_salt are part of each hash; without cache_prompt there are
            no hashes.

    Raises:
        InvalidParams: token_ids is empty or has a value that is no token id.
    """
    if isinstance(token_ids, (str, bytes, bytearray)):
        raise InvalidType(f"token_ids must be a sequence of token ids, not {type(token_ids).__name__}")
    ids = list(token_ids)
    validation.integer("the number of token_ids", len(ids), 1)
    # A prompt has thousands of ids: each is checked alone only if the prompt has a wrong one, or ids of another integer type.
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > _MAX_TOKEN_ID:
        ids = [validation.integer(f"token_ids[{index}]", id_, 0, _MAX_TOKEN_ID) for index, id_ in enumerate(ids)]
    if not options.cache_prompt:
        return PromptBlocks(len(ids))
    hashes = hash_blocks(prefix_namespace(options), pack_tokens(ids), BLOCK_TOKENS)
    return PromptBlocks(len(ids), tuple(map(shortened, hashes)))


def shortened(hash_: str) -> int:
    """Return the first 64 bits of an engine's hash."""
    return int(hash_[: 2 * _HASH_BYTES], 16)


class DigestUpdate(msgspec.Struct, frozen=True, array_like=True):
    """One change of a replica's digest. Encode it with msgspec, or pickle it.

    Attributes:
        epoch: The life of the replica's cache; another number after a restart.
        version: The version of the digest after this update, at least 1.
        base: The version before this update; None for a snapshot, which has the whole digest.
        added: Hashes of new prefixes, eight bytes each, little-endian.
        removed: Hashes of prefixes that are gone, in the same form.
    """

    epoch: int
    version: int
    base: int | None
    added: bytes = b""
    removed: bytes = b""

    @property
    def is_snapshot(self) -> bool:
        """Whether it has the whole digest."""
        return self.base is None


class DigestPublisher:
    """Turns the digests of one engine into updates of at most max_bytes, encoded.

    If a digest has too many hashes, the longest prefixes are left out: more prompts share the short ones, and a router
    that finds the first blocks of a conversation sends it to the replica that has the rest.

    Args:
        epoch: The life of the engine's cache; another number after each restart, since the cache is empty then.
        max_bytes: The most bytes of an update, and of the part of it that a router keeps.

    Raises:
        InvalidParams: max_bytes is less than one hash takes, or more than an engine's digest.
    """

    def __init__(self, epoch: int, max_bytes: int = 64 * 1024) -> None:
        self._epoch = validation.integer("epoch", epoch, 0)
        most = _HEADER_BYTES + MAX_DIGEST_PREFIXES * _HASH_BYTES
        max_bytes = validation.integer("max_bytes", max_bytes, _HEADER_BYTES + _HASH_BYTES, most)
        self.max_prefixes = (max_bytes - _HEADER_BYTES) // _HASH_BYTES
        """How many prefixes to ask `EngineClient.prefix_digest` for, with `BLOCK_TOKENS`."""
        self._hashes: dict[int, None] = {}
        self._version = 0

    def publish(self, digest: PrefixDigest) -> DigestUpdate:
        """Return the update from the last digest to this one.

        It is a snapshot if that is smaller, or if nothing was published before. If nothing changed, the version stays and the
        update is empty.
        """
        now = dict.fromkeys(shortened(prefix.hash) for prefix in digest.prefixes[: self.max_prefixes])
        added = [hash_ for hash_ in now if hash_ not in self._hashes]
        removed = [hash_ for hash_ in self._hashes if hash_ not in now]
        base, self._hashes = self._version, now
        if base and not (added or removed):
            return DigestUpdate(self._epoch, base, base)
        self._version += 1
        if len(added) + len(removed) >= len(now):
            return self.snapshot()
        return DigestUpdate(self._epoch, self._version, base, _packed(added), _packed(removed))

    def snapshot(self) -> DigestUpdate:
        """Return the whole of the last published digest, for a router that is new or missed an update."""
        return DigestUpdate(self._epoch, self._version, None, _packed(self._hashes))


@dataclass(slots=True)
class _Replica:
    """The prefixes of one replica. expected: hashes of prompts that were sent there, with the time they are computed by."""

    bit: int
    epoch: int | None = None
    version: int = 0
    hashes: set[int] = field(default_factory=set)
    expected: OrderedDict[int, float] = field(default_factory=OrderedDict)


class PrefixIndex:
    """A router's view of the digests of all replicas. Maps each hash to the set of replicas that have it, as bits of a number.

    Args:
        max_expected: The most expected hashes of a replica; the oldest are dropped.
    """

    def __init__(self, max_expected: int) -> None:
        self._max_expected = max_expected
        self._replicas: dict[str, _Replica] = {}
        self._holders: dict[int, int] = {}

    def apply(self, replica_id: str, update: DigestUpdate) -> bool:
        """Apply an update. Returns False if an earlier update was missed: then the old digest stays until a snapshot comes.

        An update that is older than the known digest changes nothing. Raises `InvalidParams`, and changes nothing, for an
        update that no publisher makes.
        """
        validation.integer("epoch", update.epoch, 0)
        validation.integer("version", update.version, 1)
        if update.base is not None:
            validation.integer("base", update.base, 1, update.version)
        added, removed = _unpacked("added", update.added), _unpacked("removed", update.removed)
        replica = self._replica(replica_id)
        is_same_life = update.epoch == replica.epoch
        if is_same_life and update.version <= replica.version:
            return True
        if not (update.is_snapshot or (is_same_life and update.base == replica.version)):
            return False
        kept = set() if update.is_snapshot else replica.hashes
        hashes = kept.difference(removed).union(added)
        if len(hashes) > MAX_DIGEST_PREFIXES:
            raise InvalidParams(f"the digest of replica {replica_id!r} has more than {MAX_DIGEST_PREFIXES} prefixes")
        if not is_same_life:  # the cache of the former life is gone
            self._drop_expected(replica, list(replica.expected))
        self._replace(replica, hashes)
        replica.epoch, replica.version = update.epoch, update.version
        return True

    def expect(self, replica_id: str, hashes: Iterable[int], due_s: float) -> None:
        """Take these hashes for cached until a report of that time or later says whether they are."""
        replica = self._replica(replica_id)
        for hash_ in hashes:
            replica.expected[hash_] = due_s
            replica.expected.move_to_end(hash_)
            self._holders[hash_] = self._holders.get(hash_, 0) | replica.bit
        num_over = len(replica.expected) - self._max_expected
        if num_over > 0:
            self._drop_expected(replica, list(replica.expected)[:num_over])

    def settle(self, replica_id: str, now_s: float) -> None:
        """Drop the expected hashes that a report of that time covers."""
        replica = self._replica(replica_id)
        self._drop_expected(replica, [hash_ for hash_, due_s in replica.expected.items() if due_s <= now_s])

    def matched_blocks(self, hashes: Sequence[int], replica_ids: Iterable[str]) -> dict[str, int]:
        """Return how many blocks of a prompt each replica has; replicas without a block are left out."""
        wanted = {self._replicas[name].bit: name for name in replica_ids if name in self._replicas}
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
        replica = self._replicas.get(replica_id)
        if replica is not None:
            self._drop_expected(replica, list(replica.expected))
            self._replace(replica, set())
            del self._replicas[replica_id]

    def _replica(self, replica_id: str) -> _Replica:
        replica = self._replicas.get(replica_id)
        if replica is None:
            taken = {known.bit for known in self._replicas.values()}
            bit = next(1 << place for place in range(len(taken) + 1) if 1 << place not in taken)
            replica = self._replicas[replica_id] = _Replica(bit)
        return replica

    def _replace(self, replica: _Replica, hashes: set[int]) -> None:
        gone, new = replica.hashes - hashes, hashes - replica.hashes
        replica.hashes = hashes
        for hash_ in new:
            self._holders[hash_] = self._holders.get(hash_, 0) | replica.bit
        for hash_ in gone:
            if hash_ not in replica.expected:
                self._clear(hash_, replica.bit)

    def _drop_expected(self, replica: _Replica, hashes: list[int]) -> None:
        for hash_ in hashes:
            del replica.expected[hash_]
            if hash_ not in replica.hashes:
                self._clear(hash_, replica.bit)

    def _clear(self, hash_: int, bit: int) -> None:
        holders = self._holders[hash_] & ~bit
        if holders:
            self._holders[hash_] = holders
        else:
            del self._holders[hash_]


def _packed(hashes: Iterable[int]) -> bytes:
    return b"".join(hash_.to_bytes(_HASH_BYTES, "little") for hash_ in hashes)


def _unpacked(name: str, data: bytes) -> array[int]:
    if len(data) % _HASH_BYTES:
        raise InvalidParams(f"{name} must have {_HASH_BYTES} bytes a hash, not {len(data)} bytes")
    return array(
        "Q", [int.from_bytes(data[at : at + _HASH_BYTES], "little") for at in range(0, len(data), _HASH_BYTES)]
    )
