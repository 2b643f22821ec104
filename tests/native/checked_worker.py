"""Has a worker check itself after every tick: loaded there by name, as an instrument. An error fails the tick."""

from __future__ import annotations

from paceline.engine.core import Engine
from paceline.kv_cache import Remove
from paceline.observability.metrics import Instrument
from paceline.scheduling.records import Event


class CheckEveryTick(Instrument):
    """Only its construction matters."""

    def __init__(self) -> None:
        tick = Engine.tick

        def checked(engine: Engine) -> list[Event]:
            events = tick(engine)
            check(engine)
            return events

        Engine.tick = checked  # type: ignore[method-assign]


def check(engine: Engine) -> None:
    """Slots, sequence ids and saved bytes add up, and the context holds the scheduler's sequences."""
    scheduler, backend = engine.scheduler, engine.executor._backend
    cache, limits = scheduler.kv_cache, scheduler._limits
    scheduler.check()
    running = {sequence.seq_id: sequence.num_computed_tokens for sequence in scheduler.running}
    kept = {prefix.seq_id: prefix.num_computed_tokens for prefix in cache._offloader.prefixes}
    assert scheduler._slots.num_free + len(running) == limits.num_slots
    assert cache._cells.seq_ids.num_free + len(running.keys() | kept.keys()) == limits.num_seq_ids
    assert cache.host_bytes <= limits.host_bytes
    leaving = {operation.seq_id for operation in cache._cells.operations if isinstance(operation, Remove)}
    for seq_id in range(limits.num_seq_ids):
        expected = running.get(seq_id, kept.get(seq_id, 0))
        if seq_id not in leaving:
            assert backend.positions(seq_id) == expected, (seq_id, expected)
