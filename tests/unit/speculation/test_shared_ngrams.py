"""N-grams over requests: what is learned, what is proposed, and that nothing crosses from one namespace into another."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
from tests.engine_world import Outcome, World

from paceline.errors import InvalidParams, InvalidType
from paceline.speculation.drafter import SharingDrafter
from paceline.speculation.drafters import shared_ngrams
from paceline.speculation.drafters.shared_ngrams import (
    NgramCacheDrafter,
    NgramModDrafter,
    SharedNgrams,
    hash_of,
    mixed,
    mixed_hashes,
    power_of,
    rolled,
    salt_of_size,
    window_hashes,
)
from paceline.speculation.named_drafter import resolve_drafter
from paceline.testing.fake_backend import FakeCost

ME, OTHERS = ("tenant a", ""), ("tenant b", "")
KEYS = count(1000)  # one sequence each
LINE = [*b"The quick brown fox jumps over the lazy dog, again and again. "]


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones in every run, so that the same n-grams are in each other's way."""
    numbers = iter(range(1000))
    monkeypatch.setattr(shared_ngrams.os, "urandom", lambda size: next(numbers).to_bytes(size))


def seen(drafter: SharedNgrams, key: int, tokens: Sequence[int], namespace: tuple[object, ...] | None = ME) -> None:
    """A sequence that came and went."""
    drafter.begin_shared(key, tokens, namespace)
    drafter.end(key)


def proposed(
    drafter: SharedNgrams, tokens: Sequence[int], most: int = 8, namespace: tuple[object, ...] | None = ME
) -> list[int]:
    drafter.begin_shared(99, tokens, namespace)
    found = drafter.propose(99, most)
    drafter.end(99)
    return found


def both() -> list[SharedNgrams]:
    return [NgramModDrafter(size_n=3, table_mib=1), NgramCacheDrafter(table_mib=1)]


