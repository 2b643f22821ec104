"""Who makes room for whom: the pure plan against all plans that there are."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import NotEnoughMemory
from paceline.model_manager import ManagerSettings, ModelEntry
from paceline.model_manager.managed_model import ManagedModel, ModelRun, plan_relief, plan_room

Models = list[ManagedModel[None]]
STATES: dict[str, Any] = {"coming": "loading", "leaving": "unloading"}


def resident(name: str, num_bytes: int, kind: str = "idle", used_s: float = 0.0) -> ManagedModel[None]:
    """A model that takes room."""
    entry = ModelEntry(name=name, pinned=kind == "pinned")
    model = ManagedModel[None](entry, STATES.get(kind, "loaded"), reserved_bytes=num_bytes, used_s=used_s)
    if kind == "busy":
        model.run = ModelRun(name, None)  # type: ignore[arg-type]
        model.run.enter()
    assert model.room_kind == kind
    return model


KINDS = st.sampled_from(["idle", "busy", "coming", "leaving", "pinned"])
RESIDENTS = st.lists(st.builds(resident, st.just("x"), st.integers(0, 10), KINDS, st.integers(0, 5)), max_size=6)
LIMITS = st.builds(ManagerSettings, memory_budget=st.none() | st.integers(1, 30), max_loaded=st.integers(0, 6))


def fits(num_bytes: int, residents: Models, limits: ManagerSettings) -> bool:
    taken = sum(model.reserved_bytes for model in residents) + num_bytes
    return (limits.memory_budget is None or taken <= limits.memory_budget) and (
        not limits.max_loaded or len(residents) < limits.max_loaded
    )


@given(st.integers(0, 12), RESIDENTS, LIMITS, st.booleans())
def test_a_plan_is_right(num_bytes: int, residents: Models, limits: ManagerSettings, may_interrupt: bool) -> None:
    """It fits, or it fits after the victims are gone; only impossible loads are refused, and no victim is needless."""
    if not fits(num_bytes, [model for model in residents if model.room_kind == "pinned"], limits):
        with pytest.raises(NotEnoughMemory):
            plan_room(num_bytes, residents, limits, may_interrupt=may_interrupt)
        return
    plan = plan_room(num_bytes, residents, limits, may_interrupt=may_interrupt)
    assert (plan == []) == fits(num_bytes, residents, limits)
    allowed = {"idle", "busy"} if may_interrupt else {"idle"}
    victims = plan or []
    assert all(victim.room_kind in allowed for victim in victims)
    staying = [model for model in residents if model.room_kind != "leaving"]
    can_be_freed = [node for node in staying if node.room_kind in allowed]
    if plan == []:
        return
    if victims:
        assert fits(num_bytes, [node for node in staying if node not in victims], limits)
        for kept in victims:
            assert not fits(num_bytes, [node for node in staying if node not in victims or node is kept], limits)
    else:
        assert fits(num_bytes, staying, limits) or not fits(
            num_bytes, [node for node in staying if node not in can_be_freed], limits
        )


@given(RESIDENTS, LIMITS)
def test_relief_evicts_no_more_than_it_must(residents: Models, limits: ManagerSettings) -> None:
    """Idle models alone, the least recently used first, until the rest is within the limits."""
    victims = plan_relief(residents, limits)
    staying = [model for model in residents if model.room_kind != "leaving"]
    idle = sorted((node for node in staying if node.room_kind == "idle"), key=lambda item: item.used_s)
    assert victims == idle[: len(victims)]
    for number in range(len(victims) + 1):
        left = [node for node in staying if node not in victims[:number]]
        taken = sum(item.reserved_bytes for item in left)
        is_within = (limits.memory_budget is None or taken <= limits.memory_budget) and (
            not limits.max_loaded or len(left) <= limits.max_loaded
        )
        assert is_within == (number == len(victims)) or (number == len(victims) == len(idle))


def test_idle_models_go_before_busy_models() -> None:
    """Also if the busy model was used longer ago."""
    residents = [resident("busy", 5, "busy", 1), resident("idle", 5, "idle", 9)]
    assert plan_room(5, residents, ManagerSettings(memory_budget=10), may_interrupt=True) == [residents[1]]


def test_small_victims_stay_where_a_large_one_is_enough() -> None:
    """The plan takes back victims that a later victim made needless."""
    for order in permutations(range(3)):
        residents = [
            resident(name, size, "idle", order[place])
            for place, (name, size) in enumerate([("small", 1), ("little", 2), ("large", 9)])
        ]
        assert plan_room(9, residents, ManagerSettings(memory_budget=12)) == [residents[2]]


def test_a_refusal_has_the_figures() -> None:
    """The needed memory, the budget, the pinned models."""
    pinned = [resident("p", 6 << 30, "pinned")]
    with pytest.raises(NotEnoughMemory, match=r"5,120 MiB.*10,240 MiB.*6,144 MiB \(p\)"):
        plan_room(5 << 30, pinned, ManagerSettings(memory_budget=10 << 30))
    with pytest.raises(NotEnoughMemory, match="max_loaded=1"):
        plan_room(0, pinned, ManagerSettings(max_loaded=1))
