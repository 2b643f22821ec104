"""The replica that a router chooses, and its reaction to wrong, old or missing reports."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from paceline.cluster import (
    BLOCK_TOKENS,
    DigestPublisher,
    PromptBlocks,
    ReplicaLoad,
    ReplicaReport,
    Router,
    hash_prompt,
)
from paceline.errors import InvalidParams
from paceline.kv_cache import HashedPrefix, PrefixDigest
from paceline.request import RequestOptions

PROMPT = hash_prompt([number % 200 for number in range(10 * BLOCK_TOKENS)], RequestOptions())
OTHER = hash_prompt([number % 100 for number in range(10 * BLOCK_TOKENS)], RequestOptions())
IDLE = ReplicaLoad(
    num_slots=4,
    num_running=0,
    num_waiting=0,
    waiting_tokens=0,
    free_cells=10_000,
    prefill_token_s=0.001,
    tick_s=0.02,
    slot_s=1.0,
)


def report(num_cached: int = 0, state: Any = "ready", epoch: int = 1, **load: Any) -> ReplicaReport:
    """A first report of a replica that has so many blocks of PROMPT."""
    hashes = tuple(HashedPrefix(f"{value:016x}{0:016x}", 64) for value in PROMPT.hashes[:num_cached])
    update = DigestPublisher(epoch).publish(PrefixDigest(hashes))
    return ReplicaReport(state=state, load=msgspec.structs.replace(IDLE, **load), updates=(update,))


def router_of(**reports: ReplicaReport) -> Router:
    """A router that got these reports at 10 s."""
    router = Router(Random(1))
    for replica_id, report in reports.items():
        assert router.observe(replica_id, report, 10.0)
    return router


def order(router: Router, names: str = "ab", prompt: PromptBlocks = PROMPT, now_s: float = 10.0) -> list[str]:
    return [rank.replica_id for rank in router.rank(prompt, names, now_s)]


def test_the_cached_prefix_decides_between_idle_replicas() -> None:
    """Times are the uncached tokens' and a tick; a fully cached prompt has one token left."""
    router = router_of(a=report(3), b=report(10), c=report())
    found = router.rank(PROMPT, "abc", 10.0)
    assert [(rank.replica_id, rank.num_cached) for rank in found] == [("b", 639), ("a", 192), ("c", 0)]
    assert [rank.ttft_s for rank in found] == pytest.approx([0.021, 0.468, 0.66])
    assert {rank.wait_s for rank in found} == {0.0}


def test_a_busy_replica_is_left_where_waiting_costs_more_than_computing() -> None:
    """640 tokens are left for up to 1.5 times their time, since others would wait for them, too."""
    assert order(router_of(a=report(10, waiting_tokens=900), b=report())) == ["a", "b"]
    assert order(router_of(a=report(10, waiting_tokens=1000), b=report())) == ["b", "a"]


def test_waiting_for_a_slot_counts() -> None:
    """A replica of four slots frees one in a quarter of the time that a request has its slot."""
    full = router_of(a=report(num_running=4, num_waiting=2)).rank(PROMPT, "a", 10.0)
    assert full[0].wait_s == pytest.approx(3 * 1.0 / 4)
    assert router_of(a=report(num_running=3)).rank(PROMPT, "a", 10.0)[0].wait_s == 0.0


def test_what_waited_at_the_report_is_done_some_time_later() -> None:
    """A report's load shrinks with the time since."""
    router = router_of(a=report(waiting_tokens=1000))
    assert [router.rank(PROMPT, "a", now_s)[0].wait_s for now_s in (10.0, 10.6, 12.0)] == pytest.approx([1.0, 0.4, 0.0])


def test_what_was_sent_since_the_last_report_waits_there() -> None:
    """A burst goes to all replicas, not to the replica that was idle at the last report."""
    router, chosen = router_of(a=report(), b=report(), c=report()), []
    for number in range(6):
        prompt = hash_prompt([number] * 640, RequestOptions())
        best = router.rank(prompt, "abc", 10.0)[0]
        router.note_routed(best, prompt, 10.0)
        chosen.append(best.replica_id)
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == ["a", "b", "c"]


