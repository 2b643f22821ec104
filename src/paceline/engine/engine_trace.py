"""The trace that an engine's option asks for: opened before the engine begins, closed after it has ended."""

from __future__ import annotations

import logging

from paceline.config import EngineConfig
from paceline.errors import InvalidParams
from paceline.observability.trace_file import TraceRecorder

_log = logging.getLogger("paceline.engine")


def open_trace(config: EngineConfig, start_s: float) -> TraceRecorder | None:
    """Return the recorder of `config.trace`; None without one. Raises `InvalidParams` where the file cannot be opened."""
    if config.trace is None:
        return None
    try:
        return TraceRecorder(config.trace, start_s=start_s, max_bytes=config.trace_max_bytes)
    except OSError as error:
        raise InvalidParams(f"trace {config.trace} cannot be written: {error.strerror or error}") from None


def close_trace(recorder: TraceRecorder) -> None:
    """Close a trace at the end of its engine; what cannot be written is logged, as nothing else depends on it."""
    try:
        recorder.close()
    except OSError as error:
        _log.error("the trace is not whole: %s", error.strerror or error)
