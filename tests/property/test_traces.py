"""Traces and histograms under any values: lines come back unchanged, and quantiles lie in their bounds."""

from __future__ import annotations

import json
from bisect import bisect_left
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.trace import viewer_data
from paceline.observability.metrics import Tally
from paceline.observability.trace_file import EVENTS, LineError, Trace, TraceEvent, from_line, to_line
from paceline.scheduling.records import EndRecord, RowRecord, TickRecord
from paceline.streaming.chunk import ENGINE_REASONS, Usage

COUNTS = st.integers(0, 2**40)
MOMENTS = st.integers(-(10**9), 10**12).map(lambda micros: round(micros / 1e6, 6))
DURATIONS = st.integers(0, 10**12).map(lambda micros: round(micros / 1e6, 6))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "request_id": st.none() | TEXTS,
    "kind": st.sampled_from(["generate", "embed"]),
    "max_tokens": st.none() | COUNTS,
    "priority": st.integers(-1000, 1000),
    "reason": st.sampled_from(ENGINE_REASONS),
    "error_code": st.none() | TEXTS,
    "cached_from": st.none() | TEXTS,
    "source": TEXTS,
    "is_paused": st.booleans(),
    "first": st.booleans(),
    "ttft_s": st.none() | DURATIONS,
    "submitted_s": MOMENTS,
    "now_s": MOMENTS,
    "start_s": MOMENTS,
    "slot": st.integers(0, 300),
}


def records(kind: type) -> st.SearchStrategy[Any]:
    """Records of a kind with whatever their fields may hold."""
    found = {name: BY_NAME.get(name, DURATIONS if name.endswith("_s") else COUNTS) for name in get_type_hints(kind)}
    if kind is EndRecord:
        found["usage"] = records(Usage)
    if kind is TickRecord:
        found["rows"] = st.lists(records(RowRecord), max_size=3).map(tuple)
    return st.builds(kind, **found)


EVENT = st.one_of([records(kind) for kind in EVENTS.values()])


@settings(deadline=None)
@given(EVENT)
def test_a_line_comes_back_as_the_event_it_was(event: TraceEvent) -> None:
    """Whatever is in the fields; the line has no break within."""
    line = to_line(event, 0.0)
    assert line.isascii() and line.isprintable()
    assert from_line(line) == event


@settings(deadline=None)
@given(EVENT, st.data())
def test_a_damaged_line_is_refused_or_is_another_event(event: TraceEvent, data: st.DataObject) -> None:
    """Only the documented error."""
    line = to_line(event, 0.0)
    begin = data.draw(st.integers(0, len(line)))
    end = data.draw(st.integers(begin, len(line)))
    damaged = line[:begin] + data.draw(st.text(max_size=5)) + line[end:]
    try:
        found = from_line(damaged)
    except LineError:
        return
    assert isinstance(found, tuple(EVENTS.values()))


@settings(deadline=None)
@given(st.lists(EVENT, max_size=12))
def test_any_events_have_a_viewer(events: list[TraceEvent]) -> None:
    """Also if they make no sense together: ends without beginnings, ticks that overlap, rows of no sequence."""
    assert json.loads(msgspec.json.encode(viewer_data(Trace(tuple(events)), title="any")))["title"] == "any"


BOUNDS = (0.0, 1.0, 10.0, 100.0)


@settings(deadline=None)
@given(st.lists(st.floats(-5, 500), min_size=1, max_size=30), st.floats(0, 1), st.floats(0, 1))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], one: float, other: float) -> None:
    """It grows with q, and lies between the smallest and the largest value."""
    tally = Tally(BOUNDS)
    for value in values:
        tally.observe(value)
    found = tally.histogram()
    low, high = found.quantile(min(one, other)), found.quantile(max(one, other))
    assert low is not None and high is not None
    assert min(values) <= low <= high <= max(values) or low == pytest.approx(high)
    rank = max(0, min(len(values) - 1, -int(-one * len(values) // 1) - 1))
    true = sorted(values)[rank]
    estimate = found.quantile(one)
    assert estimate is not None
    bucket = bisect_left(BOUNDS, true)
    assert (BOUNDS[bucket - 1] if bucket else -5) <= estimate <= (BOUNDS[bucket] if bucket < 4 else 500)
