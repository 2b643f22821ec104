"""Objects that requests leave in the server's process: none, for any end. Objects are counted, not bytes."""

from __future__ import annotations

import gc
import http.client
import json
import logging
import os
import signal
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.server.running import LONG_S, RunningServer

from paceline.engine.worker import messages
from paceline.engine.worker.supervisor import RestartLimits
from paceline.engine.worker.worker_telemetry import WorkerTotals
from paceline.observability.metrics import Metrics
from paceline.server.settings import ServerSettings
from paceline.testing.models import LlamaSpec, write_lora, write_model

pytestmark = pytest.mark.native

MANY = 40
"""Requests of each kind between two looks; what stays of each of them is found, what comes by the way is less than that."""

ENGINE: dict[str, Any] = {"isolation": "process", "num_slots": 4, "n_ctx": 2048, "n_threads": 1}
COMPLETION = "/v1/completions"
SHORT = {"prompt": "Once upon a time", "max_tokens": 2}
LONG = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, "stream": True}


class Clients:
    """Clients of one server; every request has a connection of its own, so that leaked connections are found."""

    def __init__(self, port: int) -> None:
        self._port = port

    def whole(self) -> None:
        """Read a whole response."""
        assert self.status("POST", COMPLETION, SHORT) == 200

    def stream(self) -> None:
        """Read a stream to its end."""
        assert self.status("POST", COMPLETION, {**SHORT, "stream": True}) == 200

    def chat(self) -> None:
        """Read a chat completion as llama-server streams it."""
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        assert self.status("POST", "/v1/chat/completions", body) == 200

    def native(self) -> None:
        """llama-server's own stream."""
        assert self.status("POST", "/completion", {"prompt": "Once", "n_predict": 2, "stream": True}) == 200

    def several(self) -> None:
        """Two prompts at once."""
        assert self.status("POST", COMPLETION, {**SHORT, "prompt": ["Once", "Twice"], "stream": True}) == 200

    def refused(self) -> None:
        """Send invalid requests."""
        assert self.status("POST", COMPLETION, {"prompt": 5.5}) == 400

    def nowhere(self) -> None:
        """Request unknown routes."""
        assert self.status("GET", "/nothing", None) == 404

    def tokens(self) -> None:
        """No generation."""
        assert self.status("POST", "/tokenize", {"content": "Once"}) == 200

    def scrape(self) -> None:
        """A question to the worker."""
        assert self.status("GET", "/metrics", None) == 200

    def cancelled(self) -> None:
        """Has its stream ended by its id, and reads the end."""
        with self._sent(LONG, request_id="mine") as response:
            response.readline()
            assert self.status("POST", "/v1/requests/mine/cancel", {}) == 200
            assert b"[DONE]" in response.read()

    def left(self) -> None:
        """Hangs up within the stream."""
        with self._sent(LONG) as response:
            response.readline()

    def left_at_once(self) -> None:
        """Hangs up before there is a word."""
        self._raw(LONG).close()

    def reset(self) -> None:
        """Read the response, then reset the connection instead of closing it."""
        connection = self._raw(SHORT)
        response = b""
        while not response.endswith(b"}"):
            part = connection.recv(65536)
            assert part
            response += part
        assert response.startswith(b"HTTP/1.1 200 ")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def status(self, method: str, path: str, body: dict[str, Any] | None) -> int:
        """Send a request and return the status of its response."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LONG_S)
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status

    @contextmanager
    def _sent(self, body: dict[str, Any], request_id: str = "any") -> Iterator[http.client.HTTPResponse]:
        """Yield a response with its head read."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LONG_S)
        connection.request("POST", COMPLETION, json.dumps(body), {"x-request-id": request_id})
        response = connection.getresponse()
        assert response.status == 200
        yield response
        response.close()
        connection.close()

    def _raw(self, body: dict[str, Any]) -> socket.socket:
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=LONG_S)
        connection.sendall(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (COMPLETION.encode(), len(data))
        )
        connection.sendall(data)
        return connection


KINDS: list[Callable[[Clients], None]] = [
    Clients.whole, Clients.stream, Clients.chat, Clients.native, Clients.several, Clients.refused, Clients.nowhere,
    Clients.tokens, Clients.scrape, Clients.cancelled, Clients.left, Clients.left_at_once, Clients.reset,
]  # fmt: skip


