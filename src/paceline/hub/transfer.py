"""Download one file over HTTP: continues what an earlier attempt left, verifies, then moves the file into place.

huggingface_hub removes what has arrived when a download is interrupted, and compares no checksums; so the bytes of its
repositories come through here too. Blocking; any thread. Loads httpx when something is downloaded.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NoReturn

from paceline.errors import Aborted, DiskFull, DownloadError, HubUnavailable
from paceline.hub.download import Download, DownloadObserver, tag_file
from paceline.hub.download_lock import locked
from paceline.hub.http_responses import (
    PASSING,
    are_same_version,
    body_pieces,
    content_range,
    is_weak,
    new_client,
    open_response,
    refused,
    retry_after_s,
    whole_number,
)
from paceline.hub.references import without_secrets

if TYPE_CHECKING:
    import httpx

_MAGIC: Final = b"GGUF"
_CHUNK_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 6  # in a row with fewer than _MIN_PROGRESS new bytes
_MIN_PROGRESS: Final = 1 << 16
_FIRST_ATTEMPTS: Final = 2  # where no connection was made at all
_LONGEST_WAIT_S: Final = 60.0
_CHECK_BYTES: Final = 1 << 20  # between two checks of the free space
_MAX_RESERVE: Final = 1 << 29  # bytes of the disk that downloads leave free
_RESERVED_SHARE: Final = 0.02
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def fetch(download: Download, observer: DownloadObserver, cancel: threading.Event | None = None) -> None:
    """Download the file unless its target exists. Another process that downloads it is waited for.

    Raises `HubUnavailable`, `AccessDenied`, `ModelNotFound`, `DiskFull`, `DownloadError`, and `Aborted` once `cancel` is set;
    what has arrived is kept, unless it is wrong.
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


class _Broken(Exception):
    """The connection ended, or the server asks for patience."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.wait_s = reason, wait_s


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
        """Take up what an earlier attempt left. A part without a way to see that it is of this version is dropped."""
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
        """Request the missing bytes until all are there, or six attempts in a row brought next to none."""
        import httpx

        failures = 0
        while self._total is None or self._have < self._total:
            before = self._have
            failure: Exception | None = None
            try:
                self._request(client)
            except (httpx.TransportError, _Broken) as error:
                failure = error
            except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
                self._give_up(str(error) or type(error).__name__)
            if failure is None and self._total is None:
                return  # a server that announces no length has sent what there is
            if failure is not None or self._have < (self._total or 0):
                failures = 1 if self._have - before >= _MIN_PROGRESS else failures + 1
                self._wait(failure or _Broken("the connection ended early"), failures)

    def _wait(self, error: Exception, failures: int) -> None:
        reason = str(error) or type(error).__name__
        asked_s = error.wait_s if isinstance(error, _Broken) else None
        if failures >= self._max_failures or (asked_s or 0) > _LONGEST_WAIT_S:
            self._give_up(reason if asked_s is None else f"{reason}, for {asked_s:.0f} s")
        wait_s = min(2.0 ** (failures - 1) / 2, _LONGEST_WAIT_S) if asked_s is None else asked_s
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
        status, name = response.status_code, self._download.name
        if status == HTTPStatus.PARTIAL_CONTENT:
            self._check_range(response)
        elif status == HTTPStatus.OK:
            self._begin_whole(response)
        elif status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and self._have:
            raise _Changed("the server has a shorter file than the part")
        elif status in PASSING:
            raise _Broken(
                f"{self._where(response)} is overloaded (HTTP {status})",
                retry_after_s(response.headers.get("retry-after")),
            )
        else:
            raise refused(response, name, self._download.url)

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
        """Return whether a rest belongs to the part. If-Range has made sure of a strong tag, which the server may leave out."""
        known = self._tag or ""
        return not is_weak(known) if tag is None else are_same_version(tag, known)

    def _begin_whole(self, response: httpx.Response) -> None:
        """Begin at the first byte: there is no part, or the server sends no ranges, or the file has changed."""
        if self._have:
            self._observer.note(f"{self._download.name}: the server begins anew")
            self._forget_part()
        total = whole_number(response.headers.get("content-length", ""))
        if total is not None:
            if self._total is not None and total != self._total:
                raise DownloadError(
                    f"{self._download.name} should have {self._total} bytes, and {self._where(response)} sends {total}"
                )
            self._total = total
            self._observer.begin(self._download.name, total)
        tag = response.headers.get("etag")
        if self._download.keeps_tag and tag is not None:
            self._tag = tag
            self._download.part_tag.write_text(tag, encoding="utf-8")

    def _check_disk(self) -> None:
        """Raise `DiskFull` if the missing bytes do not fit. A part of unknown length may be endless: it is deleted then."""
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
                    f"{self._where(response)} sends more than the {total} bytes of {self._download.name}; what came is deleted"
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
        if kept != self._have:  # the hash is of what arrived
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

    def _where(self, response: httpx.Response) -> str:
        return response.url.host


@contextmanager
def translating_disk_errors(name: str, folder: Path) -> Iterator[None]:
    """Raise an `OSError` of the block as `DiskFull` or `DownloadError`. name: of the file that is written to the folder."""
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
