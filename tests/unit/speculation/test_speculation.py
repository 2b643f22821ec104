"""Drafts in the tick: verified drafts, kept drafts, and that only the clock shows the difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.drafters import Oracle
from tests.engine_world import Outcome, World

from paceline.cost_model import DecodeCost, MeasuredPass
from paceline.errors import Aborted, DrafterError
from paceline.observability.metrics import Instrument
from paceline.scheduling.records import TickRecord
from paceline.sequence import Row
from paceline.speculation.drafting import Speculation
from paceline.streaming import FinishReason
from paceline.testing.fake_backend import FakeCost

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
        speculation._chooser.choose = lambda candidates, rows, num_cells, most, num_ticks: _spread(  # type: ignore[method-assign]
            candidates, depth, most
        )
        speculation._chooser.trial = lambda *_, **__: 0  # type: ignore[method-assign]
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
    """Return a reader's view of a choice."""
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


MEMORIES: list[dict[str, Any]] = [
    {"kind": "attention"},
    {"kind": "sliding_window"},
    {"kind": "hybrid"},
    {"kind": "hybrid", "rollback": 2},
    {"kind": "recurrent"},
    {"kind": "recurrent", "rollback": 8},
]


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("error_rate", [0.0, 0.4])
@pytest.mark.parametrize("options", ENDINGS)
def test_output_and_ending_match_decoding_alone(
    options: dict[str, Any], error_rate: float, memory: dict[str, Any]
) -> None:
    """Every ending inside a burst is exact, whatever of a row can be taken back."""
    oracle = Oracle(futures("once upon", **options), error_rate=error_rate, seed=3)
    world = speculative(oracle, depth=8, **memory)
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


@pytest.mark.parametrize("kind", ["attention", "sliding_window"])
def test_wrong_drafts_leave_nothing_behind(kind: str) -> None:
    """Cells of rejected drafts are free, and no prefix has them."""
    world = speculative(Fixed(1, 2, 3), kind=kind)
    outcome = world.submit("abc", max_tokens=20, ignore_eos=True)
    world.run()
    assert usage(outcome).accepted_tokens == 0
    assert usage(outcome).draft_tokens > 0
    again = world.submit([*outcome.request.prompt, *outcome.token_ids(), 65], max_tokens=5)
    world.run()
    world.check_done()
    assert usage(again).cached_tokens == 3 + 20 - 1
    assert told(again) == told(World(num_cells=400).alone(again.request.prompt, max_tokens=5))


@pytest.mark.parametrize("memory", MEMORIES[2:], ids=str)
def test_a_row_with_a_wrong_draft_is_computed_again_without_drafts(memory: dict[str, Any]) -> None:
    """Unless the wrong drafts can be cut: right drafts come with the next token, as decoding, and then drafts go on."""
    options = {"max_tokens": 30, "ignore_eos": True}
    (whole,) = futures("abc", **options)
    ticks: list[TickRecord] = []
    world = speculative(Wrong(Oracle([whole]), 2), depth=4, instruments=(Ticks(ticks),), **memory)
    outcome = world.submit("abc", **options)
    world.run()
    world.check_done()
    assert outcome.token_ids() == whole[3:]
    rows = [
        (row.num_tokens - row.num_drafts, row.num_drafts, row.num_decode, row.num_new)
        for tick in ticks
        for row in tick.rows
    ]
    assert rows[0] == (3, 0, 0, 1)
    bounded = {0: [(1, 4, 1, 3), (4, 0, 4, 1)] * 2, 2: [(1, 4, 1, 3)] * 4, 8: [(1, 4, 1, 3)] * 4}
    assert rows[1:5] == bounded[memory.get("rollback", 0)]
    assert usage(outcome).accepted_tokens == sum(row[3] - 1 for row in rows[1:])


class Wrong:
    """Another drafter, but from this draft of each proposal on all are wrong."""

    def __init__(self, drafter: Oracle, first: int) -> None:
        self._drafter, self._first = drafter, first
        self.begin, self.observe, self.end = drafter.begin, drafter.observe, drafter.end
        self.rollback = drafter.rollback

    def propose(self, key: int, max_tokens: int) -> list[int]:
        right = self._drafter.propose(key, max_tokens)
        for index in range(self._first, len(right)):
            right[index] = 1 if right[index] != 1 else 2
        self._drafter.proposed[key] = right
        return right


