"""The files of the disk cache: their names, their format, and how the least recently used ones leave. No threads.

    FOLDER/                              0700, shared by any number of processes and models
        a6c1.../                         a model with its context's layout of cells, by their fingerprint
            about.json                   its name, for people
            3f/                          the first two digits of `from`
                FROM-00000200-0000004a-TO.cells     0600: cells of the tokens between the prefixes FROM and TO
                FROM-00000081-00000000-TO.state     0600: the state at the prefix TO, which has FROM within 512 tokens before it

FROM and TO are hashes of a path of tokens from its beginning: of the model, of adapters, tenant and salt, and of all tokens up
to there (images by the hash of their contents). So a file that is found by a hash belongs to this beginning and to no other, and
processes share a folder without talking to each other. The two numbers are the tokens between FROM and TO, and the first of them.
Files begin where others end, as the nodes of a radix tree do, so that a path is found by going from file to file.

offset  size  field of a file, little-endian
0       4     magic "PLKB"
4       2     version, 1
6       2     kind: 0 = cells, 1 = state
8       4     n, number of token ids
12      4, 4  position of the first cell and after the last, int32
20      8     size of the payload in bytes
28      4     CRC-32 of the payload
32      16*3  model, FROM, TO
80      16    BLAKE2b-128 of all before and of the token ids
96      4n    token ids, int32
...           payload, in llama.cpp's own format

A file is written under another name, synced, and renamed. It never changes after that, but for its time of last use.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline import validation
from paceline.errors import StateError
from paceline.kv_cache import BLOCK_TOKENS, TOKEN_BYTES

_HEAD = struct.Struct("<4sHHIiiQI16s16s16s")
_MAGIC, VERSION = b"PLKB", 1
_CELLS, _STATE = 0, 1
_NAME: Final = re.compile("([0-9a-f]{32})-(?!0{8})([0-9a-f]{8})-([0-9a-f]{8})-([0-9a-f]{32})[.](cells|state)")
_LENGTH, _FIRST_ID = slice(33, 41), slice(41, 51)  # in a name
_HASH_BYTES = 16
_MOST_COMPARED = 8  # files of one beginning, of which a part may be used
_MOST_TOKENS = 1 << 20  # of one file
_MODEL = re.compile("[0-9a-f]{32}")
_ABOUT, _PART = "about.json", ".part"
_PART_AGE_NS = 600 * 10**9  # of a file whose writer has ended: no write takes as long
KEPT = 0.9  # of the limit, after least recently used files have left


@dataclass(frozen=True, slots=True)
class BlockName:
    """The name of a file; see the module."""

    start_hash: bytes
    num_tokens: int
    first_id: int
    end_hash: bytes
    is_state: bool

    @property
    def num_cells(self) -> int:
        """The tokens with cells in the file; none in that of a state."""
        return 0 if self.is_state else self.num_tokens

    def __str__(self) -> str:
        suffix = ".state" if self.is_state else ".cells"
        return f"{self.start_hash.hex()}-{self.num_tokens:08x}-{self.first_id & 0xFFFFFFFF:08x}-{self.end_hash.hex()}{suffix}"

    @staticmethod
    def parse(text: str) -> BlockName | None:
        """Return the name; None for the name of another file."""
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        start_hash, num_tokens, first, end_hash, suffix = found.groups()
        first_id = int(first, 16)
        first_id -= (first_id >> 31) << 32
        return BlockName(
            bytes.fromhex(start_hash), int(num_tokens, 16), first_id, bytes.fromhex(end_hash), suffix == "state"
        )


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The contents of a file.

    Attributes:
        tokens: The token ids of its range, as bytes; none of a state.
        start: The position of the first cell; end: the position after the last.
    """

    tokens: bytes
    start: int
    end: int
    payload: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return _HEAD.size + _HASH_BYTES + len(self.tokens) + self.payload.nbytes


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A file on a path.

    Attributes:
        start: The number of tokens before its range; of a state, before TO.
        reach: The number of tokens of the path up to which it can be used.
    """

    name: BlockName
    start: int
    reach: int


class ModelFolder:
    """The files of one model in a folder.

    Args:
        root: The folder. It is made when the first file is written, also if it was deleted meanwhile.
        model: Fingerprint of the model, of the layout of cells, and of the program that writes them.
        about: Facts about the model, for people.
    """

    def __init__(self, root: Path, model: bytes, about: dict[str, Any] | None = None) -> None:
        self.root, self.model, self._about = root, model, about or {}
        self._folder = root / model.hex()

    # ---- finding

    def hasher(self, namespace: Sequence[object]) -> hashlib.blake2b:
        """Return the hash of an empty path; updates with tokens give the hashes FROM and TO."""
        return hashlib.blake2b(self.model + repr(tuple(namespace)).encode() + b"\0", digest_size=_HASH_BYTES)

    def cells_along(self, path: hashlib.blake2b, tokens: bytes) -> Iterator[FoundBlock]:
        """Yield the files with the cells of a path, from its beginning to the first gap. path: `hasher`; raises `OSError`."""
        hasher, at, total = path.copy(), 0, len(tokens) // TOKEN_BYTES
        while at < total and (found := self._longest(hasher, tokens, at)) is not None:
            yield found
            hasher.update(tokens[at * TOKEN_BYTES : found.reach * TOKEN_BYTES])
            at = found.reach

    def last_state(self, path: hashlib.blake2b, tokens: bytes, above: int) -> FoundBlock | None:
        """Return the file with the last state on a path that lies after the first `above` tokens."""
        hashers, total = [path.copy()], len(tokens) // TOKEN_BYTES
        for base in range(BLOCK_TOKENS, total, BLOCK_TOKENS):
            hashers.append(hashers[-1].copy())
            hashers[-1].update(tokens[(base - BLOCK_TOKENS) * TOKEN_BYTES : base * TOKEN_BYTES])
        for index in reversed(range(above // BLOCK_TOKENS, len(hashers))):
            base = index * BLOCK_TOKENS
            texts = self._beginning_at(hashers[index].digest(), "-00000000-", ".state")
            for name in map(BlockName.parse, sorted(texts, key=itemgetter(_LENGTH), reverse=True)):
                assert name is not None  # noqa: S101 - as `_NAME` has it
                end = base + name.num_tokens
                if above < end <= total and _extended(hashers[index], tokens, base, end) == name.end_hash:
                    return FoundBlock(name, end, end)
        return None

    def _longest(self, hasher: hashlib.blake2b, tokens: bytes, at: int) -> FoundBlock | None:
        """Return the file that has most of the path from there: wholly on the path, or else a part of a file."""
        first = int.from_bytes(tokens[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES], "little", signed=True)
        start_hash, total = hasher.digest(), len(tokens) // TOKEN_BYTES
        texts = self._beginning_at(start_hash, f"-{first & 0xFFFFFFFF:08x}-", ".cells")
        for num_tokens in sorted({int(text[_LENGTH], 16) for text in texts}, reverse=True):
            if at + num_tokens <= total:
                end_hash = _extended(hasher, tokens, at, at + num_tokens)
                whole = BlockName(start_hash, num_tokens, first, end_hash, is_state=False)
                if str(whole) in texts:
                    return FoundBlock(whole, at, at + num_tokens)
        best: FoundBlock | None = None
        for name in map(BlockName.parse, nlargest(_MOST_COMPARED, texts, key=itemgetter(_LENGTH))):
            assert name is not None  # noqa: S101 - as `_NAME` has it
            num_common = _num_common(self._ids(name), tokens[at * TOKEN_BYTES :])
            if num_common and (best is None or at + num_common > best.reach):
                best = FoundBlock(name, at, at + num_common)
        return best

    def _beginning_at(self, start_hash: bytes, first_id: str, suffix: str) -> set[str]:
        """Return the names of files; there may be ten thousands, of which few have to be taken apart."""
        digits = start_hash.hex()
        try:
            texts = os.listdir(self._folder / digits[:2])  # noqa: PTH208 - names, without a path for each
        except FileNotFoundError:
            return set()
        return {
            text
            for text in texts
            if text.startswith(digits)
            and text.endswith(suffix)
            and text[_FIRST_ID] == first_id
            and _NAME.fullmatch(text)
        }

    # ---- files

    def path(self, name: BlockName) -> Path:
        """Return the path of a file."""
        return self._folder / name.start_hash.hex()[:2] / str(name)

    def num_bytes(self, name: BlockName) -> int:
        """Return the size of a file; 0 if another process has deleted it. Raises `OSError`."""
        try:
            return self.path(name).stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, name: BlockName) -> StoredBlock:
        """Read a file. Raises `StateError` if it is damaged or none of these, and `OSError`."""
        with validation.open_file(self.path(name)) as file:
            head, tokens = self._head(file, name)
            payload = np.empty(head.size, dtype=np.uint8)
            _fill(file, payload)
        if zlib.crc32(payload.data) != head.crc:
            raise StateError("its checksum does not match")
        payload.flags.writeable = False
        return StoredBlock(tokens, head.start, head.end, payload)

    def write(self, name: BlockName, tokens: bytes, start: int, end: int, payload: npt.NDArray[np.uint8]) -> int:
        """Write a file, as a whole or not at all, and return its size; 0 if it is there. Raises `OSError`."""
        target = self.path(name)
        if target.exists():
            return 0
        kind, num_ids = _STATE if name.is_state else _CELLS, len(tokens) // TOKEN_BYTES
        head = _HEAD.pack(
            _MAGIC, VERSION, kind, num_ids, start, end, payload.nbytes, zlib.crc32(payload.data), self.model, name.start_hash,
            name.end_hash,
        )  # fmt: skip
        parts = (head + _digest(head, tokens) + tokens, payload.data)
        try:
            return self._write_into(target, parts)
        except FileNotFoundError:  # `paceline cache rm` may have deleted the folder between two calls
            return self._write_into(target, parts)

    def _write_into(self, target: Path, parts: Sequence[bytes | memoryview]) -> int:
        for folder in (self.root, self._folder, target.parent):
            _make_private(folder)
        self._write_about()
        return _write_whole(target, parts)

    def touch(self, names: Sequence[BlockName]) -> None:
        """Mark files as used now, the first most recently, so that a file leaves only after those that continue it."""
        now_ns = time.time_ns()
        for index, name in enumerate(names):
            with suppress(OSError):
                os.utime(self.path(name), ns=(now_ns - index, now_ns - index))

    def discard(self, name: BlockName) -> None:
        """Delete a file, if possible."""
        with suppress(OSError):
            self.path(name).unlink()

    def _ids(self, name: BlockName) -> bytes:
        """Return the token ids of a file; none if it cannot be read, which a later `read` reports."""
        try:
            with validation.open_file(self.path(name)) as file:
                return self._head(file, name)[1]
        except (OSError, StateError):
            return b""

    def _head(self, file: BinaryIO, name: BlockName) -> tuple[_Head, bytes]:
        """Read and check all before the payload. Lengths in the file are compared with its size before anything is read."""
        size = os.fstat(file.fileno()).st_size
        raw = file.read(_HEAD.size + _HASH_BYTES)
        if len(raw) < _HEAD.size + _HASH_BYTES or raw[:4] != _MAGIC:
            raise StateError("it does not begin as a file of the disk cache")
        _, version, kind, num_ids, start, end, num_bytes, crc, model, start_hash, end_hash = _HEAD.unpack_from(raw)
        if version != VERSION:
            raise StateError(f"it has version {version}, and this paceline reads version {VERSION}")
        if num_ids > _MOST_TOKENS or size != len(raw) + num_ids * TOKEN_BYTES + num_bytes:
            raise StateError(f"its size of {size} bytes does not fit to its head")
        tokens = file.read(num_ids * TOKEN_BYTES)
        if len(tokens) != num_ids * TOKEN_BYTES or _digest(raw[: _HEAD.size], tokens) != raw[_HEAD.size :]:
            raise StateError("the checksum of its head does not match")
        is_own = (model, start_hash, end_hash, kind == _STATE) == (
            self.model, name.start_hash, name.end_hash, name.is_state,
        )  # fmt: skip
        if not is_own or num_ids != (0 if name.is_state else name.num_tokens):
            raise StateError("it belongs under another name")
        return _Head(start, end, num_bytes, crc), tokens

    def _write_about(self) -> None:
        target = self._folder / _ABOUT
        if self._about and not target.exists():
            _write_whole(target, (json.dumps(self._about).encode(),))


@dataclass(frozen=True, slots=True)
class _Head:
    start: int
    end: int
    size: int
    crc: int


# ---- all models of a folder


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of the disk cache. model: the name of its folder. name: None for a file that a writer left behind."""

    path: Path
    model: str
    name: BlockName | None
    num_bytes: int
    used_ns: int


