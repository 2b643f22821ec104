"""The depth of drafts: the most tokens in a second by measured costs, and the time that comparing may take."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine_world import World, make_limits

from paceline.observability.metrics import Instruments
from paceline.sequence import Row
from paceline.speculation.depth_chooser import COMPARING_SHARE, KEPT_FOR, Acceptance, DepthChooser, DraftCost
from paceline.speculation.drafter import DrafterCalls, DraftingSequence
from paceline.speculation.drafting import LaggingSequences, Speculation
from paceline.testing.fake_backend import FakeBackend, ManualClock


def rows_of(num_decode: int, *prompts: int) -> list[Row]:
    """Return rows of sequences that decode, and of prompts with so many tokens left."""
    decoding: Any = SimpleNamespace(is_decoding=True)
    prefilling: Any = SimpleNamespace(is_decoding=False)
    return [Row(decoding, 0, [1], True, [], None) for _ in range(num_decode)] + [
        Row(prefilling, 0, [1] * num_tokens, True, [], None) for num_tokens in prompts
    ]


def chooser_of(
    pass_s: Callable[[int], float],
    step_s: Callable[[int], float] | None = None,
    *,
    itl_target_s: float = math.inf,
    max_rollback: int | None = None,
    cells_s: float = 0.0,
) -> DepthChooser:
    """Return a chooser that knows the seconds of passes by their tokens, and of a draft model's steps by their sequences."""
    model: Any = SimpleNamespace(mean_seconds=lambda tokens, cells, outputs: pass_s(tokens) + cells_s * cells)
    decode_cost: Any = SimpleNamespace(seconds=pass_s)
    chooser = DepthChooser(model, decode_cost, itl_target_s, max_rollback)
    if step_s is not None:
        chooser.draft_cost = DraftCost(is_batch=True)
        for size in range(1, 17):
            chooser.draft_cost.observe([1] * size, [1] * size, step_s(size))
    return chooser


def depths_of(chooser: DepthChooser, candidates: list[tuple[float, int]], num_decode: int, most: int = 64) -> list[int]:
    """Return the chosen depths beside rows that decode, after the tick without drafts that compares."""
    rows = rows_of(num_decode)
    first = chooser.choose(candidates, rows, 0, most)
    return chooser.choose(candidates, rows, 0, most) if chooser.is_comparing else first


def expected(probability: float, depth: int) -> float:
    """Return the expected accepted drafts."""
    return sum([probability**number for number in range(1, depth + 1)])


@pytest.mark.parametrize("seed", range(40))
def test_one_sequence_has_the_depth_with_the_most_tokens_in_a_second(seed: int) -> None:
    """It is found by comparing all depths up to 8."""
    source = random.Random(seed)
    probability, step_s = source.uniform(0.1, 0.97), source.uniform(0.0, 0.02)
    times = [0.03]
    for _ in range(9):
        times.append(times[-1] + source.uniform(0.0, 0.02))
    chosen = depths_of(chooser_of(lambda num: times[num - 1], lambda size: step_s), [(probability, 8)], 1)
    rates = [(1 + expected(probability, depth)) / (times[depth] + depth * step_s) for depth in range(9)]
    assert rates[chosen[0]] >= 0.98 * max(rates)  # drafts that are worth less than 0.02 tokens are ignored
    assert (chosen[0] == 0) is (rates[0] == max(rates))


def test_the_most_valuable_drafts_come_first() -> None:
    """Room for few drafts goes to the sequence that is right more often; drafts that cost a pass each are not made."""
    candidates = [(0.9, 8), (0.3, 8)]
    first, second = depths_of(chooser_of(lambda num: 1.0), candidates, 2)
    assert first == 8
    assert 0 < second < 8
    assert depths_of(chooser_of(float), candidates, 2) == [0, 0]
    assert depths_of(chooser_of(lambda num: 1.0 + 0.5 * num), candidates, 2)[1] == 0
    assert sum(depths_of(chooser_of(lambda num: 1.0), [(0.9, 8)] * 4, 4, most=5)) == 5
    assert depths_of(chooser_of(lambda num: 1.0), [(0.9, 0)], 1) == [0]