@pytest.mark.parametrize("memory", MEMORIES[2:], ids=str)
def test_a_stop_within_a_burst_leaves_a_prefix_up_to_where_its_row_began(memory: dict[str, Any]) -> None:
    """A state after the end is no part of it, and the part before can be continued."""
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    (whole,) = futures("abcdefgh" * 3, **options)
    stop = next(item for index, item in enumerate(whole) if index > 30 and item not in whole[24:index])
    end = whole.index(stop, 24)
    world = speculative(Oracle([whole]), depth=4, **memory)
    outcome = world.submit("abcdefgh" * 3, stop_token_ids=[stop], **options)
    world.run()
    world.check_done()
    assert outcome.reason() is FinishReason.STOP
    again = world.submit([*whole[: end + 1], 66, 67], max_tokens=5)
    world.run()
    world.check_done()
    most = memory.get("rollback", 4) or 4
    assert end - min(most, 4) - 1 <= usage(again).cached_tokens <= end + 1
    assert told(again) == told(World(num_cells=400).alone(again.request.prompt, max_tokens=5))


def test_a_sequence_that_is_preempted_while_it_computes_again_begins_as_any_other() -> None:
    """Its recomputation is a prompt, and no decoding."""
    options = {"max_tokens": 60, "ignore_eos": True}
    (whole,) = futures("abc", **options)
    world = speculative(Wrong(Oracle([whole]), 3), depth=4, kind="recurrent")
    outcome = world.submit("abc", **options)
    (sequence,) = outcome.request.sequences
    while not sequence.num_taken_back:
        world.tick()
    assert sequence.is_decoding
    world.scheduler._admission.preempt(world.clock.now())
    assert not sequence.num_taken_back
    assert not sequence.is_decoding
    world.run()
    world.check_done()
    assert outcome.token_ids() == whole[3:]


def test_drafts_keep_a_tick_within_what_a_window_can_take_back() -> None:
    """With `n_verify` no pass with drafts has more tokens, while prompts may fill longer passes."""
    options = {"max_tokens": 60, "ignore_eos": True}
    ticks: list[TickRecord] = []
    oracle = Oracle(futures("abc", **options))
    limits = {"n_verify": 6}
    world = speculative(oracle, depth=8, kind="sliding_window", limits=limits, instruments=(Ticks(ticks),))
    outcome = world.submit("abc", **options)
    world.tick(3)
    world.submit("x" * 60, max_tokens=3)
    world.run()
    assert outcome.token_ids() == oracle.futures[0][3:]
    drafted = [tick for tick in ticks if any(row.num_drafts for row in tick.rows)]
    assert max(sum(row.num_tokens for row in tick.rows) for tick in drafted) == 6
    assert max(sum(row.num_tokens for row in tick.rows) for tick in ticks) > 6


@pytest.mark.parametrize("memory", MEMORIES[2:], ids=str)
def test_costs_decide_with_rows_that_are_taken_back(memory: dict[str, Any]) -> None:
    """If drafts are right often enough the text comes sooner, and if they are wrong not much later."""
    options = {"max_tokens": 300, "ignore_eos": True}
    cost = FakeCost(base_s=0.01, token_s=0.0005)
    taken_s = {}
    for error_rate in (None, 0.05, 0.6):
        oracle = Fixed() if error_rate is None else Oracle(futures("abc", **options), error_rate=error_rate)
        world = speculative(oracle, depth=None, cost=cost, num_cells=400, **memory)
        world.scheduler.calibrate(
            [MeasuredPass(num, num, cost.base_s + num * cost.token_s, num) for num in (1, 4, 8, 64)]
        )
        world.submit("abc", **options)
        world.run()
        taken_s[error_rate] = world.clock.now()
    assert taken_s[0.05] < 0.5 * taken_s[None]
    assert taken_s[0.6] < 1.02 * taken_s[None] + 0.05


def test_a_burst_behind_a_stop_is_no_part_of_the_cached_prefix() -> None:
    """Tokens verified after the end are cut, so that the next turn begins from the reader's tokens."""
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
    stop = next(item for index, item in enumerate(whole) if index > 5 and item not in whole[3:index])
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


class Uncopyable:
    """A constraint that allows everything, and cannot be followed along drafts."""

    is_complete, may_end = False, True

    def __init__(self, num_copies: int = 2) -> None:
        self._num_copies = num_copies

    def fill_mask(self, words: Any) -> bool:
        return False

    def accept(self, token_id: int) -> None:
        pass

    def rollback(self, num_tokens: int) -> None:
        pass

    def copy(self) -> Uncopyable:
        if not self._num_copies:
            raise RuntimeError("no copy")
        return Uncopyable(self._num_copies - 1)


