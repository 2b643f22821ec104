"""A trace: its summary, the stays of sequences in slots, and the page with its timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import msgspec

from paceline.cli import terminal
from paceline.errors import Unsupported
from paceline.observability import metric_table as table
from paceline.observability.activity_members import tick_members
from paceline.observability.metric_table import CANCELLED, COMPLETED
from paceline.observability.metrics import Metrics, TokenTimes
from paceline.observability.trace_file import (
    EngineRestarted,
    Paused,
    Preempted,
    RequestStarted,
    SlotFreed,
    Trace,
    TraceEvent,
    event_time,
)
from paceline.scheduling.records import EndRecord, RequestRecord, TickActivity, TickRecord
from paceline.streaming.chunk import ENGINE_REASONS, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Counts, and latencies in seconds. duration_s: from the beginning of the first tick to the end of the last.

    ended: the number of requests by finish reason. ttft_s, itl_s: time to first token and inter-token latency, ascending; a
    burst of k tokens counts as k equal intervals. num_drafts, num_accepted: of requests that have ended.
    """

    duration_s: float
    num_ticks: int
    num_embedding_ticks: int
    num_requests: int
    ended: tuple[tuple[FinishReason, int], ...]
    num_prefill: int
    num_generated: int
    num_embedded: int
    num_from_memory: int
    num_preemptions: int
    num_drafts: int
    num_accepted: int
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """Return generated tokens per second; 0 without ticks."""
        return self.num_generated / self.duration_s if self.duration_s else 0.0


def quantile(ascending: Sequence[float], q: float) -> float | None:
    """Return the quantile `q` of ascending values, interpolated linearly; None without values."""
    if not ascending:
        return None
    place = q * (len(ascending) - 1)
    index = min(int(place), len(ascending) - 2) if len(ascending) > 1 else 0
    following = ascending[min(index + 1, len(ascending) - 1)]
    return ascending[index] + (following - ascending[index]) * (place - index)


def summarize(trace: Trace) -> TraceSummary:
    """Summarize a trace."""
    metrics = Metrics()
    trace.replay(metrics)
    number = metrics.snapshot().number
    ticks = [event for event in trace.events if isinstance(event, TickRecord)]
    ttft_s, itl_s = _token_times(trace)
    return TraceSummary(
        duration_s=max(tick.start_s + tick.elapsed_s for tick in ticks) - ticks[0].start_s if ticks else 0.0,
        num_ticks=len(ticks),
        num_embedding_ticks=sum(tick.kind == "embed" for tick in ticks),
        num_requests=int(number(table.REQUESTS.name)),
        ended=tuple((reason, int(number(table.FINISHED.name, reason))) for reason in ENGINE_REASONS),
        num_prefill=int(number(table.PREFILL.name)),
        num_generated=int(number(table.GENERATED.name)),
        num_embedded=int(number(table.EMBEDDED.name)),
        num_from_memory=int(number(table.PREFIX_TOKENS.name)),
        num_preemptions=int(number(table.PREEMPTIONS.name)),
        num_drafts=int(number(table.DRAFTED.name)),
        num_accepted=int(number(table.ACCEPTED.name)),
        ttft_s=ttft_s,
        itl_s=itl_s,
    )


def _token_times(trace: Trace) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return times to first token and inter-token intervals, both ascending."""
    times = TokenTimes()
    ttft_s: list[float] = []
    itl_s: Counter[float] = Counter()
    for event in trace.events:
        match event:
            case RequestRecord():
                times.add(event)
            case RequestStarted():
                live = times.find(event.key)
                if live is not None:
                    live.start()
            case Paused(is_paused=True):
                times.pause(event.key)
            case EndRecord():
                times.pop(event.key)
            case TickRecord():
                ttfts_s, intervals_s = times.tick(event)
                ttft_s += ttfts_s
                itl_s.update(intervals_s)
    return tuple(sorted(ttft_s)), tuple(sorted(itl_s.elements()))


def totals(summary: TraceSummary) -> str:
    """Return the most important figures of a trace in one line."""
    words = [f"{summary.num_ticks:,} ticks in {summary.duration_s:.2f} s", f"{summary.num_requests:,} requests"]
    words.append(f"{summary.num_generated:,} tokens, {summary.tokens_per_s:,.1f} tokens/s")
    if summary.num_embedded:
        words.append(f"{summary.num_embedded:,} texts embedded")
    if summary.num_drafts:
        words.append(f"{summary.num_accepted:,} of {summary.num_drafts:,} drafts accepted")
    words.append(f"TTFT p50 {seconds(summary.ttft_s, 0.5)}, p95 {seconds(summary.ttft_s, 0.95)}")
    words.append(f"ITL p50 {seconds(summary.itl_s, 0.5)}, p99 {seconds(summary.itl_s, 0.99)}")
    return " \N{MIDDLE DOT} ".join(words)


def seconds(ascending: Sequence[float], q: float) -> str:
    """Format the quantile `q` of ascending seconds; "-" without values."""
    return terminal.duration(quantile(ascending, q))


Ending = Literal["ended", "cancelled", "failed", "preempted"]


@dataclass(slots=True)
class SlotStay:
    """A sequence's time in a slot. end_s, ending: when and how it left; None if the trace ends before."""

    slot: int
    key: int
    choice: int
    start_s: float
    end_s: float | None = None
    ending: Ending | None = None


