"""Parts that attacks share: the record of an attack, a server with bounded memory, and figures of it under load.

An attack starts a server (`Served` of tests/e2e runs `paceline serve` on the loopback), measures, and ends all processes. It
returns its figure if that is within the attack's bound, and raises `NotHeldError` with the figure if not; see `figure`.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import httpx
import tests.attack
from tests.e2e.served import LONG_S, Served

MB = 1_000_000
CGROUPS = Path("/sys/fs/cgroup")


class NotHeldError(AssertionError):
    """An attack succeeded; the text is its figure."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        name: Short; unique in its module.
        claim: The behaviour under attack, in one sentence.
        before: The figure of the first server that was attacked.
        run: Makes the attack; returns its figure now, or raises `NotHeldError`.
        sample: Whether it is among the quick attacks that run with the other tests.
        limit_s: Seconds after which it has failed.
    """

    name: str
    claim: str
    before: str
    run: Callable[[], str]
    sample: bool = False
    limit_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of an attack. now: its figure, or the error that ended it."""

    name: str
    claim: str
    before: str
    now: str
    held: bool
    seconds: float


def figure(now: str, *, held: bool) -> str:
    """Return the figure of an attack; raises `NotHeldError` with it if the attack was not held."""
    if not held:
        raise NotHeldError(now)
    return now


def find_attacks() -> dict[str, Attack]:
    """Return all attacks of the package's modules by "module.name"."""
    found = {}
    for module in pkgutil.iter_modules(tests.attack.__path__):
        if not module.name.startswith("_"):
            attacks: Iterable[Attack] = getattr(importlib.import_module(f"tests.attack.{module.name}"), "ATTACKS", ())
            found.update({f"{module.name}.{attack.name}": attack for attack in attacks})
    return found


def run_attack(name: str, attack: Attack) -> Result:
    """Make an attack. An error of any kind counts as not held. The time limit holds in the main thread alone."""
    begin = time.monotonic()
    held = False
    try:
        with _alarm(attack.limit_s):
            now, held = attack.run(), True
    except NotHeldError as error:
        now = str(error)
    except Exception as error:
        now = f"{type(error).__name__}: {error}"
    return Result(name, attack.claim, attack.before, now, held, time.monotonic() - begin)


@contextmanager
def _alarm(limit_s: float) -> Iterator[None]:
    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"it took longer than {limit_s:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


# ---- memory


def memory_kb(pid: int, name: str) -> int:
    """Return a line of /proc/PID/status in kB, for example VmRSS, VmHWM (the peak of VmRSS) or VmSize."""
    line = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert line is not None, f"no {name} of process {pid}"
    return int(line[1])


def bound_memory(server: Served, extra_mb: int) -> None:
    """Let a running server and its worker take so much more memory than now, and not more.

    If a cgroup with a memory controller can be made, both processes move into it and share the allowance. Otherwise each has an
    address space of the larger one's present size and the allowance (RLIMIT_AS), which a worker started later inherits.
    """
    pids = [server.pid, *server.children()]
    if (group := _new_cgroup()) is not None:
        (group / "memory.max").write_text(str(extra_mb * MB))
        with suppress(OSError):
            (group / "memory.swap.max").write_text("0")
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        return
    size = max(memory_kb(pid, "VmSize") for pid in pids) * 1024 + extra_mb * MB
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


def _new_cgroup() -> Path | None:
    """Make a group (version 2) with a memory controller within this process's group or next to it, if that is possible."""
    line = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    if line is None:
        return None
    own = CGROUPS / line[1]
    return _child_group(own) or (_child_group(own.parent) if line[1] else None)


def _child_group(parent: Path) -> Path | None:
    """Make a group within one that hands its memory controller on. Empty groups of earlier runs are removed."""
    with suppress(OSError):
        if "memory" in (parent / "cgroup.subtree_control").read_text().split():
            for old in parent.glob("paceline-attack-*"):
                with suppress(OSError):
                    old.rmdir()
            group = parent / f"paceline-attack-{os.getpid()}-{time.monotonic_ns()}"
            group.mkdir()
            return group
    return None


