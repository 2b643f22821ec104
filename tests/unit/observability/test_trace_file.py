"""Trace files: events survive writing and reading, a truncated end is tolerated, and a failing file harms no engine."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.unit.observability.simulated import Job, Simulation

from paceline.errors import InvalidParams, InvalidType, RequestError, TraceError
from paceline.observability.metrics import HOOKS, Instruments, Metrics
from paceline.observability.trace_file import (
    EVENTS,
    EngineRestarted,
    Evicted,
    Paused,
    Preempted,
    PrefixInstability,
    PrefixShared,
    RequestStarted,
    SlotFreed,
    Trace,
    TraceEvent,
    TraceRecorder,
    event_time,
    read_trace,
)
from paceline.scheduling.records import EndRecord, RequestRecord, RowRecord, TickRecord
from paceline.streaming.chunk import FinishReason, Usage

ROW = RowRecord(slot=1, key=3, choice=0, position=7, num_tokens=4, num_decode=1, num_drafts=3, num_new=2, first=False)
ONE_OF_EACH: tuple[TraceEvent, ...] = (
    RequestRecord(
        key=3,
        request_id='"naïve"\n\u2028',
        kind="generate",
        prompt_tokens=8,
        num_choices=2,
        max_tokens=None,
        priority=-1,
        submitted_s=0.0,
    ),
    RequestStarted(3, 0, 1, 0.25),
    PrefixShared(3, 0, 6, "host"),
    PrefixInstability(3, 700, 90, 0.25),
    Evicted(64, "device", 0.3),
    TickRecord(
        index=0,
        kind="generate",
        start_s=0.3,
        elapsed_s=0.125,
        step_s=0.1,
        rows=(ROW, ROW),
        num_slots=4,
        num_running=2,
        num_waiting=1,
        num_cells=99,
        budget=64,
    ),
    Paused(3, True, 0.5),
    Preempted(3, 0, 12, 0.5),
    SlotFreed(3, 0, 1, 0.5),
    EngineRestarted(0.75),
    EndRecord(
        key=3,
        reason=FinishReason.ERROR,
        usage=Usage(prompt_tokens=8, cached_from="host", queue_s=0.25, ttft_s=None),
        now_s=1.000001,
        error_code="decode_error",
    ),
)


def written(path: Path, trace: Trace, **options: Any) -> Path:
    with TraceRecorder(path, **options) as recorder:
        trace.replay(recorder)
    return path


def test_there_is_an_event_for_every_hook() -> None:
    """Every hook has an event, and this test has each event once."""
    assert set(EVENTS) == set(HOOKS)
    assert {type(event) for event in ONE_OF_EACH} == set(EVENTS.values())


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """Every kind of event is read back as an equal record."""
    assert read_trace(written(tmp_path / "trace", Trace(ONE_OF_EACH))) == Trace(ONE_OF_EACH)


def test_the_format_has_a_version(tmp_path: Path) -> None:
    """A change of these lines needs a new version, since trace files are kept."""
    header, *lines = written(tmp_path / "trace", Trace(ONE_OF_EACH)).read_text().splitlines()
    row = ["slot", "key", "choice", "position", "num_tokens", "num_decode", "num_drafts", "num_new", "first"]
    assert json.loads(header) == {"trace": "paceline", "version": 2, "row": row}
    assert lines[1] == '{"event":"request_started","key":3,"choice":0,"slot":1,"now_s":0.25}'
    assert json.loads(lines[5]) == {
        "event": "tick_finished",
        "index": 0,
        "kind": "generate",
        "start_s": 0.3,
        "elapsed_s": 0.125,
        "step_s": 0.1,
        "rows": [[1, 3, 0, 7, 4, 1, 3, 2, False]] * 2,
        "num_slots": 4,
        "num_running": 2,
        "num_waiting": 1,
        "num_cells": 99,
        "budget": 64,
        "num_embedded": 0,
        "num_embedded_tokens": 0,
    }
    assert list(json.loads(lines[0])) == ["event", *(field.name for field in fields(RequestRecord))]
    assert list(json.loads(lines[10])["usage"]) == [field.name for field in fields(Usage)]


def test_times_count_from_the_first_event(tmp_path: Path) -> None:
    """Times count from the first event, durations stay; both are rounded to a microsecond."""
    with TraceRecorder(tmp_path / "trace") as recorder:
        recorder.request_started(1, 0, 0, 1000.0)
        recorder.evicted(1, "host", 1002.50000049)
        recorder.request_ended(
            EndRecord(key=1, reason=FinishReason.STOP, usage=Usage(queue_s=0.12345678), now_s=1003.0)
        )
    started, evicted, ended = read_trace(tmp_path / "trace").events
    assert [event_time(event) for event in (started, evicted, ended)] == [0.0, 2.5, 3.0]
    assert isinstance(ended, EndRecord) and ended.usage.queue_s == 0.123457


def test_the_beginning_can_be_given(tmp_path: Path) -> None:
    """Events before start_s have negative times, and can be read."""
    with TraceRecorder(tmp_path / "trace", start_s=10.0) as recorder:
        recorder.engine_restarted(9)  # a clock may return integers
        recorder.engine_restarted(12.5)
    assert read_trace(tmp_path / "trace").events == (EngineRestarted(-1.0), EngineRestarted(2.5))


def test_a_replayed_trace_makes_the_same_metrics(tmp_path: Path) -> None:
    """A trace calls an instrument's hooks as the engine did."""
    live = Metrics()
    with TraceRecorder(tmp_path / "trace", start_s=0.0) as recorder:
        simulation = Simulation(Instruments([live, recorder]))
        for key in range(20):
            simulation.submit(Job(key, 30 + key, 5, 0.02 * key, burst=1 + key % 2))
        simulation.run()
    again = Metrics()
    read_trace(tmp_path / "trace").replay(again)
    again.check()
    for completion, other in zip(live.collect(), again.collect(), strict=True):
        if isinstance(completion.value, (int, float)):
            assert completion == other
        else:
            assert not isinstance(other.value, (int, float))
            assert completion.value.count == other.value.count > -1
            assert completion.value.sum == pytest.approx(other.value.sum, abs=1e-4)


