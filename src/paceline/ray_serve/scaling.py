"""How many replicas a model needs: by how long its requests wait for a slot, and how long its streams for a token. Pure.

Serve asks this in its controller, pickled by value, and applies the delays and bounds of the deployment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

MOST_GROWTH: Final = 2.0
"""Replicas at most grow to as many times as there are, at once."""

CALM: Final = 0.5
"""A replica is spared where the others would stay below this part of both targets, and of their slots."""

STATS: Final = ("queue_s", "itl_s", "busy")


def wanted_replicas(
    current: int, queue_s: float, itl_s: float, busy: float, *, queue_target_s: float, itl_target_s: float
) -> float:
    """Return how many replicas there should be.

    Args:
        current: Replicas that there are, at least 1.
        queue_s: Mean time that requests wait for a slot, in seconds.
        itl_s: Mean time between two tokens of a stream, in seconds.
        busy: Part of the slots that is in use, 0 to 1.
        queue_target_s: The longest queue_s that is fine.
        itl_target_s: The longest itl_s that is fine.
    """
    pressure = max(queue_s / queue_target_s, itl_s / itl_target_s)
    if pressure > 1:
        return current * min(pressure, MOST_GROWTH)
    if current > 1:
        crowding = current / (current - 1)
        if max(pressure, busy) * crowding < CALM:
            return current - 1
    return current


class LatencyPolicy:
    """The policy that Serve calls, with `AutoscalingContext`s. queue_time_s, itl_s: the targets."""

    def __init__(self, queue_time_s: float, itl_s: float) -> None:
        self._queue_target_s, self._itl_target_s = queue_time_s, itl_s

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return how many replicas there should be, and no state."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        queue_s, itl_s, busy = (_mean(metrics.get(name, {}).values()) for name in STATS)
        current = context.current_num_replicas
        if current < 1:
            return context.target_num_replicas, {}
        wanted = wanted_replicas(
            current, queue_s, itl_s, busy, queue_target_s=self._queue_target_s, itl_target_s=self._itl_target_s
        )
        return wanted, {}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