def stays_of(trace: Trace) -> list[SlotStay]:
    """Return the stays of sequences in slots, in the order of their beginnings."""
    tracker = _SlotTracker()
    for event in trace.events:
        tracker.follow(event)
    return tracker.stays


class _SlotTracker:
    """Track which sequence is in which slot. The order of hooks with the same time does not matter."""

    def __init__(self) -> None:
        self.stays: list[SlotStay] = []
        self._ticked_s = 0.0  # the end of the last tick
        self._latest: dict[int, dict[int, SlotStay]] = {}  # by key and choice

    def follow(self, event: TraceEvent) -> None:
        match event:
            case RequestStarted():
                stay = SlotStay(event.slot, event.key, event.choice, event.now_s)
                self.stays.append(stay)
                self._latest.setdefault(event.key, {})[event.choice] = stay
            case Preempted():
                self._leave(event, "preempted")
            case SlotFreed():
                self._leave(event, "ended")
            case EndRecord():
                is_cancelled = event.reason in CANCELLED
                self._end(event, "ended" if event.reason in COMPLETED else "cancelled" if is_cancelled else "failed")
            case TickRecord():
                self._ticked_s = event.start_s + event.elapsed_s
            case EngineRestarted():
                left_s = self._ticked_s  # the process died after its last tick
                for stay in (stay for stays in self._latest.values() for stay in stays.values() if stay.end_s is None):
                    stay.end_s, stay.ending = max(stay.start_s, left_s), "preempted"

    def _leave(self, event: Preempted | SlotFreed, ending: Ending) -> None:
        stay = self._latest.get(event.key, {}).get(event.choice)
        if stay is not None:
            stay.end_s = event.now_s
            stay.ending = stay.ending if ending == "ended" and stay.ending else ending

    def _end(self, event: EndRecord, ending: Ending) -> None:
        """Set the request's ending on the choices that left last; the others ended on their own."""
        seated = [stay for stay in self._latest.pop(event.key, {}).values() if stay.ending != "preempted"]
        for stay in seated:
            stay.end_s = event.now_s if stay.end_s is None else stay.end_s
        last_s = max((stay.end_s or 0.0 for stay in seated), default=None)
        for stay in seated:
            stay.ending = ending if stay.end_s == last_s else "ended"


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
    """Return the data of a trace for the viewer. Times are seconds since its beginning."""
    records = [event for event in trace.events if isinstance(event, TickRecord)]
    ends = {event.key: event for event in trace.events if isinstance(event, EndRecord)}
    stays = stays_of(trace)
    times = [time_s for event in trace.events if (time_s := event_time(event)) is not None]
    times += [tick.start_s + tick.elapsed_s for tick in records]
    ticks = [TickActivity(number, record) for number, record in enumerate(records)]
    return {
        "title": title,
        "summary": totals(summarize(trace)),
        "config": {"num_slots": max((record.num_slots for record in records), default=0), "itl_target_ms": None},
        "end_s": round(max(max(times, default=0.0), min(times, default=0.0) + 0.001), _MS_DIGITS),
        "ticks": tick_members(ticks, "", MOST_TICKS),
        "marks": sorted(_marks(stays, ends), key=lambda mark: float(mark["t"])),
        "requests": [
            _request(event, ends.get(event.key)) for event in trace.events if isinstance(event, RequestRecord)
        ],
        "stays": [
            {
                **asdict(stay),
                "start_s": round(stay.start_s, _MS_DIGITS),
                "end_s": None if stay.end_s is None else round(stay.end_s, _MS_DIGITS),
            }
            for stay in stays
        ],
    }


def _marks(stays: Iterable[SlotStay], ends: Mapping[int, EndRecord]) -> Iterator[dict[str, Any]]:
    for stay in stays:
        place = {"slot": stay.slot, "key": stay.key, "choice": stay.choice}
        yield {"t": round(stay.start_s, _MS_DIGITS), "what": "started", **place}
        if stay.ending is not None and stay.end_s is not None:
            has_reason = stay.ending != "preempted" and stay.key in ends
            reason = {"reason": ends[stay.key].reason} if has_reason else {}
            yield {"t": round(stay.end_s, _MS_DIGITS), "what": stay.ending, **place, **reason}


def _request(record: RequestRecord, end: EndRecord | None) -> dict[str, Any]:
    return {
        "key": record.key,
        "request_id": record.request_id,
        "prompt_tokens": record.prompt_tokens,
        "submitted_at_s": round(record.submitted_s, _MS_DIGITS),
        "cached_tokens": 0 if end is None else end.usage.cached_tokens,
        "generated_tokens": 0 if end is None else end.usage.completion_tokens,
        "ttft_s": None if end is None else end.usage.ttft_s,
        "ended_at_s": None if end is None else round(end.now_s, _MS_DIGITS),
        "reason": None if end is None else end.reason,
    }
