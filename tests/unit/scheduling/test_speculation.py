"""Drafts in the tick: what is verified, what is kept, and that only the clock shows the difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.drafters import Oracle
from tests.engine_world import Outcome, World, make_limits

from paceline.errors import Aborted, DrafterError
from paceline.observability.instruments import Instrument, Instruments
from paceline.scheduling.cost_model import MeasuredPass, TickCostModel
from paceline.scheduling.decode_cost import DecodeCost
from paceline.scheduling.draft_depth import Acceptance, choose_depths
from paceline.scheduling.plan import Row
from paceline.scheduling.speculation import DepthChooser, DraftingSequence, Speculation
from paceline.scheduling.telemetry import TickRecord
from paceline.streaming import FinishReason
from paceline.testing.fake_backend import FakeBackend, FakeCost, ManualClock

CHEAP = FakeCost(base_s=0.01, token_s=0.00001)


class Preemptions(Instrument):
    def __init__(self, found: list[int]) -> None:
        self.found = found

    def preempted(self, key: int, choice: int, num_computed_tokens: int, now_s: float) -> None:
        self.found.append(key)


class Fixed:
    """Proposes the same tokens again and again, whatever the sequence."""

    def __init__(self, *drafts: Any) -> None:
        self.drafts = drafts
        self.ended: list[int] = []

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        pass

    def propose(self, key: int, max_tokens: int) -> Any:
        return list(self.drafts)[:max_tokens]

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        pass

    def rollback(self, key: int, num_tokens: int) -> None:
        pass

    def end(self, key: int) -> None:
        self.ended.append(key)


def speculative(drafter: Any, depth: int | None = 4, **options: Any) -> World:
    """A world with a drafter. depth: of every sequence in every tick, as far as it may; None: as the costs say."""
    world = World(drafter=drafter, **{"num_cells": 400, "cost": CHEAP, **options})
    speculation = world.scheduler._speculation
    assert speculation is not None
    if depth is not None:
        speculation._chooser.choose = lambda candidates, rows, num_cells, most: _spread(  # type: ignore[method-assign]
            candidates, depth, most
        )
    return world


def _spread(candidates: list[tuple[float, int]], depth: int, most: int) -> list[int]:
    depths = []
    for _, cap in candidates:
        depths.append(min(depth, cap, most))
        most -= depths[-1]
    return depths


def futures(prompt: str | list[int], **options: Any) -> list[list[int]]:
    """The prompt and all that a request generates, for each choice."""
    alone = World(num_cells=400).alone(prompt, **options)
    return [[*alone.request.prompt, *alone.drawn(choice)] for choice in range(alone.request.params.n)]


def told(outcome: Outcome, choice: int = 0) -> tuple[Any, ...]:
    """What a reader sees of a choice."""
    last = outcome.last(choice)
    return (
        outcome.token_ids(choice),
        outcome.text(choice),
        outcome.logprobs(choice),
        last.finish_reason,
        last.stop,
        last.stop_token_ids,
    )


def usage(outcome: Outcome) -> Any:
    assert outcome.terminal is not None
    return outcome.terminal.usage


ENDINGS: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 23, "ignore_eos": True},
    {"max_tokens": 60},
    {"max_tokens": 60, "stop": ["th", "e"]},
    {"max_tokens": 60, "stop_token_ids": [101, 116]},
    {"max_tokens": 40, "min_tokens": 30, "stop": ["t"]},
    {"max_tokens": 30, "logprobs": 2, "ignore_eos": True},
    {"max_tokens": 30, "temperature": 1.0, "seed": 5, "n": 3},
    {"max_tokens": 30, "mirostat": 2, "ignore_eos": True},
    {"max_tokens": 30, "regex": "[a-e ]{3,20}x"},
    {"max_tokens": 30, "interval": 7, "ignore_eos": True},
]


@pytest.mark.parametrize("error_rate", [0.0, 0.4])
@pytest.mark.parametrize("options", ENDINGS)
def test_output_and_ending_are_those_of_decoding_alone(options: dict[str, Any], error_rate: float) -> None:
    """Every ending inside a burst is exact."""
    oracle = Oracle(futures("once upon", **options), error_rate=error_rate, seed=3)
    world = speculative(oracle, depth=8)
    outcome = world.submit("once upon", **options)
    world.run()
    world.check_done()
    alone = World(num_cells=400).alone("once upon", **options)
    for choice in range(outcome.request.params.n):
        assert told(outcome, choice) == told(alone, choice)
    found = usage(outcome)
    assert found.completion_tokens == usage(alone).completion_tokens
    assert found.accepted_tokens <= found.draft_tokens
    if error_rate == 0 and len(outcome.drawn()) > 2:
        assert found.accepted_tokens > 0
        assert found.accepted_tokens < found.completion_tokens


def test_right_drafts_save_passes() -> None:
    """A pass yields the accepted drafts and one token more, as one chunk."""
    options = {"max_tokens": 41, "ignore_eos": True}
    world = speculative(Oracle(futures("abc", **options)), depth=4)
    outcome = world.submit("abc", **options)
    world.run()
    assert world.backend.num_passes == 1 + 8
    assert max(len(chunk.token_ids) for chunk in outcome.chunks) == 5
    assert (usage(outcome).draft_tokens, usage(outcome).accepted_tokens) == (32, 32)


def test_wrong_drafts_leave_nothing_behind() -> None:
    """Cells of rejected drafts are free, and no prefix has them."""
    world = speculative(Fixed(1, 2, 3))
    outcome = world.submit("abc", max_tokens=20, ignore_eos=True)
    world.run()
    assert usage(outcome).accepted_tokens == 0
    assert usage(outcome).draft_tokens > 0
    again = world.submit([*outcome.request.prompt, *outcome.token_ids(), 65], max_tokens=5)
    world.run()
    world.check_done()
    assert usage(again).cached_tokens == 3 + 20 - 1
    assert told(again) == told(World(num_cells=400).alone(again.request.prompt, max_tokens=5))


def test_a_burst_behind_a_stop_is_no_part_of_the_cached_prefix() -> None:
    """What was verified behind the end is cut, so that the next turn begins from what the reader has."""
    options = {"max_tokens": 60, "ignore_eos": True}
    (whole,) = futures("abc", **options)
    stop = whole[3 + 5]
    world = speculative(Oracle([whole]), depth=8)
    outcome = world.submit("abc", stop_token_ids=[stop], **options)
    world.run()
    world.check_done()
    assert outcome.reason() is FinishReason.STOP
    kept = world.scheduler.kv_cache.num_cells
    assert kept <= 3 + len(outcome.drawn())
    again = world.submit([*outcome.request.prompt, *outcome.drawn(), 66, 67], max_tokens=5)
    world.run()
    assert told(again) == told(World(num_cells=400).alone(again.request.prompt, max_tokens=5))


def test_a_draft_that_completes_the_text_is_left_out_of_the_pass_and_of_the_cache() -> None:
    """It is drawn all the same, and the next turn finds every cell that the cached prefix says it has."""
    options = {"max_tokens": 30, "regex": "[a-e]{17}x"}
    (whole,) = futures("abc", **options)
    world = speculative(Oracle([[*whole, 66, 67]]), depth=12)
    outcome = world.submit("abc", **options)
    world.run()
    world.check_done()
    assert outcome.token_ids() == whole[3:]
    # One token is drawn behind the prompt, one behind each of the two passes' drafts: the last is the one left out.
    assert usage(outcome).accepted_tokens == usage(outcome).draft_tokens == 18 - 3
    again = world.submit([*whole, 66], max_tokens=5)
    world.run()
    assert usage(again).cached_tokens == len(whole) - 1


class RaisingAt:
    """A constraint that allows everything, and raises at the token of this number."""

    is_complete, may_end = False, True

    def __init__(self, number: int) -> None:
        self._num_left = number

    def fill_mask(self, words: Any) -> bool:
        return False

    def accept(self, token_id: int) -> None:
        self._num_left -= 1
        if not self._num_left:
            raise ValueError("enough")

    def rollback(self, num_tokens: int) -> None:
        self._num_left += num_tokens

    def copy(self) -> RaisingAt:
        return RaisingAt(self._num_left)


def test_what_fails_behind_the_end_of_a_text_fails_nothing() -> None:
    """A stop within accepted drafts ends the choice as it does alone; an error before it ends it with the tokens so far."""
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    (whole,) = futures("abc", **options)
    stop = next(one for index, one in enumerate(whole) if index > 5 and one not in whole[3:index])
    num_before = whole.index(stop, 3) - 3
    for number, reason in ((num_before + 2, FinishReason.STOP), (num_before, FinishReason.ERROR)):
        outcomes = []
        for drafter in (Oracle([whole]), Fixed()):
            world = speculative(drafter, depth=12)
            outcomes.append(world.submit("abc", constraint=RaisingAt(number), stop_token_ids=[stop], **options))
            world.run()
            world.check_done()
        drafted, alone = outcomes
        assert usage(drafted).accepted_tokens > 0
        assert told(drafted) == told(alone)
        assert drafted.reason() is alone.reason() is reason


class Ticks(Instrument):
    def __init__(self, found: list[TickRecord]) -> None:
        self.found = found

    def tick_finished(self, record: TickRecord) -> None:
        self.found.append(record)


def test_drafts_that_are_left_out_of_a_pass_are_not_counted_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in usage, nor in a tick's record, nor where costs are learned; and what masks took before it is no cost of rows."""
    observed: list[tuple[int, float]] = []

    def observe(self: Any, num_rows: int, num_cells: int, seconds: float) -> None:
        observed.append((num_rows, seconds))

    options = {"max_tokens": 30, "regex": "[a-e]{17}x"}
    (alone,) = futures("abc", **options)
    monkeypatch.setattr(DecodeCost, "observe", observe)
    ticks: list[TickRecord] = []
    world = speculative(Fixed(97, 98, 120, 99), instruments=(Ticks(ticks),))
    step = world.backend.step

    def waiting_step(rows: Any, lora: Any) -> Any:
        world.clock.advance(0.5)
        outputs = step(rows, lora)
        for output in outputs:
            output.waited_s = 0.5
        return outputs

    world.backend.step = waiting_step  # type: ignore[method-assign]
    outcome = world.submit("abc", **options)
    world.run()
    assert outcome.token_ids() == alone[3:]
    drafted = [row.num_drafts for tick in ticks for row in tick.rows]
    assert max(drafted) == 2  # the third is forbidden
    assert usage(outcome).draft_tokens == sum(drafted)
    assert [num_rows for num_rows, _ in observed] == [1 + num_drafts for num_drafts in drafted[1:]]
    for num_rows, seconds in observed:
        assert seconds == pytest.approx(CHEAP.base_s + num_rows * CHEAP.token_s)


