"""`paceline batch run`: interrupted and killed with a server, and finished with the demo model."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.e2e.commands import TIMEOUT_S, paceline_, started
from tests.polling import wait_until

pytestmark = pytest.mark.native

NUM_LINES = 20


class StandIn(ThreadingHTTPServer):
    """A server that responds to the first completions, by the numbers in their prompts, and holds the others."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self._num_allowed = 0
        self._changed = threading.Condition()

    def allow(self, number: int) -> None:
        with self._changed:
            self._num_allowed = number
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: number < self._num_allowed)


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self.respond({"data": [{"id": "x", "meta": {"n_ctx": 1000}}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.wait_for(int(body["prompt"]))
        with suppress(ConnectionError):  # of a client that has left
            self.respond({"usage": {"completion_tokens": 2}})

    def respond(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.allow(NUM_LINES)
        made.shutdown()
        thread.join()


def test_a_batch_goes_on_after_ctrl_c_and_kill(tmp_path: Path, server: StandIn) -> None:
    """Each line has one result after three runs; Ctrl-C exits with 130 and says how far it came."""
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"max_tokens": 2, "ignore_eos": True}
    lines = [
        {"custom_id": f"{number}", "url": "/v1/completions", "body": {"prompt": f"{number}", **body}}
        for number in range(NUM_LINES)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("batch", "run", str(source), "-o", str(results))
    remote = ("--url", f"http://127.0.0.1:{server.server_port}")

    def num_results() -> int:
        return results.read_bytes().count(b"\n") if results.exists() else 0

    with started(*command, *remote) as process:
        server.allow(3)
        wait_until(lambda: num_results() == 3)
        process.send_signal(signal.SIGINT)
        _, notes = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "3 results" in notes.decode() and "Traceback" not in notes.decode()
    with started(*command, *remote) as process:
        server.allow(7)
        wait_until(lambda: num_results() == 7)
        process.kill()
        process.communicate(timeout=TIMEOUT_S)
    done = paceline_(*command, "-t", "1", "-c", "2048")
    assert done.returncode == 0, done.stderr.decode()
    entries = [json.loads(line) for line in results.read_bytes().splitlines()]
    assert Counter(entry["custom_id"] for entry in entries) == Counter(line["custom_id"] for line in lines)
    assert {entry["response"]["body"]["usage"]["completion_tokens"] for entry in entries} == {2}
