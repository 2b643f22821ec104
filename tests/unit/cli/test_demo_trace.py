"""A trace that cannot be written: the demo continues, and reports the reason at its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.observability.recorded import two_requests

from paceline.cli.demo_pace import LenientRecorder
from paceline.observability.trace_file import read_trace

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no file here is always full")


def test_what_can_be_written_is_there(tmp_path: Path) -> None:
    """And there is no error."""
    with LenientRecorder(tmp_path / "trace") as recorder:
        two_requests().replay(recorder)
    assert read_trace(tmp_path / "trace").events == two_requests().events
    assert recorder.error is None


@needs_full
@pytest.mark.parametrize("flush_interval_s", [0, 1e9])
def test_a_write_error_is_kept_and_not_raised(flush_interval_s: float) -> None:
    """Also if it shows only when the file is closed."""
    with LenientRecorder(FULL, flush_interval_s=flush_interval_s) as recorder:
        two_requests().replay(recorder)
    assert recorder.error is not None and recorder.error.strerror == "No space left on device"


def test_a_file_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    """Before anything has begun."""
    with pytest.raises(FileNotFoundError):
        LenientRecorder(tmp_path / "no" / "trace")
