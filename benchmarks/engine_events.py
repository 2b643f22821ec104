"""What it costs to be watched: tokens/s of a server with a client of `/v1/engine/events` and without, in interleaved pairs.

python -m benchmarks.engine_events [--model FILE] [--streams 1,8,32] [--tokens N] [--pairs N] [--isolation thread|process]

A client in a process of its own reads the events as the web page does, at the default interval and with the radix tree, and draws
nothing: a browser that runs on the server's machine takes its own share. Two ratios are shown, watched to not watched: of
tokens/s, where below 1 being watched costs, and of the processor time that a token takes, of server, worker and client
together, where above 1 it costs. Each is a geometric mean over the pairs with its standard error. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from benchmarks.mean_ratio import MeanRatio
from benchmarks.processes import cpu_s, tree
from benchmarks.server import Running, serving

WATCHER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1]) as stream:
    print("watching", flush=True)
    while stream.read1(65536):
        pass
"""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a run of requests took. cpu_s: processor time of a token."""

    tokens_per_s: float
    cpu_s: float


@contextmanager
def watched(url: str) -> Iterator[int]:
    """Have a client watch, from its first event on; yield its process id."""
    command = [sys.executable, "-c", WATCHER, f"{url}/v1/engine/events"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603 - our own interpreter
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def rate(client: httpx.Client, pids: list[int], num_streams: int, num_tokens: int, number: int) -> Rate:
    """Of requests that run together, each with a prompt of its own behind a common one, and are not streamed."""
    common = "A little bear and an old owl lived at the edge of the wood, and every evening they told a story. "

    def ask(index: int) -> None:
        body = {
            "prompt": f"{common}{number} {index}", "n_predict": num_tokens, "ignore_eos": True, "seed": index,
        }  # fmt: skip
        response = client.post("/completion", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["timings"]["predicted_n"] == num_tokens

    with ThreadPoolExecutor(num_streams) as threads:
        began_s, cpu_before_s, count = time.perf_counter(), cpu_s(pids), num_streams * num_tokens
        list(threads.map(ask, range(num_streams)))
        return Rate(count / (time.perf_counter() - began_s), (cpu_s(pids) - cpu_before_s) / count)


def measure(running: Running, num_streams: int, num_tokens: int, num_pairs: int) -> None:
    """Print the ratios of the pairs: watched to not watched."""
    url, pids = f"http://127.0.0.1:{running.port}", tree(running.process.pid)
    limits = httpx.Limits(max_connections=num_streams + 4)
    with httpx.Client(base_url=url, timeout=600, limits=limits) as client:
        rate(client, pids, num_streams, 32, 0)
        pairs = []
        for pair in range(num_pairs):
            rates: dict[bool, Rate] = {}
            for is_watched in (pair % 2 == 0, pair % 2 != 0):
                if is_watched:
                    with watched(url) as watcher:
                        rates[True] = rate(client, [*pids, watcher], num_streams, num_tokens, 2 * pair + 1)
                else:
                    rates[False] = rate(client, pids, num_streams, num_tokens, 2 * pair + 2)
            pairs.append((rates[True], rates[False]))
    result = {
        "streams": num_streams,
        "pairs": num_pairs,
        "tokens_per_s": round(statistics.median(alone.tokens_per_s for _, alone in pairs), 1),
        "rate": _figures([seen.tokens_per_s / alone.tokens_per_s for seen, alone in pairs]),
        "cpu_of_a_token": _figures([seen.cpu_s / alone.cpu_s for seen, alone in pairs]),
    }
    print(json.dumps(result), flush=True)


def _figures(ratios: list[float]) -> dict[str, float]:
    """Return the mean with its standard error, and the extremes."""
    found = MeanRatio.of(ratios)
    figures = {"mean": found.mean, "error": found.error, "least": min(ratios), "most": max(ratios)}
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    """Start a server for each number of streams, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file; the demo model without one")
    parser.add_argument("--streams", default="1,8,32", help="numbers of streams, between commas")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--isolation", choices=("thread", "process"), default="process")
    arguments = parser.parse_args()
    for num_streams in map(int, arguments.streams.split(",")):
        flags = ["--parallel", str(num_streams), "--isolation", arguments.isolation]
        flags += ["--ctx-size", str(num_streams * (arguments.tokens + 128))]
        flags += ["-m", arguments.model] if arguments.model else []
        with serving(["-m", "paceline", "serve"], flags) as running:
            measure(running, num_streams, arguments.tokens, arguments.pairs)


if __name__ == "__main__":
    main()