def test_drafts_lengthen_no_tick_beyond_the_target_while_several_sequences_decode() -> None:
    """A sequence that decodes alone delays no other sequence."""
    times: Callable[[int], float] = lambda num: 1.0 + 0.01 * num  # noqa: E731
    assert depths_of(chooser_of(times, itl_target_s=1.075), [(0.9, 8)], 2) == [5]
    assert depths_of(chooser_of(times, itl_target_s=1.0), [(0.9, 8)], 2) == [0]
    assert depths_of(chooser_of(times, itl_target_s=1.0), [(0.9, 8)], 1) == [8]


@pytest.mark.parametrize("max_rollback", [0, 2, 12])
@pytest.mark.parametrize("probability", [0.2, 0.5, 0.8, 0.95])
def test_depths_weigh_the_tokens_that_are_computed_again(probability: float, max_rollback: int) -> None:
    """For one sequence the depths have the most tokens in a second in a simulation, or nearly."""

    def seconds(num_drafts: int) -> float:
        return 1.0 + 0.15 * num_drafts

    def simulated(depth: int) -> float:
        source, tokens, spent, num_again = random.Random(depth), 0, 0.0, 0
        for _ in range(20_000):
            if num_again or not depth:
                tokens, spent, num_again = tokens + 1, spent + seconds(num_again), 0
                continue
            num_right = next((i for i in range(depth) if source.random() >= probability), depth)
            tokens, spent = tokens + num_right + 1, spent + seconds(depth)
            num_again = 0 if depth - num_right <= max_rollback else num_right + 1
        return tokens / spent

    def chosen(rollback: int | None) -> int:
        return depths_of(chooser_of(lambda num: seconds(num - 1), max_rollback=rollback), [(probability, 12)], 1)[0]

    assert chosen(max_rollback) <= chosen(None)
    assert simulated(chosen(max_rollback)) >= 0.97 * max(simulated(depth) for depth in (*range(9), 10, 12))
    assert chosen(max_rollback) < chosen(None) or probability == 0.2 or max_rollback


def test_a_step_for_several_sequences_counts_once() -> None:
    """More sequences share the seconds of a draft model's pass, so they draft as deep as one at four times the gain."""
    alone = depths_of(chooser_of(lambda num: 1.0, lambda size: 0.4), [(0.8, 8)], 1)
    together = depths_of(chooser_of(lambda num: 1.0, lambda size: 0.4), [(0.8, 8)] * 4, 4)
    dear = depths_of(chooser_of(lambda num: 1.0, lambda size: 0.4 * size), [(0.8, 8)] * 4, 4)
    assert alone == [2]
    assert together == [2] * 4
    assert max(dear) < 2


def test_a_block_is_one_step_by_its_rows() -> None:
    """A row for the newest token of each sequence and a row for each draft; depth costs these rows."""

    def depth(*measured: tuple[int, float]) -> int:
        chooser = chooser_of(lambda num: 1.0)
        chooser.draft_cost = DraftCost(is_batch=True, drafts_blocks=True)
        for depth, seconds in measured:
            chooser.draft_cost.observe([depth], [depth], seconds)
        return depths_of(chooser, [(0.8, 8)], 1)[0]

    assert depth((1, 0.4), (8, 0.4)) == 8
    assert depth((1, 0.4), (8, 1.8)) == 4


def test_last_tokens_of_cached_prompts_cost_as_much_as_decoding_rows() -> None:
    """The pass has its own size, with its measurements: 16 rows, and not 1 beside prompts."""
    chooser = chooser_of(lambda num: {1: 0.017, 16: 0.09}.get(num, 0.01 * num))
    chooser.choose([(0.9, 8)], rows_of(1, *[1] * 15), 0, 64)
    assert chooser.plain_s == pytest.approx(0.09)


def test_beside_prompts_drafts_cost_the_time_that_they_add() -> None:
    """A pass that computes a prompt is long already."""
    chooser = chooser_of(lambda num: 0.1 if num <= 64 else 0.1 + 0.1 * (num - 64))
    assert chooser.choose([(0.9, 8)], rows_of(1, 40), 0, 64) == [8]
    assert not chooser.is_comparing
    assert chooser.choose([(0.9, 8)], rows_of(1, 63), 0, 64) == [0]


# ---- comparing


