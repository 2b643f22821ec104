"""A server with a sleeping engine: the routes that wake it, and the routes that respond while it sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.server.settings import ApiKey, ServerSettings

OPTIONS: dict[str, Any] = {**DEMO_ENGINE, "isolation": "process", "sleep_idle_s": 0.2}
BODY = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0}


@pytest.fixture(scope="module")
def sleeper() -> Iterator[RunningServer]:
    """The demo model, with a worker that is stopped soon when idle."""
    with RunningServer(ServerSettings(engine_options=OPTIONS)) as running:
        yield running


@pytest.fixture(scope="module")
def drowsy() -> Iterator[RunningServer]:
    """The same with embeddings; it stays awake for a second."""
    settings = ServerSettings(engine_options={**OPTIONS, "sleep_idle_s": 1.0}, embeddings=True)
    with RunningServer(settings) as running:
        yield running


def until_asleep(server: RunningServer) -> None:
    server.until(lambda: server.engine.heartbeat().state == "sleeping" and server.engine.worker_pid is None)


READ_ONLY = [
    "/health",
    "/v1/health",
    "/health/live",
    "/health/ready",
    "/props",
    "/models",
    "/v1/models",
    "/metrics",
    "/slots",
]


def test_read_only_routes_respond_and_do_not_wake_it(sleeper: RunningServer) -> None:
    """Health is ok and reports that it sleeps; so do /props and /metrics."""
    until_asleep(sleeper)
    with sleeper.client() as client:
        responses = {path: client.get(path) for path in READ_ONLY}
        assert {path: response.status_code for path, response in responses.items()} == dict.fromkeys(READ_ONLY, 200)
        assert client.options("/completion").status_code == 405
        assert client.post("/v1/requests/none/cancel").json()["cancelled"] is False
    assert responses["/health"].json() == {"status": "ok"}
    assert responses["/health/live"].json()["state"] == "sleeping"
    assert responses["/props"].json()["is_sleeping"] is True
    assert "\npaceline_engine_sleeping 1.0\n" in responses["/metrics"].text
    assert "\npaceline_engine_alive 1.0\n" in responses["/metrics"].text
    assert sleeper.engine.heartbeat().state == "sleeping"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", BODY),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 2}),
        ("/v1/embeddings", {"input": "Once"}),
        ("/tokenize", {"content": "Once"}),
        ("/apply-template", {"messages": [{"role": "user", "content": "Once"}]}),
    ],
)
def test_what_needs_the_model_wakes_it(drowsy: RunningServer, path: str, body: dict[str, Any]) -> None:
    """The request waits for the worker and completes; afterwards the engine does not sleep until it has been idle again."""
    until_asleep(drowsy)
    with drowsy.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    drowsy.until(lambda: drowsy.engine.heartbeat().state in ("starting", "idle", "ticking"))
    until_asleep(drowsy)


def test_a_completion_after_a_sleep_is_the_one_before(sleeper: RunningServer) -> None:
    """Streamed as well, and its tokens are counted with the others."""
    with sleeper.client() as client:
        texts = []
        for _ in range(2):
            texts.append(client.post("/completion", json=BODY).json()["content"])
            until_asleep(sleeper)
        assert texts[0] == texts[1]
        with client.stream("POST", "/completion", json={**BODY, "stream": True}) as response:
            assert response.status_code == 200
            assert "".join(response.iter_text()).count("data: ") > 1
        until_asleep(sleeper)
        lines = client.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("llamacpp:tokens_predicted_total ")]
        assert float(line.split()[1]) >= 24


def test_it_is_awake_as_soon_as_a_request_has_woken_it(sleeper: RunningServer) -> None:
    """Even if the request itself does not need the worker."""
    until_asleep(sleeper)
    with sleeper.client() as client:
        assert client.post("/tokenize", json={"content": "Hello"}).status_code == 200
        assert client.get("/props").json()["is_sleeping"] is False


def test_a_deadline_ends_the_wait_for_the_worker(sleeper: RunningServer) -> None:
    """With the status of a request that ran out of time."""
    until_asleep(sleeper)
    with sleeper.client() as client:
        assert client.post("/completion", json={**BODY, "timeout_s": 1e-3}).status_code == 504
        assert client.post("/completion", json=BODY).status_code == 200


def test_a_request_that_is_refused_does_not_wake_it() -> None:
    """Without a key."""
    settings = ServerSettings(engine_options=OPTIONS, api_keys=(ApiKey(secret="k"),))
    with RunningServer(settings) as server, server.client() as client:
        until_asleep(server)
        assert client.post("/completion", json=BODY).status_code == 401
        assert client.post("/nothing", json=BODY, headers={"x-api-key": "k"}).status_code == 404
        assert server.engine.heartbeat().state == "sleeping"
        response: httpx.Response = client.post("/completion", json=BODY, headers={"x-api-key": "k"})
        assert response.status_code == 200
