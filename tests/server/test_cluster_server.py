"""The application of `paceline serve` over replicas: two engines with a worker process each, called without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster_world import ClusterWorld
from tests.exact import EXACT
from tests.server.running import RunningServer

from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.ray_serve.cluster_app import cluster_app
from paceline.ray_serve.cluster_config import parse_cluster_config

pytestmark = pytest.mark.native

OPTIONS: dict[str, Any] = {"isolation": "process", "num_slots": 2, "n_ctx": 1024, **EXACT}
ONE = '[server]\napi-key = "secret"\n[models.tiny]\nmax_queue = 1\n'
TWO = "[models.first]\n[models.second]\naliases = ['other']\n"
HEADERS = {"authorization": "Bearer secret"}


class Replicas(ClusterWorld):
    """Replicas of the demo model."""

    def _make(self, name: str) -> None:
        engine: Any = WorkerEngine(None, OPTIONS)
        self.replicas[name] = engine
        self.members[name] = None


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    found = Replicas("a", "b")
    yield found
    found.close()


@pytest.fixture(scope="module")
def server(replicas: Replicas) -> Iterator[RunningServer]:
    config = parse_cluster_config(Path("/cluster.toml"), ONE.encode())
    build: Any = lambda _settings, _llm: cluster_app(config, {"tiny": replicas._make_calls})  # noqa: E731
    with RunningServer(config.models[0].settings, build=build) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client(headers=HEADERS) as client:
        yield client


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, **more}


def test_routes_and_keys_match_one_machine(server: RunningServer, client: httpx.Client) -> None:
    """A key is needed, models are listed, health is that of a loaded model."""
    with server.client() as stranger:
        assert stranger.post("/v1/completions", json=body()).status_code == 401
    assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["tiny"]
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/health/ready").status_code == 200
    assert client.get("/props").json()["total_slots"] == 4


def test_streamed_and_whole_text_agree(client: httpx.Client) -> None:
    """A stream has the same as a whole reply."""
    whole = client.post("/v1/completions", json=body()).json()["choices"][0]["text"]
    streamed = ""
    with client.stream("POST", "/v1/completions", json=body(stream=True)) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                streamed += json.loads(line[6:])["choices"][0]["text"]
    assert streamed == whole != ""


def test_wrong_requests_are_refused_and_lose_nothing(client: httpx.Client) -> None:
    """Errors are reported before any replica hears of the request, and the next request runs."""
    assert client.post("/v1/completions", json=body(temperature=-1)).status_code == 400
    assert client.post("/v1/completions", json=body(prompt="x " * 3000)).status_code == 400
    saved = client.post("/slots/0?action=save", json={"filename": "x"})
    assert saved.status_code in (400, 501)
    assert client.post("/v1/completions", json=body()).status_code == 200


def test_what_is_off_is_off_for_each_replica_too(replicas: Replicas) -> None:
    """--no-slots and --no-metrics hold for the routes of a replica; the replicas are listed all the same."""
    config = parse_cluster_config(Path("/cluster.toml"), b"[server]\nslots = false\nmetrics = false\n[models.tiny]\n")
    build: Any = lambda _settings, _llm: cluster_app(config, {"tiny": replicas._make_calls})  # noqa: E731
    with RunningServer(config.models[0].settings, build=build) as running, running.client() as client:
        assert [entry["id"] for entry in client.get("/cluster").json()["models"]["tiny"]] == ["a", "b"]
        for path in ("/slots", "/cluster/tiny/a/slots", "/metrics", "/cluster/tiny/a/metrics"):
            assert client.get(path).status_code == 501, path


def test_replicas_are_shown_each_by_itself(client: httpx.Client) -> None:
    """/cluster has the replicas, and of each its slots and metrics; /slots and /metrics have all of them together."""
    client.post("/v1/completions", json=body())
    found = client.get("/cluster").json()["models"]["tiny"]
    assert [(entry["id"], entry["slots"]) for entry in found] == [("a", 2), ("b", 2)]
    slots = client.get("/cluster/tiny/a/slots").json()
    assert len(slots) == 2 and all("request_id" not in slot for slot in slots)  # other tenants' are none of a key's
    numbers = [client.get(f"/cluster/tiny/{name}/metrics").json() for name in ("a", "b")]
    assert sum(number["paceline_tokens_generated_total"] for number in numbers) >= 20
    assert client.get("/cluster/tiny/none/slots").status_code == 404
    assert client.get("/cluster/none/a/slots").status_code == 404
    assert len(client.get("/slots").json()) == 4
    assert "paceline_slots 4.0" in client.get("/metrics").text


def test_a_full_cluster_says_when_to_come_back(server: RunningServer, client: httpx.Client, replicas: Replicas) -> None:
    """With all slots and the queue taken a request is refused with 429 and Retry-After, and one later runs."""
    engine = server.engine
    from paceline.params import SamplingParams
    from paceline.request import RequestOptions

    params = SamplingParams(max_tokens=900, ignore_eos=True)
    channels = [engine.accept(engine.prepare("Far away", params, RequestOptions())) for _ in range(6)]
    refused = client.post("/v1/completions", json=body())
    assert refused.status_code == 429, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    for channel in channels:
        channel.cancel()
    for channel in channels:
        assert channel.wait_finished(30)
    assert client.post("/v1/completions", json=body()).status_code == 200


def test_several_models_are_chosen_by_name() -> None:
    """Models of a cluster are served by name and alias, and an unknown one is a 404."""
    worlds = {"first": Replicas("a"), "second": Replicas("b")}
    config = parse_cluster_config(Path("/cluster.toml"), TWO.encode())
    build: Any = lambda _settings, _llm: cluster_app(config, {name: each._make_calls for name, each in worlds.items()})  # noqa: E731
    try:
        with RunningServer(config.server, build=build) as running, running.client() as client:
            assert sorted(entry["id"] for entry in client.get("/v1/models").json()["data"]) == ["first", "second"]
            for name in ("first", "other"):
                reply = client.post("/v1/completions", json=body(model=name))
                assert reply.status_code == 200, reply.text
            assert client.post("/v1/completions", json=body(model="third")).status_code == 404
            assert set(client.get("/cluster").json()["models"]) == {"first", "second"}
    finally:
        for world in worlds.values():
            world.close()