def test_a_text_file_of_the_caller_s_stays_open() -> None:
    """The recorder flushes a caller's file and does not close it."""
    file = io.StringIO()
    with TraceRecorder(file) as recorder:
        recorder.engine_restarted(1.0)
    assert [json.loads(line).get("event") for line in file.getvalue().splitlines()] == [None, "engine_restarted"]


def test_after_close_the_hooks_do_nothing(tmp_path: Path) -> None:
    """Hooks after close do nothing, and close is idempotent."""
    recorder = TraceRecorder(tmp_path / "trace")
    recorder.engine_restarted(1.0)
    recorder.close()
    recorder.engine_restarted(2.0)
    recorder.close()
    assert len(read_trace(tmp_path / "trace").events) == 1


class Counting(io.StringIO):
    num_flushes = 0

    def flush(self) -> None:
        self.num_flushes += 1


@pytest.mark.parametrize(("interval_s", "num_flushes"), [(0, 5), (1.0, 3), (100.0, 1)])
def test_flushes_come_at_their_interval(interval_s: float, num_flushes: int) -> None:
    """The interval is measured by the times of events, the first included, and not by a clock."""
    file = Counting()
    recorder = TraceRecorder(file, flush_interval_s=interval_s)
    for now_s in (5.0, 5.5, 6.0, 6.9, 7.2):
        recorder.engine_restarted(now_s)
    assert file.num_flushes == num_flushes


class Full(io.StringIO):
    """A disk that is full after a few lines."""

    num_lines = 2

    def write(self, text: str, /) -> int:
        self.num_lines -= 1
        if self.num_lines < 0:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """The engine continues, other instruments are called, and the recorder is removed and can be closed."""
    recorder, metrics = TraceRecorder(Full()), Metrics()
    instruments = Instruments([recorder, metrics])
    with caplog.at_level(logging.DEBUG, "paceline.engine"):
        for now_s in (1.0, 2.0, 3.0):
            instruments.engine_restarted(now_s)
    assert instruments.members == (metrics,)
    assert metrics.snapshot().number("paceline_engine_restarts_total") == 3
    (record,) = caplog.records
    assert "TraceRecorder failed in engine_restarted" in record.getMessage()
    recorder.close()


def test_a_trace_ends_before_it_is_larger_than_it_may_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file ends with a complete line; one warning is logged, and later hooks do nothing."""
    path = written(tmp_path / "trace", Trace(ONE_OF_EACH), max_bytes=1000)
    assert 500 < path.stat().st_size <= 1000
    found = read_trace(path)
    assert not found.is_truncated
    assert found.events == ONE_OF_EACH[: len(found.events)]
    assert len(found.events) < len(ONE_OF_EACH)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"the trace {path} has reached max_bytes" in caplog.text


def test_lines_of_another_recorder_are_written_as_they_are(tmp_path: Path) -> None:
    """Lines of another recorder are written among its own events, and ignored after close."""
    lines = written(tmp_path / "other", Trace(ONE_OF_EACH), start_s=0.0).read_text().splitlines()[1:]
    with TraceRecorder(tmp_path / "trace", start_s=0.0) as recorder:
        recorder.write_lines(lines[:4], 0.3)
        recorder.tick_finished(ONE_OF_EACH[5])  # type: ignore[arg-type]
        recorder.write_lines(lines[6:], 1.0)
    recorder.write_lines(lines, 2.0)
    assert read_trace(tmp_path / "trace").events == (*ONE_OF_EACH[:4], *ONE_OF_EACH[5:])


def test_what_could_not_be_written_is_not_tried_again() -> None:
    """A failed write raises once, and nothing is written afterwards."""
    file = Full()
    recorder = TraceRecorder(file)
    recorder.engine_restarted(1.0)
    with pytest.raises(OSError, match="No space left"):
        recorder.engine_restarted(2.0)
    file.num_lines = 9
    recorder.engine_restarted(3.0)
    assert len(file.getvalue().splitlines()) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_device_is_noticed_when_it_is_flushed() -> None:
    """A file that cannot be written is closed, without a ResourceWarning."""
    recorder = TraceRecorder("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        recorder.engine_restarted(1.0)
    recorder.close()
    assert recorder._file is None


def test_a_path_that_cannot_be_opened_raises_at_once(tmp_path: Path) -> None:
    """A path that cannot be opened raises before an engine runs."""
    with pytest.raises(FileNotFoundError):
        TraceRecorder(tmp_path / "nowhere" / "trace")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TraceRecorder(7), "target must be a path or a text file, not a int"),  # type: ignore[arg-type]
        (lambda: TraceRecorder(io.StringIO(), start_s=float("nan")), "start_s"),
        (lambda: TraceRecorder(io.StringIO(), flush_interval_s=-1), "flush_interval_s"),
    ],
)
def test_wrong_options_are_refused(make: Callable[[], object], message: str) -> None:
    """The message has the option's name."""
    with pytest.raises(InvalidParams, match=message):
        make()
    assert issubclass(InvalidType, InvalidParams)