def test_a_prompt_follows_one_that_is_being_computed() -> None:
    """Its prefix is cached before it is its turn, so that it is computed once."""
    router = router_of(a=report(), b=report())
    best = router.rank(PROMPT, "ab", 10.0)[0]
    router.note_routed(best, PROMPT, 10.0)
    behind = router.rank(PROMPT, "ab", 10.3)
    assert (behind[0].replica_id, behind[0].num_cached) == (best.replica_id, 639)
    assert behind[0].wait_s == pytest.approx(0.34)
    assert order(router, prompt=OTHER, now_s=10.3)[0] != best.replica_id


def test_a_report_takes_the_place_of_what_was_sent_before_it() -> None:
    """A request that it cannot have yet is added to it."""
    router = router_of(a=report())
    router.note_routed(router.rank(PROMPT, "a", 10.1)[0], PROMPT, 10.1)
    assert router.observe("a", report(epoch=2), 10.3, age_s=0.25)
    assert router.rank(OTHER, "a", 10.3)[0].wait_s == pytest.approx(0.44)
    assert router.observe("a", report(epoch=3), 10.3, age_s=0.1)
    assert router.rank(OTHER, "a", 10.3)[0].wait_s == 0.0


def test_what_is_sent_to_an_idle_replica_begins_when_it_is_sent() -> None:
    """Not when it last reported."""
    router = router_of(a=report())
    router.note_routed(router.rank(PROMPT, "a", 12.0)[0], PROMPT, 12.0)
    assert router.rank(OTHER, "a", 12.1)[0].wait_s == pytest.approx(0.54)


def test_a_replica_without_cells_comes_last() -> None:
    """If none has the cells, the soonest is first all the same."""
    assert order(router_of(a=report(2, free_cells=400), b=report(waiting_tokens=900))) == ["b", "a"]
    assert order(router_of(a=report(free_cells=400), b=report(waiting_tokens=900, free_cells=0))) == ["a", "b"]
    (alone,) = router_of(a=report(2, free_cells=None)).rank(PROMPT, "a", 10.0)
    assert alone.fits


@pytest.mark.parametrize("state", ["draining", "unhealthy"])
def test_a_replica_that_takes_no_requests_is_left_out(state: str) -> None:
    """Until it reports that it does; with no other left there is none to send to."""
    router = router_of(a=report(10, state=state), b=report())
    assert order(router) == ["b"]
    assert order(router, "a") == []
    assert router.observe("a", report(10, epoch=2), 11.0)
    assert order(router, now_s=11.0) == ["a", "b"]


def test_only_candidates_are_ranked() -> None:
    """Each once; no candidates, no choice."""
    router = router_of(a=report(10), b=report())
    assert order(router, "b") == ["b"]
    assert order(router, "bb") == ["b"]
    assert order(router, "") == []


def test_a_replica_that_has_not_reported_is_taken_for_idle() -> None:
    """With the costs of the others; without any report all are equal."""
    router = router_of(a=report(waiting_tokens=500))
    fresh, busy = router.rank(PROMPT, "ax", 10.0)
    assert (fresh.replica_id, busy.replica_id) == ("x", "a")
    assert fresh.ttft_s == pytest.approx(0.66)
    assert set(order(Router(Random(1)), "xyz")) == {"x", "y", "z"}


def test_costs_that_were_not_measured_yet_match_the_others() -> None:
    """A replica that has just started is not the best at everything."""
    unmeasured = report(prefill_token_s=0.0, tick_s=0.0, slot_s=0.0, waiting_tokens=200)
    router = router_of(a=unmeasured, b=report())
    assert order(router) == ["b", "a"]
    assert router.rank(PROMPT, "a", 10.0)[0].ttft_s == pytest.approx(0.86)


