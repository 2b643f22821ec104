"""The models that wait for room, first come first served. On the event loop; it evicts nothing itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from paceline.errors import NotEnoughMemory
from paceline.model_manager.managed_model import ManagedModel
from paceline.model_manager.room_plan import Resident, RoomLimits, plan_relief, plan_room
from paceline.model_manager.status_feed import StatusFeed

T = TypeVar("T")


@dataclass(slots=True)
class RoomChanges(Generic[T]):
    """What is to be done now. evict: models without users; admit: models whose users need not wait any more."""

    evict: list[ManagedModel[T]] = field(default_factory=list)
    admit: list[ManagedModel[T]] = field(default_factory=list)


class RoomQueue(Generic[T]):
    """The queue for the room that limits leave among the models."""

    def __init__(self, models: Collection[ManagedModel[T]]) -> None:
        self._models = models
        self._limits, self._patience_s = RoomLimits(), 0.0
        self._waiting: list[ManagedModel[T]] = []
        self._head: ManagedModel[T] | None = None  # the first of them, since _head_since_s
        self._head_since_s = 0.0

    @property
    def budget(self) -> int | None:
        """Bytes that the models may take together; None: no limit."""
        return self._limits.max_bytes

    def set_limits(self, limits: RoomLimits, patience_s: float) -> None:
        """Set what models may take from now on; what is beyond it is evicted by the next `serve`.

        patience_s: how long the first one waits before models in use take no new users, until it has its room.
        """
        self._limits, self._patience_s = limits, patience_s

    def join(self, model: ManagedModel[T]) -> asyncio.Future[None]:
        """Return a future that is done when the model may load. Its exception is `NotEnoughMemory` where it never may."""
        model.room = asyncio.get_running_loop().create_future()
        self._waiting.append(model)
        return model.room

    def leave(self, model: ManagedModel[T]) -> None:
        """Forget a model that has its room, or does not want it any more."""
        model.room = None
        if model in self._waiting:
            self._waiting.remove(model)

    def serve(self, now_s: float, feed: StatusFeed) -> RoomChanges[T]:
        """Give the first ones their room, and return what is to be done for the next, and against excess over the limits."""
        changes = RoomChanges[T]()
        while self._waiting and self._serve_head(self._waiting[0], now_s, feed, changes):
            self._waiting.pop(0)
        if not self._waiting:
            self._stop_yielding(changes)
        residents = self._residents()
        staying = [one for one, model in residents.items() if model not in changes.evict]
        changes.evict += [residents[one] for one in plan_relief(staying, self._limits)]
        return changes

    def next_s(self) -> float:
        """Return when the first one has waited long enough."""
        return self._head_since_s + self._patience_s if self._waiting else math.inf

    def idle_victim(self) -> ManagedModel[T] | None:
        """Return the model to evict first; None where all are in use or pinned."""
        idle = [one for one in self._models if one.takes_room and _resident(one).kind == "idle"]
        return min(idle, key=lambda one: one.used_s, default=None)

    def reserved_bytes(self, model: ManagedModel[T]) -> int:
        """Return what a model with a process counts for: what is planned, or what it was seen to take.

        What it takes beyond the budget is no reason to refuse it, if it was planned to fit.
        """
        needed = model.needed_bytes or 0
        most = self._limits.max_bytes
        taken = model.most_taken_bytes if most is None else min(model.most_taken_bytes, most)
        return max(needed, taken)

    def _serve_head(self, head: ManagedModel[T], now_s: float, feed: StatusFeed, changes: RoomChanges[T]) -> bool:
        """Give the first one its room, or note what it needs; return whether it waits no more."""
        if self._head is not head:
            self._stop_yielding(changes)
            self._head, self._head_since_s = head, now_s
        room = head.room
        if room is None or room.done():  # its load was cancelled
            return True
        others = self._residents()
        num_bytes = self.reserved_bytes(head)
        plan = plan_room(num_bytes, list(others), self._limits, may_interrupt=now_s >= self.next_s())
        if plan.refusal:
            room.set_exception(NotEnoughMemory(f"the model {head.entry.name!r} cannot be loaded: {plan.refusal}"))
        elif plan.fits:
            head.reserved_bytes = num_bytes
            feed.change(head, "loading")
            room.set_result(None)
        else:
            self._free([others[one] for one in plan.victims], changes)
            return False
        return True

    def _residents(self) -> dict[Resident, ManagedModel[T]]:
        """Return the models that take room; the ones that wait for it do not."""
        return {_resident(one): one for one in self._models if one.takes_room}

    def _free(self, victims: Sequence[ManagedModel[T]], changes: RoomChanges[T]) -> None:
        for victim in victims:
            if victim.num_users:
                victim.yields = True
            else:
                changes.evict.append(victim)

    def _stop_yielding(self, changes: RoomChanges[T]) -> None:
        self._head = None
        for model in self._models:
            if model.yields:
                model.yields = False
                changes.admit.append(model)


def _resident(model: ManagedModel[T]) -> Resident:
    kind: Literal["idle", "busy", "coming", "leaving", "pinned"]
    if model.state == "unloading":
        kind = "leaving"
    elif model.entry.pinned:
        kind = "pinned"
    elif model.state == "loading":
        kind = "coming"
    else:
        kind = "busy" if model.num_users else "idle"
    used_s = -math.inf if model.yields else model.used_s  # one that has stopped taking users is the first to go
    return Resident(name=model.entry.name, num_bytes=model.reserved_bytes, kind=kind, used_s=used_s)
