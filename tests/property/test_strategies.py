"""Every shipped strategy on any view: the contract, further promises of each, and that all sequences end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from paceline.cost_model import BLOCK_TOKENS, TILE_TOKENS, MeasuredPass, TickCostModel
from paceline.scheduling.strategies import (
    Balanced,
    BatchStrategy,
    DecodeMaximal,
    Paced,
    PrefillPriority,
    SchedulerView,
    TickCost,
)
from paceline.testing.strategy_check import StrategyTrial, TrialCost, TrialLoad, TrialSequence

EVERY = pytest.mark.parametrize("strategy", [DecodeMaximal(), PrefillPriority(), Balanced(), Paced()])
BUDGETS = st.integers(1, 40) | st.integers(1, 4096)


def learnt(observed: list[MeasuredPass]) -> TickCostModel:
    pace = TickCostModel()
    pace.calibrate(observed)
    return pace


COSTS: st.SearchStrategy[TickCost] = st.builds(
    TrialCost, pass_s=st.floats(0, 1), token_s=st.floats(1e-9, 1), cell_s=st.floats(0, 1e-5), output_s=st.floats(0, 1)
) | st.builds(
    learnt,
    st.lists(st.tuples(st.integers(1, 600), st.integers(0, 5000), st.floats(0, 2), st.integers(0, 64)), max_size=3),
)


@st.composite
def sequences(draw: st.DrawFn, key: int) -> TrialSequence:
    is_decoding = draw(st.booleans())
    num_uncomputed_tokens = draw(st.integers(1, 6) if is_decoding else st.integers(1, 5000))
    num_computed_tokens = draw(st.integers(1 if is_decoding else 0, 2000))
    return TrialSequence(
        key=key,
        num_prompt_tokens=draw(st.integers(1, num_computed_tokens))
        if is_decoding
        else num_computed_tokens + num_uncomputed_tokens,
        num_tokens=num_computed_tokens + num_uncomputed_tokens,
        num_computed_tokens=num_computed_tokens,
        limit=draw(st.integers(1, min(num_uncomputed_tokens, 512))),
        is_decoding=is_decoding,
        order=draw(st.integers(0, 1000)),
        submitted_s=draw(st.floats(0, 1000)),
        last_tick=draw(st.integers(-50, 0)),
        priority=draw(st.integers(-3, 3)),
    )


@st.composite
def views(draw: st.DrawFn) -> SchedulerView:
    keys = draw(st.lists(st.integers(0, 10**6), unique=True, min_size=1, max_size=12))
    return SchedulerView(
        sequences=tuple(draw(sequences(key)) for key in keys),
        chunk_size=512,
        num_cells=draw(st.integers(0, 50_000)),
        tick=draw(st.integers(0, 30)),
        now_s=1000.0,
        itl_target_s=draw(st.floats(1e-3, 2)),
        max_tick_s=draw(st.floats(1e-3, 5)),
        cost=draw(COSTS),
        lost_share=draw(st.sampled_from((0.0, 0.01, 0.011, 0.5))),
        lost_tick_s=draw(st.floats(0, 1)),
    )


def planned(strategy: BatchStrategy, view: SchedulerView, budget: int) -> dict[int, int]:
    shares = strategy.plan(view, budget)
    tokens = {share.key: share.num_tokens for share in shares}
    assert len(tokens) == len(shares)
    return tokens


def tokens_of(tokens: dict[int, int], view: SchedulerView, *, is_decoding: bool) -> int:
    return sum(tokens.get(sequence.key, 0) for sequence in view.sequences if sequence.is_decoding == is_decoding)


def wanted(view: SchedulerView, *, is_decoding: bool) -> int:
    return sum(sequence.limit for sequence in view.sequences if sequence.is_decoding == is_decoding)


@EVERY
@given(views(), BUDGETS)
def test_plans_keep_the_contract(strategy: BatchStrategy, view: SchedulerView, budget: int) -> None:
    """Keys of the view, once each, within limits and budget, at least one token; and the same again for an equal view."""
    tokens = planned(strategy, view, budget)
    limits = {sequence.key: sequence.limit for sequence in view.sequences}
    assert all(1 <= num_tokens <= limits[key] for key, num_tokens in tokens.items())
    assert 1 <= sum(tokens.values()) <= budget
    assert planned(strategy, structs.replace(view, sequences=list(view.sequences)), budget) == tokens


@pytest.mark.parametrize("strategy", [DecodeMaximal(), PrefillPriority(), Balanced()])
@given(views(), BUDGETS)
def test_no_token_of_the_budget_is_left_where_a_sequence_wants_it(
    strategy: BatchStrategy, view: SchedulerView, budget: int
) -> None:
    """All but the paced strategy fill the budget, or give every sequence all it may have."""
    limits = sum(sequence.limit for sequence in view.sequences)
    assert sum(planned(strategy, view, budget).values()) == min(budget, limits)


@given(views(), BUDGETS)
def test_balanced_gives_each_side_half_where_it_wants_it(view: SchedulerView, budget: int) -> None:
    """Neither decoding nor prompts get less than half of the budget, unless they want less."""
    tokens = planned(Balanced(), view, budget)
    for is_decoding in (True, False):
        assert tokens_of(tokens, view, is_decoding=is_decoding) >= min(
            budget // 2, wanted(view, is_decoding=is_decoding)
        )


@given(views(), BUDGETS)
def test_paced_gives_every_decoder_its_row_where_the_budget_has_room(view: SchedulerView, budget: int) -> None:
    """Every decoder has a row if they fit beside the least share of the prompts."""
    decoders = [sequence.key for sequence in view.sequences if sequence.is_decoding]
    tokens = planned(Paced(), view, budget)
    if budget >= len(decoders) + 16:
        assert set(decoders) <= set(tokens)


@given(views(), BUDGETS)
def test_paced_is_within_the_target_or_gives_the_least_share(view: SchedulerView, budget: int) -> None:
    """The tick is expected to take at most the target, or to leave decoding three tenths of it; else 16 tokens of prompts.

    The latter up to a tick without decoding, or twice the time of decoding alone. After too much lost time, it may be so long
    that the loss is a hundredth, up to a tick without decoding; a tile beside decoding may take a quarter more than all that.
    And four tokens more would not have fitted into the target, unless budget or prompts were at their end.
    """
    tokens = planned(Paced(), view, budget)
    num_decode, num_prefill = (tokens_of(tokens, view, is_decoding=is_decoding) for is_decoding in (True, False))
    limit_s = view.max_tick_s
    if num_decode:
        decode_s = view.cost.seconds(num_decode, view.num_cells, num_decode)
        shared_s = min(decode_s / (1 - 0.7), max(view.max_tick_s, 2 * decode_s))
        limit_s = max(view.itl_target_s, shared_s)
    num_outputs = max(1, num_decode)
    if num_prefill > 16:
        is_tile = num_decode > 0 and num_decode + num_prefill == TILE_TOKENS
        yielding_s = min(view.max_tick_s, view.lost_tick_s / 0.01) if view.lost_share > 0.01 else 0.0
        most_s = max(limit_s, yielding_s) * (1.25 if is_tile else 1.0)
        assert view.cost.seconds(num_decode + num_prefill, view.num_cells + num_prefill, num_outputs) <= most_s
    most = min(budget - num_decode, wanted(view, is_decoding=False))
    if num_prefill < most:
        more = num_prefill + BLOCK_TOKENS
        assert num_prefill >= min(16, budget // 2)
        assert num_decode == 0 or num_prefill >= 16 or num_decode + num_prefill == budget
        assert view.cost.seconds(num_decode + more, view.num_cells + more, num_outputs) > limit_s


LOADS = st.builds(
    TrialLoad,
    num_slots=st.integers(1, 6),
    budget=st.integers(1, 64),
    chunk_size=st.sampled_from((1, 8, 512)),
    max_first_prompt=st.integers(1, 40),
    max_prompt=st.integers(1, 40),
    max_generated=st.integers(1, 8),
    max_drafts=st.integers(0, 3),
    first_priority=st.integers(-1, 1),
    last_priority=st.integers(-1, 1),
    token_s=st.sampled_from((1e-6, 0.003, 1.0)),
)


@EVERY
@settings(max_examples=30, deadline=None)
@given(LOADS, st.integers(0, 100))
def test_every_request_is_done_although_others_keep_coming(strategy: BatchStrategy, load: TrialLoad, seed: int) -> None:
    """No sequence is in its slot for longer than a fair share of the work takes."""
    trial = StrategyTrial(load, seed)
    while trial.num_done < 3 * load.num_slots or trial.num_rest_of(3 * load.num_slots):
        trial.apply(strategy.plan(trial.view(), load.budget))
        assert trial.oldest()[1] <= load.patience_ticks