def test_right_drafts_that_no_pass_has_win_nothing_and_stop() -> None:
    """A sequence with masks that are never ready goes without drafts; later sequences have theirs."""
    options: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    oracle = Oracle(futures("abc", **options))
    world = speculative(oracle, depth=None, num_cells=1000)
    world.scheduler.calibrate([MeasuredPass(num, num, 0.01 + num * 0.00001, num) for num in (1, 4, 8, 64)])
    outcome = world.submit("abc", constraint=Uncopyable(), **options)
    world.tick(190)
    speculation: Any = world.scheduler._speculation
    ((_, known),) = speculation._sequences.items()
    assert 4 < oracle.num_proposals < 80  # a draft costs a thousandth of a pass, so trials are frequent
    assert known.acceptance.probability < 0.1
    world.run()
    assert usage(outcome).draft_tokens == 0
    free = world.submit("abc", **options)
    world.run()
    assert usage(free).accepted_tokens > 150


def test_a_draft_that_a_constraint_forbids_is_wrong() -> None:
    """Though no pass had it."""
    world = speculative(Fixed(120, 120, 120), depth=2)
    outcome = world.submit("abc", max_tokens=12, regex="[a-e]{17}x")
    world.tick(10)
    speculation: Any = world.scheduler._speculation
    ((_, known),) = speculation._sequences.items()
    assert known.acceptance.probability < 0.4
    world.run()
    assert usage(outcome).draft_tokens == 0


class Ticks(Instrument):
    def __init__(self, found: list[TickRecord]) -> None:
        self.found = found

    def tick_finished(self, record: TickRecord) -> None:
        self.found.append(record)


def test_drafts_that_are_left_out_of_a_pass_are_not_counted_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in usage, nor in a tick's record, nor in learned costs; and the time of masks before it is no cost of rows."""
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


def test_who_may_draft_is_asked_rarely_while_nobody_may_and_at_once_when_one_joins() -> None:
    """Beside a request without drafts; a new one has some in its first tick with drafts to spare."""
    options = {"max_tokens": 60, "ignore_eos": True}
    world = speculative(Oracle(futures("xyz", **options)))
    speculation = world.scheduler._speculation
    assert isinstance(speculation, Speculation)
    num_asked, candidates = 0, speculation._candidates

    def counting(rows: list[Row]) -> Any:
        nonlocal num_asked
        num_asked += 1
        return candidates(rows)

    speculation._candidates = counting  # type: ignore[method-assign]
    world.submit("abc", **options, speculation=False)
    while world.scheduler._tick < 32:
        world.tick()
    assert 0 < num_asked <= 4
    later = world.submit("xyz", max_tokens=9, ignore_eos=True)
    num_before = world.scheduler._tick
    while later.terminal is None:
        world.tick()
    assert usage(later).accepted_tokens > 0
    assert world.scheduler._tick - num_before <= 4


def test_a_prompt_that_is_cached_but_for_its_last_token_has_drafts_at_once() -> None:
    """That token is no decoding row yet, so the tick that computes it begins no rest."""
    options = {"max_tokens": 9, "ignore_eos": True}
    prompt = "the quick brown fox"
    world = speculative(Oracle(futures(prompt, **options)))
    for _ in range(2):
        outcome, num_before = world.submit(prompt, **options), world.scheduler._tick
        while outcome.terminal is None:
            world.tick()
    assert usage(outcome).cached_tokens == len(prompt) - 1
    assert world.scheduler._tick - num_before <= 4


def test_a_request_that_may_have_fewer_drafts_than_are_verified_goes_without() -> None:
    """Its `max_draft` is below the engine's `min_draft`."""
    options = {"max_tokens": 30, "ignore_eos": True}
    world = speculative(Oracle(futures("abc", **options)), limits={"min_draft": 3})
    outcomes = [world.submit("abc", max_draft=most, **options) for most in (2, 3)]
    world.run()
    assert [usage(outcome).draft_tokens > 0 for outcome in outcomes] == [False, True]


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
    for outcome, item in zip(outcomes, asked, strict=True):
        assert outcome.token_ids() == item[3:]


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
    """Neither the ended request nor another."""
    world = speculative(Failing("end"))
    for number in (1, 2):
        outcome = world.submit("abc", max_tokens=20, ignore_eos=True)
        world.run()
        assert outcome.last().error is None
        assert [message for message in caplog.messages if "Failing failed to end" in message] == caplog.messages
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
    """So that its resources are released."""
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
    """Right drafts are made if a token more costs little, and next to none if each costs as much as a pass."""
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
    """Drafts that pay in tokens a second are left out if they push a tick over the target, unless a sequence decodes alone."""
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
