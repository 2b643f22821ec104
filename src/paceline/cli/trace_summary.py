"""The summary of a trace: counts, throughput and latencies, exact since a trace has every token's time. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cli import terminal
from paceline.observability import metric_table as table
from paceline.observability.metrics import Metrics, TokenTimes
from paceline.observability.trace_events import Paused, RequestStarted, Trace
from paceline.scheduling.records import EndRecord, RequestRecord, TickRecord
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
                found = times.tick(event)
                ttft_s += found.ttft_s
                itl_s.update(found.intervals_s)
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
