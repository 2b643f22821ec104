"""The cost of speculation if it does not pay, and its gain if it does, with passes as dear as real passes, on a clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from tests.drafters import BatchOracle
from tests.engine_world import World, make_limits
from tests.speculation_world import FreeDrafter, StreamWorld

from paceline.cost_model import DecodeCost, TickCostModel
from paceline.observability.metrics import Instruments
from paceline.sequence import Row
from paceline.speculation import depth_chooser
from paceline.speculation.acceptance import Acceptance, UsualAcceptance
from paceline.speculation.depth_chooser import DepthChooser, choose_depths
from paceline.speculation.drafter import Candidates, DraftingSequence
from paceline.speculation.drafters.model_drafter import ModelDrafter
from paceline.speculation.drafting import Speculation
from paceline.testing.fake_backend import FakeBackend, ManualClock


def ratios(world: StreamWorld, plain: StreamWorld, num_rounds: int = 4) -> dict[int, float]:
    """Of the times of closed loops of 1, 4 and 16 streams in turn, without speculation and with it."""
    times: dict[int, list[float]] = {1: [0.0, 0.0], 4: [0.0, 0.0], 16: [0.0, 0.0]}
    for seed in range(num_rounds):
        for width, sums in times.items():
            for index, item in enumerate((plain, world)):
                sums[index] += 1 / item.tokens_per_s(width, 16 if width == 16 else 2 * width, seed=seed)
    return {width: without / with_drafts for width, (without, with_drafts) in times.items()}


@pytest.mark.parametrize(("acceptance", "at_four"), [(0.1, 0.98), (0.5, 1.1), (0.7, 1.2), (0.9, 1.5)])
def test_a_draft_model_costs_at_most_two_percent_and_wins_where_it_can(acceptance: float, at_four: float) -> None:
    """With four streams 16 rows are nearly as cheap as 4; with one and with sixteen next to nothing pays."""
    found = ratios(StreamWorld(acceptance), StreamWorld())
    assert found[1] >= 0.98
    assert found[16] >= 0.98
    assert found[4] >= at_four


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.7, 0.9])
def test_sixteen_streams_of_cached_prompts_lose_no_more(acceptance: float) -> None:
    """They come within milliseconds, and decode in their first pass: the drafter has none of their prompts yet."""
    with_s = without_s = 0.0
    for interval_s in (0.0, 0.001, 0.0025, 0.005, 0.009):
        world, plain = StreamWorld(acceptance), StreamWorld()
        for width in (1, 4, 16):
            world.tokens_per_s(width, 16 if width == 16 else 2 * width)
        for item in (world, plain):
            item.tokens_per_s(16, 16, seed=1)
        for _ in range(2):
            with_s += 1 / world.tokens_per_s(16, 16, seed=1, interval_s=interval_s)
            without_s += 1 / plain.tokens_per_s(16, 16, seed=1, interval_s=interval_s)
    assert without_s / with_s >= 0.98


@pytest.mark.parametrize(
    ("acceptance", "least"), [(1.0, {1: 1.8, 4: 2.0, 16: 1.05}), (0.0, {1: 0.98, 4: 0.98, 16: 0.98})]
)
def test_free_proposals_win_where_they_are_right_and_cost_nothing_where_not(
    acceptance: float, least: dict[int, float]
) -> None:
    """As prompt lookup has them: from the first request on, without a draft model's time."""
    found = ratios(StreamWorld(drafter=FreeDrafter(acceptance)), StreamWorld(), num_rounds=2)
    assert all(found[width] >= ratio for width, ratio in least.items()), found


def test_a_new_request_has_drafts_at_once_whatever_was_left_out_before_the_end_of_the_last() -> None:
    """Near its end a sequence has no room for drafts that pay; the choice of none is not kept for the next sequence."""
    world = StreamWorld(drafter=FreeDrafter(1.0))
    world.tokens_per_s(1, 2)
    num_passes = []
    for seed in range(1, 9):
        world.passes.clear()
        world.tokens_per_s(1, 1, seed=seed)
        num_passes.append(len(world.passes))
    assert max(num_passes) <= 8, num_passes


def test_trials_are_made_by_one_sequence_at_a_time() -> None:
    """If nothing pays no pass has drafts of two, once sizes are known."""
    world = StreamWorld(drafter=FreeDrafter(0.0))
    world.tokens_per_s(16, 16)
    world.passes.clear()
    world.tokens_per_s(16, 64, seed=1)
    decoding = [
        rows
        for rows in world.passes
        if len(rows) == 16 and all(len(row.token_ids) == 1 + row.num_drafts for row in rows)
    ]
    drafting = [sum(row.num_drafts > 0 for row in rows) for rows in decoding]
    assert max(drafting) == 1
    assert sum(drafting) > 1


