"""The four strategies on small views: how a tick is divided, and which sequences wait."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import InvalidParams
from paceline.scheduling.strategies import Balanced, BatchStrategy, DecodeMaximal, Paced, PrefillPriority, SchedulerView
from paceline.testing.strategy_check import TrialCost, TrialSequence

TICK = 100


def decoder(key: int, *, last_tick: int = TICK - 1, limit: int = 1) -> TrialSequence:
    return TrialSequence(
        key=key,
        num_prompt_tokens=10,
        num_tokens=20 + limit,
        num_computed_tokens=20,
        limit=limit,
        is_decoding=True,
        order=key,
        submitted_s=float(key),
        last_tick=last_tick,
        priority=0,
    )


def prompt(
    key: int,
    num_uncomputed_tokens: int,
    *,
    limit: int | None = None,
    last_tick: int = TICK - 1,
    submitted_s: float | None = None,
    priority: int = 0,
) -> TrialSequence:
    return TrialSequence(
        key=key,
        num_prompt_tokens=num_uncomputed_tokens,
        num_tokens=num_uncomputed_tokens,
        num_computed_tokens=0,
        limit=min(num_uncomputed_tokens, 512) if limit is None else limit,
        is_decoding=False,
        order=key,
        submitted_s=float(key) if submitted_s is None else submitted_s,
        last_tick=last_tick,
        priority=priority,
    )


def planned(strategy: BatchStrategy, budget: int, *sequences: TrialSequence, **changes: Any) -> dict[int, int]:
    """Tokens by key, in the order of the plan. By default a pass takes 10 ms and 1 ms a token."""
    options: dict[str, Any] = {
        "chunk_size": 512,
        "num_cells": 0,
        "tick": TICK,
        "now_s": 100.0,
        "itl_target_s": 0.25,
        "max_tick_s": 1.0,
        "cost": TrialCost(pass_s=0.01, token_s=0.001, cell_s=0.0),
    }
    view = SchedulerView(sequences=sequences, **(options | changes))
    return {share.key: share.num_tokens for share in strategy.plan(view, budget)}


EVERY = pytest.mark.parametrize("strategy", [DecodeMaximal(), PrefillPriority(), Balanced(), Paced()])


@EVERY
def test_a_tick_with_room_for_all_holds_all(strategy: BatchStrategy) -> None:
    """If everything fits, every sequence gets its most tokens."""
    tokens = planned(strategy, 512, decoder(0), decoder(1, limit=5), prompt(2, 100), prompt(3, 60, limit=20))
    assert tokens == {0: 1, 1: 5, 2: 100, 3: 20}


@EVERY
def test_one_prompt_gets_at_most_its_limit(strategy: BatchStrategy) -> None:
    """A long prompt alone is cut to its chunk, whatever the budget."""
    assert planned(strategy, 2048, prompt(0, 1000, limit=128)) == {0: 128}


@EVERY
def test_a_long_prompt_fills_the_budget_and_no_more(strategy: BatchStrategy) -> None:
    """A prompt of a thousand tokens and a budget of 50 make a tick of 50."""
    assert planned(strategy, 50, prompt(0, 1000)) == {0: 50}


@EVERY
@pytest.mark.parametrize("budget", [2, 3])
def test_decoders_that_do_not_all_fit_take_turns(strategy: BatchStrategy, budget: int) -> None:
    """The sequence with the oldest last row comes first; ties go by arrival."""
    decoders = [decoder(key, last_tick=TICK - wait) for key, wait in enumerate((1, 3, 2, 3))]
    assert list(planned(strategy, budget, *decoders)) == [1, 3, 2][:budget]


@EVERY
def test_drafts_wait_until_every_sequence_has_a_token(strategy: BatchStrategy) -> None:
    """Proposed tokens take only the rest once each sequence has a row."""
    assert planned(strategy, 5, *(decoder(key, limit=3) for key in range(3))) == {0: 3, 1: 1, 2: 1}


@EVERY
def test_a_budget_of_one_serves_both_sides_in_time(strategy: BatchStrategy) -> None:
    """With one token a tick, decoders and a prompt both get one within twenty ticks, whichever had the last one."""
    last_ticks = {0: TICK - 1, 1: TICK - 1, 2: TICK - 1}
    served = []
    for tick in range(TICK, TICK + 20):
        sequences = (
            decoder(0, last_tick=last_ticks[0]),
            decoder(1, last_tick=last_ticks[1]),
            prompt(2, 1000, last_tick=last_ticks[2]),
        )
        [(key, num_tokens)] = planned(strategy, 1, *sequences, tick=tick).items()
        assert num_tokens == 1
        last_ticks[key] = tick
        served.append(key)
    assert set(served) == {0, 1, 2}


def test_decode_maximal_gives_prompts_the_rest() -> None:
    """Decoders first, then prompts by arrival, the first as much as it may have."""
    tokens = planned(DecodeMaximal(), 100, prompt(0, 70), prompt(1, 70), decoder(2), decoder(3))
    assert list(tokens.items()) == [(2, 1), (3, 1), (0, 70), (1, 28)]


def test_decode_maximal_lets_prompts_in_where_decoders_fill_every_tick() -> None:
    """Prompts that had no row for nine ticks get half of the budget; before that, none."""
    decoders = [decoder(key) for key in range(8)]
    for wait, expected in ((8, 0), (9, 4)):
        assert planned(DecodeMaximal(), 8, *decoders, prompt(9, 70, last_tick=TICK - wait)).get(9, 0) == expected


@pytest.mark.parametrize("strategy", [DecodeMaximal(), PrefillPriority(), Balanced()])
def test_prompts_come_by_priority_and_arrival(strategy: BatchStrategy) -> None:
    """A level of priority makes up for less than ten seconds of waiting, and not for more."""
    first, second = prompt(0, 70, submitted_s=1.0), prompt(1, 70, submitted_s=2.0)
    assert list(planned(strategy, 60, first, second)) == [0]
    assert list(planned(strategy, 60, first, prompt(1, 70, submitted_s=10.5, priority=1))) == [1]
    assert list(planned(strategy, 60, first, prompt(1, 70, submitted_s=11.5, priority=1))) == [0]


def test_prefill_priority_lets_decoders_wait_while_prompts_fill_the_tick() -> None:
    """Prompts first; decoders get the rest."""
    sequences = (decoder(0), decoder(1), prompt(2, 70), prompt(3, 29))
    assert planned(PrefillPriority(), 99, *sequences) == {2: 70, 3: 29}
    assert planned(PrefillPriority(), 100, *sequences) == {2: 70, 3: 29, 0: 1}


def test_prefill_priority_starves_no_decoder() -> None:
    """A decoder without a row for eight ticks comes before the prompts, the others do not."""
    sequences = (decoder(0, last_tick=TICK - 7), decoder(1, last_tick=TICK - 8), prompt(2, 70))
    assert planned(PrefillPriority(), 50, *sequences) == {1: 1, 2: 49}
    assert planned(PrefillPriority(patience=7), 50, *sequences) == {1: 1, 0: 1, 2: 48}


def test_prefill_priority_is_more_patient_with_a_small_budget() -> None:
    """If a row for every decoder takes five ticks, decoders wait ten, so that prompts keep half of the tokens."""
    decoders = [decoder(key, last_tick=TICK - 9) for key in range(10)]
    assert planned(PrefillPriority(), 2, *decoders, prompt(10, 70)) == {10: 2}
    decoders = [decoder(key, last_tick=TICK - 10) for key in range(10)]
    assert planned(PrefillPriority(), 2, *decoders, prompt(10, 70)) == {0: 1, 1: 1}


def test_balanced_halves_the_budget() -> None:
    """Ten decoders and a long prompt get five tokens each side of ten."""
    assert planned(Balanced(), 10, *map(decoder, range(10)), prompt(10, 70)) == {**dict.fromkeys(range(5), 1), 10: 5}


def test_balanced_gives_what_one_side_leaves_to_the_other() -> None:
    """Few decoders leave prompts more than half, and a short prompt leaves decoders more."""
    assert planned(Balanced(), 10, decoder(0), decoder(1), prompt(2, 70)) == {0: 1, 1: 1, 2: 8}
    assert planned(Balanced(), 10, *map(decoder, range(9)), prompt(9, 2)) == {**dict.fromkeys(range(8), 1), 9: 2}


def test_balanced_gives_the_odd_token_to_the_side_that_waited() -> None:
    """With a budget of one, the side with the older last row gets it."""
    for decoder_wait, prompt_wait, served in ((1, 2, 1), (2, 1, 0), (1, 1, 0)):
        sequences = (decoder(0, last_tick=TICK - decoder_wait), prompt(1, 70, last_tick=TICK - prompt_wait))
        assert planned(Balanced(), 1, *sequences) == {served: 1}


def test_paced_fills_the_tick_up_to_the_target() -> None:
    """With 10 ms a pass and 1 ms a token, 250 ms hold four decoders and 236 tokens of a prompt; 100 ms 86, cut to 84."""
    assert planned(Paced(), 2048, *map(decoder, range(4)), prompt(4, 1000))[4] == 236
    assert planned(Paced(), 2048, *map(decoder, range(4)), prompt(4, 1000), itl_target_s=0.1)[4] == 84


def test_paced_cuts_prompts_where_the_tick_has_whole_blocks() -> None:
    """Of four tokens with the decoding rows; the rest of a prompt is not cut, nor is the least number of tokens."""
    for num_decoders in range(1, 9):
        decoders = [decoder(key) for key in range(num_decoders)]
        assert sum(planned(Paced(), 2048, *decoders, prompt(9, 1000)).values()) == 240
        assert planned(Paced(), 2048, *decoders, prompt(9, 101))[9] == 101
        assert (
            planned(Paced(least_tokens=33, prefill_share=0), 2048, *decoders, prompt(9, 1000), itl_target_s=0.02)[9]
            == 33
        )


def test_paced_counts_the_cells_that_the_prompt_itself_takes() -> None:
    """Cells in use and cells of the new tokens make a pass dearer: the most whole blocks that still fit are found."""
    cost = TrialCost(pass_s=0.01, token_s=0.0001, cell_s=1e-6)
    tokens = planned(Paced(), 2048, decoder(0), prompt(1, 1000), cost=cost, num_cells=500)[1]
    assert cost.seconds(1 + tokens, 500 + tokens) <= 0.25 < cost.seconds(5 + tokens, 504 + tokens)
    assert (1 + tokens) % 4 == 0


def test_paced_gives_prompts_their_share_of_the_time_where_decoding_alone_is_too_slow() -> None:
    """With 300 decoders, 310 ms alone, a tick takes a second, whatever the target; another share makes it another time."""
    decoders = [decoder(key) for key in range(300)]
    shares = planned(Paced(), 2048, *decoders, *(prompt(300 + i, 400) for i in range(3)))
    assert sum(shares.values()) == 300 + 688
    assert planned(Paced(prefill_share=0.5), 2048, *decoders, prompt(300, 1000))[300] == 308
    assert planned(Paced(prefill_share=0.2), 2048, *decoders, prompt(300, 1000))[300] == 76
    assert planned(Paced(prefill_share=0), 2048, *decoders, prompt(300, 1000))[300] == 16


def test_paced_gives_prompts_half_of_the_time_where_decoding_alone_takes_long_ticks() -> None:
    """With 600 decoders, 610 ms alone, a tick takes twice that, which is beyond `max_tick_s`."""
    decoders = [decoder(key) for key in range(600)]
    shares = planned(Paced(), 2048, *decoders, *(prompt(600 + i, 400) for i in range(3)))
    assert sum(shares.values()) == 600 + 608


WEIGHTS = TrialCost(pass_s=0.024, token_s=0.002, cell_s=0.0, output_s=0.006)
"""A pass reads the weights, which is dear: n decoding rows take 24 + 8n ms, a row 32 ms alone and 9.5 ms of sixteen."""


def test_paced_keeps_the_target_where_no_time_was_lost() -> None:
    """For any number of waiting prompts: ticks become longer by the actual loss, not by a possible loss."""
    sequences = [decoder(0), *(prompt(key, 400) for key in range(1, 9))]
    tokens = planned(Paced(), 2048, *sequences, cost=WEIGHTS, itl_target_s=0.15)
    assert sum(tokens.values()) == 1 + (150 - 24 - 8) // 2


BESIDE = (decoder(0), prompt(1, 1000))
"""One sequence decodes, a prompt waits: a tick of n ms holds n - 11 tokens of it, less what makes a block of four."""


def test_paced_lets_the_target_yield_while_too_much_time_is_lost() -> None:
    """With 5 ms lost a tick, ticks of half a second lose 1 %; a tick is no longer than one without decoding."""
    assert planned(Paced(), 2048, *BESIDE, lost_share=0.011, lost_tick_s=0.005001)[1] == 487
    assert planned(Paced(), 2048, *BESIDE, lost_share=0.011, lost_tick_s=0.005, max_tick_s=0.3)[1] == 287
    assert planned(Paced(efficiency=0.96), 2048, *BESIDE, lost_share=0.041, lost_tick_s=0.01401)[1] == 339


def test_paced_keeps_the_target_while_little_is_lost() -> None:
    """Up to the share that `efficiency` allows, and if ticks within the target lose no more than it."""
    assert planned(Paced(), 2048, *BESIDE, lost_share=0.009, lost_tick_s=0.01)[1] == 239
    assert planned(Paced(), 2048, *BESIDE, lost_share=0.5, lost_tick_s=0.002)[1] == 239


def test_the_efficiency_of_paced_may_be_all_or_nothing() -> None:
    """0 keeps the target whatever is lost; 1 makes ticks as long as they may be as soon as anything is lost."""
    assert planned(Paced(efficiency=0), 2048, *BESIDE, lost_share=0.9, lost_tick_s=0.2)[1] == 239
    assert planned(Paced(efficiency=1), 2048, *BESIDE, lost_share=0.001, lost_tick_s=0.001, max_tick_s=0.5)[1] == 487
    assert planned(Paced(efficiency=1), 2048, *BESIDE)[1] == 239


def test_paced_gives_prompts_sixteen_tokens_however_slow_the_machine() -> None:
    """If even that would take too long, prompts go on with the least number of tokens."""
    cost = TrialCost(pass_s=1.0, token_s=1.0)
    assert planned(Paced(), 2048, decoder(0), prompt(1, 1000), cost=cost) == {0: 1, 1: 16}
    assert planned(Paced(least_tokens=3), 2048, decoder(0), prompt(1, 1000), cost=cost) == {0: 1, 1: 3}
    assert planned(Paced(), 2048, prompt(1, 1000), cost=cost) == {1: 16}


class TiledCost:
    """A cost model in which a token costs less from 64 tokens on."""

    def __init__(self, below_s: float, tile_s: float) -> None:
        self._below_s, self._tile_s = below_s, tile_s

    def seconds(self, num_tokens: int, num_cells: int, num_outputs: int = 1) -> float:
        return num_tokens * (self._below_s if num_tokens < 64 else self._tile_s / 64)


@pytest.mark.parametrize(
    ("below_s", "tile_s", "num_prefill"),
    [
        (0.005, 0.09, 64),  # the tile fits, and some more
        (0.005, 0.12, 60),  # a little longer than may be, nearly three times as fast
        (0.005, 0.13, 16),  # too long
        (0.0018, 0.12, 48),  # hardly faster
    ],
)
def test_paced_fills_a_tile_where_that_is_worth_it(below_s: float, tile_s: float, num_prefill: int) -> None:
    """Up to a quarter above the target, if prompts come at least as much faster; else as much as fits below."""
    cost = TiledCost(below_s, tile_s)
    shares = planned(Paced(), 2048, *(decoder(key) for key in range(4)), prompt(4, 2000), cost=cost, itl_target_s=0.1)
    assert shares[4] == num_prefill


def test_paced_keeps_to_the_longest_tick_while_nothing_decodes() -> None:
    """A tile that takes a little longer is not filled, however much faster prompts would come."""
    shares = planned(Paced(), 2048, prompt(4, 2000), cost=TiledCost(0.005, 0.12), max_tick_s=0.1)
    assert shares[4] == 20


def test_paced_makes_large_ticks_while_nothing_decodes() -> None:
    """Then the longest tick is the bound, not the time between two tokens."""
    assert planned(Paced(), 2048, prompt(0, 1000), prompt(1, 1000)) == {0: 512, 1: 476}
    assert planned(Paced(), 2048, prompt(0, 1000), max_tick_s=0.11) == {0: 100}


def test_paced_lets_the_shortest_prompt_go_first() -> None:
    """Of prompts that came together, the prompt with the least left to compute is first."""
    sequences = (prompt(0, 500, submitted_s=0.0), prompt(1, 40, submitted_s=0.0), prompt(2, 90, submitted_s=0.0))
    assert list(planned(Paced(), 100, *sequences).items()) == [(1, 40), (2, 60)]


def test_paced_lets_a_long_prompt_win_when_it_has_waited() -> None:
    """A prompt of 5000 tokens, 7.5 s of work, comes before a short one that was submitted after that time, not before."""
    long = prompt(0, 5000, submitted_s=0.0)
    assert list(planned(Paced(), 20, long, prompt(1, 20, submitted_s=7.4))) == [1]
    assert list(planned(Paced(), 20, long, prompt(1, 20, submitted_s=7.6))) == [0]


def test_paced_counts_a_priority_as_ten_seconds() -> None:
    """A prompt of a higher priority comes before one that is ten seconds nearer to its end, and not before one at eleven."""
    urgent = prompt(1, 20, submitted_s=20.0, priority=1)
    assert list(planned(Paced(), 20, prompt(0, 20, submitted_s=10.5), urgent)) == [1]
    assert list(planned(Paced(), 20, prompt(0, 20, submitted_s=9.5), urgent)) == [0]


def test_paced_lets_prompts_in_where_decoders_fill_every_tick() -> None:
    """Prompts that had no row for nine ticks get sixteen tokens, at most half of the budget."""
    decoders = [decoder(key) for key in range(64)]
    for budget, wait, expected in ((64, 8, 0), (64, 9, 16), (8, 9, 4)):
        late = prompt(64, 70, last_tick=TICK - wait)
        assert planned(Paced(), budget, *decoders, late).get(64, 0) == expected


def test_paced_does_not_give_late_prompts_twice() -> None:
    """Prompts that waited get the share of the target, in which their first tokens count."""
    late = prompt(4, 1000, last_tick=TICK - 50)
    assert planned(Paced(), 2048, *map(decoder, range(4)), late)[4] == 236


@pytest.mark.parametrize(
    "options",
    [
        {"efficiency": -0.1},
        {"efficiency": 1.1},
        {"prefill_share": 1.0},
        {"prefill_share": float("nan")},
        {"least_tokens": 0},
        {"least_tokens": True},
        {"patience": 0},
    ],
)
def test_bad_constants_are_refused(options: dict[str, Any]) -> None:
    """The error names the constant."""
    with pytest.raises(InvalidParams, match=next(iter(options))):
        Paced(**options)


@pytest.mark.parametrize("kind", [DecodeMaximal, PrefillPriority])
def test_patience_is_at_least_one_tick(kind: type[DecodeMaximal | PrefillPriority]) -> None:
    """A decoder cannot be late before it could have had a row."""
    with pytest.raises(InvalidParams, match="patience"):
        kind(patience=0)
