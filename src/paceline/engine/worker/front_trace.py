"""The trace of an engine whose ticks are another process's: the front writes it, whatever becomes of workers.

The front knows each request once, however often it is replayed; slots, memory and ticks are known to the worker, which sends
its events as lines (`worker_trace`). Supervising thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paceline.engine.engine_trace import close_trace
from paceline.observability.instruments import Instrument
from paceline.observability.trace_file import TraceRecorder
from paceline.scheduling.telemetry import EndRecord, RequestRecord

_log = logging.getLogger("paceline.engine")


class FrontTrace(Instrument):
    """Writes what the front knows better than a worker, and what workers send."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder

    def request_queued(self, record: RequestRecord) -> None:
        """Write it."""
        self._recorder.request_queued(record)

    def request_ended(self, record: EndRecord) -> None:
        """Write it."""
        self._recorder.request_ended(record)

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:
        """Write it."""
        self._recorder.paused(key, is_paused, now_s)

    def engine_restarted(self, now_s: float) -> None:
        """Write it."""
        self._recorder.engine_restarted(now_s)

    def write_lines(self, lines: Iterable[str], now_s: float) -> None:
        """Write what a worker sent; an error ends the trace and nothing else."""
        try:
            self._recorder.write_lines(lines, now_s)
        except OSError as error:
            _log.error("the trace ends, as it cannot be written: %s", error.strerror or error)

    def close(self) -> None:
        """Write what is left; idempotent."""
        close_trace(self._recorder)
