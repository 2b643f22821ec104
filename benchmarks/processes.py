"""Processes of a server, as Linux shows them in /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def tree(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants, oldest first."""
    found, rest = [], [pid]
    while rest:
        one = rest.pop(0)
        found.append(one)
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                rest += [int(child) for child in task.read_text().split()]
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Return the processor time of running processes."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")
