"""What the front itself counts: HTTP requests by route and status, open streams, bytes of them.

Whoever answers requests calls it on the event loop, and whoever exports it reads on any thread: a lock is held for as long as
counting takes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Final

from paceline.engine.histogram import Tally
from paceline.engine.metrics_snapshot import Sample

OTHER: Final = "other"
"""The route of requests that matched none, and of all beyond the number that is kept apart."""

_MOST_PLACES = 1000  # of route, method and status: what a stranger sends must not fill memory
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
        """A request was answered. route: the path as the server names it, never as it was sent; `OTHER` where none matched."""
        with self._lock:
            place = (route, method, status)
            if place not in self._requests and len(self._requests) >= _MOST_PLACES:
                route, place = OTHER, (OTHER, OTHER, status)
            self._requests[place] += 1
            if route not in self._seconds:
                self._seconds[route] = Tally(_SECONDS)
            self._seconds[route].observe(seconds)

    def stream_opened(self) -> None:
        """A stream of events begins."""
        with self._lock:
            self._num_streams += 1

    def stream_closed(self) -> None:
        """It has ended, however that was."""
        with self._lock:
            self._num_streams -= 1

    def sent(self, num_bytes: int) -> None:
        """So many bytes of a stream went out."""
        with self._lock:
            self._num_bytes += num_bytes

    def samples(self) -> Iterator[Sample]:
        """All of it at one moment."""
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
