"""Routing under any order of reports: a stale digest costs time and nothing else, and no request is lost."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from benchmarks.cluster.policies import POLICIES
from benchmarks.cluster.replica import Machine
from benchmarks.cluster.simulation import Outcome, Setting, Simulation
from benchmarks.cluster.traces import Dialogue, Turn
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import DigestPublisher, DigestUpdate, PromptBlocks, ReplicaLoad, ReplicaReport, Router
from paceline.cluster.prefix_digest import PrefixIndex
from paceline.kv_cache import HashedPrefix, PrefixDigest
from paceline.testing import FakeCost

HASHES = range(1, 24)
DIGESTS = st.lists(st.lists(st.sampled_from(HASHES), unique=True, max_size=20), min_size=1, max_size=12)


def digest(hashes: list[int]) -> PrefixDigest:
    return PrefixDigest(tuple(HashedPrefix(f"{value:016x}{0:016x}", 64) for value in hashes))


def known(index: PrefixIndex) -> set[int]:
    return {value for value in HASHES if index.matched_blocks([value], ["a"])}


@settings(max_examples=150, deadline=None)
@given(DIGESTS, st.integers(1, 24), st.randoms(use_true_random=False), st.floats(0, 1))
def test_digests_follow_through_loss_repetition_and_disorder(
    digests: list[list[int]], max_prefixes: int, random: Random, loss: float
) -> None:
    """The index is always a published digest; after a snapshot it is the last digest, in bounded bytes."""
    max_bytes = 64 + 8 * max_prefixes
    publisher, index, updates = DigestPublisher(1, max_bytes), PrefixIndex(10), []
    for hashes in digests:
        updates.append(publisher.publish(digest(hashes)))
        assert len(msgspec.msgpack.encode(updates[-1])) <= max_bytes
    published: list[set[int]] = [set(), *(set(hashes[:max_prefixes]) for hashes in digests)]
    arriving = [update for update in updates if random.random() >= loss]
    arriving += [update for update in updates if random.random() < 0.3]
    for at in range(len(arriving) - 1):
        if random.random() < 0.3:
            arriving[at], arriving[at + 1] = arriving[at + 1], arriving[at]
    for update in arriving:
        index.apply("a", update)
        assert known(index) in published
    assert index.apply("a", publisher.snapshot())
    assert known(index) == published[-1]
    index.remove("a")
    assert not index._holders


@settings(max_examples=100, deadline=None)
@given(DIGESTS, st.integers(1, 24))
def test_nothing_is_sent_again_where_nothing_is_lost(digests: list[list[int]], max_prefixes: int) -> None:
    """Every update applies to the last, and the index has the published digest each time."""
    publisher, index = DigestPublisher(1, 64 + 8 * max_prefixes), PrefixIndex(10)
    for hashes in digests:
        assert index.apply("a", publisher.publish(digest(hashes)))
        assert known(index) == set(hashes[:max_prefixes])


SECONDS = st.floats(0, 10)
LOADS = st.builds(
    ReplicaLoad,
    num_slots=st.integers(1, 8),
    num_running=st.integers(0, 8),
    num_waiting=st.integers(0, 50),
    waiting_tokens=st.integers(0, 10**5),
    free_cells=st.none() | st.integers(0, 10**5),
    prefill_token_s=SECONDS,
    tick_s=SECONDS,
    slot_s=SECONDS,
)
UPDATES = st.builds(
    DigestUpdate,
    epoch=st.integers(0, 2),
    version=st.integers(3, 5),
    base=st.none() | st.integers(1, 3),
    added=st.sampled_from([b"", *(number.to_bytes(8, "little") for number in HASHES)]),
)
REPORTS = st.builds(
    ReplicaReport,
    state=st.sampled_from(["ready", "draining", "unhealthy"]),
    load=LOADS,
    updates=st.just(()) | st.tuples(UPDATES),
)
STEPS = st.tuples(st.sampled_from("abc"), st.none() | REPORTS, SECONDS)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=20), st.integers(1, 5000), st.lists(st.sampled_from(HASHES), max_size=20))
def test_every_ready_candidate_is_ranked_whatever_was_reported(
    steps: list[tuple[str, ReplicaReport | None, float]], num_tokens: int, hashes: list[int]
) -> None:
    """Once, with finite times, a token left to compute, and the same again with the same random numbers."""
    prompt = PromptBlocks(num_tokens, tuple(hashes))
    routers = [Router(Random(7)), Router(Random(7))]
    ready, last_read_s, now_s = dict.fromkeys("abcd", True), dict.fromkeys("abcd", float("-inf")), 100.0
    for name, report, passed_s in steps:
        now_s += passed_s
        if report is None:
            for router in routers:
                router.remove(name)
            ready[name], last_read_s[name] = True, float("-inf")
            continue
        results = [router.observe(name, report, now_s, age_s=passed_s) for router in routers]
        assert results[0] == results[1]
        if now_s - passed_s >= last_read_s[name]:
            ready[name], last_read_s[name] = report.state == "ready", now_s - passed_s
        ranks = [router.rank(prompt, "abcd", now_s) for router in routers]
        assert ranks[0] == ranks[1]
        assert sorted(rank.replica_id for rank in ranks[0]) == [name for name in "abcd" if ready[name]]
        for item in ranks[0]:
            assert 0 <= item.num_cached < num_tokens
            assert 0 <= item.wait_s <= item.ttft_s < float("inf")
        for router, rank in zip(routers, ranks, strict=True):
            router.note_routed(rank[0], prompt, now_s)


def dialogues(random: Random, num: int) -> list[Dialogue]:
    """Conversations of one to three turns after a head of two."""
    heads = [tuple(random.randbytes(200)), tuple(random.randbytes(150)), ()]
    return [
        Dialogue(
            random.random() * 5,
            random.choice(heads),
            tuple(
                Turn(tuple(random.randbytes(random.randint(1, 150))), random.randint(1, 12), random.random())
                for _ in range(random.randint(1, 3))
            ),
        )
        for _ in range(num)
    ]


def results(outcome: Outcome) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the outputs for each prompt, in any order of earlier prompts."""
    return sorted((tuple(job.prompt), tuple(job.generated)) for job in outcome.jobs)


