"""Which models make room for another one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.runtime.memory_estimate import mebibytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomLimits:
    """What models may take together. None: no limit."""

    max_bytes: int | None = None
    max_loaded: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resident:
    """A model that takes room. Two of one name may be there: one that is being removed, and its successor.

    num_bytes: its memory; 0 while it sleeps. kind: "idle" can be evicted, "busy" has users, "coming" is being loaded,
    "leaving" is being unloaded, "pinned" stays. used_s: when it was last used.
    """

    name: str
    num_bytes: int
    kind: Literal["idle", "busy", "coming", "leaving", "pinned"]
    used_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPlan:
    """What to do for a model that wants room.

    fits: load it now. victims: the models to evict before, least recently used first. refusal: why it never fits. Without
    any of these it waits.
    """

    fits: bool = False
    victims: tuple[Resident, ...] = ()
    refusal: str = ""


@dataclass(slots=True)
class _Room:
    """What would be free."""

    limits: RoomLimits
    residents: Sequence[Resident]
    gone: set[Resident] = field(default_factory=set)

    def has(self, num_bytes: int) -> bool:
        left = [one for one in self.residents if one not in self.gone]
        limits = self.limits
        fits_count = limits.max_loaded is None or len(left) < limits.max_loaded
        taken = sum(one.num_bytes for one in left)
        return fits_count and (limits.max_bytes is None or taken + num_bytes <= limits.max_bytes)


def plan_room(
    num_bytes: int, residents: Sequence[Resident], limits: RoomLimits, *, may_interrupt: bool = False
) -> RoomPlan:
    """Return what to do for a model that needs num_bytes.

    may_interrupt: whether models with users are victims, after the idle ones, since it has waited long enough. Models that
    are leaving are waited for before others are evicted.
    """
    if refusal := _refusal(num_bytes, residents, limits):
        return RoomPlan(refusal=refusal)
    room = _Room(limits, residents)
    if room.has(num_bytes):
        return RoomPlan(fits=True)
    room.gone = {one for one in residents if one.kind == "leaving"}
    kinds = ("idle", "busy") if may_interrupt else ("idle",)
    victims: list[Resident] = []
    for kind in kinds:
        for one in sorted((one for one in residents if one.kind == kind), key=lambda one: one.used_s):
            if room.has(num_bytes):
                break
            room.gone.add(one)
            victims.append(one)
    if not room.has(num_bytes):
        return RoomPlan()
    for one in reversed(victims.copy()):  # a large one that was taken later may have made a small one needless
        room.gone.discard(one)
        if room.has(num_bytes):
            victims.remove(one)
        else:
            room.gone.add(one)
    return RoomPlan(victims=tuple(victims))


def plan_relief(residents: Sequence[Resident], limits: RoomLimits) -> list[Resident]:
    """Return which idle models to evict, least recently used first, since models take more than was planned, or than may be."""
    staying = [one for one in residents if one.kind != "leaving"]
    taken = sum(one.num_bytes for one in staying)
    excess_bytes = 0 if limits.max_bytes is None else taken - limits.max_bytes
    excess = 0 if limits.max_loaded is None else len(staying) - limits.max_loaded
    victims: list[Resident] = []
    for one in sorted((one for one in staying if one.kind == "idle"), key=lambda one: one.used_s):
        if excess_bytes <= 0 and excess <= 0:
            break
        excess_bytes -= one.num_bytes
        excess -= 1
        victims.append(one)
    return victims


def _refusal(num_bytes: int, residents: Sequence[Resident], limits: RoomLimits) -> str:
    pinned = [one for one in residents if one.kind == "pinned"]
    if limits.max_bytes is not None:
        of_pinned = sum(one.num_bytes for one in pinned)
        if num_bytes > limits.max_bytes:
            return (
                f"it needs {mebibytes(num_bytes)}, and the memory budget of all models is {mebibytes(limits.max_bytes)}; "
                "use a smaller quantisation or n_ctx, or a larger budget"
            )
        if num_bytes + of_pinned > limits.max_bytes:
            names = ", ".join(one.name for one in pinned)
            return (
                f"it needs {mebibytes(num_bytes)}, and the memory budget is {mebibytes(limits.max_bytes)}, of which pinned "
                f"models take {mebibytes(of_pinned)} ({names}); unload one of these, or use a larger budget"
            )
    if limits.max_loaded is not None and len(pinned) >= limits.max_loaded:
        names = ", ".join(one.name for one in pinned)
        return f"max_loaded={limits.max_loaded} models are pinned ({names}); unload one of these, or allow more"
    return ""
