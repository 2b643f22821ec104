"""Saved prefixes: commands ask the KV cache; files are read and written on the caller's thread.

A file: magic "PLPR", version (uint32), number of ranges (uint32), number of LoRA adapters (uint32); for each applied adapter
the fingerprint of its content (16 bytes) and its scale (float64); then for each range its size (uint64) and a frame of
`runtime.sequence_state` with the token ids of the range. If memory is more than cells, the last frame is partial and without
token ids: the state after the ranges. The frames check model, layout, adapters and damage.

With images or audio the version is 3, and after the adapters come the number of items (uint32) and each item: first cell,
cells, positions (uint32), whether causal (uint8), size of its content hash (uint8) and the hash. Frames then have the items'
keys among token ids, count cells, and belong to the items and to the projector as well.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from paceline import validation
from paceline.engine.core import Ask, Engine
from paceline.engine.prompts import KeyedPrompt
from paceline.errors import InvalidParams, StateError, Unsupported
from paceline.kv_cache import MediaItem, PromptLayout, pack_tokens
from paceline.runtime import CellState
from paceline.runtime.sequence_state import HEAD_BYTES, SequenceState, check_head, layout_fingerprint

PrefixNamespace = tuple[tuple[tuple[str, float], ...], str, str]
"""The result of `prefix_namespace`: keys of adapters with their scales, tenant and salt."""

AppliedAdapters = tuple[tuple[bytes, float], ...]
"""Fingerprints of adapters with their scales, sorted."""

_HEAD = struct.Struct("<4sIII")
_ADAPTER = struct.Struct("<16sd")
_SIZE = struct.Struct("<Q")
_COUNT, _ITEM = struct.Struct("<I"), struct.Struct("<IIIBB")
_MAGIC, _VERSION, _VERSION_WITH_MEDIA = b"PLPR", 2, 3
_MAX_SHOWN = 4
_HEADS_BYTES = 1 << 20  # of a file beside its states
_MAX_MEDIA = 65_536  # images and pieces of audio of one prefix
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class SavedPrefixes:
    """Saves prefixes of the KV cache, and loads them.

    Args:
        files: The files.
        ask: Passes a command to the engine; its result resolves the future.
        next_key: Returns a new key for a command.
        adapter_fingerprint: Identifies the content of a loaded adapter by its key. Raises `AdapterNotFound`.
    """

    def __init__(
        self,
        files: StateFiles,
        ask: Callable[[Ask], Future[Any]],
        next_key: Callable[[], int],
        adapter_fingerprint: Callable[[str], bytes],
    ) -> None:
        self._files, self._ask, self._next_key = files, ask, next_key
        self._adapter_fingerprint = adapter_fingerprint

    def save(self, name: str, prompt: KeyedPrompt, namespace: PrefixNamespace) -> int:
        """Write the cached prefix of these tokens and return its number of tokens.

        Raises `StateError`, `AdapterNotFound`.
        """
        self._files.path(name)
        adapters, layout = self._applied(namespace), PromptLayout(prompt.media)
        tokens, key = pack_tokens(prompt.ids), self._next_key()

        def export(engine: Engine) -> None:
            engine.scheduler.export(key, namespace, tokens, layout)

        ranges = self._ask(Ask(key, export, may_change_cache=True)).result()
        if not ranges:
            raise StateError(
                f"nothing of this prompt is in host memory; generate from it before saving it as {name!r}, with host_cache_bytes "
                "that it fits"
            )
        ranges = [CellState(layout.cell(cells.start), layout.cell(cells.end), cells.payload) for cells in ranges]
        end = int(ranges[-1].end)
        self._files.write(name, prompt.ids, ranges, adapters, tuple(item for item in prompt.media if item.end <= end))
        return end

    def load(self, name: str, namespace: PrefixNamespace) -> list[int]:
        """Load a saved prefix into the host cache and return its token ids.

        Raises `StateError`, also if it was computed with other adapters or scales, and `AdapterNotFound`.
        """
        token_ids, ranges, media = self._files.read(name, self._applied(namespace))
        layout = PromptLayout(media)
        placed = tuple(
            (cells.start, cells.end, CellState(layout.position(cells.start), layout.position(cells.end), cells.payload))
            for cells in ranges
        )

        def bring_in(engine: Engine) -> Callable[[], list[Any]]:
            found = engine.scheduler.import_ranges(namespace, pack_tokens(token_ids), placed)
            return lambda: found

        if not self._ask(Ask(self._next_key(), bring_in, may_change_cache=True)).result():
            raise StateError(
                f"host memory has no room for the saved prefix {name!r}; raise host_cache_bytes, or save it again if an "
                "earlier version saved it"
            )
        return token_ids

    def erase(self, name: str) -> None:
        """Delete a saved prefix. Raises `StateError` if there is none."""
        self._files.erase(name)

    def _applied(self, namespace: PrefixNamespace) -> AppliedAdapters:
        return tuple(sorted((self._adapter_fingerprint(key), scale) for key, scale in namespace[0]))


class StateFiles:
    """The files of one folder, for one model and layout.

    Args:
        folder: None if saving is off.
        fingerprint: Identifies model and layout.
        projector: Identifies the file of the projector.
        host_bytes: Most memory of loaded prefixes; a larger file is not read.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        fingerprint: bytes,
        projector: bytes = b"",
        host_bytes: int = 1 << 62,
    ) -> None:
        self._folder = None if folder is None else validation.path("state_folder", folder)
        self._fingerprint, self._projector = fingerprint, projector
        self._max_bytes = host_bytes + host_bytes // 8 + _HEADS_BYTES
        if self._folder is not None and not self._folder.is_dir():
            raise InvalidParams(f"state_folder must be a folder, and {self._folder} is none; make it first")

    def path(self, name: str) -> Path:
        """Return the path of a file by its name. Raises `Unsupported` if saving is off, `InvalidParams` for a wrong name."""
        if self._folder is None:
            raise Unsupported("saving prefixes needs a folder; give the engine state_folder=...")
        if not _NAME.fullmatch(validation.text("name", name)):
            raise InvalidParams(
                f"name must have 1 to 128 letters, digits, '.', '_' or '-', and not begin with a '.', not {name!r:.140}"
            )
        return self._folder / name

    def write(
        self,
        name: str,
        token_ids: Sequence[int],
        ranges: Sequence[CellState],
        adapters: AppliedAdapters = (),
        media: Sequence[MediaItem] = (),
    ) -> int:
        """Write the ranges of a prefix, in cells and in order, as a whole or not at all, and return the size in bytes."""
        path, owner = self.path(name), self._owner(adapters, media)
        frames = [
            SequenceState(
                owner, tuple(token_ids[cells.start : cells.end]), cells.start == cells.end, cells.end - 1, cells.payload
            )
            for cells in ranges
        ]
        parts = [_HEAD.pack(_MAGIC, _VERSION_WITH_MEDIA if media else _VERSION, len(frames), len(adapters))]
        parts += [_ADAPTER.pack(*adapter) for adapter in adapters]
        if media:
            parts.append(_COUNT.pack(len(media)))
        for item in media:
            sizes = (item.start, item.num_cells, item.num_positions, item.is_causal, len(item.content_hash))
            parts += [_ITEM.pack(*sizes), item.content_hash]
        for frame in frames:
            data = frame.to_bytes()
            parts += [_SIZE.pack(len(data)), data]
        aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            aside.write_bytes(b"".join(parts))
            aside.replace(path)
        except OSError as error:
            raise StateError(f"cannot write the saved prefix {name!r}: {error.strerror or error}") from None
        finally:
            with suppress(OSError):  # a read-only file system refuses that also for a file that is not there
                aside.unlink()
        return sum(map(len, parts))

    def read(
        self, name: str, adapters: AppliedAdapters = ()
    ) -> tuple[list[int], list[CellState], tuple[MediaItem, ...]]:
        """Return the token ids of a saved prefix, its ranges in cells, and its media.

        Raises `StateError`, also if it was saved with other adapters.
        """
        try:
            with validation.open_file(self.path(name)) as file:
                return self._read(_Reader(name, file), adapters)
        except OSError as error:
            raise StateError(f"cannot read the saved prefix {name!r}: {error.strerror or error}") from None

    def _read(
        self, file: _Reader, adapters: AppliedAdapters
    ) -> tuple[list[int], list[CellState], tuple[MediaItem, ...]]:
        name = file.name
        if file.num_left < _HEAD.size or (head := file.take(_HEAD.size))[:4] != _MAGIC:
            raise StateError(f"{name!r} is not a saved prefix")
        _, version, num_ranges, num_adapters = _HEAD.unpack(head)
        if version == 1:
            raise StateError(f"{name!r} has version 1, which does not say with which LoRA adapters; save it again")
        if version not in (_VERSION, _VERSION_WITH_MEDIA):
            raise StateError(
                f"{name!r} has version {version}, and this paceline reads versions {_VERSION} and {_VERSION_WITH_MEDIA}"
            )
        if file.num_left > self._max_bytes:
            raise StateError(
                f"the saved prefix {name!r} has {file.num_left} bytes, more than fit into host memory; "
                "raise host_cache_bytes"
            )
        saved = tuple(_ADAPTER.iter_unpack(file.take(num_adapters * _ADAPTER.size)))
        if saved != adapters:
            raise StateError(
                f"the saved prefix {name!r} was computed with {_adapters_in_words(saved)}, and is to be loaded for "
                f"{_adapters_in_words(adapters)}; load it for the adapters and scales of the requests that computed it"
            )
        media = _unpacked(file) if version == _VERSION_WITH_MEDIA else ()
        token_ids, ranges = self._ranges(file, num_ranges, self._owner(adapters, media))
        return token_ids, ranges, media

    def erase(self, name: str) -> None:
        """Delete a file by its name. Raises `StateError` if there is none."""
        try:
            self.path(name).unlink()
        except OSError as error:
            raise StateError(f"cannot erase the saved prefix {name!r}: {error.strerror or error}") from None

    def _owner(self, adapters: AppliedAdapters, media: Sequence[MediaItem]) -> bytes:
        """Return the fingerprint of the frames. A damaged list of adapters or media gives another fingerprint."""
        if media:
            return layout_fingerprint(self._fingerprint, (adapters, tuple(media), self._projector))
        return layout_fingerprint(self._fingerprint, adapters) if adapters else self._fingerprint

    def _ranges(self, file: _Reader, count: int, owner: bytes) -> tuple[list[int], list[CellState]]:
        name = file.name
        token_ids: list[int] = []
        ranges: list[CellState] = []
        for _ in range(count):
            frame = SequenceState.from_bytes(file.take_frame(), owner)
            end = frame.last + 1
            follows = end - len(frame.token_ids) == len(token_ids)
            is_behind_state = bool(ranges) and ranges[-1].start == ranges[-1].end
            if frame.partial == bool(frame.token_ids) or not (follows and end) or is_behind_state:
                raise StateError(f"the saved prefix {name!r} has a gap")
            ranges.append(CellState(len(token_ids), end, frame.payload))
            token_ids += frame.token_ids
        if file.num_left or not ranges:
            raise StateError(f"the saved prefix {name!r} is damaged: its ranges do not fill it")
        return token_ids, ranges


