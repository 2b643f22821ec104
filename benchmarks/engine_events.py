"""The cost of watching an engine: `/v1/engine/events`, read like the web page, at the default interval, with the radix tree.

python -m benchmarks.engine_events [--part looks|pairs] [--model FILE] [--streams 1,8,32] [--isolation thread|process]

looks  how much longer decode passes take while a look is handled, with the time before them, than the passes between looks,
       by the events themselves: the share of the time that looks take, with its standard error, and the milliseconds of each.
       Both kinds of passes come several times a second, so other load counts for both. The tree has more nodes than are shown.
       Passes have to take longer than 10 ms, as events merge shorter passes.
pairs  tokens/s of a server with a client that watches and without, in interleaved pairs. Two ratios, watched to not watched:
       of tokens/s (below 1: watching costs), and of the processor time of a token in server, worker and client together
       (above 1: watching costs). Each is a geometric mean over the pairs with its standard error.

The client is a process, or a thread of this one, on the same machine; it draws nothing: a browser that runs there takes its own
share. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from benchmarks.mean_ratio import MeanRatio
from benchmarks.model import half_billion
from benchmarks.processes import cpu_s, tree
from benchmarks.server import Running, serving

_NODES = 300  # of the tree, more than the 256 that are shown
_LEAST_PASSES = 2  # between looks, to compare with
_LEAST_LOOKS = 10
_SETTLING_S = 5.0

WATCHER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1]) as stream:
    print("watching", flush=True)
    while stream.read1(65536):
        pass
"""


@dataclass(frozen=True, slots=True)
class Rate:
    """The times of a run of requests. cpu_s: processor time of a token."""

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


# ---- looks


@dataclass(frozen=True, slots=True)
class Passes:
    """Decode passes between two looks, each from the end of the last pass, in seconds. first: with the earlier look."""

    first_s: float
    others_s: list[float]

    @property
    def cost_s(self) -> float:
        """Return the seconds that the look has added."""
        return self.first_s - statistics.mean(self.others_s)


def look_costs(url: str, num_streams: int, seconds: float) -> Iterator[Passes]:
    """Watch for so long, and yield the passes of each event in which all streams decoded one token a pass."""
    until_s, ended_s = time.monotonic() + seconds, None
    with httpx.stream("GET", f"{url}/v1/engine/events", timeout=600) as events:
        for line in events.iter_lines():
            if time.monotonic() > until_s:
                return
            if not line.startswith("data: "):
                continue
            periods: list[float | None] = []
            for tick in json.loads(line.removeprefix("data: ")).get("ticks", []):
                end_s = tick["t"] + tick["ms"] / 1000
                decodes = tick["n"] == 1 and [row[4] for row in tick["rows"]] == [1] * num_streams
                periods.append(end_s - ended_s if ended_s is not None and decodes else None)
                ended_s = end_s if decodes else None
            first_s, *others_s = periods or [None]
            found = [seconds for seconds in others_s if seconds is not None]
            if first_s is not None and len(found) >= _LEAST_PASSES:
                yield Passes(first_s, found)


def measure_looks(running: Running, num_streams: int, num_tokens: int, seconds: float) -> None:
    """Print the share of the time that looks take."""
    url, is_over = f"http://127.0.0.1:{running.port}", threading.Event()
    limits = httpx.Limits(max_connections=num_streams + 4)
    with httpx.Client(base_url=url, timeout=600, limits=limits) as client, ThreadPoolExecutor(num_streams) as threads:
        for number in range(_NODES):
            body = {"prompt": f"{number} owls lived at the edge of the wood", "n_predict": 1}
            assert client.post("/completion", json=body).status_code == 200

        def generate(index: int) -> None:
            number = 0
            while not is_over.is_set():
                number += 1
                body = {
                    "prompt": f"Story {number} of {index}",
                    "n_predict": num_tokens,
                    "ignore_eos": True,
                    "stream": True,
                }
                with client.stream("POST", "/completion", json=body) as response:
                    response.raise_for_status()
                    for _ in response.iter_raw():
                        if is_over.is_set():
                            return

        streams = [threads.submit(generate, index) for index in range(num_streams)]
        time.sleep(_SETTLING_S)
        try:
            found = list(look_costs(url, num_streams, seconds))
        finally:
            is_over.set()
        for stream in streams:
            stream.result()
    if len(found) < _LEAST_LOOKS:
        raise SystemExit(
            f"{len(found)} looks with passes to compare with; measure for longer, or a model whose passes take longer"
        )
    costs, pass_s = (
        [look_cost.cost_s for look_cost in found],
        statistics.mean(seconds for each in found for seconds in each.others_s),
    )
    each_s, error_s = statistics.mean(costs), statistics.stdev(costs) / len(costs) ** 0.5
    period_s = statistics.mean(look_cost.first_s + sum(look_cost.others_s) for look_cost in found)
    result = {
        "streams": num_streams,
        "looks": len(found),
        "pass_ms": round(1000 * pass_s, 2),
        "look_ms": round(1000 * each_s, 2),
        "share": round(each_s / period_s, 4),
        "error": round(error_s / period_s, 4),
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
    parser.add_argument("--part", choices=("looks", "pairs"), default="looks")
    parser.add_argument(
        "--model", help="a GGUF file; a random one of half a billion parameters, or for pairs the demo model"
    )
    parser.add_argument("--streams", default="1,8,32", help="numbers of streams, between commas")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--seconds", type=float, default=60.0, help="for looks, with each number of streams")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--isolation", choices=("thread", "process"), default="process")
    arguments = parser.parse_args()
    for num_streams in map(int, arguments.streams.split(",")):
        flags = ["--parallel", str(num_streams), "--isolation", arguments.isolation]
        flags += ["--ctx-size", str(num_streams * (arguments.tokens + 128) + 32 * _NODES)]
        model = arguments.model or (half_billion(None) if arguments.part == "looks" else None)
        flags += ["-m", str(model)] if model else []
        with serving(["-m", "paceline", "serve"], flags) as running:
            if arguments.part == "looks":
                measure_looks(running, num_streams, arguments.tokens, arguments.seconds)
            else:
                measure(running, num_streams, arguments.tokens, arguments.pairs)


if __name__ == "__main__":
    main()
