"""A trace that cannot be written: the demo continues, and reports the reason at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.demo_instruments import TraceFile

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no file here is always full")


def test_what_can_be_written_is_there(tmp_path: Path) -> None:
    """And there is no problem."""
    with TraceFile(tmp_path / "trace") as file:
        file.write("one\n")
        file.flush()
        file.write("two\n")
    assert (tmp_path / "trace").read_text() == "one\ntwo\n"
    assert file.problem is None


@needs_full
@pytest.mark.parametrize("flushes", [True, False])
def test_a_write_error_is_reported_and_not_raised(flushes: bool) -> None:
    """Also where it shows only when the file is closed."""
    with TraceFile(FULL) as file:
        file.write("one\n")
        if flushes:
            file.flush()
            assert file.problem is not None
            file.write("two\n")
    assert file.problem == "the trace /dev/full is incomplete: No space left on device"


def test_a_file_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    """Before anything has begun."""
    with pytest.raises(FileNotFoundError):
        TraceFile(tmp_path / "no" / "trace")
