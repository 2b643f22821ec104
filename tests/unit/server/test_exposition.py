"""The text that Prometheus reads: everything that was counted, and nothing else, by names that dashboards rely on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response
from tests.engine_world import World

from paceline.observability.heartbeat import Heartbeat
from paceline.observability.metric_table import NAMES, Histogram, MetricsSnapshot
from paceline.server import exposition
from paceline.server.exposition import ALIVE, OTHER, HttpMetrics, LlamaMetrics, engine_metrics

PAGE = Path(__file__).parents[3] / "docs" / "prometheus.md"
LLAMA = (
    "llamacpp:prompt_tokens_total",
    "llamacpp:prompt_tokens_cached_total",
    "llamacpp:prompt_seconds_total",
    "llamacpp:tokens_predicted_total",
    "llamacpp:tokens_predicted_seconds_total",
    "llamacpp:n_decode_total",
    "llamacpp:n_tokens_max",
    "llamacpp:spec_decode_num_draft_tokens_total",
    "llamacpp:spec_decode_num_accepted_tokens_total",
    "llamacpp:spec_decode_num_drafts_total",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
    "llamacpp:n_busy_slots_per_decode",
    "llamacpp:prompt_tokens_seconds",
    "llamacpp:predicted_tokens_seconds",
)
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def busy_world() -> World:
    """Metrics with a value for everything that a fake can do."""
    world = World(eos_every=30)
    for index in range(6):
        world.submit(list(range(40, 70)), max_tokens=5 + index, seed=index)
    world.submit_embedding(["one", "two"])
    world.tick(4)
    world.submit("too late", max_tokens=3, timeout_s=0.0001)
    world.faults.undrawable.add(world.submit("no token", max_tokens=3).request.key)
    world.clock.advance(1)
    world.run()
    return world


def exposed(snapshot: MetricsSnapshot, http: HttpMetrics | None = None, accept: str = "", **heart: Any) -> Response:
    beat = Heartbeat(**{"is_alive": True, "state": "idle", "state_s": 0.0, **heart})
    engine: Any = SimpleNamespace(stats=lambda: snapshot, heartbeat=lambda: beat)
    return engine_metrics(engine, http or HttpMetrics(), LlamaMetrics(), accept)


def values(text: str, parse: Any = text_string_to_metric_families) -> Values:
    """Every sample by its name and labels."""
    found: Values = {}
    for family in parse(text):
        for sample in family.samples:
            place = (sample.name, tuple(sorted(sample.labels.items())))
            assert place not in found
            found[place] = sample.value
    return found


def exposed_by(snapshot: MetricsSnapshot) -> Values:
    """Return the expected text for this snapshot, by the metrics page alone."""
    expected: Values = {}
    for sample in snapshot:
        if not isinstance(sample.value, Histogram):
            expected[sample.name, sample.labels] = sample.value
            continue
        total = 0
        bounds = [*map(float, sample.value.bounds), float("inf")]
        for bound, count in zip(bounds, sample.value.counts, strict=True):
            total += count
            le = "+Inf" if bound == float("inf") else repr(bound)
            expected[f"{sample.name}_bucket", tuple(sorted((*sample.labels, ("le", le))))] = total
        expected[f"{sample.name}_count", sample.labels] = sample.value.count
        expected[f"{sample.name}_sum", sample.labels] = sample.value.sum
    return expected


@pytest.mark.parametrize(
    ("accept", "content_type", "parse"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8", text_string_to_metric_families),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8", text_string_to_metric_families),
        (
            "application/openmetrics-text; version=1.0.0",
            "application/openmetrics-text; version=1.0.0",
            parse_open_metrics,
        ),
    ],
)
def test_the_text_holds_what_was_counted(accept: str, content_type: str, parse: Any) -> None:
    """Each number and each bucket of a snapshot is read back by the library's own parser, in the format that was asked for."""
    snapshot = busy_world().metrics.snapshot()
    response = exposed(snapshot, accept=accept)
    assert response.headers["content-type"].startswith(content_type)
    found = values(response.body.decode(), parse)
    ours = {place: value for place, value in found.items() if place[0].startswith(tuple(NAMES))}
    if parse is text_string_to_metric_families:  # OpenMetrics writes bounds in another way
        assert ours == exposed_by(snapshot)
    assert len(ours) == len(exposed_by(snapshot))
    assert found[ALIVE, ()] == 1


