"""Download a file over HTTP: under a lock, continued after an interruption, verified, shown on a terminal, then moved in place.

huggingface_hub removes the arrived bytes when a download is interrupted, and compares no checksums; so the files of its
repositories are downloaded here too. A lock is a file that one process or thread holds while it downloads; for blobs it is
huggingface_hub's own lock. Blocking; any thread. filelock, httpx and rich are loaded when they are needed.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NoReturn, TextIO

from paceline.errors import Aborted, DiskFull, DownloadError, HubUnavailable
from paceline.hub.network import (
    LONGEST_WAIT_S,
    Passing,
    are_same_version,
    body_pieces,
    content_range,
    is_weak,
    new_client,
    open_response,
    refused,
    whole_number,
)
from paceline.hub.references import is_on, visible, without_secrets

if TYPE_CHECKING:
    import httpx
    from rich.progress import Progress


_log = logging.getLogger("paceline.hub")


class DownloadObserver:
    """Writes a line when a file begins, and the notes. A subclass draws the progress. Called on the thread that downloads."""

    def __init__(self, note: Callable[[str], object] = _log.info) -> None:
        """note: receives the lines; by default the log."""
        self._note = note
        self._name: str | None = None

    def begin(self, name: str, total: int | None) -> None:
        """Begin a file, or set its bytes once they are known."""
        if name != self._name:
            self._name = name
            self._note(f"downloading {visible(name)}" + ("" if total is None else f" ({total:,} bytes)"))

    def reached(self, num_bytes: int) -> None:
        """Set the bytes that have arrived so far, including earlier attempts."""

    def end(self) -> None:
        """End the file, complete or not."""
        self._name = None

    def note(self, text: str) -> None:
        """Show a line about a choice or a wait."""
        self._note(visible(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A file to download.

    Attributes:
        url: The address.
        target: The path of the complete file.
        part: The path for arriving bytes until the file is complete.
        lock: The file that other programs also lock for this download.
        name: The name in messages.
        size: The announced bytes; None if unknown.
        sha256: The announced hash; None if unknown.
        headers: Sent with the first request, not with redirects to other hosts.
        keeps_tag: Whether the server's ETag is kept beside the file, since the file at this URL may change.
        replaces: Whether an existing target is replaced.
    """

    url: str
    target: Path
    part: Path
    lock: Path
    name: str
    size: int | None = None
    sha256: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    keeps_tag: bool = False
    replaces: bool = False

    @property
    def part_tag(self) -> Path:
        """The file with the ETag of the part."""
        return tag_file(self.part)


def tag_file(path: Path) -> Path:
    """Return the file with the ETag of a file."""
    return path.with_name(path.name + ".etag")


_SHOWN = 40  # characters of a file's name


@contextmanager
def download_bar(stream: TextIO, note: Callable[[str], object]) -> Iterator[DownloadObserver]:
    """Show downloads on a stream while the block runs, as a bar if it is a terminal. note: shows the lines beside it.

    Control characters in names and notes of a server become question marks, since they could drive a terminal.
    HF_HUB_DISABLE_PROGRESS_BARS=1 leaves the bar out, as huggingface_hub does.
    """
    if not stream.isatty() or is_on("HF_HUB_DISABLE_PROGRESS_BARS"):
        yield DownloadObserver(note)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as progress:
        yield _Bar(progress)