@pytest.mark.parametrize("drafts_s", [0.011, 0.0475])
def test_ticks_that_compare_lose_a_hundredth_of_the_time(drafts_s: float) -> None:
    """The first tick is without drafts, and then a tick each time that its loss is a hundredth of the time since the last."""
    chooser = chooser_of(lambda num: 0.01 if num == 1 else drafts_s)
    probability = 0.9
    num_tokens = spent_s = lost_s = 0.0
    plain = []
    for tick in range(3000):
        depth = chooser.choose([(probability, 7)], rows_of(1), 0, 64)[0]
        taken_s = drafts_s if depth else 0.01
        num_tokens, spent_s = num_tokens + 1 + expected(probability, depth), spent_s + taken_s
        if not depth:
            plain.append(tick)
    best = (1 + expected(probability, 7)) / drafts_s
    lost_s = spent_s - num_tokens / best
    assert plain[0] == 0
    assert len(plain) > 4
    assert 0.3 * COMPARING_SHARE < lost_s / spent_s < 1.5 * COMPARING_SHARE


def test_a_width_with_unknown_costs_is_tried() -> None:
    """No pass with drafts was seen, so its expected time decides; the drafter's first proposal costs nothing."""
    assert depths_of(chooser_of(lambda num: 0.01), [(0.7, 8)], 1)[0] > 0


@pytest.mark.parametrize("catching_up_s", [0.0, 0.2])
def test_a_trial_waits_until_its_loss_is_a_hundredth_of_the_time(catching_up_s: float) -> None:
    """A sequence that is wrong mostly gets drafts again at times, later if the drafter has to catch up with it."""
    chooser = chooser_of(lambda num: 0.01 * num)
    candidates, waits, num_since = [(0.05, 8)], [], 0
    for _ in range(20_000):
        depths = chooser.choose(candidates, rows_of(1), 0, 64)
        assert depths == [0]
        num_since += 1
        if tried := chooser.trial(0.05, 8, depths, 0, catching_up_s):
            chooser.note_trial()
            waits.append((num_since, tried))
            num_since = 0
    assert len(waits) > 3
    for num_ticks, tried in waits:
        lost_s = catching_up_s + 0.01 * tried - 0.01 * expected(0.05, tried)
        assert num_ticks * 0.01 == pytest.approx(lost_s / COMPARING_SHARE, abs=0.02)
    assert chooser.trial(0.05, 8, [0], 0, 1000.0, is_begun=True) > 0  # that time is spent


def test_a_trial_has_the_depth_of_a_usual_sequence() -> None:
    """If 8 rows take less than 3, seven drafts lose less than two."""
    chooser = chooser_of(lambda num: {1: 0.017, 2: 0.05, 3: 0.08}.get(num, 0.03))
    chooser.choose([(0.05, 8)], rows_of(1), 0, 64, num_ticks=100_000)
    assert chooser.trial(0.05, 8, [0], 0, 0.0) == 8
    assert chooser.trial(0.05, 2, [0], 0, 0.0) == 1


def test_a_choice_is_kept_for_some_ticks_however_many_were_decided() -> None:
    """A time that grows with the cells in use is seen after a number of ticks, also if most of them decided nothing."""
    for num_ticks, num_calls in ((1, KEPT_FOR + 1), (KEPT_FOR + 1, 1)):
        chooser = chooser_of(lambda num: 0.01 * num, cells_s=1e-6)
        chooser.choose([(0.1, 7)], rows_of(1), 0, 64)
        before_s = chooser.plain_s
        for _ in range(num_calls):
            assert chooser.plain_s == before_s
            chooser.choose([(0.1, 7)], rows_of(1), 5000, 64, num_ticks)
        assert chooser.plain_s > before_s


def test_the_time_of_deciding_is_a_part_of_the_cost_of_drafts() -> None:
    """With passes of half a millisecond, drafts that win a third do not pay for the decision; decisions then become rare."""
    chooser = chooser_of(lambda num: 0.0005 if num == 1 else 0.0006)
    assert depths_of(chooser, [(0.3, 7)], 1)[0] > 0
    for _ in range(200):
        chooser.note_deciding(0.0004)
    assert depths_of(chooser, [(0.33, 7)], 1) == [0]
    assert chooser.rest_ticks() == pytest.approx(0.0004 / (COMPARING_SHARE * 0.0005), rel=0.05)
    for _ in range(200):
        chooser.note_deciding(0.0)
    assert depths_of(chooser, [(0.35, 7)], 1)[0] > 0
    assert chooser.rest_ticks() == KEPT_FOR


