"""llama-server's slots by number, over an engine that has no fixed places: what ran last under each number.

A number is a name. A request that gives one runs at once, whatever else runs under it; what it leaves behind is what save,
restore and erase speak of. Each tenant has its own. The event loop's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Slot:
    token_ids: tuple[int, ...] = ()
    num_running: int = 0
    used: int = 0  # the larger, the later


class VirtualSlots:
    """num_slots: how many numbers there are; a larger number counts modulo it, as in llama-server."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._turn = 0

    def begin(self, tenant: str, asked: int = -1) -> int:
        """A request begins under a number: the one that it asked for or, for -1, one where nothing runs, the longest unused."""
        number = asked % self.num_slots if asked >= 0 else self._idlest(tenant)
        slot = self._slot(tenant, number)
        self._turn += 1
        slot.used = self._turn
        slot.num_running += 1
        return number

    def end(self, tenant: str, number: int, token_ids: tuple[int, ...] | None) -> None:
        """A request ended, with these tokens of prompt and answer; None where it left nothing."""
        slot = self._slot(tenant, number)
        slot.num_running -= 1
        if token_ids is not None:
            slot.token_ids = token_ids

    def token_ids(self, tenant: str, number: int) -> tuple[int, ...]:
        """What ran last under a number."""
        return self._slot(tenant, number).token_ids

    def put(self, tenant: str, number: int, token_ids: tuple[int, ...]) -> None:
        """Has a number stand for these tokens."""
        self._slot(tenant, number).token_ids = token_ids

    def _idlest(self, tenant: str) -> int:
        slots = [self._slot(tenant, number) for number in range(self.num_slots)]
        return min(range(self.num_slots), key=lambda number: (slots[number].num_running, slots[number].used))

    def _slot(self, tenant: str, number: int) -> _Slot:
        return self._slots.setdefault((tenant, number % self.num_slots), _Slot())
