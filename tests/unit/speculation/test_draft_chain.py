"""Several drafters: the drafter that proposes, the drafters that observe, and separate acceptance."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.drafters import BatchOracle, Oracle
from tests.engine_world import World
from tests.unit.speculation.test_speculation import CHEAP, Failing, Fixed, _spread, futures, told, usage

from paceline.cost_model import DecodeCost, MeasuredPass, TickCostModel
from paceline.errors import DrafterError, InvalidParams, InvalidType
from paceline.speculation.depth_chooser import DepthChooser
from paceline.speculation.drafters.ngram import NgramDrafter
from paceline.speculation.drafting import DraftChain
from paceline.speculation.named_drafter import check_drafter_name, resolve_drafter

LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
PROMPTS = ("abc", "xyz", "once upon")


class Sometimes(Oracle):
    """Proposes something every other time."""

    def propose(self, key: int, max_tokens: int) -> list[int]:
        if len(self.known[key]) % 2:
            self.proposed[key] = []
            return []
        return super().propose(key, max_tokens)


def chained(*drafters: Any, depth: int | None = 4, **options: Any) -> World:
    """A world with these drafters. depth: of every sequence that the drafter is asked for, as far as it may."""
    world = World(drafter=drafters, **{"num_cells": 600, "cost": CHEAP, **options})
    for link in links(world):
        if depth is not None:
            link._chooser.choose = lambda candidates, rows, num_cells, most, num_ticks: _spread(candidates, depth, most)
    return world


def links(world: World) -> Any:
    speculation = world.scheduler._speculation
    assert isinstance(speculation, DraftChain)
    return speculation._links


@pytest.mark.parametrize("error_rate", [0.0, 0.4])
@pytest.mark.parametrize("kind", [Oracle, BatchOracle])
def test_what_the_first_leaves_out_the_second_proposes(error_rate: float, kind: type[Oracle]) -> None:
    """In the same tick, with the output of decoding alone; each hears of all tokens, and takes back its own drafts."""
    known = [future for prompt in PROMPTS for future in futures(prompt, **LONG)]
    first, second = Sometimes(known, error_rate=error_rate, seed=1), kind(known, error_rate=error_rate, seed=2)
    world = chained(first, second)
    outcomes = [world.submit(prompt, **LONG) for prompt in PROMPTS]
    world.run()
    world.check_done()
    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        assert told(outcome) == told(World(num_cells=400).alone(prompt, **LONG))
        assert usage(outcome).accepted_tokens > 10
    assert min(first.num_proposals, second.num_proposals) > 5
    if error_rate == 0:
        assert world.backend.num_passes < 30  # nearly every pass of a sequence had drafts
    world.tick()
    assert not first.known and not second.known


def test_each_is_judged_by_its_own_drafts() -> None:
    """A drafter that is nearly always right does not make a wrong drafter look better; nor the other way round."""
    known = futures("abc", **LONG)
    first = Sometimes(known)
    world = chained(first, Fixed(1, 2, 3, 4))
    outcome = world.submit("abc", **LONG)
    world.tick(14)
    good, bad = [next(iter(link._sequences.values())).acceptance.probability for link in links(world)]
    assert good > 0.9
    assert bad < 0.3
    assert links(world)[0]._usual.probability > 0.7 > 0.6 > links(world)[1]._usual.probability
    world.run()
    assert told(outcome) == told(World(num_cells=400).alone("abc", **LONG))


def test_a_useless_first_one_soon_leaves_it_to_the_second() -> None:
    """By their gain; right drafts follow nearly every pass."""
    options: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
    world = chained(Fixed(1, 2, 3), Oracle(futures("abc", **options)), depth=None)
    world.scheduler.calibrate([MeasuredPass(num, num, 0.01 + num * 0.00001, num) for num in (1, 4, 8, 64)])
    outcome = world.submit("abc", **options)
    world.run()
    assert usage(outcome).accepted_tokens > 220
    assert usage(outcome).draft_tokens < 320


def test_drafts_of_all_stay_within_room_cells_and_target() -> None:
    """For the second drafter the rest of the first."""
    known = [future for prompt in PROMPTS for future in futures(prompt, **LONG)]
    world = chained(Sometimes(known), Oracle(known), limits={"max_drafted": 5})
    rows: list[Any] = []
    step = world.backend.step
    world.backend.step = lambda given, lora: (rows.append([row.num_drafts for row in given]), step(given, lora))[1]  # type: ignore[method-assign]
    for prompt in PROMPTS:
        world.submit(prompt, **LONG)
    world.run()
    assert max(map(sum, rows)) == 5


def test_drafts_that_are_there_count_where_others_are_chosen() -> None:
    """They make the pass longer and win tokens: a draft that would pay alone does not if another row has many already."""
    flat = TickCostModel()
    decode = DecodeCost(flat)
    for num in range(1, 12):
        for _ in range(8):
            decode.observe(num, 0, 0.01 if num < 7 else 0.05)
    world = World()
    chooser = DepthChooser(flat, decode, 1.0)
    rows: list[Any] = []
    for prompt in ("abc", "xyz"):
        world.submit(prompt, **LONG)
    world.tick(2)
    step = world.backend.step
    world.backend.step = lambda given, lora: (rows.extend(given), step(given, lora))[1]  # type: ignore[method-assign]
    world.tick()
    assert len(rows) == 2
    assert chooser.choose([(0.9, 8)], rows, 0, 64) == [0]  # to see what that takes
    assert chooser.choose([(0.9, 8)], rows, 0, 64) == [4]
    rows[0].token_ids, rows[0].num_drafts = [*rows[0].token_ids, 1, 2, 3], 3
    chooser.expected_beside = 2.4
    assert chooser.choose([(0.9, 8)], rows, 0, 64) == [1]


@pytest.mark.parametrize("failing_first", [True, False])
def test_a_drafter_that_raises_ends_the_request_whichever_it_is(failing_first: bool) -> None:
    """Named in the error; other requests go on, and the other drafter hears of the end."""
    drafters: list[Any] = [Failing("propose"), Fixed()]
    other = drafters[1]
    world = chained(*(drafters if failing_first else drafters[::-1]))
    outcome = world.submit("abc", **LONG)
    without = world.submit("xyz", speculation=False, **LONG)
    world.run()
    world.tick()
    world.check_done()
    assert isinstance(outcome.last().error, DrafterError)
    assert "Failing" in str(outcome.last().error)
    assert without.last().error is None
    assert len(other.ended) == (0 if failing_first else 1)


def test_random_chains_say_what_decoding_alone_says() -> None:
    """With cancellations, constraints, stops, several choices and little memory."""
    for seed in range(12):
        source = random.Random(seed)
        options: dict[str, Any] = source.choice(
            [LONG, {"max_tokens": 30, "stop": ["th", "e"]}, {"max_tokens": 30, "regex": "[a-e ]{3,20}x"}]
        )
        known = [future for prompt in PROMPTS for future in futures(prompt, **options)]
        drafters = [
            source.choice([Oracle, Sometimes, BatchOracle])(known, error_rate=source.choice([0.0, 0.5]), seed=seed)
            for _ in range(3)
        ]
        world = chained(*drafters, depth=source.choice([1, 3, 8]), num_cells=source.choice([150, 600]))
        outcomes = [world.submit(prompt, **options) for prompt in PROMPTS]
        cancelled = world.submit("more", **LONG)
        world.tick(source.randrange(20))
        world.cancel(cancelled)
        world.run()
        world.check_done()
        for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
            assert told(outcome) == told(World(num_cells=400).alone(prompt, **options))
        world.tick()
        assert not any(drafter.known for drafter in drafters)


@pytest.mark.parametrize(
    "value",
    [
        "ngram:size_n=3,size_m=8,ngram:size_n=2",
        "ngram:size_n=3,size_m=8, ngram:size_n=2",
        ["ngram:size_n=3,size_m=8", {"name": "ngram", "size_n": 2}],
        (NgramDrafter(size_n=3, size_m=8), "ngram:size_n=2"),
        ["ngram:size_n=3,size_m=8,ngram:size_n=2"],
    ],
)
def test_several_are_named_with_commas_or_in_a_list(value: Any) -> None:
    """Options belong to the name before them."""
    check_drafter_name(value)
    first, second = resolve_drafter(value)  # type: ignore[misc]
    assert isinstance(first, NgramDrafter) and isinstance(second, NgramDrafter)
    assert (first._size_n, first._size_m, second._size_n) == (3, 8, 2)


def test_a_list_of_one_is_that_one() -> None:
    """As without the list."""
    assert isinstance(resolve_drafter(["ngram"]), NgramDrafter)


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        ([], InvalidParams, "empty list"),
        (["ngram", "ngrm"], InvalidParams, "ngram"),
        ("ngram,", InvalidParams, "draft-model"),
        ("ngram,ngram-mod:size_n=3", InvalidParams, "give 'ngram'"),
        ({"name": "ngram-cache"}, InvalidParams, "give 'ngram'"),
        ("ngram,size_n=3", InvalidParams, "size_n=3"),
        ("ngram:size_n=3,size_q=4,ngram", InvalidType, "size_n"),
        (["ngram", 3], InvalidType, "begin"),
        (["ngram", ["ngram"]], InvalidType, "begin"),
        ([one := NgramDrafter(), one], InvalidParams, "twice"),
    ],
)
def test_invalid_chain_is_refused(value: Any, kind: type[Exception], says: str) -> None:
    """With the part that is wrong."""
    with pytest.raises(kind, match=says) as error:
        resolve_drafter(value)
    assert "speculation" in str(error.value)
