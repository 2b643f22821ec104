"""Traces: what is written is read again, a cut end is tolerated, and a file that fails harms nobody."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.unit.engine.simulated import Job, Simulation

from paceline.engine.instruments import HOOKS, Instruments
from paceline.engine.metrics import Metrics
from paceline.engine.trace import TraceRecorder, read_trace
from paceline.engine.trace_events import (
    EVENTS,
    EngineRestarted,
    Evicted,
    Paused,
    Preempted,
    PrefixInstability,
    PrefixShared,
    SlotFreed,
    Started,
    Trace,
    TraceEvent,
    moment_s,
)
from paceline.errors import InvalidParams, InvalidType, RequestError, TraceError
from paceline.scheduling.instrument import EndRecord, RequestRecord, RowRecord, TickRecord
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
    Started(3, 0, 1, 0.25),
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
    """A hook that is added must become an event, and one of each is tried here."""
    assert set(EVENTS) == set(HOOKS)
    assert {type(event) for event in ONE_OF_EACH} == set(EVENTS.values())


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """Every kind of event comes back as the record that it was."""
    assert read_trace(written(tmp_path / "trace", Trace(ONE_OF_EACH))) == Trace(ONE_OF_EACH)


def test_the_format_has_a_version(tmp_path: Path) -> None:
    """Whoever changes these lines raises the version, since traces are kept."""
    header, *lines = written(tmp_path / "trace", Trace(ONE_OF_EACH)).read_text().splitlines()
    row = ["slot", "key", "choice", "position", "num_tokens", "num_decode", "num_drafts", "num_new", "first"]
    assert json.loads(header) == {"trace": "paceline", "version": 1, "row": row}
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


def test_moments_count_from_the_first_event(tmp_path: Path) -> None:
    """Durations stay what they are; all are rounded to a millionth of a second."""
    with TraceRecorder(tmp_path / "trace") as recorder:
        recorder.request_started(1, 0, 0, 1000.0)
        recorder.evicted(1, "host", 1002.50000049)
        recorder.request_ended(EndRecord(key=1, reason=FinishReason.END, usage=Usage(queue_s=0.12345678), now_s=1003.0))
    started, evicted, ended = read_trace(tmp_path / "trace").events
    assert [moment_s(event) for event in (started, evicted, ended)] == [0.0, 2.5, 3.0]
    assert isinstance(ended, EndRecord) and ended.usage.queue_s == 0.123457


def test_the_beginning_can_be_given(tmp_path: Path) -> None:
    """What was before it has negative moments, and can be read."""
    with TraceRecorder(tmp_path / "trace", start_s=10.0) as recorder:
        recorder.engine_restarted(9)  # a clock may answer integers
        recorder.engine_restarted(12.5)
    assert read_trace(tmp_path / "trace").events == (EngineRestarted(-1.0), EngineRestarted(2.5))


def test_a_replayed_trace_makes_the_same_metrics(tmp_path: Path) -> None:
    """What an instrument is told while the engine runs, it can be told again from the file."""
    live = Metrics()
    with TraceRecorder(tmp_path / "trace", start_s=0.0) as recorder:
        simulation = Simulation(Instruments([live, recorder]))
        for key in range(20):
            simulation.submit(Job(key, 30 + key, 5, 0.02 * key, burst=1 + key % 2))
        simulation.run()
    again = Metrics()
    read_trace(tmp_path / "trace").replay(again)
    again.check()
    for one, other in zip(live.collect(), again.collect(), strict=True):
        if isinstance(one.value, (int, float)):
            assert one == other
        else:
            assert not isinstance(other.value, (int, float))
            assert one.value.count == other.value.count > -1
            assert one.value.sum == pytest.approx(other.value.sum, abs=1e-4)


def test_a_text_file_of_the_caller_s_stays_open() -> None:
    """The recorder flushes it, and closing it is the caller's business."""
    file = io.StringIO()
    with TraceRecorder(file) as recorder:
        recorder.engine_restarted(1.0)
    assert [json.loads(line).get("event") for line in file.getvalue().splitlines()] == [None, "engine_restarted"]


