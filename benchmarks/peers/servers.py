"""The measured servers: their command lines for a workload, and the cost of their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import processes
from benchmarks.peers.client import Dialect, LlamaServerDialect, OpenAiDialect
from benchmarks.peers.workloads import PACELINE, Workload

START_TIMEOUT_S = 180.0
NAMES = ("paceline", "llama-server", "llama-cpp-python", "xllamacpp")


class NotPossible(Exception):
    """A server has nothing that a workload needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Paths of the servers: interpreters with their packages, and llama-server itself."""

    paceline: Path
    llama_server: Path | None = None
    llama_cpp_python: Path | None = None
    xllamacpp: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that serves, without its port, and how to speak with it."""

    command: tuple[str, ...]
    dialect: Dialect
    health: str = "/health"
    environment: tuple[tuple[str, str], ...] = ()


def launch(
    name: str,
    workload: Workload,
    programs: Programs,
    model: Path,
    adapters: Sequence[Path],
    extra: tuple[str, ...] = (),
) -> Launch:
    """Return the command of a server by name for a workload.

    paceline@STRATEGY is paceline with another strategy; llama-server has the workload's slots and its own defaults,
    llama-server@tuned the best flags for the workload, llama-server@bare no flags at all. `extra`: further flags of paceline.

    Raises `NotPossible` for a workload with adapters and a server without adapters by request.
    """
    base, _, variant = name.partition("@")
    if adapters and base in ("llama-cpp-python", "xllamacpp"):
        raise NotPossible(f"{base} has no LoRA adapters by request")
    lora = tuple(flag for path in adapters for flag in ("--lora", str(path)))
    if lora:
        lora += ("--lora-init-without-apply",)
    match base:
        case "paceline":
            strategy = ("--strategy", variant) if variant else ()
            command = (str(programs.paceline), "-m", "paceline", "serve", "-m", str(model), *PACELINE, *workload.limits)
            return Launch(
                command=(*command, *strategy, *lora, *extra, "--log-level", "error"), dialect=LlamaServerDialect()
            )
        case "llama-server":
            flags = llama_server_flags(workload, variant)
            program = str(_found(programs.llama_server, "llama-server"))
            return Launch(command=(program, "-m", str(model), *flags, *lora), dialect=LlamaServerDialect())
        case "llama-cpp-python":
            program = str(_found(programs.llama_cpp_python, "llama-cpp-python"))
            limits = dict(zip(workload.limits[::2], workload.limits[1::2], strict=True))
            n_ctx = min(4096, int(limits.get("-c", 4096)))  # it runs one sequence at a time
            command = (program, "-m", "llama_cpp.server", "--model", str(model), "--n_ctx", str(n_ctx))
            return Launch(command=command, dialect=OpenAiDialect(), health="/v1/models")
        case "xllamacpp":
            program = str(_found(programs.xllamacpp, "xllamacpp"))
            flags = llama_server_flags(workload, variant)
            script = str(Path(__file__).with_name("xllamacpp_server.py"))
            return Launch(command=(program, script, "-m", str(model), *flags), dialect=LlamaServerDialect())
    raise ValueError(f"{name!r} is no server: choose from {', '.join(NAMES)}, with @ and a variant")


def llama_server_flags(workload: Workload, variant: str) -> tuple[str, ...]:
    """Return the flags of llama-server: its defaults, `tuned`, or `bare`."""
    slots = ("-np", str(workload.slots)) if workload.slots is not None else ()
    match variant:
        case "":
            return (*slots, *workload.limits)
        case "tuned":
            return (*slots, *workload.limits, *workload.tuned)
        case "bare":
            return workload.limits
    raise ValueError(f"llama-server has no variant {variant!r}: choose tuned or bare")


def _found(path: Path | None, name: str) -> Path:
    if path is None:
        raise SystemExit(f"{name} is not there: python -m benchmarks.peers build {name}, or give its path")
    return path


@dataclass(slots=True)
class Running:
    """A server that is ready. `load_s`: from the start of the process until it is healthy."""

    how: Launch
    process: subprocess.Popen[bytes]
    port: int
    load_s: float

    def tree(self) -> list[int]:
        """Return the process ids of the server and of all its descendants, oldest first."""
        return processes.tree(self.process.pid)

    def peak_mib(self) -> float | None:
        """Return the sum of the processes' peak resident memory, if the system reports it."""
        peaks = []
        for pid in self.tree():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        peaks.append(int(line.split()[1]) / 1024)
        return round(sum(peaks), 1) if peaks else None

    def cpu_s(self) -> float:
        """Return the processor time of the running processes."""
        return processes.cpu_s(self.tree())

    def kill_engine(self) -> None:
        """Kill the computing process, which has the most memory."""
        os.kill(max(self.tree(), key=_resident_pages), signal.SIGKILL)


def _resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0


@contextlib.contextmanager
def serving(what: Launch, log: Path) -> Iterator[Running]:
    """Yield the server when it is healthy, and stop it when the block is left."""
    port = _free_port()
    start_s = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - commands of this module
            [*what.command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | dict(what.environment),
        )  # fmt: skip
        try:
            _wait_until_healthy(process, port, what.health, log)
            yield Running(what, process, port, time.perf_counter() - start_s)
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, health: str, log: Path) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s:
        if _status(f"http://127.0.0.1:{port}{health}") == 200:
            return
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.01)
    raise SystemExit(f"the server is not healthy after {START_TIMEOUT_S:g} s; see {log}")


def _status(url: str) -> int | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - of our own server
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