class Rows:
    """Rows of so many sequences that decode, and of prompts that have so many tokens left."""

    def __init__(self, num_decode: int, *prompts: int) -> None:
        self.sequence: Any = type("Decoding", (), {"is_decoding": True})
        self.prompt: Any = type("Prompt", (), {"is_decoding": False})
        self.rows: list[Any] = [Row(self.sequence, 0, [1], True, [], None) for _ in range(num_decode)]
        self.rows += [Row(self.prompt, 0, [1] * num_tokens, True, [], None) for num_tokens in prompts]


def chooser(seen_s: dict[int, float]) -> tuple[DepthChooser, DecodeCost]:
    """A chooser that has seen passes of some sizes."""
    model = TickCostModel()
    costs = DecodeCost(model)
    for _ in range(40):
        for num_rows, seconds in seen_s.items():
            costs.observe(num_rows, 0, seconds)
            model.observe(num_rows, 0, seconds, num_rows)
    return DepthChooser(model, costs, 0.25), costs


def test_passes_without_drafts_are_seen_before_drafts_are_chosen() -> None:
    """The first tick with a new number of sequences has none; then its time decides."""
    for plain_s, pays in ((0.06, True), (0.02, False)):
        one, costs = chooser({1: 0.017, 8: 0.07})
        rows = Rows(4).rows
        assert one.choose([(0.99, 8)] * 4, rows, 0, 64) == [0] * 4
        assert one.is_measuring
        costs.observe(4, 0, plain_s)
        assert any(one.choose([(0.98, 8)] * 4, rows, 0, 64)) is pays
        assert not one.is_measuring


def test_what_drafts_are_measured_by_is_seen_again() -> None:
    """The first tick with drafts is left without, and of later ticks one in 65 if drafts win much, in 9 if little."""
    for drafts_s, interval in ((0.011, 65), (0.0475, 9)):
        one, _ = chooser({1: 0.01, **dict.fromkeys(range(2, 9), drafts_s)})
        chosen = [any(one.choose([(0.9, 7)], Rows(1).rows, 0, 64)) for _ in range(200)]
        plain = [index for index, has_drafts in enumerate(chosen) if not has_drafts]
        assert plain[0] == 0
        assert {after - before for before, after in itertools.pairwise(plain)} == {interval}


def test_deciding_on_drafts_is_a_part_of_what_they_cost() -> None:
    """With passes of half a millisecond drafts that win a third do not pay for the decision on them."""
    one, _ = chooser({1: 0.0005, **dict.fromkeys(range(2, 9), 0.0006)})
    assert not any(one.choose([(0.3, 7)], Rows(1).rows, 0, 64))
    assert one.is_measuring
    assert any(one.choose([(0.3, 7)], Rows(1).rows, 0, 64))
    for _ in range(100):
        one.note_deciding(0.0004)
    assert not any(one.choose([(0.31, 7)], Rows(1).rows, 0, 64))
    assert not one.is_measuring
    assert one.rest_ticks() == 256
    for _ in range(100):
        one.note_deciding(0.0002)
    assert one.rest_ticks() == pytest.approx(0.0002 / (0.003 * 0.0005), rel=0.05)
    assert one.rest_ticks(has_room=False) == 16
    for _ in range(100):
        one.note_deciding(0.0)
    assert any(one.choose([(0.32, 7)], Rows(1).rows, 0, 64))
    assert one.rest_ticks() == 16


def test_a_choice_is_kept_for_some_ticks_however_many_were_decided() -> None:
    """A time that grows with the cells in use is seen after a number of ticks, also if most of them decided nothing."""
    for num_ticks, num_calls in ((1, 17), (17, 1)):
        one, _ = chooser({1: 0.01, **dict.fromkeys(range(2, 9), 0.02)})
        one.choose([(0.1, 7)], Rows(1).rows, 0, 64)
        for _ in range(num_calls):
            assert one._beside.num_cells == 0
            one.choose([(0.1, 7)], Rows(1).rows, 5000, 64, num_ticks)
        assert one._beside.num_cells == 5000


