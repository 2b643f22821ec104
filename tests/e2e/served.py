"""`paceline serve` as a user starts it: a process of its own with a worker of its own, on a free port of the loopback."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from tests.e2e.commands import COMMAND, environment
from tests.possessions import children

LONG_S = 100.0  # no wait of a test that passes takes so long
ADDRESS = re.compile(r"https?://\S+")


class Served:
    """One run of the server. lines: the last lines that it wrote to stderr. url: of its root, known once it listens."""

    def __init__(
        self,
        *flags: str,
        is_ready: bool = True,
        num_descriptors: int | None = None,
        is_session: bool = False,
        **env: str,
    ) -> None:
        """is_ready: waits for the model; otherwise only for the port. num_descriptors: the limit, soft and hard.

        is_session: with its worker it is a session, and so a group of processes, of its own.
        """
        limited = () if num_descriptors is None else ("sh", "-c", f'ulimit -n {num_descriptors}; exec "$@"', "sh")
        self.lines: deque[str] = deque(maxlen=1000)
        self._more_lines = threading.Condition()
        self._num_lines = 0
        self._has_ended = False
        self.reads = threading.Event()  # cleared: its stderr is not read
        self.reads.set()
        self._closes_stderr = False
        self._process = subprocess.Popen(
            [*limited, *COMMAND, "serve", "--port", "0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(**env),
            bufsize=0,
            start_new_session=is_session,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.url = ADDRESS.findall(self.wait_for("listening on"))[0]
            if is_ready:
                self.wait_for("is ready")
        except BaseException:
            self.end()
            raise

    # ---- its output

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in iter(self._process.stderr.readline, b""):
            self._add(line.decode(errors="replace"))
            self.reads.wait()
            if self._closes_stderr:
                self._process.stderr.close()
                break
        with self._more_lines:
            self._has_ended = True
            self._more_lines.notify_all()

    def _add(self, line: str) -> None:
        with self._more_lines:
            self.lines.append(line)
            self._num_lines += 1
            self._more_lines.notify_all()

    def wait_for(self, words: str) -> str:
        """The first line with them that there is or will be."""

        def found() -> str | None:
            return next((line for line in self.lines if words in line), None)

        with self._more_lines:
            self._more_lines.wait_for(lambda: found() is not None or self._has_ended, LONG_S)
            line = found()
        assert line is not None, f"it never wrote {words!r} but {list(self.lines)[-20:]}"
        return line

    # ---- its processes

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def code(self) -> int:
        """The exit code, at the end; then all that it said has been read."""
        code = self._process.wait(LONG_S)
        self._reader.join(LONG_S)
        return code

    def close_stderr(self) -> None:
        """Close the pipe that it logs to, after one more line."""
        self._closes_stderr = True
        self.get("/health")
        self._reader.join(LONG_S)

    def children(self) -> list[int]:
        """The processes that it has started and not buried."""
        return sorted(map(int, children(self.pid)))

    def worker(self) -> Worker:
        """Its worker, which has been started."""
        deadline = time.monotonic() + LONG_S
        while not (found := self.children()):
            assert time.monotonic() < deadline, "there is no worker"
            time.sleep(0.01)
        return Worker(found[0])

    def rss_bytes(self) -> int:
        """Memory of the server's own process."""
        line = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert line is not None
        return int(line[1]) * 1024

    def num_files(self) -> int:
        """Open descriptors of the server's own process."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    # ---- its routes

    def client(self, **options: Any) -> httpx.Client:
        """A client of it; a context manager."""
        return httpx.Client(base_url=self.url, timeout=LONG_S, **options)

    def get(self, path: str) -> httpx.Response:
        """One request on a connection of its own."""
        return httpx.get(self.url + path, timeout=LONG_S)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with labels."""
        lines = [line for line in self.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Ask again and again."""
        deadline = time.monotonic() + LONG_S
        while not is_so():
            assert time.monotonic() < deadline, f"waited in vain: {what}"
            time.sleep(0.01)

    def assert_idle(self) -> None:
        """Wait until nothing is open; then every slot is free and whatever came has had one end."""
        self.wait_until(lambda: self.metrics()["paceline_requests_resident"] == 0, "nothing runs")
        self.wait_until(lambda: self.metrics()["paceline_requests_queued"] == 0, "nothing waits")
        assert not any(slot["is_processing"] for slot in self.get("/slots").json())
        numbers = self.metrics()
        came = sum(value for name, value in numbers.items() if name.startswith("paceline_requests_total{"))
        ended = sum(value for name, value in numbers.items() if name.startswith("paceline_requests_finished_total{"))
        assert came == ended
        assert numbers["paceline_slots_in_use"] == 0

    # ---- its end

    def end(self) -> None:
        """It is gone, whatever happened; its worker follows."""
        self.reads.set()
        self._process.kill()
        self._process.wait(LONG_S)
        self._reader.join(LONG_S)
        if self._process.stderr is not None and not self._reader.is_alive():
            self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class Worker:
    """The process that computes, held by a descriptor, so that its number cannot come to mean another process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def wait_gone(self) -> None:
        """Wait until the process has ended, whichever process reaps it."""
        waiting = select.poll()
        waiting.register(self._handle, select.POLLIN)
        assert waiting.poll(LONG_S * 1000), f"process {self.pid} is still there"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
