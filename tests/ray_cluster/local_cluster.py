"""`paceline cluster serve` in a process of its own, with a Ray that it starts on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from tests.ports import free_port

START_S = 150.0
STOP_S = 60.0

CONFIG = """
[cluster]
{address}port = {port}
ingress_cpus = 0.1

[server]
api-key = "{key}"
drain-s = 120

[models.demo]
num_slots = {num_slots}
n_ctx = {n_ctx}
n_threads = 1
max_queue = 64
{options}
# with these a token has the same logits whether it comes in a prompt or by itself
flash_attn = "off"
type_k = "f32"
type_v = "f32"

[models.demo.replicas]
min = {replicas}
max = {most_replicas}
num_cpus = 0.3
drain_s = 20
queue_time_s = 1.0
itl_ms = 2000
upscale_delay_s = 2
downscale_delay_s = 10
"""
KEY = "sk-cluster-test"


class LocalCluster:
    """Replicas of the demo model, more if requests wait for a slot. The process tree ends with the block.

    options: further lines of TOML for the model.
    """

    def __init__(
        self, replicas: int = 2, num_slots: int = 32, most_replicas: int | None = None, options: str = ""
    ) -> None:
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-cluster-")
        self._log = Path(self._folder.name) / "log"
        self._replicas, self._most_replicas = replicas, replicas if most_replicas is None else most_replicas
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = self._start(self._config(num_slots), self._log)

    def __enter__(self) -> Self:
        try:
            self.wait_for(self._replicas, START_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _config(self, num_slots: int, address: str = "") -> Path:
        path = Path(self._folder.name) / f"cluster-{num_slots}{address}.toml"
        line = f'address = "{address}"\n' if address else ""
        text = CONFIG.format(
            address=line,
            port=self.port,
            key=KEY,
            num_slots=num_slots,
            n_ctx=1024 * num_slots,
            replicas=self._replicas,
            most_replicas=self._most_replicas,
            options=self._options,
        )
        path.write_text(text)
        return path

    @staticmethod
    def _start(config: Path, log: Path) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        command = [sys.executable, "-m", "paceline", "cluster", "serve", str(config)]
        with log.open("ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=environ, start_new_session=True)

    @property
    def log(self) -> str:
        """The command's output."""
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> Any:
        """Return the JSON of a route."""
        response = httpx.get(f"{self.url}{path}", headers={"authorization": f"Bearer {KEY}"}, timeout=10)
        response.raise_for_status()
        return response.json()

    def replicas(self) -> list[dict[str, Any]]:
        """Return the replicas that are connected; none while the ingress is not there."""
        try:
            found: list[dict[str, Any]] = self.get("/cluster")["models"].get("demo", [])
        except (httpx.HTTPError, json.JSONDecodeError):
            return []
        return found

    def wait_for(
        self, count: int, timeout_s: float = 60.0, without: frozenset[str] = frozenset()
    ) -> list[dict[str, Any]]:
        """Wait until so many replicas are connected, none of `without`."""
        end = time.monotonic() + timeout_s
        while True:
            found = [replica for replica in self.replicas() if replica["id"] not in without]
            if len(found) >= count:
                return found
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{len(found)} of {count} replicas after {timeout_s} s:\n{self.log[-4000:]}")
            time.sleep(0.25)

    def kill_replica(self) -> str:
        """Kill the busiest replica, and return its id; the others stay."""
        found = self.wait_for(1)
        chosen = max(found, key=lambda item: item["processing"])
        os.kill(chosen["pid"], signal.SIGKILL)
        return str(chosen["id"])

    def kill_worker(self) -> str:
        """Kill the worker process of the replica that has most to do, and return that replica's id."""
        chosen = max(self.wait_for(1), key=lambda item: item["processing"])
        (worker,) = (pid for pid in _children(chosen["pid"]) if b"paceline" in _command_line(pid))
        os.kill(worker, signal.SIGKILL)
        return str(chosen["id"])

    def kill_ingress(self) -> int:
        """Kill the server in front of the replicas, and return its process id."""
        pid = int(self.get("/cluster")["ingress"]["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def update(self, num_slots: int) -> None:
        """Deploy with other options, as a second operator would, and return when all replicas are new."""
        before = frozenset(replica["id"] for replica in self.replicas())
        log = Path(self._folder.name) / "update-log"
        updating = self._start(self._config(num_slots, "auto"), log)
        try:
            self.wait_for(self._replicas, START_S, without=before)
        finally:
            updating.terminate()
            updating.wait(STOP_S)

    def stop(self) -> None:
        """End everything."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_S)
        self._folder.cleanup()


def _children(pid: int) -> list[int]:
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(part) for path in paths for part in path.read_text().split()]


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