class _Bar(DownloadObserver):
    """Draws a row for each file. Bytes of an earlier attempt do not count for the rate."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(lambda text: progress.console.print(text, style="dim"))
        self._progress = progress
        self._task = progress.add_task("", visible=False, start=False)
        self._is_new = False

    def begin(self, name: str, total: int | None) -> None:
        if name == self._name:
            self._progress.update(self._task, total=total)
            return
        self._name, self._is_new = name, True
        shown = visible(name.rpartition("/")[2])
        self._task = self._progress.add_task(shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…", total=total)

    def reached(self, num_bytes: int) -> None:
        if self._is_new:
            self._progress.reset(self._task, completed=num_bytes)
            self._is_new = False
        else:
            self._progress.update(self._task, completed=num_bytes)

    def end(self) -> None:
        super().end()
        self._progress.stop_task(self._task)


_POLL_S: Final = 0.2


@contextmanager
def locked(download: Download, observer: DownloadObserver, stop: threading.Event) -> Iterator[None]:
    """Hold the lock of a download; wait while another process or thread holds it. Raises `Aborted` when `stop` is set."""
    from filelock import FileLock, Timeout

    lock = FileLock(download.lock)
    waits = False
    while True:
        try:
            lock.acquire(timeout=_POLL_S)
            break
        except Timeout:
            if not waits:
                observer.note(f"{download.name} is being downloaded by another process; waiting for it")
                waits = True
            if stop.is_set():
                raise Aborted(f"the download of {download.name} was stopped") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked_at_once(path: Path) -> Iterator[bool]:
    """Yield whether the lock was free and is now held. A lock that cannot be created is not held."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except (OSError, Timeout):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Return whether a download holds this lock. Creates no file."""
    if not path.exists():
        return False
    with locked_at_once(path) as is_free:
        return not is_free


_MAGIC: Final = b"GGUF"
_CHUNK_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 6  # in a row with fewer than _MIN_PROGRESS new bytes
_MIN_PROGRESS: Final = 1 << 16
_FIRST_ATTEMPTS: Final = 2  # if no connection was made
_CHECK_BYTES: Final = 1 << 20  # between two checks of the free space
_MAX_RESERVE: Final = 1 << 29  # bytes of the disk that downloads leave free
_RESERVED_SHARE: Final = 0.02
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def fetch(download: Download, observer: DownloadObserver, cancel: threading.Event | None = None) -> None:
    """Download the file unless its target exists, or wait for another process that downloads it.

    Raises `HubUnavailable`, `AccessDenied`, `ModelNotFound`, `DiskFull`, `DownloadError`, and `Aborted` when `cancel` is set;
    arrived bytes are kept unless they are wrong.
    """
    stop = threading.Event() if cancel is None else cancel
    with translating_disk_errors(download.name, download.part.parent):
        download.part.parent.mkdir(parents=True, exist_ok=True)
        download.lock.parent.mkdir(parents=True, exist_ok=True)
        download.target.parent.mkdir(parents=True, exist_ok=True)
        with locked(download, observer, stop):
            if download.replaces or not download.target.exists():
                observer.begin(download.name, download.size)
                try:
                    _Transfer(download, observer, stop).run()
                finally:
                    observer.end()


class _Changed(Exception):
    """The part belongs to another version of the file: begin anew."""


