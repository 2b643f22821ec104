"""Who gets a slot, and who gives it back under pressure."""

from __future__ import annotations

from paceline.scheduling.events import Event, Started
from paceline.scheduling.leaving import Way
from paceline.scheduling.memory import Memory
from paceline.scheduling.placement import WAIT, Placement, Wait
from paceline.scheduling.reports import Reports
from paceline.scheduling.sequence import Sequence
from paceline.scheduling.slots import Slots
from paceline.scheduling.waiting import Waiting


class Admission:
    """Lets waiting sequences start in turn; nobody overtakes one that only has no room yet."""

    def __init__(self, memory: Memory, slots: Slots, waiting: Waiting, reports: Reports, events: list[Event]) -> None:
        self._memory, self._slots, self._waiting = memory, slots, waiting
        self._reports, self._events = reports, events

    def admit(self, now_s: float, tick: int) -> None:
        """Starts as many as slots and cells allow."""
        if not len(self._waiting):
            return
        self._start_in_turn(now_s, tick)

    def preempt(self, now_s: float) -> None:
        """Takes slot and memory of the running sequence that is paused, least important and youngest; it goes on later."""
        victim = self._slots.next_to_give_way()
        key, num_computed = victim.request.key, victim.num_computed
        slot = self._slots.free(victim)
        self._memory.preempt(victim, now_s)
        self._waiting.add(victim)
        self._reports.watch.slot_freed(key, victim.choice, slot, now_s)
        self._reports.watch.preempted(key, victim.choice, num_computed, now_s)

    def start_over(self, sequence: Sequence, now_s: float) -> None:
        """Takes slot and memory of one that could not be given the beginning it was to have; it waits, and computes all."""
        request = sequence.request
        slot = self._slots.free(sequence)
        self._memory.forget(sequence)
        self._waiting.add(sequence)
        if sequence.choice == 0 and request.first_token_s is None:
            request.num_cached, request.cached_from = 0, None
        self._reports.watch.slot_freed(request.key, sequence.choice, slot, now_s)
        self._reports.watch.preempted(request.key, sequence.choice, 0, now_s)

    def _start_in_turn(self, now_s: float, tick: int) -> None:
        for sequence in self._waiting:
            if sequence.request.is_paused:
                continue
            if not (self._slots.num_free or self._has_paused):
                return
            placement = self._fitting(sequence, now_s)
            while self._has_paused and (
                placement is None or (isinstance(placement, Placement) and not self._slots.num_free)
            ):
                self.preempt(now_s)
                placement = self._fitting(sequence, now_s)
            if placement is WAIT:
                continue
            if not isinstance(placement, Placement):
                return
            self._start(sequence, placement, now_s, tick)

    @property
    def _has_paused(self) -> bool:
        """Whether somebody who runs only waits for a reader, and could wait without a slot."""
        return any(one.request.is_paused for one in self._slots.running)

    def _fitting(self, sequence: Sequence, now_s: float) -> Placement | Wait | Way | None:
        """Where a sequence can start from, once kept paths have made way; None where there is no room for it.

        `Way.LATER`, where a later tick may have some: what makes way for it is on its way to host memory. Alone it
        may try in any case. The path that it starts from is the last to make way; where it has to, the sequence
        starts from the saved one in the next tick.
        """
        while True:
            placement = self._memory.placement(sequence, now_s)
            if placement is WAIT:
                return WAIT
            if self._memory.is_saving(sequence, placement):
                return Way.LATER
            self._memory.touch(placement)
            has_room = self._memory.room.has(sequence.num_known - placement.num_device)
            if has_room and self._memory.room.can_load(placement):
                return placement
            way = self._memory.make_way(now_s)
            if way is Way.LATER:
                return Way.LATER
            if way is Way.NONE:
                if has_room:
                    return placement.without_parts()
                return None if self._slots.running else placement

    def _start(self, sequence: Sequence, placement: Placement, now_s: float, tick: int) -> None:
        request, watch = sequence.request, self._reports.watch
        self._waiting.discard(sequence)
        slot = self._slots.take(sequence, tick)
        is_first = request.started_s is None
        if is_first:
            request.started_s = now_s
            self._events.append(Started(request.key))
        watch.request_started(request.key, sequence.choice, slot, now_s)
        self._memory.start(sequence, placement, now_s)
        if placement.num_tokens:
            watch.prefix_shared(request.key, sequence.choice, placement.num_tokens, placement.source_name)
            if is_first:
                request.num_cached, request.cached_from = placement.num_tokens, placement.source_name
