"""What it costs to be watched: tokens/s of a server with a client of `/v1/engine/events` and without, in interleaved pairs.

python -m benchmarks.engine_events [--model FILE] [--streams 1,8,32] [--tokens N] [--pairs N] [--isolation thread|process]

A client in a process of its own reads the events as the web page does, ten times a second with the radix tree, and draws
nothing: a browser that runs on the server's machine takes its own share. The rate is the engine's own: generated tokens of
/metrics over the time that it took to generate them. Ratios below 1: being watched costs. Run it on a quiet machine.
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

import httpx

from benchmarks.server import Running, serving

WATCHER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1]) as stream:
    print("watching", flush=True)
    while stream.read1(65536):
        pass
"""


@contextmanager
def watched(url: str) -> Iterator[None]:
    """Have a client watch, from its first event on."""
    command = [sys.executable, "-c", WATCHER, f"{url}/v1/engine/events"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603 - our own interpreter
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def tokens_per_s(client: httpx.Client, num_streams: int, num_tokens: int, number: int) -> float:
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
        began_s = time.perf_counter()
        list(threads.map(ask, range(num_streams)))
        return num_streams * num_tokens / (time.perf_counter() - began_s)


def measure(running: Running, num_streams: int, num_tokens: int, num_pairs: int) -> None:
    """Print the ratio of each pair's rates: watched to not watched."""
    url = f"http://127.0.0.1:{running.port}"
    limits = httpx.Limits(max_connections=num_streams + 4)
    with httpx.Client(base_url=url, timeout=600, limits=limits) as client:
        tokens_per_s(client, num_streams, 32, 0)
        pairs = []
        for pair in range(num_pairs):
            rates: dict[bool, float] = {}
            for is_watched in (pair % 2 == 0, pair % 2 != 0):
                if is_watched:
                    with watched(url):
                        rates[True] = tokens_per_s(client, num_streams, num_tokens, 2 * pair + 1)
                else:
                    rates[False] = tokens_per_s(client, num_streams, num_tokens, 2 * pair + 2)
            pairs.append((rates[True], rates[False]))
    ratios = sorted(watched_rate / alone for watched_rate, alone in pairs)
    result = {
        "streams": num_streams,
        "pairs": num_pairs,
        "watched_tokens_per_s": round(statistics.median(pair[0] for pair in pairs), 1),
        "unwatched_tokens_per_s": round(statistics.median(pair[1] for pair in pairs), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }
    print(json.dumps(result), flush=True)


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