class _Transfer:
    """The attempts of one download, under its lock."""

    def __init__(self, download: Download, observer: DownloadObserver, stop: threading.Event) -> None:
        self._download, self._observer, self._stop = download, observer, stop
        self._hash = hashlib.sha256()
        self._have = 0
        self._total = download.size
        self._tag: str | None = None
        self._max_failures = _FIRST_ATTEMPTS

    def run(self) -> None:
        self._read_part()
        began_anew = False
        with new_client() as client:
            while True:
                try:
                    self._fill(client)
                    self._verify()
                    break
                except _Changed as change:
                    self._forget_part()
                    if began_anew:
                        raise DownloadError(f"{self._download.name}: {change}; it was downloaded twice") from None
                    began_anew = True
                    self._observer.note(f"{self._download.name}: {change}; downloading it anew")
        with self._download.part.open("rb") as file:
            os.fsync(file.fileno())
        self._download.part.replace(self._download.target)
        if self._download.part_tag.exists():
            self._download.part_tag.replace(tag_file(self._download.target))

    def _read_part(self) -> None:
        """Continue with the part of an earlier attempt. A part of an unknown version is dropped."""
        download = self._download
        if download.keeps_tag:
            with suppress(OSError):
                self._tag = download.part_tag.read_text(encoding="utf-8").strip() or None
            if self._tag is None:
                download.part.unlink(missing_ok=True)
        if not download.part.exists():
            return
        with download.part.open("rb") as file:
            while piece := file.read(_CHUNK_BYTES):
                self._stop_if_cancelled()
                self._hash.update(piece)
                self._have += len(piece)
        if self._total is not None and self._have > self._total:
            self._forget_part()
        self._observer.reached(self._have)

    def _forget_part(self) -> None:
        self._download.part.unlink(missing_ok=True)
        self._download.part_tag.unlink(missing_ok=True)
        self._hash, self._have, self._tag = hashlib.sha256(), 0, None
        self._total = self._download.size
        self._observer.reached(0)

    def _fill(self, client: httpx.Client) -> None:
        """Request the missing bytes until all have arrived or six attempts in a row brought hardly any."""
        import httpx

        failures = 0
        while self._total is None or self._have < self._total:
            before = self._have
            failure: Exception | None = None
            try:
                self._request(client)
            except (httpx.TransportError, Passing) as error:
                failure = error
            except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
                self._give_up(str(error) or type(error).__name__)
            if failure is None and self._total is None:
                return  # a server that announces no length has sent all bytes
            if failure is not None or self._have < (self._total or 0):
                failures = 1 if self._have - before >= _MIN_PROGRESS else failures + 1
                self._wait(failure or Passing("the connection ended early"), failures)

    def _wait(self, error: Exception, failures: int) -> None:
        reason = str(error) or type(error).__name__
        asked_s = error.wait_s if isinstance(error, Passing) else None
        if failures >= self._max_failures or (asked_s or 0) > LONGEST_WAIT_S:
            self._give_up(reason if asked_s is None else f"{reason}, for {asked_s:.0f} s")
        wait_s = min(2.0 ** (failures - 1) / 2, LONGEST_WAIT_S) if asked_s is None else asked_s
        self._observer.note(f"{self._download.name}: {reason}; trying again in {wait_s:.1f} s")
        self._stop.wait(wait_s)
        self._stop_if_cancelled()

    def _request(self, client: httpx.Client) -> None:
        headers = dict(self._download.headers)
        if self._have:
            headers["range"] = f"bytes={self._have}-"
            if self._tag is not None and not is_weak(self._tag):
                headers["if-range"] = self._tag
        with open_response(client, self._download.url, headers) as response:
            self._max_failures = _ATTEMPTS
            self._check_status(response)
            self._check_disk()
            with self._download.part.open("ab") as file:
                self._copy(response, file)

    def _check_status(self, response: httpx.Response) -> None:
        status = response.status_code
        if status == HTTPStatus.PARTIAL_CONTENT:
            self._check_range(response)
        elif status == HTTPStatus.OK:
            self._begin_whole(response)
        elif status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and self._have:
            raise _Changed("the server has a shorter file than the part")
        else:
            raise refused(response, self._download.name, self._download.url)

    def _check_range(self, response: httpx.Response) -> None:
        tag = response.headers.get("etag")
        if self._tag is not None and not self._is_of_part(tag):
            raise _Changed("the server has another version of it now")
        start, total = content_range(response.headers.get("content-range", ""))
        if start != self._have:
            raise _Changed("the server sent another part of the file")
        if total is not None:
            if self._total is not None and total != self._total:
                raise _Changed(f"it has {total} bytes now, not {self._total}")
            self._total = total

    def _is_of_part(self, tag: str | None) -> bool:
        """Return whether further bytes belong to the part. A strong tag was checked by If-Range, so the server may omit it."""
        known = self._tag or ""
        return not is_weak(known) if tag is None else are_same_version(tag, known)

    def _begin_whole(self, response: httpx.Response) -> None:
        """Begin at the first byte: there is no part, the server sends no ranges, or the file has changed."""
        if self._have:
            self._observer.note(f"{self._download.name}: the server begins anew")
            self._forget_part()
        total = whole_number(response.headers.get("content-length", ""))
        if total is not None:
            if self._total is not None and total != self._total:
                raise DownloadError(
                    f"{self._download.name} should have {self._total} bytes, and {response.url.host} sends {total}"
                )
            self._total = total
            self._observer.begin(self._download.name, total)
        tag = response.headers.get("etag")
        if self._download.keeps_tag and tag is not None:
            self._tag = tag
            self._download.part_tag.write_text(tag, encoding="utf-8")

    def _check_disk(self) -> None:
        """Raise `DiskFull` if the missing bytes do not fit. A part of unknown length is deleted then, as it may be endless."""
        missing = 0 if self._total is None else self._total - self._have
        try:
            check_space(self._download.name, self._download.part.parent, missing)
        except DiskFull as error:
            if self._total is not None:
                raise
            self._forget_part()
            raise DiskFull(f"{error}, except the {self._download.name} whose length the server does not say") from None

    def _copy(self, response: httpx.Response, file: BinaryIO) -> None:
        checked = self._have
        for piece in body_pieces(response):
            if self._have == 0 and not piece.startswith(_MAGIC[: len(piece)]):
                raise DownloadError(
                    f"{without_secrets(self._download.url)} is no GGUF file: it begins with {piece[:16]!r}; "
                    "give the address of the file itself, not of a page about it"
                )
            if self._total is not None and self._have + len(piece) > self._total:
                total = self._total
                self._forget_part()
                raise DownloadError(
                    f"{response.url.host} sends more than the {total} bytes of {self._download.name}; what came is deleted"
                )
            file.write(piece)
            self._hash.update(piece)
            self._have += len(piece)
            self._observer.reached(self._have)
            self._stop_if_cancelled()
            if self._have - checked >= _CHECK_BYTES:
                checked = self._have
                self._check_disk()

    def _verify(self) -> None:
        found, expected = self._hash.hexdigest(), self._download.sha256
        if self._total is not None and self._have != self._total:
            raise _Changed(f"it has {self._have} bytes, not {self._total}")
        kept = self._download.part.stat().st_size if self._download.part.exists() else 0
        if kept != self._have:  # the hash covers the arrived bytes, not the file
            raise _Changed(f"its part was removed or changed, and has {kept} bytes, not {self._have}")
        if expected is not None and found != expected:
            raise _Changed(f"its SHA-256 is {found}, not {expected}")

    def _stop_if_cancelled(self) -> None:
        if self._stop.is_set():
            raise Aborted(f"the download of {self._download.name} was stopped; the next one continues it")

    def _give_up(self, reason: str) -> NoReturn:
        raise HubUnavailable(
            f"cannot download {self._download.name} from {without_secrets(self._download.url)}: {reason}; "
            f"{self._have} bytes are kept, and the next attempt continues there"
        )


@contextmanager
def translating_disk_errors(name: str, folder: Path) -> Iterator[None]:
    """Raise an `OSError` of the block as `DiskFull` or `DownloadError`. name: the file that is written to the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            _raise_full(name, folder, error.strerror or "no space left")
        raise DownloadError(
            f"cannot write {name} to {folder}: {error.strerror or error}; set HF_HOME "
            "(for a URL XDG_CACHE_HOME) to a folder that can be written"
        ) from None


def check_space(name: str, folder: Path, missing: int) -> None:
    """Raise `DiskFull` if the missing bytes of a file would leave less of the disk free than a reserve."""
    disk = shutil.disk_usage(folder)
    reserve = min(_MAX_RESERVE, int(disk.total * _RESERVED_SHARE))
    if disk.free < missing + reserve:
        _raise_full(name, folder, f"{missing} bytes are missing and {disk.free} are free, of which {reserve} stay free")


def _raise_full(name: str, folder: Path, reason: str) -> NoReturn:
    raise DiskFull(
        f"{folder} has no space for {name}: {reason}; free some (`paceline prune`, `paceline rm`), "
        "or set HF_HOME (for a URL XDG_CACHE_HOME) to a folder on another disk; what has arrived is kept"
    ) from None