def test_hashes_of_many_are_those_of_single_ones() -> None:
    """Also rolled on by a token, with negative numbers, and with a salt."""
    source = random.Random(1)
    tokens = [source.randrange(-50, 200_000) for _ in range(40)]
    for size in (1, 4, 24):
        hashes = window_hashes(np.array(tokens, np.int32), size)
        singles = [hash_of(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
        assert hashes.tolist() == singles
        for at in range(len(singles) - 1):
            assert rolled(singles[at], power_of(size), tokens[at], tokens[at + size]) == singles[at + 1]
        for salt in (0, 7, 2**64 - 3):
            assert mixed_hashes(hashes, salt).tolist() == [mixed(single, salt) for single in singles]
    assert window_hashes(np.array([1, 2], np.int32), 3).tolist() == []


def test_what_one_sequence_said_is_proposed_to_the_next() -> None:
    """From the tokens that match on, as far as it goes."""
    mod = NgramModDrafter(size_n=3, table_mib=1)
    seen(mod, 1, [1, 2, 3, 4, 5, 6])
    assert proposed(mod, [9, 1, 2, 3]) == [4, 5, 6]
    assert proposed(mod, [9, 1, 2, 3], 2) == [4, 5]
    assert proposed(mod, [2, 3]) == []
    seen(mod, 2, [1, 2, 3, 7])
    assert proposed(mod, [9, 1, 2, 3]) == [7]
    cache = NgramCacheDrafter(table_mib=1)
    seen(cache, 1, [1, 2, 3, 4, 5])
    assert proposed(cache, [1, 2, 3]) == []
    seen(cache, 2, [1, 2, 3, 4, 5])
    assert proposed(cache, [1, 2, 3]) == [4, 5]


@pytest.mark.parametrize("index", [0, 1])
def test_nothing_crosses_namespaces(index: int) -> None:
    """Neither between two of them, nor from or to a sequence that shares nothing."""
    drafter = both()[index]
    for key in range(6):
        seen(drafter, key, LINE, OTHERS)
        seen(drafter, 10 + key, LINE, None)
    for namespace in (ME, None, ("tenant b", "salt")):
        assert proposed(drafter, LINE[:20], 8, namespace) == []
    assert proposed(drafter, LINE[:20], 8, OTHERS) == LINE[20:28]
    alone = both()[index]
    for _ in range(6):
        alone.begin(1, LINE)
        alone.end(1)
    assert proposed(alone, LINE[:20]) == []


def test_salts_are_secret() -> None:
    """Two drafters place the same n-gram of the same namespace differently, so that none can be made to collide."""
    one, two = NgramModDrafter(), NgramModDrafter()
    assert one._salt(ME) == one._salt(ME) != one._salt(OTHERS)
    assert one._salt(ME) != two._salt(ME)


def test_counts_agree_with_counting() -> None:
    """Of all followers together exactly, whatever the pieces; of the most frequent one none too many, and nearly all."""
    source = random.Random(3)
    num_dominant = num_found = 0
    for at_once in (3, 40, 2048):
        drafter: Any = NgramCacheDrafter(table_mib=4)
        drafter._at_once = at_once
        counts: dict[tuple[int, ...], Counter[int]] = {}
        for key in range(40):
            tokens = [0, *(source.choices(range(4), [12, 4, 1, 1])[0] for _ in range(source.randrange(60)))]
            drafter.begin_shared(key, tokens[:9], ME)
            for at in range(9, len(tokens), 7):
                drafter.observe(key, tokens[at : at + 7])
            drafter.end(key)
            for size in (1, 2, 3, 4):
                for at in range(size, len(tokens)):
                    counts.setdefault(tuple(tokens[at - size : at]), Counter())[tokens[at]] += 1
        while drafter._behind:
            drafter._learn_some()
        for ngram, found in counts.items():
            token, best, total = drafter._table.get(mixed(hash_of(ngram), salt_of_size(drafter._salt(ME), len(ngram))))
            halved = found.total() > 1023
            assert total == found.total() or halved
            assert 0 < best <= found[token]
            (usual, count) = found.most_common(1)[0]
            if count >= 4 and count >= 0.75 * found.total() and not halved:
                num_dominant += 1
                num_found += token == usual and best >= 0.66 * total
    assert num_dominant > 60
    assert num_found >= 0.9 * num_dominant


@pytest.mark.parametrize("at_once", [2, 2048])
def test_a_sequence_that_goes_on_is_counted_once(at_once: int) -> None:
    """Under its key with the tokens that it had: also where they were not all learned yet, and after it ended several times."""
    drafter: Any = NgramCacheDrafter(table_mib=1)
    drafter._at_once = at_once
    tokens = [1, 2, 3, 4, 5, 6, 7]
    for end in (3, 5, 6, 7):
        drafter.begin_shared(1, tokens[: end - 1], ME)
        drafter.observe(1, tokens[end - 1 : end])
        drafter.end(1)
    while drafter._behind:
        drafter._learn_some()
    for at in range(1, len(tokens)):
        found = mixed(hash_of(tokens[at - 1 : at]), salt_of_size(drafter._salt(ME), 1))
        assert drafter._table.get(found) == (tokens[at], 1, 1)
    assert not len(drafter._ended[1].tokens)


def test_a_key_with_other_tokens_or_of_another_namespace_is_another_sequence() -> None:
    """What was learned of the one before says nothing of it."""
    drafter = NgramCacheDrafter(table_mib=1)
    for follower in (10, 10, 10, 10):
        seen(drafter, 1, [5, follower])
    assert proposed(drafter, [5], 1) == []  # one sequence
    for first in range(3):
        seen(drafter, 1, [20 + first, 5, 10])
    assert proposed(drafter, [5], 1) == [10]
    for _ in range(4):
        seen(drafter, 1, [5, 11], OTHERS)
        seen(drafter, 1, [6, 5, 11], OTHERS)
    assert proposed(drafter, [5], 1, OTHERS) == [11]


def test_no_more_ended_sequences_are_known_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten; those that share nothing are not kept at all."""
    monkeypatch.setattr(shared_ngrams, "_MOST_ENDED", 3)
    drafter: Any = NgramCacheDrafter(table_mib=1)
    for key in range(5):
        seen(drafter, key, [1, 2, key])
        seen(drafter, 100 + key, [1, 2, key], None)
    assert list(drafter._ended) == [2, 3, 4]


def test_thresholds() -> None:
    """What came too rarely, or not nearly always, is not proposed; a longer n-gram goes before a shorter one."""
    drafter = NgramCacheDrafter(table_mib=1)
    for follower, num in ((10, 3), (11, 1)):
        for _ in range(num):
            seen(drafter, next(KEYS), [5, follower])
    assert proposed(drafter, [5], 1) == [10]
    seen(drafter, next(KEYS), [5, 11])
    assert proposed(drafter, [5], 1) == []
    for _ in range(2):
        seen(drafter, next(KEYS), [1, 2, 3, 5, 12])
    assert proposed(drafter, [1, 2, 3, 5], 1) == [12]
    few = NgramCacheDrafter(table_mib=1)
    for _ in range(3):
        seen(few, next(KEYS), [5, 10])
    assert proposed(few, [5], 1) == []


def test_old_counts_fade() -> None:
    """What follows now is proposed after a while, however often something else did."""
    drafter = NgramCacheDrafter(table_mib=1)
    for _ in range(40):
        seen(drafter, next(KEYS), [5, 6] * 100)
    assert proposed(drafter, [1, 2, 5], 1) == [6]
    for _ in range(60):
        seen(drafter, next(KEYS), [5, 7] * 100)
    assert proposed(drafter, [1, 2, 5], 1) == [7]


@pytest.mark.parametrize("index", [0, 1])
def test_a_long_prompt_is_learned_in_pieces(index: int) -> None:
    """Each call takes one, and the last tokens are known after some; after the end, too, by calls for others."""
    drafter = both()[index]
    drafter._at_once = 100
    tokens = [*range(1000), *range(1000), *range(1000)]
    drafter.begin_shared(1, tokens, ME)
    drafter.begin_shared(2, [997, 998], ME)
    assert drafter.propose(2, 1) == []
    drafter.end(1)
    for _ in range(40):
        drafter.propose(2, 1)
    assert proposed(drafter, [990, 991, 992, 993], 3) == [994, 995, 996]
    assert not drafter._behind


def test_as_many_sequences_as_can_be_behind() -> None:
    """Of more the oldest is left, so that nothing grows without bound."""
    drafter = NgramModDrafter(size_n=3, table_mib=1)
    drafter._at_once = 1
    for key in range(500):
        seen(drafter, key, LINE)
    assert len(drafter._behind) == shared_ngrams._MOST_BEHIND


@pytest.mark.parametrize("index", [0, 1])
def test_tables_stay_as_large_as_they_are(index: int) -> None:
    """What is new takes the place of what is old."""
    drafter: Any = both()[index]
    source = random.Random(2)
    for key in range(30):
        seen(drafter, key, [source.randrange(100_000) for _ in range(20_000)])
        for _ in range(12):
            drafter._learn_some()
    assert sum(var.nbytes for var in vars(drafter._table).values() if isinstance(var, np.ndarray)) == 2**20
    for key in range(4):
        seen(drafter, key, LINE)
    assert proposed(drafter, LINE[:20], 4) == LINE[20:24]


@pytest.mark.parametrize("index", [0, 1])
def test_cells_of_images_are_context_and_never_proposed(index: int) -> None:
    """They stand as negative numbers among the tokens."""
    drafter = both()[index]
    for key in range(5):
        seen(drafter, key, [1, 2, 3, 4, -7, -8, -9, -7, 5, 6])
    assert proposed(drafter, [1, 2, 3]) == [4]
    assert proposed(drafter, [-8, -9, -7]) == [5, 6]


def test_min_m_leaves_out_what_is_not_known_to_go_on() -> None:
    """However few are asked for."""
    drafter = NgramModDrafter(size_n=2, size_m=8, min_m=4, table_mib=1)
    seen(drafter, 1, [1, 2, 3, 4, 5, 6])
    assert proposed(drafter, [1, 2], 2) == [3, 4]
    assert proposed(drafter, [2, 3], 8) == []


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("ngram-mod:size_n=0", "size_n"),
        ("ngram-mod:size_m=65", "size_m"),
        ("ngram-mod:size_m=4,min_m=5", "min_m"),
        ("ngram-mod:table_mib=0", "table_mib"),
        ("ngram-cache:table_mib=2000", "table_mib"),
        ("ngram-cache:size_m=0", "size_m"),
        ("ngram-cache:size_n=3", "size_m"),
    ],
)
def test_wrong_options_are_refused(value: str, says: str) -> None:
    """With name and range; what is no option with the nearest one."""
    with pytest.raises((InvalidParams, InvalidType), match=says):
        resolve_drafter(value)


@pytest.mark.parametrize("name", ["ngram-mod", "ngram-cache"])
def test_drafters_go_by_name_and_pickle_without_their_tables(name: str) -> None:
    """As a worker gets them."""
    drafter = resolve_drafter(name)
    assert isinstance(drafter, SharingDrafter)
    assert len(pickle.dumps(drafter)) < 1000
    again: Any = pickle.loads(pickle.dumps(drafter))
    seen(again, 1, LINE)
    assert not hasattr(resolve_drafter("ngram"), "begin_shared")


def served(world: World, **options: Any) -> Outcome:
    """A request that says the line again, in a world where that is cheap to draft."""
    outcome = world.submit(LINE[:16], script=LINE[16:], max_tokens=len(LINE) - 16, **options)
    world.run()
    world.check_done()
    return outcome


def accepted(outcome: Outcome) -> int:
    assert outcome.terminal is not None and outcome.terminal.usage is not None
    return outcome.terminal.usage.accepted_tokens


def world_of(drafter: Any) -> World:
    return World(drafter=drafter, num_cells=400, eos_every=10**9, cost=FakeCost(base_s=0.01, token_s=0.00001))


@pytest.mark.parametrize("name", ["ngram-mod:size_n=4", "ngram-cache"])
def test_a_request_is_drafted_from_those_before_it_of_its_tenant_and_salt(name: str) -> None:
    """Not from another tenant's, another salt's, or one's that caches nothing."""
    world = world_of(resolve_drafter(name))
    for options in ({"tenant": "b"}, {"cache_salt": "s"}, {"cache_prompt": False}, {"speculation": False}):
        for _ in range(4):
            served(world, **options)
    assert accepted(served(world)) <= 2  # of "again and again", which is its own
    served(world)
    assert accepted(served(world)) > 10
    assert accepted(served(world, cache_prompt=False)) == 0
    assert accepted(served(world, tenant="b", cache_salt="s")) <= 2
    assert accepted(served(world, tenant="b")) > 10


def test_a_preempted_request_is_counted_once() -> None:
    """It begins with the drafter once more, and has said everything once."""
    drafter: Any = NgramCacheDrafter(table_mib=1)
    world = world_of(drafter)
    outcome = world.submit(LINE[:16], script=LINE[16:], max_tokens=len(LINE) - 16)
    while len(drafter._sequences) == 0 or len(outcome.token_ids()) < 10:
        world.tick()
    world.scheduler._admission.preempt(world.clock.now())
    world.run()
    world.check_done()
    assert outcome.last().usage is not None
    (one,) = drafter._ended.values()
    assert one.num_learned == len(LINE)
    found = mixed(hash_of(LINE[:4]), salt_of_size(one.salt, 4))
    assert drafter._table.get(found) == (LINE[4], 1, 1)


class Recorder:
    """A drafter that keeps what it is called with."""

    def __init__(self, fails: str = "") -> None:
        self.begun: list[tuple[int, list[int], Any]] = []
        self.known: dict[int, list[int]] = {}
        self.ended: dict[int, list[int]] = {}
        self.fails = fails

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        raise AssertionError("begin_shared comes in its place")

    def begin_shared(self, key: int, token_ids: Sequence[int], namespace: Any) -> None:
        self.begun.append((key, list(token_ids), namespace))
        if self.fails == "begin":
            raise ValueError("no idea")
        self.known[key] = list(token_ids)

    def propose(self, key: int, max_tokens: int) -> list[int]:
        return []

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        if self.fails == "observe":
            raise ValueError("no idea")
        self.known[key] += token_ids

    def rollback(self, key: int, num_tokens: int) -> None:
        raise AssertionError("nothing was proposed")

    def end(self, key: int) -> None:
        self.ended[key] = self.known.pop(key, [])


@pytest.mark.parametrize("num_wanted", [0, 4])
def test_a_sharing_drafter_has_seen_all_of_a_sequence_by_its_end(num_wanted: int) -> None:
    """Whether or not it was ever asked for drafts; with the namespace, which is None for what shares nothing."""
    recorder = Recorder()
    world = world_of(recorder)
    speculation: Any = world.scheduler._speculation
    speculation._chooser.choose = lambda candidates, *_: [num_wanted] * len(candidates)
    served(world, tenant="a", cache_salt="s")
    served(world, cache_prompt=False)
    assert list(recorder.ended.values()) == [LINE, LINE]
    assert [namespace for _, _, namespace in recorder.begun] == [((), "a", "s"), None]
    assert not recorder.known


def test_what_a_sharing_drafter_raises_about_the_end_of_a_sequence_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The request has its text; one whose begin raised ends with the error, and nothing but its end follows."""
    recorder = Recorder("observe")
    world = world_of(recorder)
    speculation: Any = world.scheduler._speculation
    speculation._chooser.choose = lambda candidates, *_: [4 if not recorder.begun else 0] * len(candidates)
    speculation._chooser.budget.spend(1e6)  # no trials
    outcome = served(world)
    assert outcome.last().error is None
    world.tick()
    assert "Recorder failed to observe" in caplog.text
    assert len(recorder.ended) == 1
    recorder.fails = "begin"
    recorder.begun.clear()
    failed = served(world)
    world.tick()
    assert "begin_shared" in str(failed.last().error)
    assert len(recorder.begun) == 1
    assert len(recorder.ended) == 2
