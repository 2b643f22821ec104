"""The cost of HTTP: the server's tokens a second against its engine's own, and the delays of its event loop.

python -m benchmarks.server [--part speed|loop] [--model FILE | --demo] [--streams N ...] [--pairs N] [--isolation process|thread]

speed  streams through `paceline serve`, in a process of its own as a user starts it, against streams of an `AsyncLLM` in
       this process, in interleaved pairs. The client is this process, on the same cores: plain asyncio sockets that find the
       events of a stream and parse the last one, which has the usage; --json parses all of them.
loop   a ticker of 1 ms within the server's process, while 32 streams run and end and others begin: how late it comes.

Figures of speed are ratios within one run; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from benchmarks.engine import prompts
from benchmarks.model import half_billion
from paceline import AsyncLLM, SamplingParams
from paceline.demo import demo_model_path

PROMPT_TOKENS = 16
TICK_S = 0.001


# ---- the server


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready."""

    process: subprocess.Popen[bytes]
    port: int


@contextmanager
def serving(command: list[str], flags: list[str]) -> Iterator[Running]:
    """Yield a server on a free port, ready when the block begins and stopped when it is left."""
    process = subprocess.Popen(  # noqa: S603 - our own interpreter
        [sys.executable, *command, "--port", "0", "--log-level", "error", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    try:
        yield Running(process, port_when_ready(process))
        process.send_signal(signal.SIGTERM)
    except BaseException:
        process.kill()
        raise


def port_when_ready(process: subprocess.Popen[bytes]) -> int:
    """Read the server's output until the model is loaded; the rest goes to this process's stderr."""
    assert process.stderr is not None
    port = None
    for line in iter(process.stderr.readline, b""):
        if found := re.search(rb"listening on http://[^:]+:(\d+)", line):
            port = int(found[1])
        if b"is ready" in line and port is not None:
            threading.Thread(target=pass_on, args=(process.stderr,), daemon=True).start()
            return port
        if port is None:
            sys.stderr.write(line.decode(errors="replace"))
    raise SystemExit("the server ended before it was ready")


def pass_on(pipe: Any) -> None:
    """Until its end."""
    for line in iter(pipe.readline, b""):
        if not line.startswith(b"paceline: ending"):
            sys.stderr.write(line.decode(errors="replace"))


# ---- a client that costs little


class EventReader(asyncio.Protocol):
    """Send one request and return the events of its response. done: how many tokens there were, by the usage at the end."""

    def __init__(self, request: bytes, *, parses: bool) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._request, self._parses = request, parses
        self._rest, self._last = b"", b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Split the events; the lengths of chunks are on lines of their own and are skipped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._last = line
                if self._parses:
                    json.loads(line[6:])
            elif line == b"data: [DONE]":
                self._end()

    def _end(self) -> None:
        assert self._transport is not None
        self._transport.close()
        if not self.done.done():
            self.done.set_result(json.loads(self._last[6:])["usage"]["completion_tokens"])

    def connection_lost(self, exc: Exception | None) -> None:
        """Too early, if there was no end."""
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError(f"no end of the stream: {self._rest[:300]!r}"))


def request_bytes(prompt: list[int], num_tokens: int) -> bytes:
    """Return a streamed completion request as the bytes of HTTP."""
    body = {
        "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "seed": 1, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close"
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + data


async def http_stream(port: int, prompt: list[int], num_tokens: int, *, parses: bool) -> int:
    """One stream; how many tokens it had."""
    request, loop = request_bytes(prompt, num_tokens), asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: EventReader(request, parses=parses), "127.0.0.1", port)
    return await reader.done


async def own_stream(llm: AsyncLLM, prompt: list[int], num_tokens: int) -> int:
    """Run the same request on the engine itself and return its number of tokens."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1)
    count = 0
    async with llm.stream(prompt, params) as stream:
        async for chunk in stream:
            count += len(chunk.token_ids)
    return count


# ---- speed


async def speed_of(streams: list[Coroutine[Any, Any, int]], num_tokens: int) -> float:
    """Tokens a second of all of them together."""
    start = time.perf_counter()
    counts = await asyncio.gather(*streams)
    took_s = time.perf_counter() - start
    assert counts == [num_tokens] * len(counts), counts
    return sum(counts) / took_s


async def speed(model: Path, num_streams: int, options: argparse.Namespace) -> None:
    """Run interleaved pairs; both are loaded all the time, and one of the two runs."""
    num_tokens, n_ctx = options.tokens, num_streams * (options.tokens + 64)
    flags = ["-m", str(model), "-np", str(num_streams), "-c", str(n_ctx), "--isolation", options.isolation]
    engine: dict[str, Any] = {"num_slots": num_streams, "n_ctx": n_ctx, "isolation": options.isolation}
    rows: list[tuple[float, float]] = []
    with serving(["-m", "paceline", "serve"], flags) as server:
        async with AsyncLLM(model, **engine) as llm:
            ids = prompts(num_streams, PROMPT_TOKENS, llm.model.n_vocab)

            async def through_http(length: int) -> float:
                return await speed_of(
                    [http_stream(server.port, token_id, length, parses=options.json) for token_id in ids], length
                )

            async def by_itself(length: int) -> float:
                return await speed_of([own_stream(llm, token_id, length) for token_id in ids], length)

            await through_http(8), await by_itself(8)
            for pair in range(options.pairs):
                first = await by_itself(num_tokens) if pair % 2 == 0 else None
                http = await through_http(num_tokens)
                rows.append((await by_itself(num_tokens) if first is None else first, http))
                if options.verbose:
                    print(f"  engine {rows[-1][0]:.1f}, HTTP {http:.1f}, ratio {http / rows[-1][0]:.3f}", flush=True)
    tell_ratios(num_streams, rows)


def tell_ratios(num_streams: int, rows: list[tuple[float, float]]) -> None:
    """Medians and spread."""
    ratios = sorted(http / own for own, http in rows)
    quarter = len(ratios) // 4
    print(
        f"{num_streams:>3} streams: engine {statistics.median(own for own, _ in rows):8.1f} tok/s, "
        f"HTTP {statistics.median(http for _, http in rows):8.1f} tok/s, ratio {statistics.median(ratios):.3f} "
        f"(all {ratios[0]:.3f}-{ratios[-1]:.3f}, middle half {ratios[quarter]:.3f}-{ratios[-1 - quarter]:.3f}, "
        f"{len(ratios)} pairs)",
        flush=True,
    )


# ---- loop


def serve_with_ticker(flags: list[str]) -> int:
    """Run the server; at its end it prints how late each tick was: monotonic seconds and lateness of each."""
    from paceline.cli import terminal
    from paceline.server.flags import DiskFiles, resolve
    from paceline.server.service import Service
    from paceline.server.startup import serve

    ticks: list[tuple[float, float]] = []
    begin = Service.start

    async def begin_to_tick(self: Service) -> None:
        await begin(self)
        loop = asyncio.get_running_loop()

        def tick(expected_s: float) -> None:
            now = time.monotonic()
            ticks.append((now, now - expected_s))
            loop.call_later(TICK_S, tick, now + TICK_S)

        tick(time.monotonic())

    Service.start = begin_to_tick  # type: ignore[method-assign]
    code = serve(resolve(flags, os.environ, DiskFiles(terminal.note)).settings)
    sys.stdout.write(json.dumps(ticks))
    return code


async def keep_asking(port: int, seed: int, options: argparse.Namespace, until_s: float, n_vocab: int) -> int:
    """Run streams in a row, with prompts of different lengths; return the number of tokens."""
    count = turn = 0
    while time.monotonic() < until_s:
        turn += 1
        length = 8 + (seed * 37 + turn * 61) % 120
        prompt = [(7919 * (seed + 1) + 31 * column + turn) % (n_vocab - 1000) for column in range(length)]
        count += await http_stream(port, prompt, options.tokens, parses=options.json)
    return count


async def loop(model: Path, num_streams: int, options: argparse.Namespace) -> None:
    """Idle first, then under load."""
    n_ctx = num_streams * (options.tokens + 192)
    flags = ["-m", str(model), "-np", str(num_streams), "-c", str(n_ctx), "--isolation", options.isolation]
    n_vocab = paceline.Model.load(model, vocab_only=True).n_vocab
    with serving(["-m", "benchmarks.server", "--ticking"], flags) as server:
        idle = (time.monotonic(), time.monotonic() + 3)
        await asyncio.sleep(3)
        busy_from = time.monotonic()
        until_s = busy_from + options.seconds
        counts = await asyncio.gather(
            *(keep_asking(server.port, seed, options, until_s, n_vocab) for seed in range(num_streams))
        )
        busy = (busy_from, time.monotonic())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stdout is not None
        ticks = json.loads(await asyncio.to_thread(server.process.stdout.read))
    print(f"{num_streams:>3} streams, {sum(counts) / (busy[1] - busy[0]):.1f} tok/s; the loop was late by, in ms:")
    for name, (begin_s, end_s) in (("idle", idle), ("busy", busy)):
        late = sorted(1000 * late_s for at_s, late_s in ticks if begin_s <= at_s <= end_s)
        print(
            f"  {name}: median {late[len(late) // 2]:.2f}, p99 {late[int(len(late) * 0.99)]:.2f}, "
            f"p99.9 {late[int(len(late) * 0.999)]:.2f}, most {late[-1]:.2f} ({len(late)} ticks)",
            flush=True,
        )


def main() -> None:
    """Parse the command line and run the parts."""
    if sys.argv[1:2] == ["--ticking"]:
        sys.exit(serve_with_ticker(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("speed", "loop", "all"), default="all")
    parser.add_argument("--model", type=Path, help="by default one of half a billion parameters")
    parser.add_argument("--demo", action="store_true", help="the demo model")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the loop's load")
    parser.add_argument("--isolation", choices=("process", "thread"), default="process")
    parser.add_argument("--json", action="store_true", help="the client parses every event")
    parser.add_argument("--verbose", action="store_true", help="print every pair")
    parser.add_argument("--llama-cpp-source", type=Path)
    options = parser.parse_args()
    model = demo_model_path() if options.demo else options.model or half_billion(options.llama_cpp_source)
    print(f"paceline {paceline.__version__}, {model.name}, engine in a {options.isolation}", flush=True)
    if options.part in ("speed", "all"):
        for num_streams in options.streams:
            asyncio.run(speed(model, num_streams, options))
    if options.part in ("loop", "all"):
        asyncio.run(loop(model, 32, options))


if __name__ == "__main__":
    main()
