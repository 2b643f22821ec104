"""Who makes room for whom: the pure plan against all plans that there are."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from paceline.model_manager.room_plan import Resident, RoomLimits, plan_relief, plan_room

KINDS = st.sampled_from(["idle", "busy", "coming", "leaving", "pinned"])
RESIDENTS = st.lists(
    st.builds(
        Resident, name=st.just(""), num_bytes=st.integers(0, 10), kind=KINDS, used_s=st.integers(0, 5).map(float)
    ),
    max_size=6,
).map(
    lambda found: [
        Resident(name=str(n), num_bytes=o.num_bytes, kind=o.kind, used_s=o.used_s) for n, o in enumerate(found)
    ]
)
LIMITS = st.builds(RoomLimits, max_bytes=st.none() | st.integers(1, 30), max_loaded=st.none() | st.integers(1, 6))


def fits(num_bytes: int, residents: list[Resident], limits: RoomLimits) -> bool:
    taken = sum(one.num_bytes for one in residents) + num_bytes
    return (limits.max_bytes is None or taken <= limits.max_bytes) and (
        limits.max_loaded is None or len(residents) < limits.max_loaded
    )


@given(st.integers(0, 12), RESIDENTS, LIMITS, st.booleans())
def test_a_plan_is_right(num_bytes: int, residents: list[Resident], limits: RoomLimits, may_interrupt: bool) -> None:
    """It fits, or it fits after the victims are gone; refused is only what cannot fit even then, and none is needless."""
    plan = plan_room(num_bytes, residents, limits, may_interrupt=may_interrupt)
    assert plan.fits == fits(num_bytes, residents, limits)
    never = not fits(num_bytes, [one for one in residents if one.kind == "pinned"], limits)
    assert bool(plan.refusal) == never
    allowed = {"idle", "busy"} if may_interrupt else {"idle"}
    victims = list(plan.victims)
    assert all(one.kind in allowed for one in victims)
    staying = [one for one in residents if one.kind != "leaving"]
    can_be_freed = [one for one in staying if one.kind in allowed]
    if plan.fits or plan.refusal:
        assert not victims
    elif victims:
        assert fits(num_bytes, [one for one in staying if one not in victims], limits)
        for kept in victims:
            assert not fits(num_bytes, [one for one in staying if one not in victims or one is kept], limits)
    else:
        assert fits(num_bytes, staying, limits) or not fits(
            num_bytes, [one for one in staying if one not in can_be_freed], limits
        )


@given(RESIDENTS, LIMITS)
def test_relief_evicts_no_more_than_it_must(residents: list[Resident], limits: RoomLimits) -> None:
    """Idle models alone, the least recently used first, until the rest is within the limits."""
    victims = plan_relief(residents, limits)
    staying = [one for one in residents if one.kind != "leaving"]
    idle = sorted((one for one in staying if one.kind == "idle"), key=lambda one: one.used_s)
    assert victims == idle[: len(victims)]
    for number in range(len(victims) + 1):
        left = [one for one in staying if one not in victims[:number]]
        is_within = (limits.max_bytes is None or sum(one.num_bytes for one in left) <= limits.max_bytes) and (
            limits.max_loaded is None or len(left) <= limits.max_loaded
        )
        assert is_within == (number == len(victims)) or (number == len(victims) == len(idle))


def test_idle_models_go_before_busy_ones() -> None:
    """Also where the busy one was used longer ago."""
    residents = [
        Resident(name="busy", num_bytes=5, kind="busy", used_s=1),
        Resident(name="idle", num_bytes=5, kind="idle", used_s=9),
    ]
    plan = plan_room(5, residents, RoomLimits(max_bytes=10), may_interrupt=True)
    assert plan.victims == (residents[1],)


def test_small_victims_stay_where_a_large_one_is_enough() -> None:
    """The plan takes back what a later victim made needless."""
    for order in permutations(range(3)):
        residents = [
            Resident(name=name, num_bytes=size, kind="idle", used_s=order[place])
            for place, (name, size) in enumerate([("small", 1), ("little", 2), ("large", 9)])
        ]
        assert plan_room(9, residents, RoomLimits(max_bytes=12)).victims == (residents[2],)


def test_a_refusal_has_the_figures() -> None:
    """What is needed, what there may be, what is pinned."""
    pinned = [Resident(name="p", num_bytes=6 << 30, kind="pinned")]
    words = plan_room(5 << 30, pinned, RoomLimits(max_bytes=10 << 30)).refusal
    assert "5,120 MiB" in words
    assert "10,240 MiB" in words
    assert "6,144 MiB (p)" in words
    assert "max_loaded=1" in plan_room(0, pinned, RoomLimits(max_loaded=1)).refusal