def test_a_failed_pass_keeps_no_draft() -> None:
    """An aborted pass is repeated, and the drafter learns that its proposal was not verified."""
    options = {"max_tokens": 30, "ignore_eos": True}
    oracle = Oracle(futures("abc", **options))
    world = speculative(oracle)
    outcome = world.submit("abc", **options)
    world.tick(4)
    world.faults.next_passes.append(Aborted("told to stop"))
    world.run()
    assert told(outcome) == told(World(num_cells=400).alone("abc", **options))
    assert not oracle.known


@pytest.mark.parametrize("off", [{"speculation": False}, {"max_draft": 0}])
def test_a_request_may_go_without(off: dict[str, Any]) -> None:
    """No token of it is proposed, while others have drafts."""
    options = {"max_tokens": 30, "ignore_eos": True}
    oracle = Oracle([*futures("abc", **options), *futures("xyz", **options)])
    world = speculative(oracle)
    without, with_drafts = world.submit("abc", **options, **off), world.submit("xyz", **options)
    world.run()
    assert usage(without).draft_tokens == 0
    assert usage(with_drafts).accepted_tokens > 0


def test_a_request_that_may_have_fewer_drafts_than_are_verified_goes_without() -> None:
    """Its `max_draft` is below the engine's `min_draft`."""
    options = {"max_tokens": 30, "ignore_eos": True}
    world = speculative(Oracle(futures("abc", **options)), limits={"min_draft": 3})
    outcomes = [world.submit("abc", max_draft=most, **options) for most in (2, 3)]
    world.run()
    assert [usage(one).draft_tokens > 0 for one in outcomes] == [False, True]


