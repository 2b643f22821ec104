"""A replica's load, from what `EngineClient` says of itself: any engine has it, with a worker or without."""

from __future__ import annotations

from collections.abc import Callable

from paceline import validation
from paceline.cluster.replica_report import ReplicaLoad
from paceline.observability import metric_table as table
from paceline.observability.metrics_snapshot import MetricsSnapshot
from paceline.scheduling.telemetry import SlotsSnapshot

_FORGET = 0.5  # weight of what was before, at each reading


class _Ratio:
    """A quotient of two counters, with what is older counting less; 0 until they grow."""

    def __init__(self) -> None:
        self._last_above, self._last_below = 0.0, 0.0
        self._above, self._below = 0.0, 0.0

    def update(self, above: float, below: float) -> float:
        """Take in what the counters are now and return the quotient; where `above` fell, it grows from what it was before."""
        above = max(above, self._last_above)
        if below > self._last_below:
            self._above = self._above * _FORGET + above - self._last_above
            self._below = self._below * _FORGET + below - self._last_below
            self._last_above, self._last_below = above, below
        return self._above / self._below if self._below else 0.0


class LoadMeter:
    """Reads an engine's load. Costs are of the last few readings, so read it at equal times, such as every half second.

    Args:
        num_cells: The engine's KV cells; None where its memory is not made of cells.
    """

    def __init__(self, num_cells: int | None) -> None:
        self._num_cells = None if num_cells is None else validation.integer("num_cells", num_cells, 0)
        self._token_s = _Ratio()
        self._tick_s = _Ratio()
        self._slot_s = _Ratio()
        self._prompt_tokens = _Ratio()

    def read(self, metrics: MetricsSnapshot, slots: SlotsSnapshot) -> ReplicaLoad:
        """Return the load at this moment; the prompts of waiting requests are taken to be as long as those before."""
        ticks = metrics.histogram(table.TICK_S.name, "generate")
        requests, queues = metrics.histogram(table.REQUEST_S.name), metrics.histogram(table.QUEUE_S.name)
        count: Callable[[str], float] = metrics.number
        mean_prompt = self._prompt_tokens.update(count(table.PREFILL.name), queues.count)
        running = [one for one in slots if one.is_processing]
        left = sum(max(0, one.num_prompt_tokens - one.num_computed_tokens) for one in running)
        used = sum(one.num_computed_tokens - one.num_cached for one in running)
        return ReplicaLoad(
            num_slots=max(1, len(slots)),
            num_running=len(running),
            num_waiting=slots.num_waiting,
            waiting_tokens=left + round(slots.num_waiting * mean_prompt),
            free_cells=None if self._num_cells is None else max(0, self._num_cells - used),
            prefill_token_s=self._token_s.update(count(table.PREFILL_S.name), count(table.PREFILL.name)),
            tick_s=self._tick_s.update(ticks.sum, ticks.count),
            # the difference may fall: waiting counts when it ends, a request later
            slot_s=self._slot_s.update(max(0.0, requests.sum - queues.sum), requests.count),
        )