@pytest.mark.parametrize(
    ("before", "after", "num_ticks", "is_chosen_anew"),
    [
        ([(0.30, 20)], [(0.25, 30)], 20, False),  # a request that follows, no better
        ([(0.30, 20)], [(0.30, 20)], 20, False),
        ([(0.30, 20)], [(0.301, 20)], 20, True),
        ([(0.30, 4)], [(0.30, 8)], 20, True),  # that one had no room
        ([(0.30, 20)], [(0.25, 30)], 300, True),  # long ago
        ([(0.30, 20), (0.10, 20)], [(0.05, 20), (0.30, 20)], 20, False),
        ([(0.30, 20), (0.10, 20)], [(0.30, 20), (0.30, 20)], 20, True),
        ([(0.30, 20)], [(0.30, 20), (0.10, 20)], 20, True),
    ],
)
def test_a_choice_of_no_drafts_holds_for_others_that_are_no_better(
    monkeypatch: pytest.MonkeyPatch,
    before: list[tuple[float, int]],
    after: list[tuple[float, int]],
    num_ticks: int,
    is_chosen_anew: bool,
) -> None:
    """For as many ticks as nothing is decided: a short request is not worth the time of a choice of its own."""
    one, num_chosen = counted_chooser(monkeypatch)
    rows = Rows(*[1] * max(len(before), len(after))).rows
    assert not any(one.choose(before, rows, 0, 64))
    assert not any(one.choose(after, rows, 0, 64, num_ticks))
    assert num_chosen() == 1 + is_chosen_anew


