"""Devices, cores and memory of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline import _native


@dataclass(frozen=True, slots=True)
class Device:
    """One device llama.cpp can use. `kind` is "cpu", "gpu", "igpu" or "accel"."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int


def devices() -> list[Device]:
    """Return all devices of this build and machine, the CPU among them."""
    return [Device(d.name, d.description, d.kind, d.free_bytes, d.total_bytes) for d in _native.devices()]


def backend_features() -> Mapping[str, str]:
    """Return the features of each backend, compiled in and detected on this machine, like {"CPU.AVX2": "1"}."""
    return dict(_native.backend_features())


def physical_cores() -> int:
    """Return the number of cores this process may use, hyper-threads counted once, within its container's CPU quota."""
    allowed = _allowed_cpus()
    cores = {_siblings(cpu) for cpu in allowed}
    quota = _cpu_quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, min(len(cores), quota if quota is not None else len(cores)))


def available_memory() -> int | None:
    """Return the bytes of host memory that can still be allocated, within the container's limit; None if unknown."""
    known = [bytes_ for bytes_ in (_meminfo_available(), _cgroup_available(), _darwin_memory()) if bytes_ is not None]
    return min(known) if known else None


def total_memory() -> int:
    """Return the bytes of host memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_memory() -> int:
    """Return the bytes of host memory that an empty machine could allocate, within the container's limit."""
    limit = _cgroup_limit()
    return total_memory() if limit is None else min(limit, total_memory())


def _allowed_cpus() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _siblings(cpu: int) -> str:
    """Return the core that a logical CPU belongs to; the CPU's own number if the kernel does not report it."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cpu_quota(path: Path) -> int | None:
    """Return the whole CPUs of a cgroup v2 quota file, "max 100000" or "200000 100000", rounded up."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else -(-int(quota) // int(period))


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(fields[0][1]) * 1024 if fields else None


def _cgroup_available(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = (root / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    # File cache counts as used but is reclaimed when memory is allocated.
    reclaimable = sum(
        int(line.split()[1]) for line in stat.splitlines() if line.startswith(("inactive_file ", "active_file "))
    )
    return max(0, int(limit) - used + reclaimable)


def _cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = (root / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit)
    except (OSError, ValueError):
        return None


def _darwin_memory() -> int | None:
    """Return all memory of a Mac: there is no cheap way to read the free memory."""
    if os.uname().sysname != "Darwin":
        return None
    return total_memory()