class _Reader:
    """The bytes of an open file in order. Lengths in the file are compared with its size before anything is read.

    Attributes:
        num_left: Bytes that were not read yet.
    """

    def __init__(self, name: str, file: BinaryIO) -> None:
        self.name, self._file = name, file
        self.num_left = os.fstat(file.fileno()).st_size

    def take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self.num_left else b""
        if len(data) != count:
            raise StateError(f"the saved prefix {self.name!r} is cut")
        self.num_left -= count
        return data

    def take_frame(self) -> bytes:
        """Return the next range with its frame. The head is checked before the rest is read."""
        (size,) = _SIZE.unpack(self.take(_SIZE.size))
        head = self.take(min(size, HEAD_BYTES))
        if size - len(head) > self.num_left:
            raise StateError(f"the saved prefix {self.name!r} is cut")
        check_head(head, size)
        return head + self.take(size - len(head))


def _unpacked(file: _Reader) -> tuple[MediaItem, ...]:
    media: list[MediaItem] = []
    (count,) = _COUNT.unpack(file.take(_COUNT.size))
    if count > _MAX_MEDIA:
        raise StateError(f"the saved prefix {file.name!r} is damaged: it has {count} images, {_MAX_MEDIA} at most")
    for _ in range(count):
        start, num_cells, num_positions, is_causal, size = _ITEM.unpack(file.take(_ITEM.size))
        if is_causal > 1:
            raise StateError(f"the saved prefix {file.name!r} is damaged: its list of images and audio is none")
        media.append(MediaItem(start, num_cells, num_positions, file.take(size), bool(is_causal)))
    return tuple(media)


def _adapters_in_words(adapters: AppliedAdapters) -> str:
    if not adapters:
        return "no LoRA adapter"
    shown = [f"{content.hex()[:8]} (scale {scale})" for content, scale in adapters[:_MAX_SHOWN]]
    hidden = len(adapters) - len(shown)
    return f"the LoRA adapter{'s' if len(adapters) > 1 else ''} {', '.join(shown)}{f' and {hidden} more' if hidden else ''}"
