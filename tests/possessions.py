"""A process's resources of the system: child processes, open files, threads.

Only gains between two looks are reported: resources of an earlier test may be freed at any time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self


def children(pid: int | None = None) -> set[str]:
    """Processes that this one, or another, started and that have not been buried, by their ids."""
    found: set[str] = set()
    for task in Path(f"/proc/{'self' if pid is None else pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread ended just now
            found.update((task / "children").read_text().split())
    return found


def is_gone(pid: int) -> bool:
    """Whether there is no process of this id any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def open_files() -> Counter[str]:
    """Return the targets of the open descriptors, with counts; sockets and pipes have a name each."""
    links: Counter[str] = Counter()
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listed the folder
            links[str(descriptor.readlink())] += 1
    return links


@dataclass(frozen=True, slots=True)
class Possessions:
    """One look at the resources; garbage is collected before."""

    children: frozenset[str]
    files: Counter[str]
    threads: frozenset[threading.Thread]

    @classmethod
    def now(cls) -> Self:
        gc.collect()
        return cls(frozenset(children()), open_files(), frozenset(threading.enumerate()))

    def gained_since(self, before: Self) -> list[str]:
        """Return all resources held now and not then, in words; empty if nothing stayed."""
        return [
            *(f"process {child}" for child in sorted(self.children - before.children)),
            *(f"file {link}" for link in sorted((self.files - before.files).elements())),
            *(f"thread {thread.name}" for thread in self.threads - before.threads),
        ]
