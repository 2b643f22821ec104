"""The lock of a download: a file that one process or thread holds while it downloads, huggingface_hub's own for its blobs.

Loads filelock when a lock is taken. Blocking; any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paceline.errors import Aborted
from paceline.hub.download import Download, DownloadObserver

_POLL_S: Final = 0.2


@contextmanager
def locked(download: Download, observer: DownloadObserver, stop: threading.Event) -> Iterator[None]:
    """Hold the lock of a download, waiting for another process or thread that holds it. Raises `Aborted` once `stop` is set."""
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
    """Hold a lock if no download holds it, and yield whether that is so. A lock that cannot be made is not held either."""
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
    """Return whether a download holds this lock. Makes no file."""
    if not path.exists():
        return False
    with locked_at_once(path) as is_free:
        return not is_free
