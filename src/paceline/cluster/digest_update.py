"""What travels of a replica's prefix digest: all of its hashes, or those that came and went since a version before."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from paceline import validation
from paceline.cluster.block_hashes import HASH_BYTES
from paceline.errors import InvalidParams

HEADER_BYTES = 64
"""More than all of an update takes but its hashes."""


class DigestUpdate(msgspec.Struct, frozen=True, array_like=True):
    """One step of a replica's digest. Encode it with msgspec, or pickle it.

    Attributes:
        epoch: The life of the replica's cache that it is about; another number after a restart.
        version: Of the digest behind this update, at least 1.
        base: The version that it is applied to; None: to nothing, it has the whole digest.
        added: Hashes of prefixes, eight bytes each, little-endian.
        removed: The same.
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


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Return hashes as they travel."""
    return b"".join(one.to_bytes(HASH_BYTES, "little") for one in hashes)


def unpack_hashes(name: str, data: bytes) -> array[int]:
    """Return the hashes. Raises `InvalidParams`, naming the field, where the bytes are no whole number of them."""
    if len(data) % HASH_BYTES:
        raise InvalidParams(f"{name} must have {HASH_BYTES} bytes a hash, not {len(data)} bytes")
    return array("Q", [int.from_bytes(data[at : at + HASH_BYTES], "little") for at in range(0, len(data), HASH_BYTES)])


def check_update(update: DigestUpdate) -> None:
    """Raise `InvalidParams` for versions that no publisher gives."""
    validation.integer("epoch", update.epoch, 0)
    validation.integer("version", update.version, 1)
    if update.base is not None:
        validation.integer("base", update.base, 1, update.version)