def test_an_incomplete_last_line_is_omitted(tmp_path: Path) -> None:
    """Complete lines are read wherever the last one ends, and is_truncated is set."""
    path = written(tmp_path / "trace", Trace(ONE_OF_EACH))
    whole = path.read_bytes()
    begin = whole.rindex(b"\n", 0, -1) + 1
    for end in range(begin, len(whole) + 1):
        path.write_bytes(whole[:end])
        found = read_trace(path)
        assert found.is_truncated == (begin < end < len(whole))
        assert found.events == (ONE_OF_EACH if end == len(whole) else ONE_OF_EACH[:-1])


LINE = '{"event":"request_started","key":3,"choice":0,"slot":1,"now_s":0.25}'
TICK = (
    '{"event":"tick_finished","index":0,"kind":"generate","start_s":0,"elapsed_s":0.1,"step_s":0.1,"rows":[%s],'
    '"num_slots":4,"num_running":2,"num_waiting":1,"num_cells":9,"budget":64,"num_embedded":0,"num_embedded_tokens":0}'
)
END = '{"event":"request_ended","key":1,"reason":%s,"usage":%s,"now_s":1,"error_code":null}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not valid JSON"),
        (LINE[:-4], "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"event":"nap"}', "unknown event 'nap'"),
        ('{"event":[]}', "unknown event"),
        (LINE.replace("choice", "voice"), "RequestStarted has missing or unknown fields: choice, voice"),
        (LINE.replace("3", "3.0"), "invalid key: 3.0"),
        (LINE.replace("3", "true"), "invalid key: True"),
        (LINE.replace("3", "-3"), "invalid key: -3"),
        (LINE.replace("3", "9" * 30), "invalid key: 9999"),
        (LINE.replace("0.25", '"0.25"'), "invalid now_s: '0.25'"),
        (LINE.replace("0.25", "NaN"), "invalid now_s: nan"),
        (LINE.replace("0.25", "1e999"), "invalid now_s: inf"),
        (TICK.replace("generate", "dream") % "", "invalid kind: 'dream'"),
        (TICK.replace("0.1", "-0.1") % "", "invalid elapsed_s: -0.1"),
        (TICK % "[1,2,3]", r"invalid rows: \[1, 2, 3\]"),
        (TICK % "[1,3,0,7,4,1,3,-2,false]", "invalid rows:"),
        (TICK % "[1,3,0,7,4,1,3,2,0]", "invalid rows:"),
        (TICK.replace("[%s]", "7"), "invalid rows: 7"),
        (END % ('"bored"', "{}"), "invalid reason: 'bored'"),
        (END % ("[]", "{}"), r"invalid reason: \[\]"),
        (END % ('"stop"', "{}"), "Usage has missing or unknown fields"),
        (END % ('"stop"', "3"), "invalid usage: 3"),
    ],
)
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    """An invalid complete line is an error, as no crash leaves one."""
    path = written(tmp_path / "trace", Trace(ONE_OF_EACH[:1]))
    path.write_text(path.read_text() + line + "\n" + LINE + "\n")
    with pytest.raises(TraceError, match=f"trace, line 3: .*{message}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has no complete first line"),
        (b'{"trace":"pace', "it has no complete first line"),
        (b"hello\n", "line 1: not valid JSON"),
        (b"\xff\xfe\n", "line 1: not valid UTF-8"),
        (b'{"a": 1}\n', "line 1: this is not the first line of a trace"),
        (b'{"trace": "paceline", "version": 1}\n', "line 1: its version is 1; this paceline reads version 2"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    """The message has the line and the reason."""
    (tmp_path / "trace").write_bytes(data)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "trace")
    assert issubclass(TraceError, RequestError)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    """It is Python's own error."""
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nothing")
