"""The disk cache: prefixes of the KV cache that survive the process, in files of `disk_blocks`.

Two threads work for an engine. The reader answers lookups: it finds the files of a path, decides whether reading them takes less
than computing their tokens, and hands them to the engine's thread as saved ranges. The writer, at a low priority, writes what was
saved to host memory, marks what was used, and deletes what was used least recently.

An error of the disk, or a damaged file, costs the tokens of its files and a warning.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline import validation
from paceline.config import EngineConfig
from paceline.engine.backend import Backend
from paceline.engine.core import Ask, Engine
from paceline.engine.disk_blocks import KEPT, VERSION, BlockName, FoundBlock, ModelFolder, evict, files_of
from paceline.errors import InvalidParams, PacelineError, StateError
from paceline.kv_cache import (
    BLOCK_TOKENS,
    MIN_CACHED_TOKENS,
    TOKEN_BYTES,
    DiskBlocks,
    DiskLookup,
    Namespace,
    Save,
    SavedState,
    SaveState,
)
from paceline.observability.metrics import Metrics
from paceline.runtime import build_info
from paceline.runtime.sequence_state import layout_fingerprint
from paceline.sequence import Limits

_log = logging.getLogger("paceline.engine")

_FIRST_SPEED: Final = 2e9  # bytes a second, before a file was read: too high, so that one is read
_FORGET: Final = 1.02  # raises the speed after each search that reads nothing: a slow moment passes
_GAIN: Final = 0.3
_TELLING_BYTES: Final = 1 << 16  # a smaller file says little about the speed
_AT_ONCE_S: Final = 0.002  # for which a lookup waits to know that nothing is there
_IDLE_S: Final = 2.0  # without saves and lookups, after which prefixes on the device are saved as well
_RESCAN_SHARE: Final = 32  # of the limit; a process that has written so much looks how much others have written
_TOUCH_S: Final = 60.0  # between two marks of a path
_SCAN_S: Final = 300.0  # between two looks at how much all processes have written
_RETRY_S: Final = 30.0  # after a file could not be written
_MOST_TOUCHED: Final = 4096  # paths whose time is remembered
_MOST_WAITING: Final = 64  # searches, and uses to mark, while a disk does not answer
_TAKEN_S: Final = 0.5  # between two looks whether the engine ends while it takes a range
_NICENESS: Final = 10
_CLOSE_S: Final = 5.0  # for what is left to write when the engine ends; a worker has ten to leave
_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT))


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Of a disk cache.

    Attributes:
        max_bytes: Most bytes of the folder, of all models and processes.
        max_pending: Most bytes that wait to be written; what comes beyond is not written.
        has_cells, has_states: Of the model's memory.
    """

    max_bytes: int
    max_pending: int
    has_cells: bool
    has_states: bool