MACHINE = Machine(cost=FakeCost(base_s=0.02, token_s=0.001), num_cells=2048, num_slots=3, max_report_bytes=64 + 8 * 12)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 3), st.floats(0.1, 3), st.booleans())
def test_no_request_is_lost_or_answered_twice(
    seed: int, lost_share: float, delay_s: float, report_s: float, has_leaving: bool
) -> None:
    """With stale, lost and bounded digests, and a replica that leaves: all outputs of a single replica, and no less."""
    trace = dialogues(Random(seed), 10)
    leaves = ((2.0, 0), (3.0, 2)) if has_leaving else ()
    setting = Setting(3, MACHINE, report_s=report_s, delay_s=delay_s, lost_share=lost_share, leaves=leaves, seed=seed)
    outcome = Simulation(trace, POLICIES["ours"](Random(seed)), setting).run()
    assert results(outcome) == results(Simulation(trace, POLICIES["random"](Random(0)), Setting(1, MACHINE)).run())
    assert sum(len(record.turns) for record in trace) == len(outcome.jobs)
    for job in outcome.jobs:
        assert len(job.generated) == job.max_tokens
    assert max(outcome.update_bytes) <= 8 * 12


@pytest.mark.parametrize("name", POLICIES)
def test_a_simulation_is_the_same_each_time(name: str) -> None:
    """And every policy serves every request."""
    trace = dialogues(Random(3), 12)
    runs = [Simulation(trace, POLICIES[name](Random(1)), Setting(3, MACHINE)).run() for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0].jobs) == sum(len(record.turns) for record in trace)
