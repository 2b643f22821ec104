"""A worker that is alive and does nothing: its process is stopped while requests and questions wait for it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import httpx
from tests.attack.harness import Attack, figure, post
from tests.e2e.served import LONG_S, Served

from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.streaming import StreamChannel
from paceline.testing.fake_engine_client import fake_worker_engine

FLAGS = ("-np", "8", "-c", "4096", "-t", "1")
NEVER = ("--hang-timeout", "-1")
QUESTIONS = ("/slots", "/props", "/metrics", "/health", "/v1/models")
NUM_STREAMS = 384
NUM_TOKENS = 120


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process in the block; it goes on afterwards unless it is gone."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def seconds_until(is_so: Callable[[], bool], limit_s: float = 60.0) -> float:
    """Return how long it takes until a condition holds, at most `limit_s`."""
    begin = time.monotonic()
    while time.monotonic() - begin < limit_s and not is_so():
        time.sleep(0.05)
    return time.monotonic() - begin


def timed(send: Callable[[], httpx.Response]) -> tuple[float, int]:
    """Return the seconds of a request and its status; 0 if it fails."""
    begin = time.monotonic()
    try:
        status = send().status_code
    except httpx.HTTPError:
        status = 0
    return time.monotonic() - begin, status


def is_ready(server: Served) -> bool:
    """Return whether a load balancer would send requests to a server."""
    return server.get("/health/ready").status_code == 200


def late_readiness() -> str:
    """Stop an idle worker, and wait until the server is not ready any more and then until it is again."""
    with Served(*FLAGS) as server:
        pid = server.children()[0]
        with stopped(pid):
            until_503_s = seconds_until(lambda: not is_ready(server))
            until_200_s = seconds_until(lambda: is_ready(server))
            live = server.get("/health/live").status_code
            num_hangs = server.metrics()["paceline_engine_hangs_total"]
            took_s, status = timed(lambda: post(server, "/v1/completions", {"prompt": "Once", "max_tokens": 5}))
    held = until_503_s < 30 and until_200_s < 30 and (live, num_hangs, status) == (200, 1, 200)
    return figure(
        f"readiness 503 after {until_503_s:.1f} s and 200 again {until_200_s:.1f} s later; {num_hangs:.0f} worker "
        f"replaced; then a completion with {status} in {took_s:.1f} s",
        held=held,
    )


def passed_deadlines() -> str:
    """Ask for a completion within 3 s while the worker is stopped for good."""
    with Served(*FLAGS, *NEVER, "--request-timeout-s", "3") as server, stopped(server.children()[0]):
        took_s, status = timed(lambda: post(server, "/v1/completions", {"prompt": "Once", "max_tokens": 500}))
    return figure(f"timeout_s=3 ended with {status} after {took_s:.1f} s", held=status == 504 and took_s < 8)


def unanswered_questions() -> str:
    """Send requests that need the worker, and requests that do not, while the worker is stopped for good."""
    with Served(*FLAGS, *NEVER) as server, stopped(server.children()[0]):
        found = {path: timed(partial(httpx.get, server.url + path, timeout=LONG_S)) for path in QUESTIONS}
    held = found["/slots"][1] == 503 and max(took_s for took_s, _ in found.values()) < 20
    return figure(", ".join(f"{path} {status} after {s:.1f} s" for path, (s, status) in found.items()), held=held)


def read_reason(server: Served) -> str | None:
    """Read a long stream with the request id `attack` to its end, and return its finish reason."""
    reason: str | None = None
    body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "attack"}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=headers, timeout=LONG_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                reason = event["error"]["code"] if "error" in event else event["choices"][0]["finish_reason"] or reason
    return reason


def vain_cancels() -> str:
    """Cancel a stream while the worker is stopped for good, then end the server by a signal."""
    with Served(*FLAGS, *NEVER, "--drain-s", "1") as server, ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read_reason, server)
        seconds_until(lambda: any(slot["is_processing"] for slot in server.get("/slots").json()))
        with stopped(server.children()[0]):
            begin = time.monotonic()
            status = post(server, "/v1/requests/attack/cancel", {}).status_code
            reason = reading.result(LONG_S)
            cancel_s = time.monotonic() - begin
            begin = time.monotonic()
            server.signal(signal.SIGTERM)
            code = server.code()
            end_s = time.monotonic() - begin
    return figure(
        f"cancel {status}, and the stream ended ({reason}) after {cancel_s:.1f} s; SIGTERM ended the server with {code} "
        f"after {end_s:.1f} s",
        held=status == 200 and cancel_s < 5 and code == 0 and end_s < 25,
    )


def start(engine: WorkerEngine, number: int) -> StreamChannel:
    """Start a stream, drawn by a hash of all earlier tokens."""
    params = SamplingParams(seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)
    return engine.accept(engine.prepare(f"stream {number}", params, RequestOptions()))


def ids_of(channel: StreamChannel) -> list[int]:
    """Return the tokens of a stream; each chunk must begin at the end of the last chunk."""
    ids: list[int] = []
    for chunk in channel:
        assert chunk.index == len(ids)
        ids += chunk.token_ids
    return ids


def torn_streams() -> str:
    """Stop the worker under 384 streams, three times, and compare all tokens with an undisturbed run."""
    options = {"num_cells": 200_000, "eos_every": 10**9}
    engine = fake_worker_engine(backend_options=options, max_queue=NUM_STREAMS, hang_timeout_s=3.0)
    try:
        whole = [ids_of(channel) for channel in [start(engine, number) for number in range(NUM_STREAMS)]]
        num_wrong, longest_s = 0, 0.0
        for turn in range(1, 4):
            channels = [start(engine, number) for number in range(NUM_STREAMS)]
            seconds_until(lambda channels=channels: channels[0].num_buffered > 3)
            pid = engine.worker_pid
            assert pid is not None
            with stopped(pid):
                begin = time.monotonic()
                found = [ids_of(channel) for channel in channels]
                longest_s = max(longest_s, time.monotonic() - begin)
            num_wrong += sum(item != other for item, other in zip(found, whole, strict=True))
            assert engine.heartbeat().num_hangs == turn, "the worker was not replaced"
    finally:
        engine.close()
    return figure(
        f"3 times {NUM_STREAMS} streams of {NUM_TOKENS} tokens, the slowest within {longest_s:.1f} s of the stop: "
        f"{num_wrong} not equal to the undisturbed",
        held=num_wrong == 0,
    )


ATTACKS = (
    Attack(
        "readiness",
        "A server whose worker was stopped is not ready after 20 s, replaces the worker and is ready again.",
        "readiness stayed 200, and the worker was never replaced",
        late_readiness,
    ),
    Attack(
        "deadlines",
        "A request ends at its deadline though the worker does nothing.",
        "timeout_s of 3 had not ended minutes later",
        passed_deadlines,
        sample=True,
    ),
    Attack(
        "questions", "Every route replies in time though the worker does nothing.", "/slots hung", unanswered_questions
    ),
    Attack(
        "cancels",
        "A cancelled stream ends, and SIGTERM ends the server, though the worker does nothing.",
        "cancel said true and did nothing",
        vain_cancels,
    ),
    Attack(
        "streams",
        "Streams go on in the next worker, no token lost or doubled, when a worker is stopped.",
        "they stood still for as long as the worker was stopped",
        torn_streams,
    ),
)
