"""The cost of Ray Serve for a stream of tokens: `paceline cluster serve` with one replica against `paceline serve`, over HTTP.

python -m benchmarks.cluster.ray_costs [--rounds N]

Each server has the demo model, as many slots as streams, and the machine to itself; each round is greedy streams of 300 tokens,
all at once. CPU is the processor time of all processes of the server, Ray's included. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.client import Call, LlamaServerDialect, Reply, stream

NUM_STREAMS = (1, 8, 32)
NUM_TOKENS = 300
START_S = 150.0
_HZ = os.sysconf("SC_CLK_TCK")
_CLUSTER = """
[cluster]
port = {port}
ingress_cpus = 0.1
[models.demo]
num_slots = 32
n_ctx = 16384
n_threads = 1
[models.demo.replicas]
num_cpus = 0.1
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one server and one number of streams."""

    tokens_per_s: float
    ttft_ms: float
    gap_ms: float
    gap_p99_ms: float
    cpu_ms_per_token: float

    def line(self, name: str, num_streams: int) -> str:
        """Return a row of the table."""
        return (
            f"| {name} | {num_streams} | {self.tokens_per_s:.0f} | {self.ttft_ms:.1f} | "
            f"{self.gap_ms:.2f} / {self.gap_p99_ms:.2f} | {self.cpu_ms_per_token:.2f} |"
        )


@contextmanager
def serving(*, with_ray: bool) -> Iterator[tuple[int, int]]:
    """Start a server, and yield its port and process id."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(_CLUSTER.format(port=port))
        command = ["cluster", "serve", str(path)]
        if not with_ray:
            command = ["serve", "--port", str(port), "-np", "32", "-c", "16384", "-t", "1"]
        process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "paceline", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            start_new_session=True,
        )
        try:
            _wait_until_healthy(port, process)
            yield port, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def measure(port: int, pid: int, num_streams: int, rounds: int) -> Figures:
    """Return the medians over the rounds, after one that does not count."""
    found = [asyncio.run(_round(port, pid, num_streams, number)) for number in range(rounds + 1)][1:]
    return Figures(*(statistics.median(values) for values in zip(*found, strict=True)))


async def _round(port: int, pid: int, num_streams: int, number: int) -> tuple[float, float, float, float, float]:
    calls = [
        Call(
            token_ids=[2 + (7 * index + 31 * number + place) % 500 for place in range(32)],
            text="",
            max_tokens=NUM_TOKENS,
        )
        for index in range(num_streams)
    ]
    cpu_s, start_s = _cpu_s(pid), time.perf_counter()
    replies = await asyncio.gather(*(stream(port, LlamaServerDialect(), call, on_events=_count) for call in calls))
    elapsed_s, cpu_s = time.perf_counter() - start_s, _cpu_s(pid) - cpu_s
    assert all(reply.num_generated == NUM_TOKENS for reply in replies), [reply.problem for reply in replies]
    gaps = sorted(gap for reply in replies for gap in _gaps(reply))
    num_tokens = num_streams * NUM_TOKENS
    return (
        num_tokens / elapsed_s,
        1000 * statistics.median(reply.times_s[0] - reply.start_s for reply in replies),
        1000 * statistics.median(gaps),
        1000 * gaps[int(0.99 * len(gaps))],
        1000 * cpu_s / num_tokens,
    )


def _count(_num_events: int) -> None:
    pass


def _gaps(reply: Reply) -> Iterator[float]:
    """Yield the time of each token after the first; tokens of one event share the pause before them."""
    for before_s, at_s, size in zip(reply.times_s, reply.times_s[1:], reply.sizes[1:], strict=False):
        yield from [(at_s - before_s) / size] * size


def _cpu_s(root: int) -> float:
    """Return the processor time of a process, its descendants, and the processes of its session."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == root:  # the session
            total += int(fields[11]) + int(fields[12])
    return total / _HZ


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError("the server did not start")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print("| server | streams | tokens/s | TTFT, ms | between tokens, ms: median / p99 | CPU ms a token |")
    print("|---|---|---|---|---|---|")
    for name, with_ray in (("paceline serve", False), ("on Ray Serve", True)):
        with serving(with_ray=with_ray) as (port, pid):
            for num_streams in NUM_STREAMS:
                print(measure(port, pid, num_streams, rounds).line(name, num_streams), flush=True)


if __name__ == "__main__":
    main()