def files_of(root: Path) -> Iterator[FoundFile]:
    """Yield the files of all models; files of other names are left alone. Files and folders may vanish meanwhile."""
    for model in _entries(root):
        if not _MODEL.fullmatch(model.name):
            continue
        for shard in _entries(Path(model.path)):
            for entry in [shard] if shard.name.endswith(_PART) else _entries(Path(shard.path)):
                name = BlockName.parse(entry.name)
                if name is None and not (entry.name.startswith(".") and entry.name.endswith(_PART)):
                    continue
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    yield FoundFile(Path(entry.path), model.name, name, status.st_size, status.st_mtime_ns)


class EvictedBlocks(NamedTuple):
    """What `evict` has done.

    Attributes:
        num_bytes_left: Bytes of the files that stay.
        num_blocks, num_tokens, num_bytes: Of the deleted files.
    """

    num_bytes_left: int
    num_blocks: int
    num_tokens: int
    num_bytes: int


def evict(root: Path, max_bytes: int) -> EvictedBlocks:
    """Delete least recently used files until the rest fits, and the files of writers that have ended.

    Several processes may do so at once. A file that another process has deleted is gone, but was not evicted here. A file that
    cannot be deleted stays, and others leave in its place.
    """
    now_ns, found = time.time_ns(), list(files_of(root))
    num_bytes = sum(file.num_bytes for file in found)
    evicted: list[tuple[BlockName, int]] = []
    is_full = num_bytes > max_bytes
    for file in sorted(found, key=lambda file: file.used_ns):
        is_left_behind = file.name is None and abs(now_ns - file.used_ns) > _PART_AGE_NS
        if is_left_behind or (is_full and file.name is not None and num_bytes > KEPT * max_bytes):
            try:
                file.path.unlink()
            except FileNotFoundError:
                pass
            except OSError:
                continue
            else:
                if file.name is not None:
                    evicted.append((file.name, file.num_bytes))
            num_bytes -= file.num_bytes
    num_tokens, num_deleted_bytes = sum(name.num_cells for name, _ in evicted), sum(size for _, size in evicted)
    return EvictedBlocks(num_bytes, len(evicted), num_tokens, num_deleted_bytes)


