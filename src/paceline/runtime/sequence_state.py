"""The file format of a saved sequence: a frame with the model's fingerprint and a checksum.

offset  size  field, little-endian
0       4     magic "PLSQ"
4       2     version, 1
6       2     flags: 1 = only the sliding window and the recurrent state
8       16    fingerprint of the model and of the layout of its KV cells
24      4     n, number of token ids
28      4     last position that the sequence held, int32, -1 if it was empty
32      8     size of the state in bytes
40      16    BLAKE2b-128 of everything but this field
56      4n    token ids, int32
...           the state, in llama.cpp's own format
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import StateError

_MAGIC = b"PLSQ"
_VERSION = 1
_HEAD = struct.Struct("<4sHH16sIiQ")
_DIGEST_SIZE = 16
_PARTIAL = 1
HEAD_BYTES = _HEAD.size + _DIGEST_SIZE
"""Bytes of a frame before the token ids."""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A saved sequence: llama.cpp's state, and the token ids it was computed from, if given."""

    fingerprint: bytes
    token_ids: tuple[int, ...]
    partial: bool
    last: int
    payload: npt.NDArray[np.uint8]

    def to_bytes(self) -> bytes:
        """Return the frame."""
        flags = _PARTIAL if self.partial else 0
        sizes = (len(self.token_ids), self.last, self.payload.nbytes)
        head = _HEAD.pack(_MAGIC, _VERSION, flags, self.fingerprint, *sizes)
        ids = np.asarray(self.token_ids, dtype="<i4").tobytes()
        payload = self.payload.tobytes()
        return b"".join((head, _digest(head, ids, payload), ids, payload))

    @classmethod
    def from_bytes(cls, data: bytes, fingerprint: bytes) -> SequenceState:
        """Read a frame. Raises `StateError` if it is not valid, damaged, or of another model or layout."""
        view = memoryview(data).cast("B")
        check_head(view[:HEAD_BYTES], len(view))
        start = HEAD_BYTES
        _, _, flags, owner, num_ids, last, _ = _HEAD.unpack_from(view)
        ids, payload = view[start : start + 4 * num_ids], view[start + 4 * num_ids :]
        if _digest(view[: _HEAD.size], ids, payload) != bytes(view[_HEAD.size : start]):
            raise StateError("the saved sequence is damaged: its checksum does not match")
        if owner != fingerprint:
            raise StateError(
                "the saved sequence belongs to another model or to another kind of context: weights, kv_overrides, "
                "adapters, type_k, type_v, rope and kv options must be the same"
            )
        token_ids = tuple(np.frombuffer(ids, dtype="<i4").tolist())
        return cls(owner, token_ids, bool(flags & _PARTIAL), last, np.frombuffer(payload, dtype=np.uint8))


@dataclass(frozen=True, slots=True)
class CellState:
    """Positions [start, end) of a sequence, in llama.cpp's format without a frame, for the context it came from.

    An empty range means the state beside the cells of `end` positions.
    """

    start: int
    end: int
    payload: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return self.payload.nbytes


def check_head(head: bytes | memoryview, num_bytes: int) -> None:
    """Raise `StateError` if this is not the head of a frame with this length. Checked before the rest of a file is read."""
    if len(head) < HEAD_BYTES or bytes(head[:4]) != _MAGIC:
        raise StateError(f"not a saved sequence: {num_bytes} bytes that do not begin with {_MAGIC!r}")
    _, version, _, _, num_ids, _, size = _HEAD.unpack_from(head)
    if version != _VERSION:
        raise StateError(f"the saved sequence has version {version}, and this paceline reads version {_VERSION}")
    if num_bytes != HEAD_BYTES + 4 * num_ids + size:
        raise StateError(
            f"the saved sequence is damaged: it has {num_bytes} bytes instead of {HEAD_BYTES + 4 * num_ids + size}"
        )


def layout_fingerprint(model: bytes, layout: Sequence[object]) -> bytes:
    """Return 16 bytes for a model and the context options that determine the layout of its KV cells."""
    return hashlib.blake2b(model + repr(tuple(layout)).encode(), digest_size=16).digest()


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    for part in parts:
        digest.update(part)
    return digest.digest()