# ---- figures


class Poller:
    """Repeats a request on a connection of its own while a block runs.

    Attributes:
        longest_s: The longest time that a request took; a request under way at the end of the block is waited for.
        statuses: How often each status came; 0 stands for a connection that failed.
    """

    def __init__(self, url: str, send: Callable[[httpx.Client], httpx.Response], *, pause_s: float = 0.02) -> None:
        self.longest_s = 0.0
        self.statuses: Counter[int] = Counter()
        self._url, self._send, self._pause_s = url, send, pause_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def _poll(self) -> None:
        with httpx.Client(base_url=self._url, timeout=LONG_S) as client:
            while True:
                begin = time.monotonic()
                try:
                    status = self._send(client).status_code
                except httpx.HTTPError:
                    status = 0
                self.longest_s = max(self.longest_s, time.monotonic() - begin)
                self.statuses[status] += 1
                if self._is_over.wait(self._pause_s):
                    return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(LONG_S)


def ask_health(client: httpx.Client) -> httpx.Response:
    """Ask for /health; how long that takes is how long the event loop stands still."""
    return client.get("/health")


def bystander(**headers: str) -> Callable[[httpx.Client], httpx.Response]:
    """Return a request for two tokens, as another client sends it."""
    body = {"prompt": "Once upon a time", "max_tokens": 2}
    return lambda client: client.post("/v1/completions", json=body, headers=headers)


@dataclass(slots=True)
class Measured:
    """Figures of a server while a block ran.

    Attributes:
        seconds: How long the block took.
        server_mb: Peak memory of the server's process, less that at the beginning.
        worker_mb: The same of the worker, or of the oldest if there are several; None if there was none or it ended.
        stood_s: The longest time that /health took.
        statuses: Statuses of /health; 0 stands for a connection that failed.
    """

    seconds: float = 0.0
    server_mb: float = 0.0
    worker_mb: float | None = None
    stood_s: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)

    def __str__(self) -> str:
        worker = "no worker of before" if self.worker_mb is None else f"worker +{self.worker_mb:.0f} MB"
        return f"server +{self.server_mb:.0f} MB, {worker}, {self.seconds:.1f} s, /health at most {self.stood_s:.2f} s"


@contextmanager
def measured(server: Served) -> Iterator[Measured]:
    """Measure a server while the block runs. The server must be alive at the end."""
    pids = [server.pid, *server.children()[:1]]
    begin = [_reset_peak(pid) for pid in pids]
    result = Measured()
    since = time.monotonic()
    with Poller(server.url, ask_health) as health:
        yield result
        result.seconds = time.monotonic() - since
    grown = [_peak_growth_mb(pid, before_kb) for pid, before_kb in zip(pids, begin, strict=True)]
    if grown[0] is None:
        raise NotHeldError("the server died")
    result.server_mb = grown[0]
    result.worker_mb = grown[1] if grown[1:] else None
    result.stood_s, result.statuses = health.longest_s, health.statuses


def _peak_growth_mb(pid: int, before_kb: int) -> float | None:
    """Return how far a process's memory peaked over its earlier one; None if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError, AssertionError):  # a zombie has no lines about memory
        return (memory_kb(pid, "VmHWM") - before_kb) * 1024 / MB
    return None


def _reset_peak(pid: int) -> int:
    """Make the peak of a process's memory its present memory, and return that in kB."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory_kb(pid, "VmRSS")


def post(server: Served, path: str, body: Any, **headers: str) -> httpx.Response:
    """Send one request on a connection of its own and read its response. body: JSON, or bytes as they are."""
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    return httpx.post(server.url + path, timeout=LONG_S, headers=headers, **content)