def test_max_draft_bounds_a_burst() -> None:
    """No chunk has more than max_draft tokens and one."""
    options = {"max_tokens": 30, "ignore_eos": True}
    world = speculative(Oracle(futures("abc", **options)), depth=8)
    outcome = world.submit("abc", max_draft=2, **options)
    world.run()
    assert max(len(chunk.token_ids) for chunk in outcome.chunks) == 3


def test_drafts_take_only_cells_that_are_free() -> None:
    """Speculation preempts no sequence: with little memory it drafts less."""
    options = {"max_tokens": 20, "ignore_eos": True}
    asked = [*futures("abc", **options), *futures("xyz", **options)]
    preempted = []
    world = speculative(Oracle(asked), depth=12, num_cells=60, instruments=(Preemptions(preempted),))
    outcomes = [world.submit(text, **options) for text in ("abc", "xyz")]
    world.run()
    assert not preempted
    for outcome, one in zip(outcomes, asked, strict=True):
        assert outcome.token_ids() == one[3:]


@pytest.mark.parametrize("drafts", [("x",), (-1,), (258,), (1.5,)])
def test_a_proposal_that_is_no_token_ends_its_sequence(drafts: tuple[Any, ...]) -> None:
    """The error names the drafter, and other requests go on."""
    world = speculative(Fixed(*drafts))
    outcome = world.submit("abc", max_tokens=20, ignore_eos=True)
    other = world.submit("abc", max_tokens=20, speculation=False)
    world.run()
    world.check_done()
    assert isinstance(outcome.last().error, DrafterError)
    assert "Fixed" in str(outcome.last().error)
    assert other.last().error is None