@pytest.fixture(autouse=True)
def unlogged() -> Iterator[None]:
    """Nothing is logged: pytest keeps the records of a test, whatever level an earlier one has left behind."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def watched() -> None:
    """All objects are counted: what grows may be in a container that was there before."""
    gc.unfreeze()


def held(server: RunningServer) -> str:
    """Objects by type, and objects in containers by type, once no request is open; as JSON, which no later look finds."""
    server.until(lambda: not (server.engine.num_open or server.connections or server.service.in_flight.count))
    return json.dumps(counted())


def counted() -> Counter[str]:
    """The result of `held` for the whole process."""
    settle()
    found: Counter[str] = Counter()
    for item in objects():
        if item is found:  # how much is in it by now depends on where the collector lists it
            continue
        kind: Any = type(item)  # not isinstance: a lazy module would load itself for it
        name = f"{kind.__module__}.{kind.__qualname__}"
        found[name] += 1
        if issubclass(kind, (dict, list, set, deque)):
            found[f"items of {name}"] += kind.__len__(item)
    return found


def settle() -> None:
    """Collect until no object leaves the collector's care any more.

    A collection untracks tuples that hold only texts, numbers and untracked tuples. So the labels of the worker's last report,
    tuples of tuples, take several collections. Otherwise the labels of a report just before the look would be counted, and an
    older report's would not.
    """
    most, left = -1, len(gc.get_objects())
    while left != most:
        most = left
        gc.collect()
        left = min(most, len(gc.get_objects()))


def objects() -> Iterator[object]:
    """All that the collector knows, and the mappings that it leaves alone, since there are only numbers and texts in them."""
    known = gc.get_objects()
    yield from known
    others = {
        id(get_referent): get_referent
        for get_referent in gc.get_referents(*known)
        if type(get_referent) is dict and not gc.is_tracked(get_referent)
    }
    yield from others.values()


@pytest.mark.full
def test_a_report_that_has_just_come_counts_no_more_than_one_of_before() -> None:
    """The worker reports each second; whether it did so between two looks or long before makes no difference to them."""
    metrics = Metrics()  # as the worker sends them: with labels
    for source in ("running", "device", "host"):
        metrics.prefix_shared(1, 0, 10, source)
    data, totals = messages.encode(messages.Stats(list(metrics.snapshot()))), WorkerTotals()

    def report() -> None:
        message = messages.decode_up(data)
        assert isinstance(message, messages.Stats)
        totals.report(message.samples)

    report()
    for _ in range(5):  # so that this one was long before
        gc.collect()
    before = json.dumps(counted())
    report()
    after = json.dumps(counted())
    assert gained(before, after, by_more_than=2) == {}  # the labels of a report are more; the process has other threads


def test_a_request_leaves_nothing_behind_however_it_ends() -> None:
    """After as many again of every kind there are as many objects as before, and as much in lists, sets and mappings."""
    with RunningServer(ServerSettings(engine_options=ENGINE)) as server:
        clients = Clients(server.port)

        def ask() -> None:
            for _ in range(MANY):
                for kind in KINDS:
                    kind(clients)

        ask()
        before = held(server)
        ask()
        after = held(server)
    assert gained(before, after, by_more_than=MANY // 2) == {}


def test_a_worker_that_died_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some more deaths there are as many objects as before."""
    forgets = RestartLimits(first_wait_s=0.0)
    monkeypatch.setattr("paceline.engine.worker.worker_engine.RestartLimits", lambda: forgets)
    with RunningServer(ServerSettings(engine_options=ENGINE)) as server:
        clients = Clients(server.port)

        def kill(times: int) -> None:
            for _ in range(times):
                clients.scrape()  # so that there is something to be added up
                os.kill(server.engine.worker_pid, signal.SIGKILL)
                clients.whole()  # by the next one

        kill(2)
        before = held(server)
        kill(4)
        after = held(server)
    assert gained(before, after, by_more_than=3) == {}


@pytest.mark.full
def test_sleep_and_adapters_leave_nothing_behind(tmp_path: Path) -> None:
    """Sleeping and waking, and loading and unloading a LoRA adapter, leave as many objects as before."""
    spec = LlamaSpec(n_ctx_train=2048)
    model, adapter = write_model(tmp_path / "tiny.gguf", spec), write_lora(tmp_path / "style.gguf", spec)
    settings = ServerSettings(
        model=model, engine_options={**ENGINE, "n_ctx": 512, "sleep_idle_s": 0.05}, lora_loading=True
    )
    with RunningServer(settings) as server:
        clients = Clients(server.port)

        def sleep_and_adapt(times: int) -> None:
            for _ in range(times):
                server.until(lambda: server.engine.worker_pid is None)
                load = {"lora_name": "style", "lora_path": str(adapter)}
                assert clients.status("POST", "/v1/load_lora_adapter", load) == 200
                clients.whole()
                assert clients.status("POST", "/v1/unload_lora_adapter", {"lora_name": "style"}) == 200
            # The last report of a running worker is kept as it is. Once the worker sleeps, the report is in the totals.
            server.until(lambda: server.engine.worker_pid is None)

        sleep_and_adapt(2)
        before = held(server)
        sleep_and_adapt(5)
        after = held(server)
    assert gained(before, after, by_more_than=4) == {}


def gained(before: str, after: str, *, by_more_than: int) -> dict[str, int]:
    """Return the growth between two looks."""
    old, new = json.loads(before), json.loads(after)
    found = {name: count - old.get(name, 0) for name, count in new.items()}
    return {name: count for name, count in found.items() if count > by_more_than}
