"""The cost of computing in another process over RPC, and the pause of a stream when a server is lost.

python -m benchmarks.rpc [--model FILE] [--rounds N] [--threads N]

speed      generated tokens/s of 1 and 8 streams, and prompt tokens/s, with all layers here and all with a server on this
           machine, in interleaved rounds; either way in a worker process, and the server has as many threads.
recovery   how long a running stream pauses when its server is killed, and started again at once.
silence    from the final stop of the server to the error of a running stream.

Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.engine import prompts
from paceline import LLM
from paceline.demo import demo_model_path
from paceline.errors import RpcServerUnavailable
from paceline.runtime.rpc import greet

TOKENS = 64
_LONG = 800  # tokens of a prompt
_SILENCE_S = 2.0


class Server:
    """A server on this machine, on a port that stays the same over restarts."""

    def __init__(self, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._threads = threads
        self.start()

    @property
    def address(self) -> str:
        """The address of the server."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait for its greeting."""
        command = [sys.executable, "-m", "paceline", "rpc-serve", "-p", str(self.port), "-t", str(self._threads)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
        while not self._greets():
            time.sleep(0.02)

    def _greets(self) -> bool:
        try:
            greet(self.address, 2)
        except RpcServerUnavailable:
            return False
        return True

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


@contextmanager
def engine(model: Path, threads: int, **options: Any) -> Iterator[LLM]:
    """Yield an engine with a worker."""
    wanted = {"num_slots": 8, "n_ctx": 8192, "n_threads": threads, "cache_prompt": False, **options}
    with LLM(model, isolation="process", **wanted) as llm:
        yield llm


def speeds(llm: LLM) -> dict[str, float]:
    """Return tokens/s."""
    found, n_vocab = {}, llm.model.n_vocab
    for streams in (1, 8):
        start_s = time.perf_counter()
        llm.generate(prompts(streams, 16, n_vocab), max_tokens=TOKENS, ignore_eos=True, temperature=0)
        found[f"{streams} streams, generated tokens/s"] = streams * TOKENS / (time.perf_counter() - start_s)
    usage = llm.generate(prompts(1, _LONG, n_vocab)[0], max_tokens=1).usage
    found["prompt tokens/s"] = usage.prompt_tokens / usage.prefill_s
    return found


def measure_speed(model: Path, threads: int, rounds: int) -> None:
    """Print the medians of both, and of their ratio within a round."""
    server = Server(threads)
    try:
        with engine(model, threads) as here, engine(model, threads, rpc=server.address) as there:
            for llm in (here, there):
                speeds(llm)
            pairs = [(speeds(here), speeds(there)) for _ in range(rounds)]
    finally:
        server.end()
    for name in pairs[0][0]:
        local, remote = ([pair[side][name] for pair in pairs] for side in (0, 1))
        ratio = statistics.median(there / here for here, there in zip(local, remote, strict=True))
        print(f"{name}: here {statistics.median(local):.1f}, over RPC {statistics.median(remote):.1f} ({ratio:.2f})")


def measure_recovery(model: Path, threads: int, rounds: int) -> None:
    """Print how much longer a stream takes if its server is killed at its beginning and started again."""
    pauses = []
    server = Server(threads)
    try:
        with engine(model, threads, rpc=server.address) as llm:
            for _ in range(rounds):
                undisturbed_s, _ = _timed_stream(llm, None)
                whole_s, start_s = _timed_stream(llm, server)
                pauses.append((whole_s - undisturbed_s, start_s))
    finally:
        server.end()
    pause, start = (statistics.median(side) for side in zip(*pauses, strict=True))
    print(f"a stream pauses for {pause:.2f} s when its server is killed and started, {start:.2f} s of it that start")


def _timed_stream(llm: LLM, killed: Server | None) -> tuple[float, float]:
    """Return the seconds of a stream, and of the server's start."""
    begin_s, start_s = time.perf_counter(), 0.0
    with llm.stream("Once upon a time", max_tokens=600, ignore_eos=True) as stream:
        chunks = iter(stream)
        next(chunks)
        if killed is not None:
            dead_s = time.perf_counter()
            killed.end()
            killed.start()
            start_s = time.perf_counter() - dead_s
        for _ in chunks:
            pass
    return time.perf_counter() - begin_s, start_s


def measure_silence(model: Path, threads: int) -> None:
    """Print the time from a server's stop to the end of its stream."""
    server = Server(threads)
    try:
        with (
            engine(model, threads, rpc=server.address, rpc_timeout_s=_SILENCE_S) as llm,
            llm.stream("Once upon a time", max_tokens=4000, ignore_eos=True) as stream,
        ):
            chunks = iter(stream)
            next(chunks)
            server.process.send_signal(signal.SIGSTOP)
            start_s = time.perf_counter()
            try:
                for _ in chunks:
                    pass
            except RpcServerUnavailable as error:
                print(
                    f"rpc_timeout_s={_SILENCE_S:g}: {time.perf_counter() - start_s:.1f} s after its server was stopped: {error}"
                )
    finally:
        server.end()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    measure_speed(options.model, options.threads, options.rounds)
    measure_recovery(options.model, options.threads, options.rounds)
    measure_silence(options.model, options.threads)


if __name__ == "__main__":
    main()