class DiskTier:
    """Reads and writes prefixes, on the caller's thread.

    Args:
        folder: The files.
        options: See there.
        fingerprint: Identifies the content of a loaded adapter by its key. Raises `AdapterNotFound`.
        restore: Makes saved cells of their positions and bytes.
        metrics: Counts blocks and searches.
    """

    def __init__(
        self,
        folder: ModelFolder,
        options: DiskOptions,
        fingerprint: Callable[[str], bytes],
        restore: Callable[[int, int, Any], SavedState],
        metrics: Metrics,
    ) -> None:
        self._folder, self._options, self._fingerprint, self._restore = folder, options, fingerprint, restore
        self.metrics = metrics
        self._speed = _FIRST_SPEED
        self._num_bytes: int | None = None  # of all models, as far as known
        self._num_new = 0  # bytes that were written since the last look
        self._has_warned = False
        self._scanned_s = 0.0
        self._touched: dict[bytes, float] = {}

    # ---- reading

    def find(self, lookup: DiskLookup) -> list[FoundBlock]:
        """Return the files to read for a lookup, in order of their path, the state last; none if computing is cheaper."""
        found = self._find(lookup)
        if not found:
            self.metrics.count_lookup(is_hit=False)
        return found

    def _find(self, lookup: DiskLookup) -> list[FoundBlock]:
        try:
            found = self._found(lookup)
            reach = max([block.reach for block in found], default=0)
            if reach - lookup.num_known < MIN_CACHED_TOKENS:
                return []
            num_bytes, kept = 0, []
            for block in found:
                num_bytes += self._folder.num_bytes(block.name)
                if num_bytes > lookup.max_bytes:
                    break
                kept.append(block)
        except PacelineError:  # the adapter is gone
            return []
        except OSError as error:
            self._warn(error)
            return []
        if self._options.has_states and len(kept) < len(found):
            return []
        num_read = max([block.reach for block in kept], default=0) - lookup.num_known
        is_cheaper = not lookup.token_s or num_bytes / self._speed < num_read * lookup.token_s
        if not is_cheaper:
            self._speed *= _FORGET
        return kept if is_cheaper and num_read >= MIN_CACHED_TOKENS else []

    def _found(self, lookup: DiskLookup) -> list[FoundBlock]:
        path, tokens = self._folder.hasher(self._identity(lookup.namespace)), lookup.tokens
        cells = list(self._folder.cells_along(path, tokens)) if self._options.has_cells else []
        if not self._options.has_states:
            return [block for block in cells if block.reach > lookup.num_cells]
        reach = len(tokens) // TOKEN_BYTES
        if self._options.has_cells:
            reach = max(lookup.num_cells, cells[-1].reach if cells else 0)
        state = self._folder.last_state(path, tokens[: reach * TOKEN_BYTES], lookup.num_known)
        if state is None:
            return []
        return [*(block for block in cells if block.start < state.reach and block.reach > lookup.num_cells), state]

    def read(self, lookup: DiskLookup, found: Sequence[FoundBlock]) -> DiskBlocks:
        """Return the ranges and states in these files, up to the first file that cannot be read."""
        blocks = self._read(lookup, found)
        self.metrics.count_lookup(is_hit=bool(blocks))
        return blocks

    def _read(self, lookup: DiskLookup, found: Sequence[FoundBlock]) -> DiskBlocks:
        blocks: list[tuple[Save | SaveState, SavedState]] = []
        for block in found:
            begin = time.perf_counter()
            try:
                stored = self._folder.read(block.name)
                state = self._restore(stored.start, stored.end, stored.payload)
            except StateError as error:
                _log.warning(
                    "a file of the disk cache is deleted, and its tokens are computed: %s: %s", block.name, error
                )
                self._folder.discard(block.name)
                self.metrics.count_blocks("damaged", block.name.num_cells, 0)
                return [] if self._options.has_states else blocks
            except OSError as error:
                self._warn(error)
                if error.errno == errno.EIO:  # else it would be in the way of a file with the same cells
                    self._folder.discard(block.name)
                    self.metrics.count_blocks("damaged", block.name.num_cells, 0)
                return [] if self._options.has_states else blocks
            num_bytes, read_s = stored.num_bytes, time.perf_counter() - begin
            self.metrics.count_blocks("read", block.name.num_cells, num_bytes)
            self.metrics.note_disk(read_s=read_s)
            if num_bytes >= _TELLING_BYTES:
                speed = num_bytes / max(1e-9, read_s)
                self._speed += _GAIN * (speed - self._speed)
            tokens = lookup.tokens[: block.start * TOKEN_BYTES] + stored.tokens
            end = len(tokens) // TOKEN_BYTES
            save = (
                SaveState(0, end, lookup.namespace, tokens)
                if block.name.is_state
                else Save(0, block.start, end, lookup.namespace, tokens)
            )
            blocks.append((save, state))
        return blocks

    def _warn(self, error: OSError) -> None:
        """Say once that files cannot be read; a file that another process has deleted is no fault."""
        if not isinstance(error, FileNotFoundError) and not self._has_warned:
            self._has_warned = True
            _log.warning("files of the disk cache cannot be read, and their tokens are computed: %s", error)

    # ---- writing

    def write(self, save: Save | SaveState, data: Any) -> int:
        """Write saved cells or a saved state, and return the size of the file; 0 if a file has them.

        Raises `OSError`, also if there is no room for the file.
        """
        try:
            path = self._folder.hasher(self._identity(save.namespace))
        except PacelineError:  # the adapter is gone, and so are the requests that would need it
            return 0
        is_state = isinstance(save, SaveState)
        end = len(save.tokens) // TOKEN_BYTES
        start = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS if isinstance(save, SaveState) else save.start
        ids = save.tokens[start * TOKEN_BYTES :]
        path.update(save.tokens[: start * TOKEN_BYTES])
        start_hash = path.digest()
        path.update(ids)
        first = 0 if is_state else int.from_bytes(ids[:TOKEN_BYTES], "little", signed=True)
        name = BlockName(start_hash, end - start, first, path.digest(), is_state)
        begin = time.perf_counter()
        num_bytes = self._folder.write(name, b"" if is_state else ids, data.start, data.end, data.payload)
        self.metrics.note_disk(write_s=time.perf_counter() - begin)
        self._num_new += num_bytes
        is_due = self._num_new * _RESCAN_SHARE > self._options.max_bytes
        if self._num_bytes is None or is_due or self._num_bytes + num_bytes > self._options.max_bytes:
            self.evict(self._options.max_bytes)
            if num_bytes and (self._num_bytes or 0) > self._options.max_bytes:
                self._folder.discard(name)
                raise OSError(errno.EACCES, "it is larger than its limit, and its files cannot be deleted")
        else:
            self._num_bytes += num_bytes
            self.metrics.note_disk(self._num_bytes)
        if num_bytes:
            self.metrics.count_blocks("written", name.num_cells, num_bytes)
        return num_bytes

    def touch(self, namespace: Namespace, tokens: bytes) -> None:
        """Mark the files of a path as used now."""
        try:
            path, now_s = self._folder.hasher(self._identity(namespace)), time.monotonic()
            end = path.copy()
            end.update(tokens)
            if now_s - self._touched.get(end.digest(), -_TOUCH_S) < _TOUCH_S:
                return
            if len(self._touched) >= _MOST_TOUCHED:
                self._touched.clear()
            self._touched[end.digest()] = now_s
            names = [block.name for block in self._folder.cells_along(path, tokens)] if self._options.has_cells else []
            state = self._folder.last_state(path, tokens, 0) if self._options.has_states else None
            self._folder.touch([*names, *([] if state is None else [state.name])])
        except (OSError, PacelineError):
            return

    def evict(self, max_bytes: int) -> None:
        """Delete least recently used files of all models until they fit."""
        evicted = evict(self._folder.root, max_bytes)
        self._num_bytes, self._num_new, self._scanned_s = evicted.num_bytes_left, 0, time.monotonic()
        self.metrics.note_disk(evicted.num_bytes_left)
        if evicted.num_blocks:
            self.metrics.count_blocks("evicted", evicted.num_tokens, evicted.num_bytes, evicted.num_blocks)
            _log.info(
                "%d files left the disk cache, which has %d MiB now", evicted.num_blocks, evicted.num_bytes_left >> 20
            )

    def make_room(self) -> None:
        """Delete a fifth of the files, after the disk was full."""
        self.scan()
        self.evict((self._num_bytes or 0) * 9 // 10)

    def scan(self) -> None:
        """Look again at how much all processes have written, every few minutes."""
        if self._num_bytes is None or time.monotonic() - self._scanned_s > _SCAN_S:
            self.evict(self._options.max_bytes)

    def _identity(self, namespace: Namespace) -> tuple[object, ...]:
        """Return a namespace that means the same in every process: the contents of adapters in place of their keys."""
        lora: Any = namespace[0]
        return (tuple(sorted((self._fingerprint(key), scale) for key, scale in lora)), *namespace[1:])


@dataclass(slots=True, eq=False)
class _Search:
    lookup: DiskLookup
    is_over: threading.Event
    is_empty: bool = False
    is_late: bool = False  # whether the engine's thread waits for it no longer


class DiskCache:
    """The disk store of one engine, with its threads. The engine's thread calls the methods of `DiskStore`."""

    def __init__(self, tier: DiskTier, options: DiskOptions) -> None:
        self._tier, self._max_pending = tier, options.max_pending
        self._most = int(KEPT * options.max_bytes)  # of one range: for more, all other files would have to leave
        self._ask: Callable[[Ask], Future[Any]] | None = None
        self._next_key: Callable[[], int] = lambda: 0
        self._searches: queue.SimpleQueue[_Search | None] = queue.SimpleQueue()
        self._late: _Search | None = None  # the last one, if it took longer than the engine's thread waits
        self._wake = threading.Condition()
        self._unwritten: deque[tuple[Save | SaveState, SavedState]] = deque()
        self._used: dict[tuple[Namespace, bytes], None] = {}
        self._num_pending = self._num_lost = 0
        self._is_unsaved = self._is_closed = self._has_warned = False
        self._busy_s = self._retry_s = 0.0
        self._threads = [
            threading.Thread(target=target, name=f"paceline-disk-{name}", daemon=True)
            for target, name in ((self._read_all, "reader"), (self._write_all, "writer"))
        ]

    def start(self, ask: Callable[[Ask], Future[Any]], next_key: Callable[[], int]) -> None:
        """Start the threads. ask: passes a command to the engine; next_key: returns a new key for one."""
        self._ask, self._next_key = ask, next_key
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Write the ranges that wait, for a limited time, and end the threads. The rest is lost, with a warning."""
        due_s = time.monotonic() + _CLOSE_S
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        self._searches.put(None)
        for thread in reversed(self._threads):  # the writer first: it has more to do
            if thread.ident is not None:
                thread.join(max(0.0, due_s - time.monotonic()))
        with self._wake:
            for save, data in self._unwritten:
                self._lose(save, data)
            self._unwritten.clear()
            if self._num_lost:
                _log.warning(
                    "%d MiB of prefixes were not written to the disk cache, and are computed again: it was too slow, or failed",
                    self._num_lost >> 20,
                )

    # ---- DiskStore

    def put(self, save: Save | SaveState, data: SavedState) -> None:
        """Write saved cells or a saved state soon, unless too much waits for it."""
        with self._wake:
            self._busy_s = time.monotonic()
            has_room = data.nbytes <= self._most and self._num_pending + data.nbytes <= self._max_pending
            if not has_room or self._busy_s < self._retry_s or self._is_closed:
                self._lose(save, data)
                return
            self._num_pending += data.nbytes
            self._unwritten.append((save, data))
            self._wake.notify_all()

    def _lose(self, save: Save | SaveState, data: SavedState) -> None:
        self._num_lost += data.nbytes
        self._tier.metrics.count_blocks("lost", save.end - save.start if isinstance(save, Save) else 0, data.nbytes)

    def look_up(self, lookup: DiskLookup) -> bool:
        """Hand a search to the reader, and wait two milliseconds at most to know that nothing is there.

        While the reader is behind with the last search, it is not waited for.
        """
        if self._searches.qsize() >= _MOST_WAITING:
            return False
        search = _Search(lookup, threading.Event())
        self._busy_s = time.monotonic()
        is_free = self._late is None or self._late.is_over.is_set()
        self._searches.put(search)
        if is_free:  # else every request of a burst would hold the tick up
            search.is_over.wait(_AT_ONCE_S)
        with self._wake:
            search.is_late = not search.is_over.is_set()
        self._late = search if search.is_late else None
        return not search.is_empty

    def note_use(self, namespace: Namespace, tokens: bytes) -> None:
        """Mark these tokens as used, later."""
        with self._wake:
            if len(self._used) < _MOST_WAITING:
                self._mark(namespace, tokens)

    def _mark(self, namespace: Namespace, tokens: bytes) -> None:
        """Have a path marked later, and no more its beginning: the ranges of a long prompt come one after another."""
        if self._used:
            last = next(reversed(self._used))
            if last[0] == namespace and tokens.startswith(last[1]):
                del self._used[last]
        self._used[(namespace, tokens)] = None

    def note_unsaved(self) -> None:
        """Have the prefixes on the device saved after a while without work."""
        with self._wake:
            self._busy_s = time.monotonic()
            self._is_unsaved = True
            self._wake.notify_all()

    # ---- threads

    def _read_all(self) -> None:
        while (search := self._searches.get()) is not None:
            lookup = search.lookup
            found = self._guarded(self._tier.find, lookup) or []
            with self._wake:
                search.is_empty = not found
                search.is_over.set()
                if search.is_empty and not search.is_late:
                    continue
                if self._is_closed:
                    return
            blocks: DiskBlocks = (found and self._guarded(self._tier.read, lookup, found)) or []
            taken = self._tell(partial(_end_lookup, lookup, blocks))
            while blocks and taken is not None and not self._is_closed:  # what was read before is in host memory
                if wait([taken], _TAKEN_S).done:
                    break

    def _write_all(self) -> None:
        if sys.platform == "linux":  # elsewhere the number of a thread may be that of another process
            with suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._guarded(self._tier.scan)
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Write the next range, or do what is left to do without one; return False at the end."""
        with self._wake:
            if not self._unwritten and not self._is_closed:
                self._wake.wait(_IDLE_S if self._is_unsaved or self._used else _TOUCH_S)
            item = self._unwritten.popleft() if self._unwritten else None
            must_mark = item is None or len(self._used) >= _MOST_WAITING
            used, self._used = (self._used, {}) if must_mark else ({}, self._used)
            is_idle = self._is_unsaved and item is None and time.monotonic() - self._busy_s >= _IDLE_S
            self._is_unsaved = self._is_unsaved and not is_idle
        for namespace, tokens in used:
            self._guarded(self._tier.touch, namespace, tokens)
        if item is None:
            self._guarded(self._tier.scan)
            if is_idle:
                self._tell(self._save_idle)
            return not self._is_closed
        save, data = item
        is_written = self._write(save, data)
        with self._wake:
            self._num_pending -= data.nbytes
            if not is_written:
                self._lose(save, data)
            self._mark(save.namespace, save.tokens)
        return True

    def _save_idle(self, engine: Engine) -> None:
        if engine.is_idle:
            engine.scheduler.kv_cache.save_idle()
        else:  # a long generation saves and looks up nothing
            self.note_unsaved()

    def _write(self, save: Save | SaveState, data: SavedState) -> bool:
        try:
            if self._tier.write(save, data):
                self._has_warned = False
        except OSError as error:
            if error.errno in _FULL and time.monotonic() >= self._retry_s:  # once, not for each range that waits
                self._guarded(self._tier.make_room)
            with self._wake:
                self._retry_s = time.monotonic() + _RETRY_S
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the disk cache cannot be written, and is tried again later: %s", error)
        except Exception:  # noqa: BLE001 - the engine goes on
            _log.warning("a range could not be written to the disk cache", exc_info=True)
        else:
            return True
        return False

    def _tell(self, begin: Callable[[Engine], None]) -> Future[Any] | None:
        """Have the engine's thread do something before its next tick; None if it has ended."""
        if self._ask is None:
            return None

        def run(engine: Engine) -> Callable[[], None]:
            begin(engine)
            return lambda: None

        with suppress(Exception):
            return self._ask(Ask(self._next_key(), run, may_change_cache=True))
        return None

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception:  # noqa: BLE001 - the engine goes on
            _log.warning("the disk cache failed", exc_info=True)
            return None


def _end_lookup(lookup: DiskLookup, blocks: DiskBlocks, engine: Engine) -> None:
    engine.scheduler.end_lookup(lookup, blocks)


_SHARE: Final = 10  # a tenth of the free space
_MOST_BYTES: Final = 16 << 30
_PENDING_SHARE: Final = 2  # half of host memory may wait to be written; most of it is there in any case


def open_disk_cache(
    config: EngineConfig,
    limits: Limits,
    backend: Backend,
    fingerprint: bytes,
    facts: dict[str, Any],
    metrics: Metrics,
) -> DiskCache | None:
    """Return the disk cache of an engine; None if it has none. facts: about the model, for people.

    A folder that cannot be made is only warned of if it was not named. Raises `InvalidParams` if it was.
    """
    if config.disk_cache is None or limits.cannot_generate:
        return None
    if not limits.host_bytes:
        if config.disk_cache != "auto":
            _log.warning(
                "disk_cache has no effect without host memory; raise host_cache_bytes, or leave disk_cache out"
            )
        return None
    try:
        folder = disk_folder(config.disk_cache)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        num_free = shutil.disk_usage(folder).free
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        text = f"disk_cache: the folder cannot be made or read: {error}; give another folder, or None"
        if config.disk_cache != "auto":
            raise InvalidParams(text) from None
        _log.warning("%s", text)
        return None
    max_bytes = config.disk_cache_bytes
    if max_bytes is None:
        max_bytes = min(_MOST_BYTES, (num_free + sum(file.num_bytes for file in files_of(folder))) // _SHARE)
    options = DiskOptions(
        max_bytes=max_bytes,
        max_pending=max(1, limits.host_bytes // _PENDING_SHARE),
        has_cells=limits.can_share_part or limits.has_state_apart,
        has_states=not limits.can_share_part,
    )
    model = layout_fingerprint(fingerprint, (build_info().llama_cpp_commit, VERSION))
    cells = ModelFolder(folder, model, facts)
    tier = DiskTier(cells, options, backend.adapter_fingerprint, backend.saved_cells, metrics)
    _log.info("disk cache: prefixes are kept in %s, at most %d MiB of all models", folder, max_bytes >> 20)
    return DiskCache(tier, options)


def disk_folder(given: str | os.PathLike[str]) -> Path:
    """Return the folder of the option `disk_cache`."""
    return default_folder() if given == "auto" else validation.path("disk_cache", given)


def default_folder() -> Path:
    """Return the folder of the disk cache in the user's cache folder."""
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "paceline" / "kv"
