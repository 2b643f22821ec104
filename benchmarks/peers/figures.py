"""Figures of a run: from the times of events to throughput, latencies, gaps and goodput; medians and ratios of rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.peers.client import Reply
from benchmarks.peers.workloads import Target, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """The record of a request, in seconds since the run began."""

    role: str
    status: str
    start_s: float
    end_s: float
    times_s: tuple[float, ...]
    num_prompt: int
    num_generated: int
    problem: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.times_s[0] - self.start_s if self.times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between events with tokens."""
        return [after - before for before, after in pairwise(self.times_s)]


def request_times(workload: Workload, replies: Sequence[Reply]) -> list[RequestTimes]:
    """Reduce the replies of a run."""
    begin_s = min(reply.start_s for reply in replies)
    return [
        RequestTimes(
            role=request.role,
            status=reply.status,
            start_s=round(reply.start_s - begin_s, 5),
            end_s=round(reply.end_s - begin_s, 5),
            times_s=tuple(round(time_s - begin_s, 5) for time_s in reply.times_s),
            num_prompt=reply.num_prompt,
            num_generated=reply.num_generated,
            problem=reply.problem,
        )
        for request, reply in zip(workload.requests, replies, strict=True)
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-round(share * 1_000_000) * len(ordered) // 1_000_000) - 1))]


def figures(requests: Sequence[RequestTimes], max_gap_s: float) -> dict[str, float]:
    """Return the figures of some requests of a run; undefined figures are left out."""
    served = [request for request in requests if request.status != "failed"]
    found: dict[str, float] = {"complete": sum(request.status == "complete" for request in requests)}
    if not served:
        return found
    begin_s = min(request.start_s for request in requests)
    total_s = max(request.end_s for request in served) - begin_s
    good = [
        request for request in served if request.status == "complete" and max(request.gaps_s, default=0.0) <= max_gap_s
    ]
    found |= {
        "total_s": total_s,
        "tokens_per_s": sum(request.num_generated for request in served) / total_s,
        "goodput_per_s": len(good) / total_s,
    }
    if firsts := [request.ttft_s for request in served if request.ttft_s is not None]:
        found |= {
            "ttft_p50_s": statistics.median(firsts),
            "ttft_p95_s": percentile(firsts, 0.95),
            "ttft_max_s": max(firsts),
        }
    if gaps := [gap for request in served for gap in request.gaps_s]:
        found |= {"itl_p50_s": percentile(gaps, 0.5), "itl_p99_s": percentile(gaps, 0.99), "longest_gap_s": max(gaps)}
    return found


def figures_by_role(workload: Workload, requests: Sequence[RequestTimes]) -> dict[str, dict[str, float]]:
    """Return the figures of all requests, and of each role."""
    by_role = {"all": figures(requests, workload.max_gap_s)}
    for role in dict.fromkeys(request.role for request in requests):
        by_role[role] = figures([request for request in requests if request.role == role], workload.max_gap_s)
    return by_role


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the extremes of its rounds."""

    median: float
    least: float
    most: float
    num_rounds: int


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the extremes."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


Rounds = Mapping[int, float]
"""A figure by the number of the round."""


def ratios(ours: Rounds, theirs: Rounds) -> Spread | None:
    """Return the ratios of common rounds; None if there are none."""
    found = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys() if theirs[number]]
    return spread(found) if found else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and its measured figures."""

    target: Target
    measured: Spread
    is_met: bool


def verdict(target: Target, ours: Rounds, theirs: Rounds) -> Verdict | None:
    """Return whether the median over the rounds meets the target; `theirs` are the peer's figures, or empty."""
    if target.beside is None and target.of_role is None:
        measured: Spread | None = spread(list(ours.values())) if ours else None
    elif target.is_difference:
        pairs = [ours[number] - theirs[number] for number in ours.keys() & theirs.keys()]
        measured = spread(pairs) if pairs else None
    else:
        measured = ratios(ours, theirs)
    if measured is None:
        return None
    is_met = measured.median >= target.bound if target.at_least else measured.median <= target.bound
    return Verdict(target, measured, is_met)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run of one workload against one server, as it is kept."""

    workload: str
    server: str
    round: int
    at: str
    command: tuple[str, ...]
    environment: dict[str, Any]
    requests: tuple[RequestTimes, ...] = ()
    process: dict[str, float] = field(default_factory=dict)  # load_s, peak_mib, import_s

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON's types."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Record:
        """Return the record from the output of `to_json`."""
        requests = tuple(
            RequestTimes(**request | {"times_s": tuple(request["times_s"])}) for request in fields["requests"]
        )
        return cls(**fields | {"requests": requests, "command": tuple(fields["command"])})
