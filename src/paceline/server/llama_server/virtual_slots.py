"""llama-server's slots by number, over an engine that has no fixed places: what ran last under each number.

A number is a name. A request that gives one runs at once, whatever else runs under it; what it leaves behind is what save,
restore and erase speak of. Each tenant has its own. The event loop's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Held:
    """What ran last under a number: the tokens of prompt and answer, and the scales of the adapters that it ran with."""

    token_ids: tuple[int, ...] = ()
    lora: Mapping[str, float] = field(default_factory=dict)


_NOTHING = Held()


@dataclass(slots=True)
class _Slot:
    held: Held = _NOTHING
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

    def end(self, tenant: str, number: int, left: Held | None) -> None:
        """A request ended; None where it left nothing."""
        slot = self._slot(tenant, number)
        slot.num_running -= 1
        if left is not None:
            slot.held = left

    def held(self, tenant: str, number: int) -> Held:
        """What ran last under a number."""
        return self._slot(tenant, number).held

    def put(self, tenant: str, number: int, held: Held = _NOTHING) -> None:
        """Has a number stand for these tokens, or for nothing."""
        self._slot(tenant, number).held = held

    def _idlest(self, tenant: str) -> int:
        slots = [self._slot(tenant, number) for number in range(self.num_slots)]
        return min(range(self.num_slots), key=lambda number: (slots[number].num_running, slots[number].used))

    def _slot(self, tenant: str, number: int) -> _Slot:
        return self._slots.setdefault((tenant, number % self.num_slots), _Slot())
