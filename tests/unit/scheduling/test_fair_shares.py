"""Weighted fair queueing: tokens by weight while tenants wait, no delay by another tenant's queue, nothing without tenants."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_world import Outcome, World

from paceline.errors import Aborted, InvalidParams
from paceline.kv_cache import MediaItem
from paceline.observability.metrics import Instrument
from paceline.request import RequestOptions
from paceline.scheduling.fair_shares import FairShares
from paceline.scheduling.records import TickRecord
from paceline.sequence import Row, Sequence
from paceline.streaming import FinishReason
from paceline.testing.fake_backend import FakeCost

STRATEGIES = ("paced", "balanced", "decode_maximal", "prefill_priority")
BUSY: dict[str, Any] = {"cost": FakeCost(base_s=0.03, token_s=0.001), "num_cells": 4000}


class Tokens(Instrument):
    """The computed tokens of each tenant."""

    def __init__(self) -> None:
        self.of_tenants: Counter[str] = Counter()
        self.world: World | None = None

    def tick_finished(self, record: TickRecord) -> None:
        assert self.world is not None
        for row in record.rows:
            self.of_tenants[self.world.outcomes[row.key].request.options.tenant] += row.num_tokens


class BusyWorld(World):
    """A world without checks of each tick, as it runs for many."""

    def __init__(self, **options: Any) -> None:
        self.tokens = Tokens()
        super().__init__(instruments=(self.tokens,), **{**BUSY, **options})
        self.tokens.world = self

    def check(self) -> None:
        pass

    def num_waiting(self, tenant: str) -> int:
        return sum(sequence.request.options.tenant == tenant for sequence in self.scheduler._queue)


def jain(values: list[float]) -> float:
    """Jain's index of fairness: 1 if all values are equal, 1 / n if a single one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def run_for(
    world: BusyWorld, seconds: float, weights: Mapping[str, float], lengths: Mapping[str, tuple[int, int]]
) -> None:
    """Keep three requests of each tenant in the queue. lengths: of prompts and of outputs, at most."""
    chance = random.Random(7)
    end_s = world.clock.now() + seconds
    while world.clock.now() < end_s:
        for tenant, weight in weights.items():
            longest, most = lengths.get(tenant, (120, 40))
            while world.num_waiting(tenant) < 3:
                ids = [chance.randrange(97, 122) for _ in range(chance.randrange(longest // 2, longest))]
                world.submit(
                    ids,
                    max_tokens=chance.randrange(1, most),
                    ignore_eos=True,
                    tenant=tenant,
                    tenant_weight=weight,
                    cache_prompt=False,
                )
                world.tick()
        world.tick()


@pytest.mark.parametrize(
    ("weights", "lengths"),
    [
        ({"a": 1, "b": 1, "c": 1}, {}),
        ({"a": 1, "b": 2, "c": 4}, {}),
        ({"a": 1, "b": 10}, {}),
        ({"a": 1, "b": 1}, {"a": (400, 5), "b": (20, 100)}),  # one tenant reads, the other one writes
    ],
)
def test_tokens_are_by_weight_while_all_tenants_wait(
    weights: dict[str, float], lengths: dict[str, tuple[int, int]]
) -> None:
    """In a minute of ticks Jain's index of the tokens by weight is at least 0.98; prompts and outputs count alike."""
    world = BusyWorld(strategy="paced", limits={"num_slots": 8, "n_batch": 64, "chunk_size": 32})
    run_for(world, 60, weights, lengths)
    shares = [world.tokens.of_tenants[tenant] / weight for tenant, weight in weights.items()]
    assert jain(shares) >= 0.98, shares


def num_ticks_to_first_token(world: BusyWorld, outcome: Outcome) -> int:
    begin = world.num_ticks
    while outcome.request.progress.first_token_s is None:
        assert world.num_ticks - begin < 1000
        world.tick()
    return world.num_ticks - begin


@pytest.mark.parametrize("num_slots", [2, 8, 128])
@pytest.mark.parametrize("weight", [1, 3])
def test_a_hundred_requests_delay_another_tenants_by_at_most_a_tick_beyond_its_share(
    num_slots: int, weight: float
) -> None:
    """Its prompt gets its share of each tick's prompt tokens from the next tick on, although no slot was free."""
    world = BusyWorld(
        strategy="decode_maximal", limits={"num_slots": num_slots, "n_batch": 160, "chunk_size": 64}, num_cells=40_000
    )
    for _ in range(100):
        world.submit([97] * 300, max_tokens=200, ignore_eos=True, tenant="a", cache_prompt=False)
    world.tick(10)
    assert world.num_waiting("a") == max(0, 100 - num_slots)
    num_decode = sum(sequence.is_decoding for sequence in world.scheduler.running)
    outcome = world.submit([98] * 256, max_tokens=2, ignore_eos=True, tenant="b", tenant_weight=weight)
    most_a_tick = min(64, int((160 - num_decode) * weight / (1 + weight))) if num_decode < num_slots - 1 else 64
    assert num_ticks_to_first_token(world, outcome) <= math.ceil(256 / most_a_tick) + 1


def test_a_tenant_that_takes_a_slot_costs_one_preemption() -> None:
    """The youngest sequence of the tenant with most gives its slot up, and goes on when the other request has ended."""
    world = World(limits={"num_slots": 2})
    many = [world.submit("abc", max_tokens=12, ignore_eos=True, tenant="a") for _ in range(4)]
    world.tick(2)
    other = world.submit("xyz", max_tokens=3, ignore_eos=True, tenant="b")
    world.tick()
    assert [outcome.is_started for outcome in (*many, other)] == [True, True, False, False, True]
    world.run()
    assert [outcome.request.sequences[0].num_preempted for outcome in (*many, other)] == [0, 1, 0, 0, 0]
    assert {tuple(outcome.token_ids()) for outcome in many} == {
        tuple(world.alone("abc", max_tokens=12, ignore_eos=True).token_ids())
    }


def test_a_lone_slot_is_never_taken() -> None:
    """With a slot for each tenant, or a single slot, a running request goes on to its end."""
    for num_slots in (1, 2):
        world = World(limits={"num_slots": num_slots})
        running = [world.submit("abc", max_tokens=8, ignore_eos=True, tenant=tenant) for tenant in "ab"[:num_slots]]
        world.tick(2)
        world.submit("xyz", max_tokens=3, tenant="c")
        world.run()
        assert [outcome.request.sequences[0].num_preempted for outcome in running] == [0] * num_slots


def test_more_tenants_than_slots_cost_no_search_in_each_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """While all slots are taken and no tenant has two, no sequence can get one."""
    world = World(limits={"num_slots": 2})
    for tenant in "abcde":
        world.submit("abc", max_tokens=20, ignore_eos=True, tenant=tenant)
    world.tick(2)

    def searched(_: object) -> Iterator[Sequence]:
        raise AssertionError("the queue was searched")

    monkeypatch.setattr(world.scheduler._queue, "in_turn", searched)
    world.tick(3)
    assert world.scheduler._slots.num_running == {"a": 1, "b": 1}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tenant", ["", "a"])
def test_a_tenant_alone_gets_everything(strategy: str, tenant: str) -> None:
    """The ticks are those of requests without tenants, whatever the weight, and nothing is counted."""

    def ticks(**options: Any) -> list[list[tuple[int, int]]]:
        plans = []
        world = World(strategy=strategy, limits={"num_slots": 3, "n_batch": 24})
        for number in range(6):
            world.submit("abcdefgh" * 6 + str(number), max_tokens=5, ignore_eos=True, priority=number % 3, **options)
        while True:
            plan = world.scheduler.plan() if world.num_ticks else None
            if plan is None:
                world.tick()
                continue
            assert not world.scheduler._shares.is_shared
            rows = getattr(plan, "rows", [])
            plans.append([(row.sequence.key, len(row.token_ids)) for row in rows])
            world.take(world.scheduler.apply(plan, world.executor.run(plan)))
            if world.engine.is_idle:
                return plans

    assert ticks(tenant=tenant, tenant_weight=5) == ticks()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_priority_orders_the_requests_of_one_tenant(strategy: str) -> None:
    """Beside another tenant's requests, the tenant's later one of a higher priority has its first token first."""
    world = World(strategy=strategy, limits={"num_slots": 4, "n_batch": 16, "chunk_size": 8}, num_cells=600)
    low = world.submit("l" * 90, max_tokens=1, tenant="a")
    high = world.submit("h" * 90, max_tokens=1, tenant="a", priority=1000)
    other = world.submit("o" * 90, max_tokens=1, tenant="b", priority=-1000)
    world.run()
    first = [outcome.request.progress.first_token_s or 0 for outcome in (low, high, other)]
    assert first[1] < first[0]
    assert first[2] < first[0]  # half of the tokens, whatever the priorities


def test_an_idle_tenant_saves_up_no_credit() -> None:
    """A tenant that was away for long shares equally with the other from its return on."""
    world = BusyWorld(strategy="decode_maximal", limits={"num_slots": 4, "n_batch": 32, "chunk_size": 32})
    lengths = {"a": (120, 3), "b": (120, 3)}
    run_for(world, 5, {"a": 1, "b": 1}, lengths)
    run_for(world, 20, {"a": 1}, lengths)
    world.tokens.of_tenants.clear()
    run_for(world, 5, {"a": 1, "b": 1}, lengths)
    tokens = world.tokens.of_tenants
    assert tokens["b"] < 1.2 * tokens["a"], tokens


def test_decoding_without_competition_is_no_debt() -> None:
    """While no tenant waits, virtual times are equal, so a tenant that decoded more is not behind afterwards."""
    world = World(limits={"num_slots": 4})
    for _ in range(3):
        world.submit("abc", max_tokens=20, ignore_eos=True, tenant="a")
    world.submit("abc", max_tokens=20, ignore_eos=True, tenant="b")
    world.tick(12)
    assert world.scheduler._shares.time("a") == world.scheduler._shares.time("b")


def row_of(world: World, tenant: str, num_tokens: int) -> Row:
    request = world.request([97] * num_tokens, tenant=tenant)
    (sequence,) = request.sequences
    sequence.request = request
    return Row(sequence=sequence, position=0, token_ids=sequence.token_ids, draws=False, targets=[], num_logprobs=None)


def shares_of(most_debt: int, **weights: float) -> FairShares:
    shares = FairShares(most_debt)
    for tenant, weight in weights.items():
        shares.add(RequestOptions(tenant=tenant, tenant_weight=weight))
    return shares


def test_a_paused_stream_without_a_slot_takes_nothing_from_the_share_of_others() -> None:
    """Its tenant does not wait, so the virtual times of the other tenants go on, longer than the limit of a debt lasts."""
    world = BusyWorld(strategy="paced", limits={"num_slots": 4, "n_batch": 64, "chunk_size": 32, "max_positions": 400})
    slow = world.submit([101] * 40, max_tokens=300, ignore_eos=True, tenant="slow")
    world.tick(6)
    world.pause(slow)
    weights = {"low": 1.0, "high": 4.0}
    run_for(world, 20, weights, {})
    assert slow.request.sequences[0].slot is None
    assert world.scheduler._queue.tenants == {"low", "high"}
    world.tokens.of_tenants.clear()
    run_for(world, 20, weights, {})
    shares = [world.tokens.of_tenants[tenant] / weight for tenant, weight in weights.items()]
    assert jain(shares) >= 0.98, shares


def test_tenants_at_the_limit_of_the_debt_are_equal_again() -> None:
    """A limit by weight would put a tenant of a high weight before a tenant of a low one, as long as a third one is stuck."""
    world, shares = World(), shares_of(100, low=1, high=10, stuck=1)
    shares.charge([row_of(world, "low", 200), row_of(world, "high", 2000)], ["low", "high", "stuck"])
    assert [shares.time(tenant) for tenant in ("low", "high", "stuck")] == [100, 100, 0]


def test_a_debt_ends_when_the_tenant_is_alone_and_idle_tenants_are_forgotten() -> None:
    """A tenant that comes later shares equally from the start; nothing of a tenant that left is kept."""
    world, shares = World(), shares_of(1000, a=1, b=1)
    shares.charge([row_of(world, "a", 500)], ["a", "b"])
    shares.remove(world.request("x", tenant="b"))
    assert not shares.is_shared
    shares.add(RequestOptions(tenant="b"))
    assert shares.time("a") == shares.time("b")
    for number in range(5):
        shares.add(RequestOptions(tenant=f"c{number}"))
        shares.charge([row_of(world, f"c{number}", 50)], ["a"])
        shares.remove(world.request("x", tenant=f"c{number}"))
        assert shares.time(f"c{number}") > shares.time("a")
        shares.charge([row_of(world, "a", 1)], [])
    assert shares._weights.keys() == {"a", "b"}


def test_a_running_sequence_counts_with_the_mean_of_computed_tokens() -> None:
    """Neither cached tokens count, nor requests that never started."""
    world, shares = World(), shares_of(1000, a=2)
    for num_cached, started_s in ((40, 0.0), (0, None)):
        request = world.request([97] * 50, tenant="a")
        request.progress.num_cached, request.progress.started_s = num_cached, started_s
        shares.add(request.options)
        shares.remove(request)
    shares.add(RequestOptions(tenant="a", tenant_weight=2))
    assert shares.turn("a", 3) == 3 * 10 / 2


def test_a_tenant_that_left_after_a_plan_does_not_wait() -> None:
    """Its prompt was planned in part, and the plan was not carried out."""
    world, shares = World(), shares_of(1000, a=1, b=1, c=1)
    prompts = [row_of(world, tenant, 50).sequence for tenant in "ab"]
    for prompt in prompts:
        prompt.limit = 50
    shares.divide([(prompts[0], 10)], prompts)
    shares.remove(prompts[0].request)
    shares.charge([row_of(world, "b", 5)], ["c"])
    assert shares.time("b") == 5


@pytest.mark.parametrize("weight", [1, 10, 100])
def test_a_tenant_with_one_slot_does_not_shield_a_tenant_with_many(weight: float) -> None:
    """The slot for a third tenant comes from the tenant with several, although the other one has more by weight."""
    world = BusyWorld(
        strategy="decode_maximal", limits={"num_slots": 8, "n_batch": 160, "chunk_size": 64}, num_cells=40_000
    )
    for _ in range(20):
        world.submit([97] * 100, max_tokens=400, ignore_eos=True, tenant="a", tenant_weight=weight, cache_prompt=False)
    world.submit([99] * 100, max_tokens=400, ignore_eos=True, tenant="c", cache_prompt=False)
    world.tick(12)
    assert world.scheduler._slots.num_running == {"a": 7, "c": 1}
    outcome = world.submit([98] * 100, max_tokens=2, ignore_eos=True, tenant="b")
    assert num_ticks_to_first_token(world, outcome) <= 3


def test_cells_are_taken_from_a_tenant_with_several_sequences() -> None:
    """Not from the only sequence of a tenant of a lower weight."""
    world = BusyWorld(
        strategy="decode_maximal", limits={"num_slots": 8, "n_batch": 160, "chunk_size": 64}, num_cells=900
    )
    many = [
        world.submit([97] * 60, max_tokens=120, ignore_eos=True, tenant="a", tenant_weight=10, cache_prompt=False)
        for _ in range(20)
    ]
    world.tick(2)
    other = world.submit([99] * 60, max_tokens=120, ignore_eos=True, tenant="c", cache_prompt=False)
    world.run()
    assert other.request.sequences[0].num_preempted == 0
    assert sum(outcome.request.sequences[0].num_preempted for outcome in many) > 0


@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_the_priority_of_a_tenant_protects_it_from_no_preemption(priority: int) -> None:
    """With equally many sequences and tokens, the tenant with the youngest sequence gives up a slot."""
    world = World(limits={"num_slots": 4})
    world.submit("abc", max_tokens=50, ignore_eos=True, tenant="a", priority=priority)
    world.submit("abd", max_tokens=50, ignore_eos=True, tenant="b")
    world.tick(3)
    assert world.scheduler._slots.next_victim().request.options.tenant == "b"


def test_a_pass_over_a_media_item_is_charged_and_forgives_nothing() -> None:
    """The prompts outside of that pass wait meanwhile."""
    world = World(strategy="decode_maximal", limits={"n_batch": 32, "n_ubatch": 32, "chunk_size": 32}, num_cells=3000)
    world.submit([98] * 600, max_tokens=2, ignore_eos=True, tenant="b")
    world.submit([99] * 600, max_tokens=2, ignore_eos=True, tenant="c", tenant_weight=3)
    media = [MediaItem(10 + 20 * number, 16, 1, b"%d" % number, is_causal=False) for number in range(9)]
    world.submit([1] * 200, media=media, max_tokens=2, ignore_eos=True, tenant="a")
    times = [0.0, 0.0, 0.0]
    for _ in range(14):
        world.tick()
        before, times = times, [world.scheduler._shares.time(tenant) for tenant in "abc"]
        assert all(new >= old for new, old in zip(times, before, strict=True)) and times > before
    assert max(times) - min(times) < 32


def test_rows_for_scores_of_prompt_tokens_are_shared_among_tenants() -> None:
    """A tenant gets them although sequences in lower slots need some as well."""
    world = BusyWorld(
        strategy="decode_maximal",
        limits={"num_slots": 8, "n_batch": 64, "chunk_size": 32, "max_scored": 32},
        num_cells=20_000,
    )
    for _ in range(20):
        world.submit([97] * 600, max_tokens=1, prompt_logprobs=1, ignore_eos=True, tenant="a", cache_prompt=False)
    world.tick(3)
    outcome = world.submit([98] * 64, max_tokens=1, prompt_logprobs=1, ignore_eos=True, tenant="b")
    assert num_ticks_to_first_token(world, outcome) <= 6


@pytest.mark.parametrize("num_sets", [1, 7])
def test_a_tenant_with_many_sets_of_adapters_gets_no_more_turns(num_sets: int) -> None:
    """The ticks alternate between two tenants, and all sets of both have their turns."""
    sets = ["x1", "x2", "x3", "x4", "x5", "x6", "x7"][:num_sets]
    world = BusyWorld(
        strategy="paced",
        adapters=("v", *sets),
        limits={"num_slots": 8, "n_batch": 64, "chunk_size": 32},
        num_cells=20_000,
    )
    many = [
        world.submit(
            [97] * 400,
            max_tokens=50,
            ignore_eos=True,
            tenant="a",
            cache_prompt=False,
            lora={sets[number % num_sets]: 1.0},
        )
        for number in range(14)
    ]
    world.tick(20)
    outcome = world.submit([98] * 256, max_tokens=1, ignore_eos=True, tenant="b", lora={"v": 1.0})
    assert num_ticks_to_first_token(world, outcome) <= 20
    world.run()
    assert all(item.reason() is FinishReason.LENGTH for item in many)


def test_a_pass_that_was_aborted_is_not_charged() -> None:
    """Its tokens are computed and charged later."""
    world = World(strategy="decode_maximal", limits={"n_batch": 32, "n_ubatch": 32, "chunk_size": 32}, num_cells=3000)
    for tenant in "bcd":
        world.submit([98] * 600, max_tokens=2, ignore_eos=True, tenant=tenant, cache_prompt=False)
    world.tick(3)
    before = [world.scheduler._shares.time(tenant) for tenant in "bcd"]
    world.faults.next_passes.append(Aborted("x"))
    world.tick()
    assert [world.scheduler._shares.time(tenant) for tenant in "bcd"] == before
    world.tick()
    assert [world.scheduler._shares.time(tenant) for tenant in "bcd"] > before


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from("abcde"),
        st.tuples(st.integers(1, 200), st.integers(0, 1000), st.sampled_from([0.001, 0.5, 1, 3, 1000])),
        min_size=1,
    ),
    st.floats(0, 1),
)
def test_prompt_tokens_are_divided_to_the_last(tenants: dict[str, tuple[int, int, float]], part: float) -> None:
    """No tenant gets more than it wants, all tokens are given, and a tenant that is cut is not behind one with tokens."""
    shares = FairShares(10**6)
    for tenant, (_, time, weight) in tenants.items():
        shares.add(RequestOptions(tenant=tenant, tenant_weight=weight))
        shares._times[tenant] = float(time)
    wanted = {tenant: number for tenant, (number, _, _) in tenants.items()}
    num_tokens = int(part * sum(wanted.values()))
    given_tokens = shares._levelled(wanted, num_tokens)
    assert sum(given_tokens.values()) == num_tokens
    assert all(0 <= number <= wanted[tenant] for tenant, number in given_tokens.items())
    ends = {tenant: time + given_tokens[tenant] / weight for tenant, (_, time, weight) in tenants.items()}
    for tenant, (number, _, weight) in tenants.items():
        for other, (_, _, other_weight) in tenants.items():
            if given_tokens[tenant] < number and given_tokens[other] > 0:
                assert ends[other] - 1.01 / other_weight <= ends[tenant] + 1.01 / weight


def test_a_weight_is_a_positive_number() -> None:
    """Weights outside of 0.001 to 1000 are refused."""
    for weight in (0, -1, 0.0001, 1001, math.inf):
        with pytest.raises(InvalidParams, match="tenant_weight"):
            RequestOptions(tenant_weight=weight)