def test_a_trial_without_room_comes_when_there_is_room() -> None:
    """The sequence had to wait for it for long enough, so it waits no longer."""

    class TwoTokens:
        begin = observe = rollback = end = lambda *_: None

        def propose(self, key: int, max_tokens: int) -> list[int]:
            return [1, 2][:max_tokens]

    acceptance = Acceptance()
    for _ in range(60):
        acceptance.observe(4, 0)
    limits = make_limits(FakeBackend(clock=ManualClock()), min_draft=2)
    chooser = chooser_of(lambda num: 0.01 * num)
    speculation = Speculation(TwoTokens(), limits, chooser, ManualClock(), Instruments().drafter_failed)
    row = Row(World().request("abc").sequences[0], 0, [1], True, [], None)
    candidates: Any = [(row, DraftingSequence(acceptance), 8)]
    chooser.choose([(0.01, 8)], [row], 0, 64, num_ticks=1_000_000)
    assert [speculation._choose(candidates, [row], 0, room=1) for _ in range(100)] == [[]] * 100
    ((_, _, depth),) = speculation._choose(candidates, [row], 0, room=2)
    assert depth == 2


def test_the_first_proposal_of_a_drafter_is_not_timed() -> None:
    """It reads weights or a whole prompt, and would keep the drafter from being asked for minutes."""
    clock, seconds = ManualClock(), [5.0, 0.002]

    class SlowStart:
        begin = observe = rollback = end = lambda *_: None

        def propose(self, key: int, max_tokens: int) -> list[int]:
            clock.advance(seconds.pop(0))
            return [1][:max_tokens]

    chooser = chooser_of(lambda num: 0.01 * num)
    limits = make_limits(FakeBackend(clock=clock))
    speculation = Speculation(SlowStart(), limits, chooser, clock, Instruments().drafter_failed)
    sequence = World().request("abc").sequences[0]
    known = DraftingSequence(Acceptance())
    for expected_s in (0.0, 0.002):
        speculation._propose([(Row(sequence, 0, [1], True, [], None), known, 1)])
        assert chooser.draft_cost.seconds(1) == pytest.approx(expected_s)


# ---- acceptance


def test_the_usual_share_counts_verdicts_and_not_proposals() -> None:
    """A drafter is right nine times of ten, whatever the length of its proposals, and a new sequence begins there."""
    for depth in (1, 2, 7):
        usual, source = Acceptance(), random.Random(depth)
        sequences = [Acceptance(usual) for _ in range(8)]
        for tick in range(800):
            num_right = next((i for i in range(depth) if source.random() >= 0.9), depth)
            sequences[tick % 8].observe(depth, num_right)
        assert usual.probability == pytest.approx(0.9, abs=0.07)
        assert Acceptance(usual).probability == usual.probability


def test_acceptance_follows_verdicts() -> None:
    """Upwards and downwards, and drafts after a wrong draft say nothing."""
    acceptance = Acceptance(Acceptance())
    for _ in range(10):
        acceptance.observe(4, 4)
    assert acceptance.probability > 0.9
    for _ in range(30):
        acceptance.observe(4, 0)
    assert acceptance.probability < 0.4
    before = acceptance.probability
    acceptance.observe(0, 0)
    assert acceptance.probability == before


def test_expected_tokens_are_the_sum_of_all_drafts() -> None:
    """Of certain drafts their number."""
    acceptance = Acceptance()
    acceptance.probability = 0.5
    assert acceptance.expected(3) == pytest.approx(0.5 + 0.25 + 0.125)
    assert acceptance.expected(0) == 0.0
    acceptance.probability = 1.0
    assert acceptance.expected(3) == 3.0


# ---- the cost of drafting


def test_seconds_of_deep_blocks_say_little_of_shallow_blocks_and_the_reverse() -> None:
    """Fewer rows are assumed to be cheaper, and more rows as dear as the most seen, until they are tried."""
    deep = DraftCost(is_batch=True, drafts_blocks=True)
    assert deep.of_depths([7]) == 0.0
    deep.observe([15], [15], 0.09)
    assert deep.of_depths([1]) == pytest.approx(0.09 * 2 / 16)
    deep.observe([1], [1], 0.02)
    assert deep.of_depths([1]) == 0.02
    assert deep.of_depths([15]) == 0.09
    assert deep.of_depths([8]) == pytest.approx(0.055)
    assert deep.of_depths([0, 0]) == 0.0