def test_after_close_the_hooks_do_nothing(tmp_path: Path) -> None:
    """An engine may outlive its trace; closing twice is closing once."""
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
    """By the moments of the events, the first one among them; no clock is asked."""
    file = Counting()
    recorder = TraceRecorder(file, flush_interval_s=interval_s)
    for now_s in (5.0, 5.5, 6.0, 6.9, 7.2):
        recorder.engine_restarted(now_s)
    assert file.num_flushes == num_flushes


class Full(io.StringIO):
    """A disk that takes a few lines and no more."""

    num_lines = 2

    def write(self, text: str, /) -> int:
        self.num_lines -= 1
        if self.num_lines < 0:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """The engine goes on, other instruments are told, the recorder is removed and can be closed."""
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


def test_what_could_not_be_written_is_not_tried_again() -> None:
    """The error is raised once; what comes after it is no part of the trace."""
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
    """And the file is closed, so that nothing complains about it later."""
    recorder = TraceRecorder("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        recorder.engine_restarted(1.0)
    recorder.close()
    assert recorder._file is None


def test_a_path_that_cannot_be_opened_raises_at_once(tmp_path: Path) -> None:
    """Before any engine runs."""
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
    """By the name of the option."""
    with pytest.raises(InvalidParams, match=message):
        make()
    assert issubclass(InvalidType, InvalidParams)


def test_a_last_line_that_is_cut_is_left_out(tmp_path: Path) -> None:
    """Wherever the process died: what was whole is read, and the trace says that it is cut."""
    path = written(tmp_path / "trace", Trace(ONE_OF_EACH))
    whole = path.read_bytes()
    begin = whole.rindex(b"\n", 0, -1) + 1
    for end in range(begin, len(whole) + 1):
        path.write_bytes(whole[:end])
        found = read_trace(path)
        assert found.is_cut == (begin < end < len(whole))
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
        ("", "it is no JSON"),
        (LINE[:-4], "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[1]", "it is no JSON object"),
        ('{"event":"nap"}', "'nap' is no event"),
        ('{"event":[]}', "is no event"),
        (LINE.replace("choice", "voice"), "Started lacks fields, or has some too many: choice, voice"),
        (LINE.replace("3", "3.0"), "key cannot be 3.0"),
        (LINE.replace("3", "true"), "key cannot be True"),
        (LINE.replace("3", "-3"), "key cannot be -3"),
        (LINE.replace("3", "9" * 30), "key cannot be 9999"),
        (LINE.replace("0.25", '"0.25"'), "now_s cannot be '0.25'"),
        (LINE.replace("0.25", "NaN"), "now_s cannot be nan"),
        (LINE.replace("0.25", "1e999"), "now_s cannot be inf"),
        (TICK.replace("generate", "dream") % "", "kind cannot be 'dream'"),
        (TICK.replace("0.1", "-0.1") % "", "elapsed_s cannot be -0.1"),
        (TICK % "[1,2,3]", r"rows cannot be \[1, 2, 3\]"),
        (TICK % "[1,3,0,7,4,1,3,-2,false]", "rows cannot be"),
        (TICK % "[1,3,0,7,4,1,3,2,0]", "rows cannot be"),
        (TICK.replace("[%s]", "7"), "rows cannot be 7"),
        (END % ('"bored"', "{}"), "reason cannot be 'bored'"),
        (END % ("[]", "{}"), r"reason cannot be \[\]"),
        (END % ('"end"', "{}"), "Usage lacks fields"),
        (END % ('"end"', "3"), "usage cannot be 3"),
    ],
)
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    """A line in the middle, or one that is whole, is no crash's doing."""
    path = written(tmp_path / "trace", Trace(ONE_OF_EACH[:1]))
    path.write_text(path.read_text() + line + "\n" + LINE + "\n")
    with pytest.raises(TraceError, match=f"trace, line 3: .*{message}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has no first line"),
        (b'{"trace":"pace', "it has no first line"),
        (b"hello\n", "line 1: it is no JSON"),
        (b"\xff\xfe\n", "line 1: it is no UTF-8"),
        (b'{"a": 1}\n', "line 1: it does not begin as a trace does"),
        (b'{"trace": "paceline", "version": 2}\n', "line 1: its version is 2; this paceline reads version 1"),
    ],
)
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, data: bytes, message: str) -> None:
    """An error of the caller's, with the path."""
    (tmp_path / "trace").write_bytes(data)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "trace")
    assert issubclass(TraceError, RequestError)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    """As everywhere in Python."""
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nothing")
