"""What llama-server's routes remember between requests: numbered slots, adapters, what runs. On the event loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.server.llama_server.virtual_slots import Held, VirtualSlots
from paceline.server.service import Service


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters that the engine was given: names and files, by the numbers that llama-server gives them."""

    names: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def of(cls, lora: Any) -> Adapters:
        """Of the engine's option `lora`: a mapping of names to paths, or paths whose stems are the names."""
        named = dict(lora) if isinstance(lora, Mapping) else {Path(path).stem: path for path in lora or ()}
        return cls(tuple(named), tuple(Path(path).name for path in named.values()))


@dataclass(slots=True)
class LlamaState:
    """One for an app. running: the settings of what was asked here and has not ended, by request id."""

    service: Service
    adapters: Adapters
    running: dict[str, dict[str, Any]] = field(default_factory=dict)
    _slots: VirtualSlots | None = None

    @classmethod
    def of(cls, service: Service) -> LlamaState:
        """A fresh one."""
        return cls(service, Adapters.of(service.settings.engine_options.get("lora")))

    @property
    def slots(self) -> VirtualSlots:
        """As many as the engine has. Raises where it is not loaded."""
        if self._slots is None:
            self._slots = VirtualSlots(self.service.engine().limits.num_slots)
        return self._slots

    @property
    def scales(self) -> Mapping[str, float]:
        """Of the adapters, for requests that do not say; adapters without one do not apply."""
        return self.service.settings.lora_scales

    def set_scales(self, scales: Mapping[str, float]) -> None:
        """From now on these, for all APIs."""
        self.service.settings = dataclasses.replace(self.service.settings, lora_scales=dict(scales))

    def begin_slots(self, tenant: str, asked: int, num_prompts: int, num_choices: int) -> list[int]:
        """The numbers that sequences run under: the first choice of each prompt under the one asked for."""
        return [
            self.slots.begin(tenant, asked if choice == 0 else -1)
            for _ in range(num_prompts)
            for choice in range(num_choices)
        ]

    def end_slots(self, tenant: str, numbers: Sequence[int], left: Sequence[Held | None]) -> None:
        """What `begin_slots` answered is over."""
        for number, held in zip(numbers, left, strict=True):
            self.slots.end(tenant, number, held)
