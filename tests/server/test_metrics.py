"""GET /metrics of a server over the demo model."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.server.settings import ServerSettings

pytestmark = pytest.mark.native


def scrape(client: httpx.Client, **headers: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = client.get("/metrics", headers=headers)
    assert response.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_metrics_are_the_engine_s(server: RunningServer, client: httpx.Client) -> None:
    """After a generation the text matches `stats()`; the engine lives."""
    engine = server.engine
    request = engine.prepare("Once upon a time", SamplingParams(max_tokens=5, ignore_eos=True), RequestOptions())
    assert len(list(engine.accept(request))) > 0
    found = scrape(client)
    stats = engine.stats()
    assert found["paceline_tokens_generated_total", ()] == stats.number("paceline_tokens_generated_total") >= 5
    assert found["llamacpp:tokens_predicted_total", ()] == found["paceline_tokens_generated_total", ()]
    assert found["llamacpp:n_tokens_max", ()] >= 5
    assert found["paceline_ttft_seconds_count", ()] == stats.histogram("paceline_ttft_seconds").count
    assert found["paceline_engine_alive", ()] == 1


def test_requests_are_counted_by_route_and_status(client: httpx.Client) -> None:
    """Paths that no route has count together."""
    before = scrape(client)
    client.get("/health")
    client.get("/nothing")
    client.get("/nothing/else")
    after = scrape(client)

    def gained(route: str, status: str) -> float:
        place = ("paceline_http_requests_total", (("method", "GET"), ("route", route), ("status", status)))
        return after[place] - before.get(place, 0)

    assert gained("/health", "200") == 1
    assert gained("other", "404") == 2
    assert gained("/metrics", "200") == 1
    assert not any("/nothing" in str(place) for place in after)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics-text; version=1.0.0;"),
    ],
)
def test_the_format_is_the_one_that_was_asked_for(client: httpx.Client, accept: str, content_type: str) -> None:
    """As the library negotiates it; the server's start is in a header spelt as llama-server spells it."""
    response = client.get("/metrics", headers={"accept": accept})
    assert response.headers["content-type"].startswith(content_type)
    started = [value for name, value in response.headers.raw if name == b"Process-Start-Time-Unix"]
    assert [int(value) > 0 for value in started] == [True]
    assert response.text.endswith("# EOF\n") == ("openmetrics" in accept)


def test_a_server_whose_metrics_are_off_responds_with_501() -> None:
    """501, in llama-server's shape."""
    with (
        RunningServer(ServerSettings(engine_options=DEMO_ENGINE, metrics=False)) as running,
        running.client() as client,
    ):
        response = client.get("/metrics")
        error: dict[str, Any] = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (501, 501, "not_supported_error")


def test_streams_are_counted_by_their_bytes(client: httpx.Client) -> None:
    """The bytes that a client read equal the sent bytes; soon none is open."""
    before = scrape(client)
    with client.stream(
        "POST", "/v1/completions", json={"prompt": "Once", "max_tokens": 20, "stream": True}
    ) as response:
        num_bytes = sum(map(len, response.iter_raw()))
    while (after := scrape(client))["paceline_http_streams_open", ()]:
        pass
    gained = after["paceline_http_streamed_bytes_total", ()] - before["paceline_http_streamed_bytes_total", ()]
    assert gained == num_bytes > 0


def test_the_worker_s_process_has_metrics_too() -> None:
    """Memory, time and descriptors of the process that computes."""
    options = {**DEMO_ENGINE, "isolation": "process"}
    with RunningServer(ServerSettings(engine_options=options)) as running, running.client() as client:
        found = scrape(client)
        assert found["paceline_worker_process_resident_memory_bytes", ()] > 0
        assert found["paceline_engine_alive", ()] == 1
        assert found["paceline_slots", ()] == DEMO_ENGINE["num_slots"]
