"""The figures of a trace, against sums done by hand."""

from __future__ import annotations

import pytest
from tests.unit.observability.recorded import busy, two_requests

from paceline.cli.trace import quantile, seconds, summarize, totals
from paceline.observability.trace_file import Paused, Trace
from paceline.streaming.chunk import FinishReason


def test_the_figures_of_a_known_trace() -> None:
    """Ticks of 10 ms and 0.1 ms a token: 64, 46, 2 and 1 tokens."""
    found = summarize(two_requests())
    ticks_s = [0.0164, 0.0146, 0.0102, 0.0101]
    assert (found.num_ticks, found.num_embedding_ticks, found.num_requests) == (4, 0, 2)
    assert (found.num_prefill, found.num_generated) == (110, 5)
    assert found.duration_s == pytest.approx(sum(ticks_s))
    assert found.tokens_per_s == pytest.approx(5 / sum(ticks_s))
    assert found.ttft_s == pytest.approx((0.031, 0.031))
    assert found.itl_s == pytest.approx((0.0101, 0.0102, 0.0102))
    assert dict(found.ended)[FinishReason.LENGTH] == 2
    assert "4 ticks in 0.05 s" in totals(found) and "TTFT p50 31.0 ms, p95 31.0 ms" in totals(found)


def test_everything_that_happened_is_counted() -> None:
    """Embedded texts, preemptions and ends by reason have their counts."""
    found = summarize(busy(30))
    assert found.num_embedding_ticks > 0 and found.num_embedded == 3 * found.num_embedding_ticks
    assert found.num_preemptions == found.num_embedding_ticks
    assert sum(num for _, num in found.ended) == found.num_requests == 30
    assert list(found.itl_s) == sorted(found.itl_s)
    assert "texts embedded" in totals(found)


def test_a_pause_of_the_reader_is_no_interval() -> None:
    """A pause is excluded from inter-token latency, as in the metrics."""
    events = list(two_requests().events)
    last = len(events) - 1 - next(i for i, event in enumerate(reversed(events)) if hasattr(event, "rows"))
    events.insert(last, Paused(0, True, 0.041))
    assert len(summarize(Trace(tuple(events))).itl_s) == 2


def test_an_empty_trace_has_no_figures() -> None:
    """An empty trace has zeros and no quantiles."""
    found = summarize(Trace(()))
    assert (found.num_ticks, found.duration_s, found.tokens_per_s, found.ttft_s) == (0, 0.0, 0.0, ())
    assert totals(found).endswith("ITL p50 -, p99 -")


@pytest.mark.parametrize(("q", "value"), [(0, 1.0), (0.5, 2.5), (0.9, 4.4), (1, 5.0)])
def test_a_quantile_is_interpolated_linearly(q: float, value: float) -> None:
    """Quantiles of 1, 2, 3 and 5 are interpolated linearly."""
    assert quantile([1.0, 2.0, 3.0, 5.0], q) == pytest.approx(value)
    assert (quantile([7.0], q), quantile([], q)) == (7.0, None)


def test_seconds_are_shown_as_people_read_them() -> None:
    """Times below one second are in milliseconds."""
    assert (seconds([0.0123], 0.5), seconds([12.3456], 0.5), seconds([], 0.5)) == ("12.3 ms", "12.35 s", "-")