def test_blocks_are_no_deeper_than_the_file_makes_them() -> None:
    """More may be asked for; drafts that were too improbable were computed all the same."""
    cost = DraftCost(is_batch=True, drafts_blocks=True)
    cost.observe([40], [7], 0.08)
    cost.observe([1], [1], 0.02)
    assert cost.of_depths([40]) == cost.of_depths([7]) == 0.08
    assert cost.of_depths([40, 40]) == cost.of_depths([7, 7])


def test_steps_of_a_draft_model_are_learned_from_whole_proposals() -> None:
    """By the number of sequences, between measured numbers, and without a single time that was odd."""
    cost = DraftCost(is_batch=True)
    assert cost.of_depths([4]) == 0.0
    for _ in range(200):
        cost.observe([3, 3], [3, 3], 0.006)
        cost.observe([1] * 4, [1] * 4, 0.006)
    assert cost.seconds(2) == pytest.approx(0.002, rel=0.05)
    assert cost.seconds(4) == pytest.approx(0.006, rel=0.05)
    assert cost.seconds(3) == pytest.approx(0.004, rel=0.05)
    assert cost.seconds(1) == cost.seconds(2)
    assert cost.seconds(9) == cost.seconds(4)
    assert cost.of_depths([2, 1, 2, 2]) == pytest.approx(cost.seconds(4) + cost.seconds(3))
    cost.observe([1] * 4, [1] * 4, 600.0)  # the machine was asleep
    assert cost.seconds(4) < 0.007
    for _ in range(100):
        cost.observe([1] * 4, [1] * 4, 0.03)
    assert cost.seconds(4) == pytest.approx(0.03, rel=0.1)


def test_a_proposal_that_ended_early_took_one_step_more() -> None:
    """The step that proposed nothing was computed."""
    cost = DraftCost(is_batch=True)
    cost.observe([8], [1], 0.004)
    assert cost.seconds(1) == pytest.approx(0.002)
    alone = DraftCost(is_batch=False)
    alone.observe([3, 0, 5], [3, 0, 5], 0.004)
    assert alone.of_depths([1]) == pytest.approx(0.002)


def test_of_the_first_two_times_of_a_step_the_shorter_counts() -> None:
    """The first may be of a machine that was asleep, after which nothing would be drafted for long."""
    cost = DraftCost(is_batch=False)
    for seconds in (5.0, 0.002):
        cost.observe([1], [1], seconds)
    assert cost.seconds(1) == 0.002
    cost.observe([1], [1], 0.001)
    assert 0.001 < cost.seconds(1) < 0.002


@pytest.mark.parametrize("step_s", [0.001, 0.008])
def test_a_drafter_that_proposes_nothing_is_seldom_asked(step_s: float) -> None:
    """Passes take 10 ms. It is not forgotten: it is asked as often as before when it has proposals again."""
    chooser = chooser_of(lambda num: 0.01 + 0.0005 * num)
    chooser.draft_cost = DraftCost(is_batch=False)
    acceptance, rows = Acceptance(), rows_of(1)

    def num_asked(num_ticks: int, share: float) -> int:
        """Return in how many ticks it is asked if it proposes this share of the wanted drafts, which are right."""
        num = 0
        for _ in range(num_ticks):
            depths = chooser.choose([(acceptance.probability, 40)], rows, 0, 40)
            if not depths[0] and not chooser.is_comparing:
                depths = [chooser.trial(acceptance.probability, 40, depths, 0, 0.0)]
                if depths[0]:
                    chooser.note_trial()
            if depths[0]:
                num += 1
                proposed = int(share * depths[0])
                chooser.draft_cost.observe(depths, [proposed], step_s)
                acceptance.observe(proposed, proposed)
        return num

    assert num_asked(200, 1) > 190
    num_asked(600, 0)
    assert step_s * num_asked(1000, 0) < 0.02 * 1000 * 0.01
    num_asked(3000, 1)
    assert num_asked(200, 1) > 190


