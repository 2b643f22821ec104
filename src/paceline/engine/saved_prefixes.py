"""Prefixes saved to files and loaded from them: commands ask the KV cache, files are read and written on the caller's thread.

A file: magic "PLPR", version (uint32), number of ranges (uint32); then each range: its size (uint64) and a frame of
`runtime.sequence_state`, whose token ids are those of the range. A partial frame without token ids comes last where memory is
more than cells: the state behind them. The frames check themselves: model, layout, damage.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from paceline import validation
from paceline.engine.commands import Export, Import, Question
from paceline.errors import InvalidParams, StateError, Unsupported
from paceline.kv_cache import pack_tokens
from paceline.request import RequestOptions
from paceline.runtime import CellState
from paceline.runtime.sequence_state import SequenceState
from paceline.scheduling.sequence import prefix_namespace

_HEAD = struct.Struct("<4sII")
_SIZE = struct.Struct("<Q")
_MAGIC, _VERSION = b"PLPR", 1
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class SavedPrefixes:
    """ask: passes a command to the engine, whose result resolves the future; next_key: a number for each."""

    def __init__(
        self,
        files: StateFiles,
        ask: Callable[[Question], Future[list[Any]]],
        next_key: Callable[[], int],
    ) -> None:
        self._files, self._ask, self._next_key = files, ask, next_key

    def save(self, name: str, token_ids: list[int], options: RequestOptions) -> int:
        """Write what the KV cache has of these tokens and return how many of them that is. Raises `StateError`."""
        self._files.path(name)
        ranges = self._ask(Export(self._next_key(), prefix_namespace(options), pack_tokens(token_ids))).result()
        if not ranges:
            raise StateError(
                f"nothing of this prompt is in host memory; generate from it before saving it as {name!r}, with host_cache_bytes "
                "that it fits"
            )
        self._files.write(name, token_ids, ranges)
        return int(ranges[-1].end)

    def load(self, name: str, options: RequestOptions) -> list[int]:
        """Load a saved prefix into the host cache and return its token ids. Raises `StateError`."""
        token_ids, ranges = self._files.read(name)
        placed = tuple((one.start, one.end, one) for one in ranges)
        there = self._ask(Import(self._next_key(), prefix_namespace(options), pack_tokens(token_ids), placed)).result()
        if not there:
            raise StateError(
                f"host memory has no room for the saved prefix {name!r}; raise host_cache_bytes, or save it again if an "
                "earlier version saved it"
            )
        return token_ids

    def erase(self, name: str) -> None:
        """Delete a saved prefix. Raises `StateError` where there is none."""
        self._files.erase(name)


class StateFiles:
    """The files of one folder, for one model and layout. folder: None where saving is off."""

    def __init__(self, folder: str | os.PathLike[str] | None, fingerprint: bytes) -> None:
        self._folder = None if folder is None else Path(folder)
        self._fingerprint = fingerprint
        if self._folder is not None and not self._folder.is_dir():
            raise InvalidParams(f"state_folder must be a folder, and {self._folder} is none; make it first")

    def path(self, name: str) -> Path:
        """Return the path of a name's file. Raises `Unsupported` if saving is off, `InvalidParams` for what is no name."""
        if self._folder is None:
            raise Unsupported("saving prefixes needs a folder; give the engine state_folder=...")
        if not _NAME.fullmatch(validation.text("name", name)):
            raise InvalidParams(
                f"name must have 1 to 128 letters, digits, '.', '_' or '-', and not begin with a '.', not {name!r:.140}"
            )
        return self._folder / name

    def write(self, name: str, token_ids: Sequence[int], ranges: Sequence[CellState]) -> int:
        """Write the ranges of a prefix, in order, whole or not at all, and return the size in bytes."""
        path = self.path(name)
        frames = [
            SequenceState(
                self._fingerprint, tuple(token_ids[one.start : one.end]), one.start == one.end, one.end - 1, one.payload
            )
            for one in ranges
        ]
        parts = [_HEAD.pack(_MAGIC, _VERSION, len(frames))]
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
            aside.unlink(missing_ok=True)
        return sum(map(len, parts))

    def read(self, name: str) -> tuple[list[int], list[CellState]]:
        """Return the token ids of a saved prefix, and its ranges. Raises `StateError`."""
        try:
            data = self.path(name).read_bytes()
        except OSError as error:
            raise StateError(f"cannot read the saved prefix {name!r}: {error.strerror or error}") from None
        if len(data) < _HEAD.size or data[:4] != _MAGIC:
            raise StateError(f"{name!r} is no saved prefix")
        _, version, count = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise StateError(f"{name!r} has version {version}, and this paceline reads version {_VERSION}")
        return self._ranges(name, memoryview(data)[_HEAD.size :], count)

    def erase(self, name: str) -> None:
        """Delete the file of a name. Raises `StateError` where there is none."""
        try:
            self.path(name).unlink()
        except OSError as error:
            raise StateError(f"cannot erase the saved prefix {name!r}: {error.strerror or error}") from None

    def _ranges(self, name: str, rest: memoryview, count: int) -> tuple[list[int], list[CellState]]:
        token_ids: list[int] = []
        ranges: list[CellState] = []
        for _ in range(count):
            if len(rest) < _SIZE.size or len(rest) < _SIZE.size + _SIZE.unpack_from(rest)[0]:
                raise StateError(f"the saved prefix {name!r} is cut")
            size = _SIZE.unpack_from(rest)[0]
            frame = SequenceState.from_bytes(bytes(rest[_SIZE.size : _SIZE.size + size]), self._fingerprint)
            rest = rest[_SIZE.size + size :]
            end = frame.last + 1
            follows = end - len(frame.token_ids) == len(token_ids)
            is_behind_state = bool(ranges) and ranges[-1].start == ranges[-1].end
            if frame.partial == bool(frame.token_ids) or not (follows and end) or is_behind_state:
                raise StateError(f"the saved prefix {name!r} has a gap")
            ranges.append(CellState(len(token_ids), end, frame.payload))
            token_ids += frame.token_ids
        if rest or not ranges:
            raise StateError(f"the saved prefix {name!r} is damaged: its ranges do not fill it")
        return token_ids, ranges
