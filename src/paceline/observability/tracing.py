"""Spans of requests by OpenTelemetry's API package, and W3C trace contexts, which need no package. Any thread.

Without the package, and without an SDK that the program has set up, there are no spans. Trace ids are in logs and reach replicas
in any case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from paceline.streaming.chunk import Usage

if TYPE_CHECKING:
    from opentelemetry.trace import Span

TRACE_ID: Final[ContextVar[str]] = ContextVar("trace_id", default="")
"""The trace id of the request that is being served, for logs."""

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def trace_id_of(traceparent: str | None) -> str:
    """Return the trace id of a traceparent header; empty if it is missing or malformed."""
    match = _TRACEPARENT.match(traceparent or "")
    return match[1] if match else ""


@cache
def opentelemetry_api() -> Any:
    """Return OpenTelemetry's modules `trace` and `propagate`, or None without the package. The first call imports them."""
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return None
    return trace, propagate


class RequestSpan:
    """The span of one request with its children. It has no effect without OpenTelemetry.

    Args:
        name: The span's name.
        headers: `traceparent` and `tracestate` of the caller, if there are any.
        is_on: False: no span is made, and the headers are passed on as they are.
    """

    def __init__(self, name: str, headers: Mapping[str, str], *, is_on: bool = True) -> None:
        self._headers = headers
        self._span: Span | None = None
        if is_on and (api := opentelemetry_api()) is not None:
            trace, propagate = api
            parent = propagate.extract(headers)
            self._span = self._tracer().start_span(name, context=parent, kind=trace.SpanKind.SERVER)

    @staticmethod
    def _tracer() -> Any:
        return opentelemetry_api()[0].get_tracer("paceline")

    @property
    def traceparent(self) -> str | None:
        """The header for requests that follow from this one; the caller's without a span; None if it is malformed."""
        if self._span is not None and self._span.get_span_context().is_valid:
            carrier: dict[str, str] = {}
            trace, propagate = opentelemetry_api()
            propagate.inject(carrier, trace.set_span_in_context(self._span))
            if trace_id_of(carrier.get("traceparent")):
                return carrier["traceparent"]
        given = self._headers.get("traceparent")
        return given if trace_id_of(given) else None

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager that makes the span the current one."""
        if self._span is None:
            return nullcontext()
        found: AbstractContextManager[object] = opentelemetry_api()[0].use_span(self._span, end_on_exit=False)
        return found

    def add_phases(self, submitted_ns: int, usage: Usage) -> None:
        """Add the children `queue`, `prefill` and `decode` of an engine's request that has ended."""
        at_ns = submitted_ns
        for name, seconds in (("queue", usage.queue_s), ("prefill", usage.prefill_s), ("decode", usage.decode_s)):
            end_ns = at_ns + int(seconds * 1e9)
            self.add_child(name, at_ns, end_ns)
            at_ns = end_ns

    def add_child(self, name: str, start_ns: int, end_ns: int) -> None:
        """Add a child that has ended. start_ns, end_ns: Unix nanoseconds."""
        if self._span is not None and self._span.is_recording():
            context = opentelemetry_api()[0].set_span_in_context(self._span)
            self._tracer().start_span(name, context=context, start_time=start_ns).end(end_ns)

    def end(self, name: str, attributes: Mapping[str, Any], *, error: str | None = None) -> None:
        """End the span. attributes: those that are None are left out. error: why it failed."""
        if self._span is None:
            return
        if self._span.is_recording():
            self._span.update_name(name)
            self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})
            if error is not None:
                trace = opentelemetry_api()[0]
                self._span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        self._span.end()
