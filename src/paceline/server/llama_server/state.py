"""State that llama-server's routes keep between requests: numbered slots, adapters, running requests.

The engine has no fixed places, so a slot's number is a name: a request that gives one runs at once, whatever else
runs under it; the tokens that it leaves are what save, restore and erase refer to. Each tenant has its own
numbers. On the event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.server.service import Service


@dataclass(frozen=True, slots=True)
class Adapters:
    """Names and files of the engine's LoRA adapters, by llama-server's ids."""

    names: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def of(cls, lora: Any) -> Adapters:
        """Return those of the option `lora`: a mapping of names to paths, or paths whose stems are the names."""
        named = dict(lora) if isinstance(lora, Mapping) else {Path(path).stem: path for path in lora or ()}
        return cls(tuple(named), tuple(Path(path).name for path in named.values()))


@dataclass(slots=True)
class LlamaServerState:
    """One per app. running: the settings of running requests by request id."""

    service: Service
    adapters: Adapters
    running: dict[str, dict[str, Any]] = field(default_factory=dict)
    _slots: VirtualSlots | None = None

    @classmethod
    def of(cls, service: Service) -> LlamaServerState:
        """Create the state of a service."""
        return cls(service, Adapters.of(service.settings.engine_options.get("lora")))

    @property
    def slots(self) -> VirtualSlots:
        """As many numbers as the engine has slots. Raises if it is not loaded."""
        if self._slots is None:
            self._slots = VirtualSlots(self.service.engine().limits.num_slots)
        return self._slots

    @property
    def scales(self) -> Mapping[str, float]:
        """Scales of adapters for requests without a `lora`; adapters without one are off."""
        return self.service.settings.lora_scales

    def set_scales(self, scales: Mapping[str, float]) -> None:
        """Set the scales, for all APIs."""
        self.service.settings = dataclasses.replace(self.service.settings, lora_scales=dict(scales))

    def begin_slots(self, tenant: str, asked: int, num_prompts: int, num_choices: int) -> list[int]:
        """Return the slot of each sequence: the first choice of each prompt has the one asked for."""
        return [
            self.slots.begin(tenant, asked if choice == 0 else -1)
            for _ in range(num_prompts)
            for choice in range(num_choices)
        ]

    def end_slots(self, tenant: str, numbers: Sequence[int], left: Sequence[SlotContent | None]) -> None:
        """Release the slots that `begin_slots` returned."""
        for number, held in zip(numbers, left, strict=True):
            self.slots.end(tenant, number, held)


@dataclass(frozen=True, slots=True)
class SlotContent:
    """What ran last in a slot: token ids of prompt and output, and the scales of its adapters."""

    token_ids: tuple[int, ...] = ()
    lora: Mapping[str, float] = field(default_factory=dict)


_EMPTY = SlotContent()


@dataclass(slots=True)
class _VirtualSlot:
    held: SlotContent = _EMPTY
    num_running: int = 0
    used: int = 0  # the larger, the later


class VirtualSlots:
    """num_slots: how many numbers there are; a larger number counts modulo it, as in llama-server."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[tuple[str, int], _VirtualSlot] = {}
        self._turn = 0

    def begin(self, tenant: str, asked: int = -1) -> int:
        """Assign a slot: the one asked for or, for -1, the least busy one, of those the longest unused."""
        number = asked % self.num_slots if asked >= 0 else self._idlest(tenant)
        slot = self._slot(tenant, number)
        self._turn += 1
        slot.used = self._turn
        slot.num_running += 1
        return number

    def end(self, tenant: str, number: int, left: SlotContent | None) -> None:
        """Release a slot. left: its content; None: unchanged."""
        slot = self._slot(tenant, number)
        slot.num_running -= 1
        if left is not None:
            slot.held = left

    def held(self, tenant: str, number: int) -> SlotContent:
        """Return what ran last in a slot."""
        return self._slot(tenant, number).held

    def put(self, tenant: str, number: int, held: SlotContent = _EMPTY) -> None:
        """Set a slot's content; by default none."""
        self._slot(tenant, number).held = held

    def _idlest(self, tenant: str) -> int:
        slots = [self._slot(tenant, number) for number in range(self.num_slots)]
        return min(range(self.num_slots), key=lambda number: (slots[number].num_running, slots[number].used))

    def _slot(self, tenant: str, number: int) -> _VirtualSlot:
        return self._slots.setdefault((tenant, number % self.num_slots), _VirtualSlot())
