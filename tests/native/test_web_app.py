"""The web application in examples/: whole replies, events, refusals, clients that leave, and its shutdown."""

from __future__ import annotations

import json
import queue
import runpy
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from tests.polling import wait_until

import paceline

pytestmark = pytest.mark.native

EXAMPLE = Path(__file__).parents[2] / "examples" / "web_app.py"
LONG_S = 60.0


class Watched(paceline.Instrument):
    """Notes the ends of requests, and makes each tick take 20 ms, so that replies last as long as a large model's."""

    def __init__(self) -> None:
        self.reasons: queue.Queue[str] = queue.Queue()
        self.num_running = 0

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:
        self.num_running += 1

    def request_ended(self, record: paceline.EndRecord) -> None:
        self.num_running -= 1
        self.reasons.put(record.reason)

    def tick_finished(self, record: paceline.TickRecord) -> None:
        time.sleep(0.02)


@dataclass
class WebApp:
    """The application on a port of its own, in a thread."""

    watched: Watched = field(default_factory=Watched)
    engines: list[paceline.AsyncLLM] = field(default_factory=list)

    def __post_init__(self) -> None:
        watched, engines = self.watched, self.engines

        class Noted(paceline.AsyncLLM):
            def __init__(self, model: str | None, **options: Any) -> None:
                super().__init__(model, n_ctx=8192, instruments=[watched], **options)
                engines.append(self)

        namespace = runpy.run_path(str(EXAMPLE))
        make_app = namespace["make_app"]
        self.names = make_app.__globals__
        names = {name: getattr(paceline, name) for name in paceline.__all__ if name != "AsyncLLM"}
        make_app.__globals__["paceline"] = SimpleNamespace(**names, AsyncLLM=Noted)
        self.server: uvicorn.Server = namespace["Server"](make_app(), 0)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_until(lambda: self.server.started or not self.thread.is_alive())
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S)

    def stop(self) -> None:
        """End it as a signal does."""
        self.server.handle_exit(signal.SIGTERM, None)
        self.thread.join(LONG_S)


def chat(max_tokens: int, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": max_tokens, **options}


@pytest.fixture
def app() -> Iterator[WebApp]:
    """The application; it is stopped at the end."""
    app = WebApp()
    try:
        yield app
    finally:
        app.client.close()
        app.stop()
    assert not app.thread.is_alive()


def test_a_reply_comes_whole_or_as_events(app: WebApp) -> None:
    """With its finish reason."""
    whole = app.client.post("/chat", json=chat(30))
    assert whole.status_code == 200
    assert set(whole.json()) == {"content", "finish_reason"}
    assert whole.json()["finish_reason"] == "length"
    with app.client.stream("POST", "/chat", json=chat(30, stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert events[-1] == {"finish_reason": "length"}
    assert len(events) > 5
    assert all(list(event) == ["content"] and event["content"] for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_chat(app: WebApp, stream: bool) -> None:
    """Within some chunks, whether the reply was to come whole or as events."""
    if stream:
        with app.client.stream("POST", "/chat", json=chat(1000, stream=True)) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            app.client.post("/chat", json=chat(1000), timeout=2)
    assert app.watched.reasons.get(timeout=LONG_S) == "cancelled"


def test_too_many_chats_are_refused_with_429_before_a_response_begins(app: WebApp) -> None:
    """Four run and four wait; the ninth is refused at once, also as events."""
    replies: queue.Queue[int] = queue.Queue()
    others = [
        threading.Thread(target=lambda: replies.put(app.client.post("/chat", json=chat(60)).status_code))
        for _ in range(8)
    ]
    for thread in others:
        thread.start()
    wait_until(lambda: app.engines[0].engine.num_open == 8)
    for stream in (False, True):
        refused = app.client.post("/chat", json=chat(10, stream=stream))
        assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
    for thread in others:
        thread.join(LONG_S)
    assert [replies.get(timeout=LONG_S) for _ in others] == [200] * 8


def test_an_error_in_a_chat_is_a_400(app: WebApp) -> None:
    """With a code and a message."""
    body = {"messages": [{"role": "nobody", "content": "Hi"}]}
    refused = app.client.post("/chat", json=body)
    assert refused.status_code == 400
    assert set(refused.json()) == {"code", "message"}
    long = app.client.post("/chat", json={"messages": [{"role": "user", "content": "word " * 20_000}]})
    assert (long.status_code, long.json()["code"]) == (400, "prompt_too_long")


def test_a_shutdown_lets_a_reply_end(app: WebApp) -> None:
    """And closes the engine."""
    replies: queue.Queue[httpx.Response] = queue.Queue()
    asking = threading.Thread(target=lambda: replies.put(app.client.post("/chat", json=chat(40))))
    asking.start()
    wait_until(lambda: app.watched.num_running == 1)
    app.stop()
    reply = replies.get(timeout=LONG_S)
    assert (reply.status_code, reply.json()["finish_reason"]) == (200, "length")
    assert not app.engines[0].heartbeat().is_alive
    asking.join(LONG_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_shutdown_ends_a_long_reply_with_its_reason(app: WebApp, stream: bool) -> None:
    """After its time; the client gets the text so far."""
    app.names["SHUTDOWN_S"] = 0.2
    replies: queue.Queue[httpx.Response] = queue.Queue()
    asking = threading.Thread(target=lambda: replies.put(app.client.post("/chat", json=chat(1000, stream=stream))))
    asking.start()
    wait_until(lambda: app.watched.num_running == 1)
    app.stop()
    reply = replies.get(timeout=LONG_S)
    assert reply.status_code == 200
    last = reply.text.strip().rpartition("data: ")[2] if stream else reply.text
    assert json.loads(last)["finish_reason"] == "shutdown"
    asking.join(LONG_S)
