"""A replica's side of its digest: which hashes travel, and as what."""

from __future__ import annotations

from typing import Final

from paceline import validation
from paceline.cluster.block_hashes import HASH_BYTES, digest_hashes
from paceline.cluster.digest_update import HEADER_BYTES, DigestUpdate, pack_hashes
from paceline.kv_cache import MAX_DIGEST_PREFIXES, PrefixDigest

DEFAULT_MAX_BYTES: Final = 64 * 1024
_MOST_BYTES = HEADER_BYTES + MAX_DIGEST_PREFIXES * HASH_BYTES


class DigestPublisher:
    """Turns digests of one engine into updates of at most max_bytes, encoded.

    Where a digest has more hashes than fit, those of the longest prefixes are left out: one is of no use without the
    shorter ones before it, those are shared by more prompts, and a router that finds the first blocks of a conversation sends
    it to where its last ones lie as well.

    Args:
        epoch: A number for this life of the engine's cache, other than those before it: after a restart nothing is cached.
        max_bytes: Of an update, and of what a router keeps of it.

    Raises:
        InvalidParams: max_bytes is less than one hash takes, or more than an engine's digest.
    """

    def __init__(self, epoch: int, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._epoch = validation.integer("epoch", epoch, 0)
        max_bytes = validation.integer("max_bytes", max_bytes, HEADER_BYTES + HASH_BYTES, _MOST_BYTES)
        self.max_prefixes = (max_bytes - HEADER_BYTES) // HASH_BYTES
        """What to ask `EngineClient.prefix_digest` for, with `BLOCK_TOKENS`."""
        self._hashes: dict[int, None] = {}
        self._version = 0

    def publish(self, digest: PrefixDigest) -> DigestUpdate:
        """Return the update from the last digest to this one; a snapshot where that is smaller, or nothing was published.

        Where nothing changed, the version stays, and the update is empty.
        """
        now = dict.fromkeys(digest_hashes(digest)[: self.max_prefixes])
        added = [one for one in now if one not in self._hashes]
        removed = [one for one in self._hashes if one not in now]
        base, self._hashes = self._version, now
        if base and not (added or removed):
            return DigestUpdate(self._epoch, base, base)
        self._version += 1
        if len(added) + len(removed) >= len(now):
            return self.snapshot()
        return DigestUpdate(self._epoch, self._version, base, pack_hashes(added), pack_hashes(removed))

    def snapshot(self) -> DigestUpdate:
        """Return the whole of the last digest, for a router that has none of it, or missed an update; after `publish`."""
        return DigestUpdate(self._epoch, self._version, None, pack_hashes(self._hashes))
