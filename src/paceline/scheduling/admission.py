"""Who gets a slot, and who gives it back under pressure."""

from __future__ import annotations

from paceline.scheduling.events import Event, Started
from paceline.scheduling.limits import Limits
from paceline.scheduling.reports import Reports
from paceline.scheduling.sequence import Sequence
from paceline.scheduling.sharing import WAIT, NoSource, Source, prompt_source
from paceline.scheduling.slots import Slots
from paceline.scheduling.waiting import Waiting


class Admission:
    """Lets waiting sequences start in turn; nobody overtakes one that only has no room yet."""

    def __init__(self, limits: Limits, slots: Slots, waiting: Waiting, reports: Reports, events: list[Event]) -> None:
        self._limits, self._slots, self._waiting = limits, slots, waiting
        self._reports, self._events = reports, events

    def admit(self, now_s: float, tick: int) -> None:
        """Starts as many as slots and cells allow."""
        if not len(self._waiting):
            return
        self._start_in_turn(now_s, tick)
        while self._is_blocked():
            self.preempt(now_s)
            self._start_in_turn(now_s, tick)

    def preempt(self, now_s: float) -> None:
        """Takes slot and memory of the running sequence that is paused, least important and youngest; it goes on later."""
        victim = max(self._slots.running, key=lambda one: (one.request.is_paused, -one.priority, one.order))
        key, num_computed = victim.request.key, victim.num_computed
        slot = self._slots.free(victim)
        self._waiting.add(victim)
        self._reports.watch.slot_freed(key, victim.choice, slot, now_s)
        self._reports.watch.preempted(key, victim.choice, num_computed, now_s)

    def _start_in_turn(self, now_s: float, tick: int) -> None:
        for sequence in self._waiting:
            if not self._slots.num_free:
                return
            if sequence.request.is_paused:
                continue
            source = prompt_source(sequence, can_share_part=self._limits.can_share_part)
            if source is WAIT:
                continue
            if self._slots.running and not self._fits(sequence, source):
                return
            self._start(sequence, source, now_s, tick)

    def _is_blocked(self) -> bool:
        """Whether only paused sequences run, while others wait for what they hold."""
        running = self._slots.running
        return (
            bool(running)
            and all(one.request.is_paused for one in running)
            and any(not one.request.is_paused for one in self._waiting)
        )

    def _fits(self, sequence: Sequence, source: Source | NoSource) -> bool:
        taken_over = source.num_tokens if isinstance(source, Source) else 0
        return self._slots.has_room(sequence.num_known - taken_over)

    def _start(self, sequence: Sequence, source: Source | NoSource, now_s: float, tick: int) -> None:
        request, watch = sequence.request, self._reports.watch
        self._waiting.discard(sequence)
        self._slots.place(sequence, tick)
        assert sequence.slot is not None  # noqa: S101 - just placed
        if request.started_s is None:
            request.started_s = now_s
            self._events.append(Started(request.key))
        watch.request_started(request.key, sequence.choice, sequence.slot, now_s)
        if isinstance(source, Source):
            self._slots.share(sequence, source.sequence, source.num_tokens)
            watch.prefix_shared(request.key, sequence.choice, source.num_tokens, "running")
