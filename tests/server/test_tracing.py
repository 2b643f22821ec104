"""Traces: the context of `traceparent`, spans of requests by OpenTelemetry's SDK, and trace ids in logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.polling import wait_until

from paceline.cli.serve import _JsonLines
from paceline.cluster.replica_service import _Trace
from paceline.errors import Unsupported
from paceline.observability.tracing import TRACE_ID, RequestSpan, trace_id_of
from paceline.scheduling.records import Delta, Failed
from paceline.server.settings import ACCESS_LOGGER
from paceline.streaming import FinishReason, StreamChunk

pytestmark = pytest.mark.native

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The spans that end during the test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(RequestSpan, "_tracer", staticmethod(lambda: provider.get_tracer("test")))
    yield exporter
    provider.shutdown()


def finished(exporter: InMemorySpanExporter, name: str) -> dict[str, ReadableSpan]:
    """All spans by name, when the request's own has ended: the client may have its response before."""
    wait_until(lambda: any(span.name == name for span in exporter.get_finished_spans()))
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_chat_has_a_span_with_its_phases(world: Any, spans: InMemorySpanExporter) -> None:
    """It belongs to the caller's trace; its children follow each other, and the attributes are GenAI's."""
    with world.client(headers={"traceparent": PARENT}) as client:
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,
        }
        reply = client.post("/v1/chat/completions", json=body).json()
    found = finished(spans, "chat tale")
    span = found["chat tale"]
    assert span.parent is not None and span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent.is_remote
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "tale"
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == (5, 0)
    assert attributes["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert (attributes["http.route"], attributes["http.response.status_code"]) == ("/v1/chat/completions", 200)
    children = [found[name] for name in ("queue", "prefill", "decode", "parse_tool_calls")]
    assert all(child.parent is not None and child.parent.span_id == span.context.span_id for child in children)
    queue, prefill, decode, _ = children
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert "hello" not in str([each.to_json() for each in found.values()])


def test_failures_and_other_routes(world: Any, spans: InMemorySpanExporter) -> None:
    """A refused request has its status; a GET has no span."""
    with world.client() as client:
        client.get("/v1/models")
        client.post("/v1/completions", json={"prompt": "x", "top_p": 5})
    found = finished(spans, "POST /v1/completions")
    assert len(found) == 1
    span = found["POST /v1/completions"]
    assert dict(span.attributes or {})["error.type"] == "400"
    assert span.parent is None


def access_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == ACCESS_LOGGER]


def test_trace_ids_are_in_the_logs_also_without_spans(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of the access log, and of each line of JSON that is logged while a request is served."""
    with caplog.at_level(logging.INFO, logger=ACCESS_LOGGER), world.client() as client:
        client.get("/v1/models", headers={"traceparent": PARENT})
        client.get("/v1/models", headers={"traceparent": "malformed"})
        wait_until(lambda: len(access_lines(caplog)) == 2)
    lines = list(map(json.loads, access_lines(caplog)))
    assert [line.get("trace_id") for line in lines] == [TRACE, None]
    record = logging.LogRecord("paceline.server", logging.INFO, "", 0, "text", None, None)
    token = TRACE_ID.set(TRACE)
    assert json.loads(_JsonLines().format(record))["trace_id"] == TRACE
    TRACE_ID.reset(token)
    assert "trace_id" not in json.loads(_JsonLines().format(record))


def test_the_trace_goes_on_to_replicas(
    world: Any, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options of the engine's request have the context of the span, as the front of a cluster sends them."""
    engine = world.service.engine()
    seen: list[str | None] = []
    prepare = engine.prepare

    def noted(prompt: Any, params: Any, options: Any) -> Any:
        seen.append(options.traceparent)
        return prepare(prompt, params, options)

    monkeypatch.setattr(engine, "prepare", noted)
    with world.client(headers={"traceparent": PARENT}) as client:
        client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
    span = finished(spans, "text_completion tale")["text_completion tale"]
    assert span.context is not None
    assert seen == [f"00-{TRACE}-{span.context.span_id:016x}-01"]


def test_a_replica_has_a_span_in_the_trace_of_its_front(spans: InMemorySpanExporter) -> None:
    """It ends with the request, or its failure; a request without a trace has none."""
    chunk = StreamChunk(index=0, token_ids=(), text="", finish_reason=FinishReason.STOP)
    for event in (Delta(1, None), Delta(1, chunk, is_last=True), Failed(1, Unsupported("no"))):
        assert _Trace(PARENT, "one").noted(event) is event
        assert _Trace(None, "one").noted(event) is event
    ended, failed = spans.get_finished_spans()
    assert ended.name == failed.name == "replica one"
    assert ended.parent is not None and f"{ended.parent.trace_id:032x}" == TRACE
    assert dict(ended.attributes or {})["gen_ai.response.finish_reasons"] == ("stop",)
    assert (ended.status.is_ok, failed.status.is_ok, failed.status.description) == (True, False, "unsupported")


@pytest.mark.parametrize(
    ("header", "trace_id"),
    [
        (PARENT, TRACE),
        (None, ""),
        ("", ""),
        (PARENT.upper(), ""),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", ""),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (PARENT[:-3], ""),
    ],
)
def test_malformed_headers_are_no_trace(header: str | None, trace_id: str) -> None:
    """As W3C's recommendation defines them."""
    assert trace_id_of(header) == trace_id