class Failing(Fixed):
    def __init__(self, name: str) -> None:
        super().__init__(1)
        setattr(self, name, self.fail)

    def fail(self, *arguments: Any) -> Any:
        raise ValueError("no idea")


def test_an_end_that_raises_is_logged_and_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the one that has ended nor another one's."""
    world = speculative(Failing("end"))
    for number in (1, 2):
        outcome = world.submit("abc", max_tokens=20, ignore_eos=True)
        world.run()
        assert outcome.last().error is None
        assert [one for one in caplog.messages if "Failing failed to end" in one] == caplog.messages
        assert len(caplog.messages) == number
    world.check_done()


def test_a_rollback_that_raises_behind_the_last_pass_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The choice has ended already, with all its text."""
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    (whole,) = futures("abc", **options)
    world = speculative(Failing("rollback"))
    outcome = world.submit("abc", stop_token_ids=[whole[3 + 1]], **options)
    world.run()
    assert outcome.last().error is None
    assert "Failing failed to rollback" in caplog.text
    world.check_done()


class HalfBegun(Fixed):
    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        raise ValueError("half-way")


def test_a_begin_that_raises_is_followed_by_an_end() -> None:
    """So that what it had set up is let go."""
    drafter = HalfBegun(1)
    world = speculative(drafter)
    outcome = world.submit("abc", max_tokens=20, ignore_eos=True)
    world.run()
    assert "begin" in str(outcome.last().error)
    assert len(drafter.ended) == 1


class AllFailing(Failing):
    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        raise ValueError("no idea either")


def test_a_drafter_that_raises_twice_ends_its_sequence_once() -> None:
    """The first error counts."""
    world = speculative(AllFailing("rollback"))
    outcome = world.submit("abc", max_tokens=20, ignore_eos=True)
    world.run()
    world.check_done()
    assert "rollback" in str(outcome.last().error)


def test_a_proposal_that_took_long_once_is_forgiven() -> None:
    """A machine that was asleep does not turn speculation off; a drafter that is slow each time does."""
    chooser = DepthChooser(TickCostModel(), DecodeCost(TickCostModel()), 0.05)
    chooser.note_drafting(600.0)
    assert chooser.draft_s < 0.001
    for _ in range(100):
        chooser.note_drafting(0.05)
    assert chooser.draft_s == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("name", ["begin", "propose", "observe", "rollback"])
def test_a_drafter_that_raises_ends_its_sequence(name: str) -> None:
    """Whatever a drafter raises, the request says so."""
    world = speculative(Failing(name))
    outcome = world.submit("abc", max_tokens=20, ignore_eos=True)
    world.run()
    world.check_done()
    assert isinstance(outcome.last().error, DrafterError)
    assert name in str(outcome.last().error)
    assert "no idea" in str(outcome.last().error)


def test_sequences_that_end_are_forgotten() -> None:
    """The drafter hears of the end of each sequence that it knows."""
    fixed = Fixed(1)
    world = speculative(fixed)
    world.submit("abc", max_tokens=20, ignore_eos=True)
    world.tick(5)
    outcome = world.submit("xyz", max_tokens=20)
    world.cancel(outcome)
    world.run()
    world.submit("more", max_tokens=3)
    world.run()
    assert fixed.ended == [1]


def test_costs_decide() -> None:
    """Right drafts are made where a token more costs little, and next to none where each costs as much as a pass."""
    options = {"max_tokens": 300, "ignore_eos": True}
    asked = futures("abc", **options)
    spent = {}
    for cost in (FakeCost(base_s=0.01, token_s=0.0001), FakeCost(base_s=0.0, token_s=0.01)):
        world = speculative(Oracle(asked, error_rate=0.3), depth=None, cost=cost, num_cells=400)
        world.scheduler.calibrate(
            [MeasuredPass(num, num, cost.base_s + num * cost.token_s, num) for num in (1, 4, 8, 64)]
        )
        outcome = world.submit("abc", **options)
        world.run()
        spent[cost.base_s] = usage(outcome).draft_tokens
    assert spent[0.01] > 100
    assert spent[0.0] < 30


def test_drafts_keep_the_inter_token_target_of_the_sequences_beside() -> None:
    """What pays in tokens a second is left out where a tick gets longer than the target, unless one sequence decodes alone."""
    options = {"max_tokens": 200, "ignore_eos": True}
    cost = FakeCost(base_s=0.04, token_s=0.002)
    longest_s = {}
    for has_neighbour in (True, False):
        ticks: list[TickRecord] = []
        oracle = Oracle(futures("abc", **options))
        world = speculative(oracle, depth=None, cost=cost, num_cells=1000, instruments=(Ticks(ticks),))
        world.scheduler.calibrate(
            [MeasuredPass(num, num, cost.base_s + num * cost.token_s, num) for num in (1, 2, 3, 4, 5, 8, 16)]
        )
        outcome = world.submit("abc", **options)
        if has_neighbour:
            world.submit("xyz", max_tokens=300, ignore_eos=True, speculation=False)
        world.run()
        assert usage(outcome).accepted_tokens > 100
        decoding = [tick for tick in ticks if sum(row.num_decode for row in tick.rows) == 1 + has_neighbour]
        longest_s[has_neighbour] = max(tick.step_s for tick in decoding)
    assert longest_s[True] < 0.051
    assert longest_s[False] > 0.06


def test_a_trial_that_has_no_room_is_not_used_up() -> None:
    """A sequence that was due gets its trial as soon as the memory has room again."""
    acceptance = Acceptance()
    for _ in range(10):
        acceptance.observe(4, 0)
    limits = make_limits(FakeBackend(clock=ManualClock()), min_draft=2)
    chooser = DepthChooser(TickCostModel(), DecodeCost(TickCostModel()), 0.05)
    chooser.choose = lambda candidates, rows, num_cells, most: [0]  # type: ignore[method-assign]
    one = Speculation(Fixed(1, 2), limits, chooser, ManualClock(), Instruments())
    candidates: Any = [
        (Row(World().request("abc").sequences[0], 0, [1], True, [], None), DraftingSequence(acceptance), 8)
    ]
    rows = [row for row, _, _ in candidates]
    assert [one._depths(candidates, rows, 0, room=1) for _ in range(100)] == [[0]] * 100
    assert [2] in [one._depths(candidates, rows, 0, room=2) for _ in range(64)]


def test_speculation_that_never_pays_costs_at_most_two_percent() -> None:
    """With a drafter that is always wrong and passes as dear as tokens, the time is that without it."""
    options = {"max_tokens": 380, "ignore_eos": True}
    times = []
    for drafter in (None, Fixed(1, 2, 3)):
        world = World(drafter=drafter, num_cells=400, cost=FakeCost(base_s=0.0, token_s=0.01))
        world.submit("abc", max_tokens=10)
        world.run()  # what the model costs is known
        begin_s = world.clock.now()
        world.submit("abc", **options)
        world.run()
        times.append(world.clock.now() - begin_s)
    assert times[1] <= times[0] * 1.02 + 0.04


def test_depths_follow_worth_and_cost() -> None:
    """The most valuable drafts go in first, as many as make the most tokens in a second."""
    flat = choose_depths([(0.9, 8), (0.3, 8)], 2, lambda num: 1.0, 100)
    assert flat[0] == 8
    assert 0 < flat[1] < 8
    assert choose_depths([(0.9, 8), (0.3, 8)], 2, lambda num: 2.0 + num, 100) == [0, 0]
    assert choose_depths([(0.9, 8), (0.3, 8)], 2, lambda num: 2.0 + 0.5 * num, 100)[1] == 0
    assert sum(choose_depths([(0.9, 8)] * 4, 4, lambda num: 1.0, 5)) == 5
    assert choose_depths([(0.9, 8)], 2, lambda num: 1.0 + 0.01 * num, 100, limit_s=1.055) == [5]
    assert choose_depths([(0.9, 8)], 2, lambda num: 1.0 + 0.01 * num, 100, limit_s=1.0) == [0]
    assert choose_depths([(0.9, 0)], 1, lambda num: 1.0, 5) == [0]


def test_acceptance_follows_verdicts_and_trials_become_rare() -> None:
    """Probability follows the verdicts; what fails is tried less and less often."""
    one = Acceptance()
    for _ in range(10):
        one.observe(4, 4)
    assert one.probability > 0.9
    for _ in range(10):
        one.observe(4, 0)
    assert one.probability < 0.4
    waits = []
    for _ in range(3):
        waits.append(next(number for number in range(1, 5000) if one.is_due()))
        one.observe(2, 0)
    assert waits == sorted(waits)
    assert waits[0] < waits[2]
