"""A recorder into memory, and traces that several tests use."""

from __future__ import annotations

import io
from collections.abc import Iterable

from tests.unit.observability.simulated import Job, Simulation

from paceline.observability.trace_file import Trace, TraceEvent, TraceRecorder, from_line
from paceline.streaming.chunk import FinishReason


class Recorded(TraceRecorder):
    """Record a trace in memory."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        super().__init__(self._text, start_s=0.0)

    def trace(self, extra: Iterable[TraceEvent] = ()) -> Trace:
        """Return the trace so far, followed by extra events."""
        lines = self._text.getvalue().splitlines()[1:]
        return Trace((*map(from_line, lines), *extra))


def two_requests() -> Trace:
    """A prompt of 100 tokens in two ticks of at most 64, then 3 tokens; beside it 10 tokens and then 2; two slots of four.

    Ticks: prefill 64 | prefill 36 and 10, both first tokens | two decode rows | one decode row.
    """
    recorded = Recorded()
    simulation = Simulation(recorded)
    simulation.submit(Job(0, 100, 3, request_id="long"))
    simulation.submit(Job(1, 10, 2, request_id="<short> & \x1b\ud7ff"))
    simulation.run()
    return recorded.trace()


def busy(num_requests: int, num_slots: int = 4, num_wanted: int = 30) -> Trace:
    """Many requests that end in every way, with preemptions and embedding ticks among them."""
    recorded = Recorded()
    simulation = Simulation(recorded, num_slots=num_slots)
    reasons = (FinishReason.STOP, FinishReason.CANCELLED, FinishReason.ERROR)
    for key in range(num_requests):
        simulation.submit(Job(key, 20 + key % 60, num_wanted, 0.05 * key, 1 + key % 2, reason=reasons[key % 3]))
    while simulation.coming or simulation.queue or simulation.slots:
        simulation.tick()
        if simulation.num_ticks % 50 == 0 and simulation.slots:
            simulation.preempt(min(simulation.slots))
            simulation.embed(3, 40)
    return recorded.trace()
