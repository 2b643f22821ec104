"""Reader of the header of GGUF files: metadata and tensor infos. The core reads lists of strings, the rest is Python.

llama.cpp reads the same header, but aborts on some values; this reader checks them first.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (little-endian; versions 2 and 3).
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline import _native, validation
from paceline.errors import ModelFileForbidden, ModelFileNotFound, ModelLoadError

MAGIC: Final = b"GGUF"
MAX_DIMS: Final = 4

_SAMPLE_BYTES = 65536
_HEADER_BYTES = 16 << 20  # more than the header of any common vocabulary
_START_BYTES = 512  # of a file that is no GGUF file
_MAX_SAFETENSORS_HEADER = 100_000_000  # bytes, the limit of its library
_MAX_SHOWN_FILES = 5
_CONVERT = (
    "look for a repository of GGUF files (hf:USER/REPO-GGUF), or convert it with convert_hf_to_gguf.py of llama.cpp"
)
_KINDS: Final = (  # of files that are no GGUF file, by the bytes that they begin with
    (
        (b"version https://git-lfs.github.com/",),
        "it is a pointer of Git LFS, which stands for the model; run `git lfs pull` in its repository, or download the file",
    ),
    (
        (b"<!doctype html", b"<html", b"<?xml"),
        "it is a web page; download the file itself: on the Hugging Face Hub its address has /resolve/ in it, not /blob/",
    ),
    (
        (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        f"it is a zip archive or a pickle, as PyTorch saves models (.bin, .pt, .pth); {_CONVERT}",
    ),
    ((b"lmgg", b"tjgg", b"fmgg", b"algg"), "it is of a GGML format from before GGUF; download the model as GGUF"),
    ((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"7z\xbc\xaf", b"BZh"), "it is compressed; unpack it"),
    ((b"{", b"["), "it is JSON text, such as an error that a server sent; download the file again"),
)
_MAX_SHOWN = 80  # bytes of a name in a message


class ValueType(IntEnum):
    """The types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_CODES: Final = {
    ValueType.UINT8: "B", ValueType.INT8: "b", ValueType.UINT16: "H", ValueType.INT16: "h", ValueType.UINT32: "I",
    ValueType.INT32: "i", ValueType.FLOAT32: "f", ValueType.BOOL: "B", ValueType.UINT64: "Q", ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """A value with its type. Strings are bytes, arrays lists; `item_type` is the type of an array's items."""

    type: ValueType
    value: Any
    item_type: ValueType | None = None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The header's entry for one tensor; `shape` innermost first, as in the file; `offset` into the data section."""

    name: bytes
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file. Keys are bytes: the format does not require UTF-8."""

    version: int
    metadata: dict[bytes, MetadataValue]
    tensors: list[TensorInfo]
    header_bytes: int


def read_gguf(path: str | Path) -> GgufFile:
    """Read the header of the file at `path`. Raises `ModelLoadError` with the reason if it is not valid GGUF."""
    try:
        with validation.open_file(Path(path)) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(data, str(path), len(data)).read()
    except OSError as error:
        raise _unreadable(Path(path), error) from error
    except ValueError as error:  # mmap refuses an empty file
        raise ModelLoadError(f"{path}: the file is empty; download or copy it again") from error


def _unreadable(path: Path, error: OSError) -> ModelLoadError:
    message = f"cannot read {path}: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return ModelFileNotFound(f"{message}{validation.similar_files(path)}", str(path))
    if isinstance(error, PermissionError):
        return ModelFileForbidden(f"{message}; give this user the right to read it", str(path))
    is_folder = os.path.isdir(path)  # noqa: PTH112 - a path that is too long raises in `Path.is_dir`
    return ModelLoadError(_about_folder(path) if is_folder else message)


def _about_folder(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError:
        names = []
    models = [name for name in names if name.endswith(".gguf")]
    if models:
        shown = ", ".join(models[:_MAX_SHOWN_FILES]) + (" ..." if len(models) > _MAX_SHOWN_FILES else "")
        return f"{path} is a folder; give the path of a GGUF file in it: {shown}"
    if any(name.endswith((".safetensors", ".bin", ".pth", ".pt")) for name in names):
        return f"{path} is a folder with a model for other programs, and no GGUF file; {_CONVERT}"
    return f"{path} is a folder without a GGUF file; give the path of a GGUF file"


def _kind_of(start: bytes) -> str:
    """Return the kind of a file that is no GGUF file by its first bytes, and the way out; "" if it is not known."""
    text = start.lstrip().lower()
    if start[8:9] == b"{" and 2 <= int.from_bytes(start[:8], "little") < _MAX_SAFETENSORS_HEADER:
        return f"it is a safetensors file; {_CONVERT}"
    if start and not any(start):
        return "it begins with zeros, as a download that has not ended; download it again"
    return next(
        (kind for beginnings, kind in _KINDS if start.startswith(beginnings) or text.startswith(beginnings)), ""
    )


def read_gguf_start(data: bytes, name: str, file_bytes: int | None) -> GgufFile | None:
    """Read the header from the first bytes of a file; None if the header may not end within them.

    file_bytes: the length of the whole file; None if unknown. Takes memory in proportion to `data`, whatever the header
    promises. Raises `ModelLoadError` if this cannot be the beginning of a valid file.
    """
    try:
        return _HeaderReader(data, name, file_bytes).read()
    except _HeaderIsCut:
        return None


class _HeaderIsCut(Exception):
    """The header does not end within the given bytes."""


class _HeaderReader:
    """Reads the bytes in order. data: the beginning of the file. file_bytes: the length of the whole file; None if unknown.

    A read past the end of the file raises ModelLoadError, one past the end of data alone _HeaderIsCut.
    """

    def __init__(self, data: mmap.mmap | bytes, name: str, file_bytes: int | None) -> None:
        self._data = data
        self._name = name
        self._file_bytes = file_bytes
        self._at = 0

    def read(self) -> GgufFile:
        if self._data[:4] != MAGIC:
            kind = _kind_of(bytes(self._data[:_START_BYTES]))
            raise self._error(f"not a GGUF file: {kind or f'it does not begin with {MAGIC!r}'}")
        self._at = 4
        try:
            return self._header()
        except (struct.error, OverflowError):  # an overflow comes from lengths beyond the address space
            raise self._past_the_end() from None

    def _past_the_end(self) -> Exception:
        whole = self._file_bytes
        if whole is None or (self._at <= whole and whole > len(self._data)):
            return _HeaderIsCut()
        return self._error(
            f"the file ends in the middle of its header, after {whole} bytes; it is not complete, so download it again"
        )

    def _header(self) -> GgufFile:
        version = self._number("I")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported, only 2 and 3 (little-endian)")
        n_tensors, n_values = self._number("Q"), self._number("Q")
        metadata = self._metadata(n_values)
        tensors = [self._tensor() for _ in self._promised(n_tensors, 24, "tensors")]
        return GgufFile(version, metadata, tensors, self._at)

    def _metadata(self, count: int) -> dict[bytes, MetadataValue]:
        metadata: dict[bytes, MetadataValue] = {}
        for _ in self._promised(count, 13, "metadata values"):
            key = self._string()
            if key in metadata:
                raise self._error(f"the key {_shown(key)!r} is there twice")
            metadata[key] = self._value(key)
        return metadata

    def _value(self, key: bytes) -> MetadataValue:
        kind = self._type(key)
        if kind is ValueType.STRING:
            return MetadataValue(kind, self._string())
        if kind is not ValueType.ARRAY:
            return MetadataValue(kind, self._number(_CODES[kind]))
        item = self._type(key)
        if item is ValueType.ARRAY:
            raise self._error(f"{_shown(key)}: an array of arrays, which llama.cpp does not read")
        return MetadataValue(kind, self._array(item, self._number("Q")), item)

    def _array(self, item: ValueType, count: int) -> list[Any]:
        if item is ValueType.STRING:
            return self._strings(len(self._promised(count, 8, "strings")))
        code = f"<{len(self._promised(count, struct.calcsize(_CODES[item]), 'array items'))}{_CODES[item]}"
        values = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return list(values)

    def _strings(self, count: int) -> list[bytes]:
        """Read strings; a large vocabulary has hundreds of thousands, for which a loop here would take a tenth of a second."""
        found, self._at = _native.gguf_strings(self._data, self._at, count)
        if len(found) < count:
            raise struct.error
        return found

    def _tensor(self) -> TensorInfo:
        name = self._string()
        n_dims = self._number("I")
        if n_dims > MAX_DIMS:
            raise self._error(f"tensor {_shown(name)!r} has {n_dims} dimensions, at most {MAX_DIMS} are possible")
        shape = tuple(self._number("Q") for _ in range(n_dims))
        return TensorInfo(name, shape, self._number("I"), self._number("Q"))

    def _type(self, key: bytes) -> ValueType:
        number = self._number("I")
        try:
            return ValueType(number)
        except ValueError:
            raise self._error(f"{_shown(key)!r} has type {number}, which GGUF does not know") from None

    def _string(self) -> bytes:
        length = self._number("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise struct.error
        return self._data[start : self._at]

    def _number(self, code: str) -> Any:
        (number,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return number

    def _promised(self, count: int, least_bytes: int, what: str) -> range:
        """Return a range over `count` entries. Raises `ModelLoadError` if the file is too short for them."""
        end = self._at + count * least_bytes
        if self._file_bytes is not None and end > self._file_bytes:
            raise self._error(f"the header promises {count} {what}, more than the rest of the file can hold")
        if end > len(self._data):
            raise _HeaderIsCut
        return range(count)

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self._name}: {message}")


def tensor_bytes(path: str | Path, tensor: TensorInfo) -> int:
    """Return the bytes of a tensor. Raises `ModelLoadError` if llama.cpp does not know its type. path: of the file."""
    size = _native.tensor_type_size(tensor.type)
    if size is None:
        name = tensor.name.decode(errors="replace")
        raise ModelLoadError(f"{path}: tensor {name!r} has the type {tensor.type}, which is unknown")
    block_bytes, block_values = size
    return math.prod(tensor.shape) // block_values * block_bytes


def _shown(text: bytes) -> str:
    return text[:_MAX_SHOWN].decode(errors="replace")


def file_fingerprint(paths: Iterable[Path], *more: str) -> bytes:
    """Return 16 bytes that identify files without reading all of them, and further texts.

    Hashes each file's length and samples from its beginning, middle and end.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        _hash_samples(digest, path, _SAMPLE_BYTES)
    for text in more:
        digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
    return digest.digest()


def _hash_samples(digest: hashlib.blake2b, path: Path, num_first: int) -> None:
    """Hash a file's size, its first `num_first` bytes, and samples from its middle and end. Raises `OSError`."""
    with validation.open_file(path) as file:
        total = os.fstat(file.fileno()).st_size
        digest.update(total.to_bytes(8, "little"))
        while data := file.read(min(1 << 20, num_first - file.tell())):
            digest.update(data)
        for start in (total // 2, max(0, total - _SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))


class LoadedFiles:
    """The files of a loaded model, to notice that a file was replaced before the model is loaded again.

    A file is the same if its inode, size and times are, or else if its content is: the first 16 MiB, which have the
    header with metadata, vocabulary and tensor table, and samples from its middle and end. Blocking; one thread at a time.
    """

    def __init__(self) -> None:
        self._stamps: dict[Path, tuple[int, ...] | None] = {}
        self._contents: dict[Path, bytes | None] = {}

    def record(self, paths: Iterable[Path]) -> None:
        """Record files as they are now, before they are loaded, and forget all others."""
        self._stamps = {path: _stamp(path) for path in paths}
        self._contents = {}

    def add(self, path: Path, kept: Iterable[Path]) -> None:
        """Record one more file as it is now, read its content, and forget all other files except `kept`."""
        stamps, contents, others = self._stamps, self._contents, set(kept) - {path}
        self._stamps = {path: _stamp(path), **{other: stamps[other] for other in others if other in stamps}}
        self._contents = {other: contents[other] for other in others if other in contents}
        self.read_contents()

    def read_contents(self) -> None:
        """Read the contents of recorded files. The content of a file that has changed since is unknown."""
        for path, stamp in self._stamps.items():
            if path not in self._contents:
                content = _content(path)
                self._contents[path] = content if _stamp(path) == stamp else None

    def replaced(self, paths: Iterable[Path]) -> list[Path]:
        """Return the files that are not as recorded, or not recorded. A missing file is not among them."""
        return [path for path in dict.fromkeys(paths) if self._is_replaced(path)]

    def _is_replaced(self, path: Path) -> bool:
        now = _stamp(path)
        if now is None or now == self._stamps.get(path):
            return False
        content = self._contents.get(path)
        if content is None or _content(path) != content:
            return True
        self._stamps[path] = now
        return False


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return numbers that change when a file is replaced or written; None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _content(path: Path) -> bytes | None:
    """Return a digest of a file's size, beginning, middle and end; None if it cannot be read, or is no regular file."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        _hash_samples(digest, path, _HEADER_BYTES)
    except OSError:
        return None
    return digest.digest()


def content_fingerprint(path: Path) -> bytes:
    """Return 16 bytes that identify the whole content of a file, which is read once. Raises `OSError`."""
    with validation.open_file(path) as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).digest()