def test_a_removed_replica_is_forgotten() -> None:
    """Its cached prefixes, its load and its state; removing one that is not known is no error."""
    router = router_of(a=report(10, state="draining"), b=report())
    router.remove("a")
    router.remove("a")
    assert router.rank(PROMPT, "a", 10.0)[0].num_cached == 0


def test_an_overtaken_report_changes_nothing() -> None:
    """The later one counts, whichever comes first."""
    router = router_of(a=report(waiting_tokens=500))
    assert router.observe("a", report(10, epoch=2, state="draining"), 10.5, age_s=1.0)
    (still,) = router.rank(PROMPT, "a", 10.0)
    assert (still.num_cached, still.wait_s) == (0, pytest.approx(0.5))


def test_a_missed_update_is_reported_and_the_load_counts() -> None:
    """Cached prefixes stay as they were until a snapshot comes."""
    publisher = DigestPublisher(1)
    prefixes = tuple(HashedPrefix(f"{value:016x}", 64) for value in PROMPT.hashes)
    router = Router(Random(1))
    first = ReplicaReport(state="ready", load=IDLE, updates=(publisher.publish(PrefixDigest(prefixes[:8])),))
    assert router.observe("a", first, 10.0)
    publisher.publish(PrefixDigest(prefixes[:9]))
    busy = msgspec.structs.replace(IDLE, waiting_tokens=300)
    lost = ReplicaReport(state="ready", load=busy, updates=(publisher.publish(PrefixDigest(prefixes)),))
    assert not router.observe("a", lost, 11.0)
    (found,) = router.rank(PROMPT, "a", 11.0)
    assert (found.num_cached, found.wait_s) == (8 * BLOCK_TOKENS, pytest.approx(0.3))
    assert router.observe("a", ReplicaReport(state="ready", load=busy, updates=(publisher.snapshot(),)), 11.0)
    assert router.rank(PROMPT, "a", 11.0)[0].num_cached == 639


def test_a_report_without_a_digest_says_nothing_of_the_cache() -> None:
    """Its state is kept."""
    router = router_of(a=report(5))
    assert router.observe("a", ReplicaReport(state="ready", load=IDLE), 11.0)
    assert router.rank(PROMPT, "a", 11.0)[0].num_cached == 5 * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 0),
        ("num_running", -1),
        ("num_waiting", 1.5),
        ("waiting_tokens", -1),
        ("free_cells", -1),
        ("prefill_token_s", float("nan")),
        ("tick_s", -0.1),
        ("slot_s", float("inf")),
    ],
)
def test_what_no_replica_reports_is_refused_and_changes_nothing(field: str, value: Any) -> None:
    """The error names the field."""
    router = router_of(a=report(3))
    before = router.rank(PROMPT, "a", 10.0)
    with pytest.raises(InvalidParams, match=field):
        router.observe("a", report(10, epoch=2, **{field: value}), 11.0)
    assert router.rank(PROMPT, "a", 10.0) == before


def test_other_wrong_reports_are_refused() -> None:
    """An unknown state, a time that is none."""
    router = router_of(a=report(3))
    with pytest.raises(InvalidParams, match="state"):
        router.observe("a", report(10, epoch=2, state="happy"), 11.0)
    with pytest.raises(InvalidParams, match="age_s"):
        router.observe("a", report(10, epoch=2), 11.0, age_s=-1.0)
    assert router.rank(PROMPT, "a", 10.0)[0].num_cached == 3 * BLOCK_TOKENS


def test_ties_are_broken_by_the_given_numbers() -> None:
    """The same seed gives the same order, and no replica is favoured."""

    def firsts(seed: int) -> list[str]:
        router = Router(Random(seed))
        for name in "abcd":
            router.observe(name, report(), 10.0)
        return [order(router, "abcd")[0] for _ in range(200)]

    assert firsts(1) == firsts(1)
    assert firsts(1) != firsts(2)
    assert {firsts(1).count(name) > 25 for name in "abcd"} == {True}
