"""What tells large files apart without reading all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_SIZE = 65536  # bytes of each sample


def file_fingerprint(paths: Iterable[Path], *more: str) -> bytes:
    """16 bytes of the files' lengths, their beginnings, middles and ends, and of more texts."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        total = path.stat().st_size
        digest.update(total.to_bytes(8, "little"))
        with path.open("rb") as file:
            for start in (0, total // 2, max(0, total - _SIZE)):
                file.seek(start)
                digest.update(file.read(_SIZE))
    for text in more:
        digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
    return digest.digest()