def about(root: Path, model: str) -> dict[str, Any]:
    """Return the facts about a model; none if they cannot be read."""
    try:
        found = json.loads((root / model / _ABOUT).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remove(root: Path, models: Iterable[str]) -> int:
    """Delete the files of these models and return their number of bytes; files of other names stay, with their folders."""
    wanted, num_bytes = set(models), 0
    for file in files_of(root):
        if file.model in wanted:
            with suppress(OSError):
                file.path.unlink()
                num_bytes += file.num_bytes
    for model in wanted:
        with suppress(OSError):
            (root / model / _ABOUT).unlink()
        for shard in _entries(root / model):
            with suppress(OSError):
                Path(shard.path).rmdir()
        with suppress(OSError):
            (root / model).rmdir()
    return num_bytes


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _make_private(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def _write_whole(target: Path, parts: Sequence[bytes | memoryview]) -> int:
    aside = target.with_name(f".{os.getpid()}.{time.monotonic_ns()}{_PART}")
    try:
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        try:
            for part in parts:
                left = memoryview(part)
                while left.nbytes:
                    left = left[os.write(handle, left) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        aside.replace(target)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    return sum(memoryview(part).nbytes for part in parts)


def _fill(file: Any, payload: npt.NDArray[np.uint8]) -> None:
    left = payload.data
    while left.nbytes:
        count = file.readinto(left)
        if not count:
            raise StateError("it is cut")
        left = left[count:]


def _digest(head: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(head + tokens, digest_size=_HASH_BYTES).digest()


def _extended(hasher: hashlib.blake2b, tokens: bytes, start: int, end: int) -> bytes:
    extended = hasher.copy()
    extended.update(tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
    return extended.digest()


def _num_common(ids: bytes, tokens: bytes) -> int:
    count = min(len(ids), len(tokens)) // TOKEN_BYTES
    same = np.frombuffer(ids, "<i4", count) == np.frombuffer(tokens, "<i4", count)
    return count if same.all() else int(np.argmin(same))