def test_what_a_trial_shows_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice of no drafts from before it holds no longer."""
    one, num_chosen = counted_chooser(monkeypatch)
    one.choose([(0.3, 20)], Rows(1).rows, 0, 64)
    one.note_drafts([2], 0.4, is_trial=True)
    one.choose([(0.25, 30)], Rows(1).rows, 0, 64)
    assert num_chosen() == 2


def counted_chooser(monkeypatch: pytest.MonkeyPatch) -> tuple[DepthChooser, Callable[[], int]]:
    """One that is dear beside its passes, in which drafts do not pay, and how often it has compared depths."""
    one, _ = chooser({1: 0.0005, 2: 0.001, **dict.fromkeys(range(3, 9), 0.004)})
    for _ in range(100):
        one.note_deciding(0.0003)
    compare = Mock(side_effect=choose_depths)
    monkeypatch.setattr(depth_chooser, "choose_depths", compare)
    return one, lambda: compare.call_count


def test_last_tokens_of_cached_prompts_cost_what_decoding_rows_do() -> None:
    """The pass is of its own size, with its measurements: 16 rows, and not 1 beside prompts."""
    one, _ = chooser({1: 0.017, 8: 0.071, 16: 0.09, 24: 0.133})
    rows = Rows(1, *[1] * 15).rows
    one.choose([(0.9, 8)], rows, 0, 64)
    assert one.plain_s == pytest.approx(0.09, rel=0.02)
    assert one.choose([(0.9, 8)], rows, 0, 64) == [0]
    assert one.choose([(0.9, 8)], Rows(1).rows, 0, 64) == [0]  # the first alone
    assert any(one.choose([(0.98, 8)], Rows(1).rows, 0, 64))


def test_beside_prompts_there_are_no_more_drafts_than_when_all_decode() -> None:
    """Soon they do, and a token that costs more now than it will then is dear, however cheap a row seems in a long pass."""
    seen_s = {1: 0.017, 4: 0.063, 8: 0.071, 16: 0.09, 20: 0.114, 24: 0.133, 32: 0.165}
    few, many = [40, 24], [40, 24, *[8] * 13]
    for prompts, has_drafts in ((few, True), (many, False)):
        one, _ = chooser(seen_s)
        assert any(one.choose([(0.9, 8)], Rows(1, *prompts).rows, 0, 64)) is has_drafts


def test_a_size_between_whole_blocks_is_taken_to_cost_what_these_do() -> None:
    """Rows are computed four at a time: measurements of other sizes do not apply to blocks, and beyond nothing is known."""
    _, costs = chooser({1: 0.017, 7: 0.098, 10: 0.094, 16: 0.09, 32: 0.17})
    assert costs.least_seconds(7) == costs.seconds(7)
    assert costs.least_seconds(8) == pytest.approx(0.017 + 7 / 15 * 0.073, rel=0.05)
    assert costs.least_seconds(24) == pytest.approx(0.13, rel=0.05)
    assert costs.least_seconds(33) is None


def test_where_passes_are_never_seen_drafts_are_not_held_back_for_good() -> None:
    """As beside adapters, from which no costs are learned: one tick is without."""
    one, _ = chooser({})
    has_drafts = [any(one.choose([(0.99, 8)] * 2, Rows(2).rows, 0, 64)) for _ in range(20)]
    assert not has_drafts[0]
    assert all(has_drafts[1:])


@pytest.mark.parametrize("seen_s", [{}, {1: 0.017}, {1: 0.017, 2: 0.02}, {1: 0.017, 64: 0.3}])
def test_where_prompts_are_never_away_drafts_are_not_held_back_for_good(seen_s: dict[int, float]) -> None:
    """As with steady arrivals, or one long prompt: no pass with drafts is ever one that only decodes."""
    one, _ = chooser(seen_s)
    has_drafts = [any(one.choose([(0.95, 8)], Rows(1, 64).rows, 0, 64)) for _ in range(50)]
    assert all(has_drafts)


def test_sizes_that_were_never_seen_are_trials() -> None:
    """The loss of the pass is spent, and until it is paid back only known sizes are chosen."""
    one, costs = chooser({1: 0.017, 4: 0.018, 8: 0.02})
    one.budget.spend(one.budget.saved_s)
    rows, candidates = Rows(1).rows, [(0.9, 2)]
    assert one.choose(candidates, rows, 0, 64) == [0]  # to see what that takes
    (depth,) = one.choose(candidates, rows, 0, 64)
    assert depth
    one.note_drafts([depth], 0.9, is_trial=False)
    for _ in range(8):
        costs.observe(1 + depth, 0, 0.1)
    assert one.choose(candidates, rows, 0, 64) == [0]
    assert one.budget.saved_s < 0
    assert one.would_choose([(0.9, 1)], 64) == one.would_choose([(0.9, 2)], 64) == [0]
    assert one.would_choose([(0.9, 3)], 64) == [3]  # 4 rows were seen
    one.budget.pass_time(100.0)
    assert one.would_choose([(0.9, 3 - depth)], 64) == [3 - depth]


def test_a_trial_has_as_many_drafts_as_lose_least() -> None:
    """If 8 rows take less than 3, seven drafts lose less than two, if they may be right."""
    one, _ = chooser({1: 0.017, 3: 0.08, 8: 0.071})
    one.choose([(0.5, 0)], Rows(1).rows, 0, 64)
    usual = Acceptance(UsualAcceptance(0.7))
    assert one.trial([0], 0, usual, (0, 8))[0] == 7
    assert one.trial([0], 0, usual, (0, 2))[0] == 2
    assert one.trial([0], 0, usual, (4, 3)) == (0, float("inf"))
    lost_s = one.trial([0], 0, usual, (0, 8))[1]
    assert lost_s == pytest.approx(0.071 - 0.017 - 0.017 * usual.expected(7), rel=0.05)


def test_what_is_usual_counts_verdicts_and_not_proposals() -> None:
    """Of a drafter that is right nine times of ten, whatever the length of its proposals; a new sequence is taken to be so."""
    for depth in (1, 2, 7):
        usual, source = UsualAcceptance(), random.Random(depth)
        sequences = [Acceptance(usual) for _ in range(8)]
        for tick in range(400):
            num_right = next((i for i in range(depth) if source.random() >= 0.9), depth)
            sequences[tick % 8].observe(depth, num_right)
        assert usual.probability == pytest.approx(0.9, abs=0.06)
        assert Acceptance(usual).probability == usual.probability


def test_of_many_like_sequences_none_looks_much_better() -> None:
    """A few lucky verdicts do not show that a sequence is right more often than the others; many do."""
    usual, source = UsualAcceptance(), random.Random(3)
    sequences = [Acceptance(usual) for _ in range(16)]
    for _ in range(12):
        for sequence in sequences:
            is_right = source.random() < 0.7
            sequence.observe(1, int(is_right))
    assert max(sequence.probability for sequence in sequences) < 0.86
    for _ in range(60):
        sequences[0].observe(1, 1)
        sequences[1].observe(1, 0)
    assert sequences[0].probability > 0.85
    assert sequences[1].probability < 0.3


class SlowToBegin(BatchOracle):
    """Takes half a second to say how far it is behind, and next to nothing for anything else."""

    clock: ManualClock
    num_caught_up = 0

    def lag(self, key: int) -> float:
        self.clock.advance(0.5)
        return 0.0

    def limit_catch_up(self, num_tokens: int) -> int:
        return num_tokens


def test_only_decisions_count_as_deciding() -> None:
    """Neither the time of beginning with a sequence counts, nor do ticks without candidates make decisions seem cheap."""
    drafter = SlowToBegin()
    world = World(drafter=drafter, cost=lambda rows: 0.01)
    drafter.clock = world.clock
    speculation: Any = world.scheduler._speculation
    for _ in range(3):
        world.submit("abc", max_tokens=20, ignore_eos=True)
        world.run()
    assert speculation._chooser.deciding_s == 0
    speculation._chooser.deciding_s = 0.0005
    world.submit("a long prompt " * 20, max_tokens=1)
    world.run()
    assert speculation._chooser.deciding_s == 0.0005


class Asked(ModelDrafter):
    """Notes the requested depths, with the backlog of each sequence."""

    asked: list[list[tuple[int, float]]]

    def propose_all(self, wanted: Sequence[tuple[int, int]]) -> list[list[int]]:
        self.asked.append([(depth, self.lag(key)) for key, depth in wanted])
        return super().propose_all(wanted)


def test_a_sequence_that_misses_much_is_caught_up_with_before_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk a tick with 0 drafts; drafts are chosen for it when the rest fits into the tick."""
    monkeypatch.setattr(Asked, "asked", [], raising=False)
    monkeypatch.setattr("tests.draft_world.ModelDrafter", Asked)
    world = StreamWorld(0.9)
    world.tokens_per_s(4, 8)  # what all of it takes is known
    Asked.asked.clear()
    source = random.Random(1)
    world.world.submit([source.randrange(200) for _ in range(900)], max_tokens=200, ignore_eos=True)
    world.world.submit("abc", max_tokens=200, ignore_eos=True)
    while not world.world.engine.is_idle or world.world.commands.queue:
        world.world.take(world.world.engine.tick())
    late = [(depth, lag) for wanted in Asked.asked for depth, lag in wanted if lag > 256]
    assert len(late) >= 2
    assert all(depth == 0 for depth, _ in late)
    assert max(depth for wanted in Asked.asked for depth, lag in wanted if not lag) > 1


