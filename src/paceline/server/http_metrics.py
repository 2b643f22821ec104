"""Count HTTP requests by route and status, open event streams and their bytes.

Written on the event loop, read on any thread, under a lock.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Final

from paceline.observability.metrics import Tally
from paceline.observability.metrics_snapshot import Sample

OTHER: Final = "other"
"""The route of requests that matched none, and of all beyond the maximum number of series."""

_MAX_SERIES = 1000  # of route, method and status: requests must not fill memory
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)

REQUESTS: Final = "paceline_http_requests_total"
SECONDS: Final = "paceline_http_request_seconds"
STREAMS: Final = "paceline_http_streams_open"
BYTES: Final = "paceline_http_streamed_bytes_total"

HELP: Final = {
    REQUESTS: "HTTP requests that were answered.",
    SECONDS: "From an HTTP request's first byte to its answer's last one.",
    STREAMS: "Streams of events that are open.",
    BYTES: "Bytes sent in streams of events, heartbeats included.",
}


class HttpMetrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: dict[str, Tally] = {}
        self._num_streams = 0
        self._num_bytes = 0

    def observe(self, route: str, status: int, seconds: float, *, method: str = "GET") -> None:
        """Count a request. route: the route's pattern, never the path as sent; `OTHER` where none matched."""
        with self._lock:
            series = (route, method, status)
            if series not in self._requests and len(self._requests) >= _MAX_SERIES:
                route, series = OTHER, (OTHER, OTHER, status)
            self._requests[series] += 1
            if route not in self._seconds:
                self._seconds[route] = Tally(_SECONDS)
            self._seconds[route].observe(seconds)

    def stream_opened(self) -> None:
        """Count an event stream as open."""
        with self._lock:
            self._num_streams += 1

    def stream_closed(self) -> None:
        """Count an event stream as ended."""
        with self._lock:
            self._num_streams -= 1

    def sent(self, num_bytes: int) -> None:
        """Count bytes of event streams."""
        with self._lock:
            self._num_bytes += num_bytes

    def samples(self) -> Iterator[Sample]:
        """Yield a consistent snapshot of all samples."""
        with self._lock:
            requests = sorted(self._requests.items())
            seconds = [(route, tally.histogram()) for route, tally in sorted(self._seconds.items())]
            num_streams, num_bytes = self._num_streams, self._num_bytes
        for (route, method, status), number in requests:
            labels = (("route", route), ("method", method), ("status", str(status)))
            yield Sample(REQUESTS, "counter", labels, number)
        for route, histogram in seconds:
            yield Sample(SECONDS, "histogram", (("route", route),), histogram)
        yield Sample(STREAMS, "gauge", (), num_streams)
        yield Sample(BYTES, "counter", (), num_bytes)
