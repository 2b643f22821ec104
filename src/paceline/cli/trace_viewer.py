"""The viewer of a trace: the timeline of the web page, with the trace inside, as one HTML file that loads nothing. Pure.

The viewer is built with the page (`web/`), so that both draw ticks by the same code; here its data are put in.
docs/reference/engine_events.md has their members.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from paceline.cli.trace_layout import Layout, SlotStay, arrange
from paceline.cli.trace_summary import summarize, totals
from paceline.errors import Unsupported
from paceline.observability.activity_members import tick_members
from paceline.observability.trace_events import Trace
from paceline.scheduling.records import TickActivity, TickRecord
from paceline.streaming.chunk import FinishReason

MOST_TICKS: Final = 20_000
"""More are merged with their neighbours."""

PLACE: Final = '<script type="application/json" id="paceline-trace">null</script>'
_BEGIN, _END = PLACE.split("null")
_MS_DIGITS: Final = 6


def viewer_html(viewer: str, trace: Trace, *, title: str) -> str:
    """Return the viewer with a trace in it.

    Args:
        viewer: the file trace.html of the built page.
        trace: any trace, also an empty one.
        title: shown at the top.

    Raises:
        Unsupported: the viewer has no place for data, so it is of another version.
    """
    if viewer.count(PLACE) != 1:
        raise Unsupported("the trace viewer of this installation is of another version; install paceline anew")
    data = msgspec.json.encode(viewer_data(trace, title=title)).decode()
    safe = data.replace("<", "\\u003c")  # no text may end the element
    return viewer.replace(PLACE, f"{_BEGIN}{safe}{_END}")


def viewer_data(trace: Trace, *, title: str) -> dict[str, Any]:
    """Return what the viewer shows of a trace. Times are seconds since its beginning."""
    layout = arrange(trace, 1)
    records = [event for event in trace.events if isinstance(event, TickRecord)]
    ticks = [TickActivity(number, record) for number, record in enumerate(records)]
    return {
        "title": title,
        "summary": totals(summarize(trace)),
        "config": {"num_slots": max((one.num_slots for one in records), default=0), "itl_target_ms": None},
        "end_s": round(layout.end_s, _MS_DIGITS),
        "ticks": tick_members(ticks, "", MOST_TICKS),
        "marks": sorted(_marks(layout), key=lambda mark: float(mark["t"])),
        "requests": list(_requests(layout)),
        "stays": [_stay(one) for one in layout.stays],
    }


def _marks(layout: Layout) -> Iterator[dict[str, Any]]:
    for stay in layout.stays:
        place = {"slot": stay.slot, "key": stay.key, "choice": stay.choice}
        yield {"t": round(stay.start_s, _MS_DIGITS), "what": "started", **place}
        if stay.ending is not None and stay.end_s is not None:
            reason = {} if stay.ending == "preempted" else _reason(layout, stay.key)
            yield {"t": round(stay.end_s, _MS_DIGITS), "what": stay.ending, **place, **reason}


def _reason(layout: Layout, key: int) -> dict[str, str]:
    end = layout.ends.get(key)
    return {} if end is None else {"reason": end.reason}


def _requests(layout: Layout) -> Iterator[dict[str, Any]]:
    for key, record in layout.requests.items():
        end = layout.ends.get(key)
        reason: FinishReason | None = None if end is None else end.reason
        yield {
            "key": key,
            "request_id": record.request_id,
            "prompt_tokens": record.prompt_tokens,
            "submitted_at_s": round(record.submitted_s, _MS_DIGITS),
            "cached_tokens": 0 if end is None else end.usage.cached_tokens,
            "generated_tokens": 0 if end is None else end.usage.completion_tokens,
            "ttft_s": None if end is None else end.usage.ttft_s,
            "ended_at_s": None if end is None else round(end.now_s, _MS_DIGITS),
            "reason": reason,
        }


def _stay(stay: SlotStay) -> dict[str, Any]:
    return {
        "slot": stay.slot,
        "key": stay.key,
        "choice": stay.choice,
        "start_s": round(stay.start_s, _MS_DIGITS),
        "end_s": None if stay.end_s is None else round(stay.end_s, _MS_DIGITS),
        "ending": stay.ending,
    }