def test_names_are_a_promise() -> None:
    """Ours, llama-server's, the process's: dashboards rely on them."""
    text = exposed(busy_world().metrics.snapshot()).body.decode()
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(set(families)) == len(families)
    assert [name for name in families if name.startswith("llamacpp:")] == list(LLAMA)
    assert set(NAMES) | {ALIVE} <= set(families)
    http = [name for name in families if name.startswith("paceline_http")]
    assert http == [exposition.STREAMS, exposition.BYTES]
    assert {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"} <= set(families)


def test_llama_server_s_metrics_have_the_values_of_ours() -> None:
    """From the same counters; prompts and embedded texts count together, tokens and seconds alike."""
    snapshot = busy_world().metrics.snapshot()
    embedded, embedding_s = snapshot.number("paceline_embedded_tokens_total"), 0.0
    for sample in snapshot:
        if sample.name == "paceline_tick_seconds" and sample.labels == (("kind", "embed"),):
            assert isinstance(sample.value, Histogram)
            embedding_s = sample.value.sum
    assert embedded > 0
    assert embedding_s > 0
    found = {name: value for (name, _), value in values(exposed(snapshot).body.decode()).items()}
    assert found["llamacpp:prompt_tokens_total"] == snapshot.number("paceline_prefill_tokens_total") + embedded
    assert found["llamacpp:prompt_tokens_cached_total"] == snapshot.number("paceline_prefix_hit_tokens_total") > 0
    assert found["llamacpp:prompt_seconds_total"] == snapshot.number("paceline_prefill_seconds_total") + embedding_s
    assert found["llamacpp:tokens_predicted_total"] == snapshot.number("paceline_tokens_generated_total") > 0
    assert found["llamacpp:tokens_predicted_seconds_total"] == snapshot.histogram("paceline_itl_seconds").sum > 0
    ticks = [snapshot.histogram("paceline_tick_seconds", kind).count for kind in ("generate", "embed")]
    assert min(ticks) > 0
    assert found["llamacpp:n_decode_total"] == sum(ticks)
    assert found["llamacpp:n_tokens_max"] == 30 + 10
    assert found["llamacpp:requests_processing"] == found["llamacpp:requests_deferred"] == 0
    assert 1 < found["llamacpp:n_busy_slots_per_decode"] <= 4


def test_requests_that_run_and_wait_are_counted_apart() -> None:
    """Running requests are counted by slots, waiting requests by the queue."""
    world = World(limits={"num_slots": 2}, eos_every=10**9)
    for _ in range(5):
        world.submit("on and on", max_tokens=None)
    world.tick(2)
    found = values(exposed(world.metrics.snapshot()).body.decode())
    assert (found["llamacpp:requests_processing", ()], found["llamacpp:requests_deferred", ()]) == (2, 3)


def test_rates_are_those_since_the_last_look() -> None:
    """Without anything new in between there is none."""
    world = World(eos_every=10**9)
    rates = LlamaMetrics()
    world.submit(list(range(40, 60)), max_tokens=20)
    world.run()
    first = {sample.name: sample.value for sample in rates.samples(world.metrics.snapshot())}
    second = {sample.name: sample.value for sample in rates.samples(world.metrics.snapshot())}
    snapshot = world.metrics.snapshot()
    between = snapshot.histogram("paceline_itl_seconds")
    assert first["llamacpp:predicted_tokens_seconds"] == between.count / between.sum
    assert first["llamacpp:prompt_tokens_seconds"] == 20 / snapshot.number("paceline_prefill_seconds_total")
    assert second["llamacpp:predicted_tokens_seconds"] == second["llamacpp:prompt_tokens_seconds"] == 0


def test_the_servers_own_counts_are_exposed_too() -> None:
    """Requests by route, method and status, their times, streams and bytes."""
    http = HttpMetrics()
    http.observe("/v1/completions", 200, 0.3, method="POST")
    http.observe("/v1/completions", 200, 0.4, method="POST")
    http.observe("/health", 503, 0.0005)
    http.stream_opened()
    http.stream_opened()
    http.stream_closed()
    http.sent(70)
    http.sent(7)
    found = counted(http)
    completions = (("method", "POST"), ("route", "/v1/completions"), ("status", "200"))
    assert found[exposition.REQUESTS, completions] == 2
    assert found[exposition.REQUESTS, (("method", "GET"), ("route", "/health"), ("status", "503"))] == 1
    assert found[f"{exposition.SECONDS}_sum", (("route", "/v1/completions"),)] == pytest.approx(0.7)
    assert found[f"{exposition.SECONDS}_bucket", (("le", "0.001"), ("route", "/health"))] == 1
    assert found[exposition.STREAMS, ()] == 1
    assert found[exposition.BYTES, ()] == 77


def counted(http: HttpMetrics) -> Values:
    return values(exposed(World().metrics.snapshot(), http).body.decode())


def test_strangers_cannot_fill_memory_with_places() -> None:
    """Beyond a bound all that is new counts as other; nothing is left uncounted."""
    http = HttpMetrics()
    for index in range(3000):
        http.observe(f"/{index}", 404, 0.01, method=f"M{index}")
    found = {place: value for place, value in counted(http).items() if place[0] == exposition.REQUESTS}
    assert len(found) == 1001
    assert sum(found.values()) == 3000
    assert found[exposition.REQUESTS, (("method", OTHER), ("route", OTHER), ("status", "404"))] == 2000


def test_a_worker_has_process_metrics_while_there_is_one() -> None:
    """Any process will do here: this one."""
    snapshot = World().metrics.snapshot()
    there = values(exposed(snapshot, worker_pid=os.getpid()).body.decode())
    assert there["paceline_worker_process_open_fds", ()] > 0
    gone = values(exposed(snapshot, worker_pid=None).body.decode())
    assert not [name for name, _ in gone if name.startswith("paceline_worker")]


def test_an_engine_that_is_not_alive_is_a_zero() -> None:
    """For alarms."""
    found = values(exposed(World().metrics.snapshot(), is_alive=False).body.decode())
    assert found[ALIVE, ()] == 0


@pytest.mark.skipif(not PAGE.is_file(), reason="the tests run without the pages beside them")
def test_the_page_is_the_tables() -> None:
    """docs/prometheus.md is generated: python -m paceline.server.exposition > docs/prometheus.md."""
    assert PAGE.read_text(encoding="utf-8") == exposition.markdown()