def test_a_fast_drafter_is_asked_in_every_tick_whether_or_not_it_proposes() -> None:
    """It takes less than a two-hundredth of a pass, and proposes something at the start of a repetition."""
    chooser = chooser_of(lambda num: 0.01 + 0.0005 * num)
    chooser.draft_cost = DraftCost(is_batch=False)
    for _ in range(500):
        chooser.draft_cost.observe([8], [0], 0.00004)
    for _ in range(20):
        assert any(chooser.choose([(0.7, 40)], rows_of(1), 0, 40)) or chooser.is_comparing


# ---- catching up


def lagging_of(token_s: float = 0.0, itl_target_s: float = 0.05, pass_s: float = 0.01) -> tuple[Any, Any, list[int]]:
    """Return lagging sequences, their chooser, and the limits that the drafter is given, of which it takes at most 1,000."""
    limits: list[int] = []
    drafter: Any = SimpleNamespace(num_caught_up=0)

    def limit_catch_up(num_tokens: int) -> int:
        limits.append(num_tokens)
        return min(num_tokens, 1000)

    drafter.limit_catch_up = limit_catch_up
    chooser = chooser_of(lambda num: pass_s)
    calls = DrafterCalls(drafter, 10, Instruments().drafter_failed)
    engine_limits: Any = SimpleNamespace(itl_target_s=itl_target_s)
    lagging = LaggingSequences(calls, chooser, engine_limits, {})
    lagging.token_s = token_s
    return lagging, chooser, limits


def row_with(max_tokens: int | None) -> Any:
    """Return the row of a sequence that has generated nothing yet."""
    params, output = SimpleNamespace(max_tokens=max_tokens), SimpleNamespace(num_generated=0)
    return SimpleNamespace(sequence=SimpleNamespace(request=SimpleNamespace(params=params), output=output))


@pytest.mark.parametrize(("max_tokens", "num_drafting", "most"), [(200, 1, 1800), (200, 4, 450), (None, 1, 4608)])
def test_catching_up_pays_if_the_rest_of_the_sequence_wins_it_back(
    max_tokens: int | None, num_drafting: int, most: int
) -> None:
    """Drafts save 9 of 10 ms for each token that is left, 512 at most; the sequences that draft share that."""
    lagging, chooser, _ = lagging_of(0.001)
    chooser.choose([(1.0, 9)], rows_of(1), 0, 64)
    assert chooser.saved_s() == pytest.approx(0.009, rel=0.01)
    known = DraftingSequence(Acceptance())
    for num_missing, pays in ((0, True), (0.98 * most, True), (1.02 * most, False)):
        known.num_missing = num_missing
        assert lagging.pays(row_with(max_tokens), known, num_drafting) is pays
    known.is_catching_up = True
    assert lagging.pays(row_with(max_tokens), known, num_drafting)


def test_a_chunk_takes_the_time_that_the_tick_leaves() -> None:
    """Of 50 ms a tick takes 20: 30 tokens of 1 ms; 16 at least, 1024 at most, 32 while a token's time is not known."""
    lagging, _, limits = lagging_of(0.001)
    assert [lagging.limit(tick_s) for tick_s in (0.02, 0.04, 0.2)] == [30, 16, 16]
    assert limits == [30, 16, 16]
    fast, _, limits = lagging_of(0.000001)
    assert fast.limit(0.02) == 1000  # as the drafter says
    assert limits == [1024]
    unknown, _, limits = lagging_of()
    unknown.limit(0.02)
    assert limits == [32]


def test_the_seconds_of_a_missing_token_are_learned_from_many_tokens() -> None:
    """Few tokens teach nothing, and steps count as drafting."""
    lagging, chooser, _ = lagging_of()
    calls: Any = lagging._calls
    asked: Sequence[Any] = ()
    calls.num_caught_up = 15
    lagging.note_proposals(asked, [], [], 1.0)
    assert lagging.token_s == 0.0
    calls.num_caught_up = 16
    lagging.note_proposals(asked, [], [], 16.0)  # the machine was asleep
    lagging.note_proposals(asked, [], [], 0.016)
    assert lagging.token_s == pytest.approx(0.001)
    for _ in range(200):
        lagging.note_proposals(asked, [], [], 0.032)
    assert lagging.token_s == pytest.approx(0.002, rel=0.05)
    assert chooser.draft_cost.of_depths([1]) == 0.0