class Behind(BatchOracle):
    """Lags behind as far as the sequences say, and catches up with nothing."""

    num_caught_up = 0

    def lag(self, key: int) -> float:
        return 0.0

    def limit_catch_up(self, num_tokens: int) -> int:
        return num_tokens


def due_sequences(*num_missing: int) -> tuple[Speculation, Candidates]:
    """Sequences that are due for a trial beside each other and miss so many tokens, at a millisecond each."""
    one, _ = chooser({4: 0.06, 5: 0.063, 6: 0.064, 7: 0.065, 8: 0.066})
    speculation = Speculation(Behind(), make_limits(FakeBackend()), one, ManualClock(), Instruments().drafter_failed)
    assert speculation._lagging is not None
    speculation._lagging.catch_up.token_s = 0.001
    rows = Rows(len(num_missing)).rows
    one.choose([(0.5, 0)] * len(rows), rows, 0, 64)
    candidates = [(row, DraftingSequence(Acceptance(UsualAcceptance())), 8) for row in rows]
    for (_, known, _), missing in zip(candidates, num_missing, strict=True):
        known.num_missing = float(missing)
        known.acceptance.note_plain(1024)
    return speculation, candidates


def test_a_sequence_that_misses_too_much_holds_up_no_trials_behind_it() -> None:
    """The next one that is due has its trial, within the budget."""
    speculation, candidates = due_sequences(3000, 0, 0, 0)
    depths = [0] * 4
    assert speculation._try_one(candidates, depths, 64)
    assert depths[0] == depths[2] == depths[3] == 0 < depths[1]
    assert [known.acceptance.is_due for _, known, _ in candidates] == [True, False, True, True]
    budget = speculation._chooser.budget
    budget.spend(budget.saved_s + 0.01)
    assert not speculation._try_one(candidates, [0] * 4, 64)
    assert candidates[2][1].acceptance.is_due


def test_catching_up_says_nothing_about_the_next_trial() -> None:
    """The wait that has doubled stays; a proposal that was asked for and is empty begins it anew."""
    speculation, [(row, known, _)] = due_sequences(0)
    for _ in range(3):
        known.acceptance.note_trial()  # 64 rows
    known.acceptance.note_plain(10)
    assert speculation._add(row, known, [], 0) == 0
    known.acceptance.note_plain(53)
    assert not known.acceptance.is_due
    known.acceptance.note_plain(1)
    assert known.acceptance.is_due
    assert speculation._add(row, known, [], 3) == 0
    assert not known.acceptance.is_due
    known.acceptance.note_plain(8)
    assert known.acceptance.is_due
