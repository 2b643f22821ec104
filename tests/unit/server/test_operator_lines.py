"""Lines of the log are written by a thread, in order; lines that find no room are counted."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator

import pytest

from paceline.server import operator_lines
from paceline.server.operator_lines import LogQueue, QueuedLines, write_to

LONG_S = 60.0


class Reader:
    """A descriptor that is written to only while `gate` is set."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.text = ""
        self.error: Exception | None = None

    def write(self, text: str) -> None:
        self.begun.set()
        assert self.gate.wait(LONG_S)
        if self.error is not None:
            raise self.error
        self.text += text


@pytest.fixture
def reader() -> Iterator[Reader]:
    """End the wait of the queue's thread."""
    made = Reader()
    yield made
    made.gate.set()


def test_lines_are_written_in_order_once_they_are_read(reader: Reader) -> None:
    """Until then the threads that log go on."""
    queue = LogQueue(reader.write)
    for number in range(10_000):
        queue.put(f"line {number}")
    queue.flush(0.01)
    assert reader.text == ""
    reader.gate.set()
    queue.flush(LONG_S)
    assert reader.text.splitlines() == [f"line {number}" for number in range(10_000)]


def test_dropped_lines_are_counted_at_their_place(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the log and at its end."""
    monkeypatch.setattr(operator_lines, "MAX_WAITING_CHARS", 10)
    queue = LogQueue(reader.write)
    queue.put("first")
    assert reader.begun.wait(LONG_S)
    for line in ("second", "x" * 10, "y" * 11, "z" * 12):
        queue.put(line)
    reader.gate.set()
    queue.flush(LONG_S)
    queue.put("x" * 11)
    queue.put("last")
    queue.flush(LONG_S)
    gap = "{} lines of the log were dropped, as they were not read or could not be written"
    assert reader.text.splitlines() == ["first", "second", gap.format(3), gap.format(1), "last"]


def test_a_closed_queue_writes_its_lines_first(reader: Reader) -> None:
    """Closing does not wait; the thread ends when the lines are written, and calls back."""
    closed = threading.Event()
    queue = LogQueue(reader.write, closed.set)
    queue.put("one")
    queue.close()
    assert not closed.is_set()
    reader.gate.set()
    assert closed.wait(LONG_S)
    assert reader.text == "one\n"


def test_a_line_after_the_end_of_a_queue_is_lost(reader: Reader) -> None:
    """It is not written: its descriptor may be another file's by now."""
    reader.gate.set()
    queue = LogQueue(reader.write)
    queue.close()
    queue.put("late")
    queue.flush(LONG_S)
    assert reader.text == ""


def test_a_queue_without_lines_is_closed_at_once(reader: Reader) -> None:
    """There is no thread to end."""
    closed = threading.Event()
    LogQueue(reader.write, closed.set).close()
    assert closed.is_set()


def test_lines_that_cannot_be_written_are_dropped(reader: Reader) -> None:
    """A closed pipe, a full disk or a closed stream ends nothing; later lines are written when they can be."""
    reader.gate.set()
    for error in (BrokenPipeError(), OSError(errno.ENOSPC, "full"), ValueError("closed")):
        queue = LogQueue(reader.write)
        reader.error = error
        queue.put("lost")
        queue.flush(LONG_S)
        reader.error, reader.text = None, ""
        queue.put("kept")
        queue.flush(LONG_S)
        assert [line[:13] for line in reader.text.splitlines()] == ["1 lines of th", "kept"]


def test_a_record_that_cannot_be_formatted_is_named(reader: Reader) -> None:
    """Python's own handlers would write to stderr."""
    reader.gate.set()
    queue = LogQueue(reader.write)
    QueuedLines(queue).emit(logging.LogRecord("a.logger", logging.INFO, "", 0, "%d", ("x",), None))
    queue.flush(LONG_S)
    assert reader.text.startswith("paceline: a record of a.logger cannot be formatted: TypeError")


def test_a_descriptor_that_does_not_block_is_waited_for() -> None:
    """As a pipe is that another process has set so."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    text = "\u00e9" * 200_000
    writing = threading.Thread(target=write_to, args=(write_end, text))
    writing.start()
    data = b""
    while len(data) < 400_000:
        data += os.read(read_end, 65536)
    writing.join(LONG_S)
    assert data.decode() == text
    os.close(read_end)
    os.close(write_end)
