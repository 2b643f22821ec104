"""The cost model of a tick: its first expectations, its learning, and its robustness against odd values."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cost_model import MeasuredPass, TickCostModel
from paceline.errors import InvalidParams, InvalidType
from paceline.scheduling.strategies import Paced, SchedulerView
from paceline.testing.strategy_check import TrialSequence

Machine = Callable[[int, int, int], float]  # decode rows, prefill tokens, cells -> seconds
Points = list[tuple[int, float]]

# Measured with 0.5 billion parameters on two cores: prefill chunks, and what as many decode rows take beyond them.
PREFILL: Points = [
    (1, 0.014),
    (8, 0.040),
    (16, 0.071),
    (32, 0.133),
    (64, 0.219),
    (128, 0.407),
    (256, 0.785),
    (512, 1.509),
]
DECODE_MORE: Points = [(0, 0.0), (1, 0.003), (8, 0.033), (32, 0.040)]


def between(points: Points, size: int) -> float:
    """Linear between the measured sizes, flat outside of them."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, low_s), (high, high_s) in pairwise(points):
        if size <= high:
            return low_s + (high_s - low_s) * (size - low) / (high - low)
    return points[-1][1]


def cpu(num_decode: int, num_prefill: int, num_cells: int) -> float:
    num_tokens = num_decode + num_prefill
    whole, rest = divmod(num_tokens, 512)
    pass_s = whole * PREFILL[-1][1] + (between(PREFILL, rest) if rest else 0.0)
    return pass_s + between(DECODE_MORE, num_decode) + num_tokens * num_cells * 1.5e-7


def fast_cpu(num_decode: int, num_prefill: int, num_cells: int) -> float:
    return cpu(num_decode, num_prefill, num_cells) / 20


def gpu(num_decode: int, num_prefill: int, num_cells: int) -> float:
    """10 ms a ubatch up to 256 tokens, then in proportion."""
    num_tokens = num_decode + num_prefill
    whole, rest = divmod(num_tokens, 512)
    return whole * 0.02 + (0.01 * max(1.0, rest / 256) if rest else 0.0) + num_tokens * num_cells * 2e-10


def noisy(random: Random, seconds: float) -> float:
    return seconds * math.exp(random.gauss(0, 0.05))


def observe_mixed(pace: TickCostModel, random: Random, machine: Machine, num_ticks: int = 50) -> None:
    """Decoding alone, decoding with chunks, and chunks alone, while memory is used more or less."""
    for _ in range(num_ticks):
        num_decode, num_prefill = random.choice(
            [
                (random.randint(1, 8), 0),
                (random.randint(1, 8), random.choice((16, 32, 64, 100))),
                (0, random.randint(64, 512)),
            ]
        )
        num_cells = random.randint(0, 4000)
        seconds = noisy(random, machine(num_decode, num_prefill, num_cells))
        pace.observe(num_decode + num_prefill, num_cells, seconds, num_decode)


def sequence(key: int, num_uncomputed_tokens: int, *, is_decoding: bool) -> TrialSequence:
    return TrialSequence(
        key=key,
        num_prompt_tokens=num_uncomputed_tokens,
        num_tokens=num_uncomputed_tokens,
        num_computed_tokens=0,
        limit=num_uncomputed_tokens,
        is_decoding=is_decoding,
        order=key,
        submitted_s=0.0,
        last_tick=0,
        priority=0,
    )


def run_paced(pace: TickCostModel, random: Random, machine: Machine, target_s: float, num_ticks: int) -> list[float]:
    """Ticks as multiples of the target, with four decoders and more prompt than any tick can hold."""
    sequences = [sequence(key, 1, is_decoding=True) for key in range(4)] + [sequence(4, 100_000, is_decoding=False)]
    ticks, num_cells = [], 500
    for _ in range(num_ticks):
        num_cells = (num_cells + 30) % 4000
        view = SchedulerView(
            sequences=sequences,
            chunk_size=2048,
            num_cells=num_cells,
            tick=1,
            now_s=0.0,
            itl_target_s=target_s,
            max_tick_s=1.0,
            cost=pace,
        )
        num_prefill = sum(share.num_tokens for share in Paced().plan(view, 2048)) - 4
        seconds = noisy(random, machine(4, num_prefill, num_cells))
        pace.observe(4 + num_prefill, num_cells + num_prefill, seconds, 4)
        ticks.append(seconds / target_s)
    return ticks


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


@pytest.mark.parametrize(("machine", "target_s"), [(cpu, 0.25), (fast_cpu, 0.05), (gpu, 0.05)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_paced_ticks_keep_to_the_target_and_use_it(machine: Machine, target_s: float, seed: int) -> None:
    """After 50 mixed ticks, 99 of 100 ticks take at most 1.3 times the target, and the mean more than 0.75 of it."""
    pace, random = TickCostModel(), Random(seed)
    observe_mixed(pace, random, machine)
    ticks = run_paced(pace, random, machine, target_s, 300)
    assert quantile(ticks, 0.99) <= 1.3
    assert sum(ticks) / len(ticks) >= 0.75


@pytest.mark.parametrize(("machine", "target_s"), [(cpu, 0.25), (fast_cpu, 0.05), (gpu, 0.05)])
def test_a_calibration_is_as_good_as_many_ticks(machine: Machine, target_s: float) -> None:
    """Calibrated with five passes, the first hundred ticks keep to the target and use it."""
    pace = TickCostModel()
    pace.calibrate([MeasuredPass(size, 0, machine(0, size, 0), 0) for size in (1, 16, 64, 256, 512)])
    ticks = run_paced(pace, Random(0), machine, target_s, 100)
    assert quantile(ticks, 0.99) <= 1.3
    assert sum(ticks) / len(ticks) >= 0.75


def test_a_calibration_leaves_a_margin() -> None:
    """Passes that were measured are expected to take a little longer than they did."""
    pace = TickCostModel()
    samples = [MeasuredPass(size, 0, cpu(0, size, 0), 0) for size in (1, 16, 64, 256, 512)]
    pace.calibrate(samples)
    for num_tokens, num_cells, seconds, num_outputs in samples:
        assert 1.0 <= pace.seconds(num_tokens, num_cells, num_outputs) / seconds <= 1.4
    assert pace.state().num_observed == 40


def test_a_slow_first_pass_is_soon_forgotten() -> None:
    """After a start pass of 100 ms, four passes of a machine that is five times faster correct the expectation of a prompt."""
    pace = TickCostModel()
    pace.calibrate([MeasuredPass(1, 1, 0.1, 1)])
    assert pace.seconds(128, 128) > 2.5
    pace.observe(24, 24, 0.138)
    for num_cells in (25, 26, 27):
        pace.observe(1, num_cells, 0.022)
    assert pace.seconds(128, 128) < 1.2


def test_nothing_observed_means_a_slow_machine() -> None:
    """Before the first tick, a second goes by with fewer than 64 tokens, and the beginning of a stream gets its least share."""
    pace = TickCostModel()
    assert pace.seconds(64, 0) > 1
    assert pace.seconds(4 + 17, 0) > 0.25
    assert pace.state().num_observed == 0


def test_the_first_tick_scales_every_size() -> None:
    """One tick of a machine that is a hundred times faster makes all sizes that much faster."""
    pace = TickCostModel()
    before = [pace.seconds(size, 0) for size in (1, 64, 512)]
    pace.observe(64, 0, pace.seconds(64, 0) / 100)
    for size, seconds in zip((1, 64, 512), before, strict=True):
        assert seconds / 300 < pace.seconds(size, 0) < seconds / 50


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_machine_that_changes_its_speed_is_followed(factor: float) -> None:
    """Twenty ticks after it became twice as fast or slow, ticks keep to the target and use it again."""
    pace, random = TickCostModel(), Random(3)
    observe_mixed(pace, random, cpu)
    ticks = run_paced(pace, random, lambda *tick: factor * cpu(*tick), 0.25, 100)
    assert ticks[0] > 1.3 or ticks[0] < 0.75
    assert quantile(ticks[20:], 0.99) <= 1.3
    assert sum(ticks[20:]) / 80 >= 0.75


def test_a_change_seen_while_decoding_counts_for_prompts_too() -> None:
    """A machine that became twice as slow while no prompt came does not get too long a tick with the next one."""
    pace, random = TickCostModel(), Random(4)
    observe_mixed(pace, random, fast_cpu)
    for _ in range(30):
        pace.observe(4, 1000, noisy(random, 2 * fast_cpu(4, 0, 1000)), 4)
    ticks = run_paced(pace, random, lambda *tick: 2 * fast_cpu(*tick), 0.05, 5)
    assert max(ticks) <= 1.3


@pytest.mark.parametrize("odd_s", [0.0, 30.0, 1e30])
def test_one_odd_tick_changes_little(odd_s: float) -> None:
    """A pass without time, or of half a minute, moves the expectation by less than a tenth."""
    pace = TickCostModel()
    observe_mixed(pace, Random(5), cpu)
    before = [pace.seconds(size, 1000) for size in (1, 64, 512)]
    pace.observe(60, 1000, odd_s)
    for size, seconds in zip((1, 64, 512), before, strict=True):
        assert pace.seconds(size, 1000) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("odd_s", [0.0, 30.0])
@pytest.mark.parametrize("num_odd", [1, 300])
def test_it_recovers_from_any_beginning(odd_s: float, num_odd: int) -> None:
    """Forty true ticks after ticks that took nothing, or half a minute, the target holds and more than 0.6 of it is used."""
    pace, random = TickCostModel(), Random(6)
    for _ in range(num_odd):
        pace.observe(10, 10, odd_s)
    ticks = run_paced(pace, random, cpu, 0.25, 140)[40:]
    assert quantile(ticks, 0.99) <= 1.3
    assert sum(ticks) / len(ticks) >= 0.6


def test_a_range_that_was_hardly_seen_does_not_run_away() -> None:
    """A tick one token beyond the end of a range that took a quarter longer predicts next to nothing about 200 more."""
    pace, random = TickCostModel(), Random(7)
    observe_mixed(pace, random, cpu)
    for _ in range(200):
        pace.observe(64, 1000, noisy(random, cpu(1, 63, 1000)))
    before = pace.seconds(256, 1000)
    for factor in (1.25, 0.8):
        pace.observe(65, 1000, factor * cpu(1, 64, 1000))
        assert pace.seconds(256, 1000) == pytest.approx(before, rel=0.25)


def test_a_pass_is_the_sum_of_its_ubatches() -> None:
    """Two whole ubatches take twice the time of one, and a token more begins another."""
    pace = TickCostModel(n_ubatch=128)
    assert pace.seconds(256, 0, 2) == pytest.approx(2 * pace.seconds(128, 0, 1))
    assert pace.seconds(257, 0, 3) == pytest.approx(pace.seconds(256, 0, 2) + pace.seconds(1, 0, 1))


def test_cells_in_use_are_learnt() -> None:
    """If a full memory makes passes slower, that is expected, and separated from the cost of tokens."""
    pace, random = TickCostModel(), Random(8)
    for _ in range(200):
        num_tokens, num_cells = random.randint(1, 500), random.randint(0, 30_000)
        pace.observe(num_tokens, num_cells, 0.01 + num_tokens * (0.001 + 1e-7 * num_cells))
    assert pace.state().from_tile.per_cell_s == pytest.approx(1e-7, rel=0.1)
    assert pace.seconds(300, 20_000) / pace.seconds(300, 0) == pytest.approx(0.91 / 0.31, rel=0.1)


def test_outputs_are_learnt() -> None:
    """If logits are a third of a token's cost, decoding rows are dearer than as many prompt tokens."""
    pace, random = TickCostModel(), Random(8)
    for _ in range(200):
        num_decode, num_prefill = random.randint(1, 32), random.choice((0, 0, 16, 100))
        num_tokens = num_decode + num_prefill
        pace.observe(num_tokens, 0, noisy(random, 0.02 + 0.006 * num_tokens + 0.003 * num_decode), num_decode)
    assert pace.state().per_output_s == pytest.approx(0.003, rel=0.2)
    for num_decode in (8, 16, 32):
        expected = (0.02 + 0.009 * num_decode) * pace.state().margin
        assert pace.seconds(num_decode, 0, num_decode) == pytest.approx(expected, rel=0.1)


def test_the_state_has_the_estimates() -> None:
    """Seconds of a ubatch, of tokens and cells, the margin, and how many ticks were seen."""
    pace = TickCostModel()
    for _ in range(100):
        pace.observe(512, 0, 0.02)
        pace.observe(256, 0, 0.01)
        pace.observe(1, 0, 0.01)
    state = pace.state()
    one = state.below_tile
    assert (one.base_s + one.per_token_s[0], state.num_observed) == (pytest.approx(0.01, rel=0.05), 300)
    assert state.from_tile.per_token_s[-1] == pytest.approx(0.01 / 256, rel=0.05)
    assert 1.0 <= state.margin < 1.15


@pytest.mark.parametrize(
    ("observed", "error", "field"),
    [
        ((0, 0, 1.0), InvalidParams, "num_tokens"),
        ((1, -1, 1.0), InvalidParams, "num_cells"),
        ((1, 0, -1.0), InvalidParams, "seconds"),
        ((1, 0, math.nan), InvalidParams, "seconds"),
        ((1, 0, math.inf), InvalidParams, "seconds"),
        ((True, 0, 1.0), InvalidType, "num_tokens"),
        ((1, 0, "1"), InvalidType, "seconds"),
        ((1, 0, 1.0, -1), InvalidParams, "num_outputs"),
        ((1, 0, 1.0, None), InvalidType, "num_outputs"),
    ],
)
def test_impossible_observations_are_refused_and_forgotten(observed: Any, error: type[Exception], field: str) -> None:
    """The error names the field, and expectations do not change."""
    pace = TickCostModel()
    before = (pace.seconds(64, 100), pace.state())
    with pytest.raises(error, match=f"^{field} must be"):
        pace.observe(*observed)
    assert (pace.seconds(64, 100), pace.state()) == before


@pytest.mark.parametrize("n_ubatch", [0, -1, True, 1.5])
def test_a_bad_ubatch_is_refused(n_ubatch: Any) -> None:
    """A ubatch has at least one token."""
    with pytest.raises(InvalidParams, match="n_ubatch"):
        TickCostModel(n_ubatch=n_ubatch)


@pytest.mark.parametrize("quantile", [0, 1, -0.5, math.nan, True])
def test_a_bad_quantile_is_refused(quantile: Any) -> None:
    """A share lies between nothing and everything."""
    with pytest.raises(InvalidParams, match="quantile"):
        TickCostModel(quantile=quantile)


@pytest.mark.parametrize("quantile", [0.75, 0.9, 0.97])
def test_that_share_of_the_ticks_takes_no_longer_than_expected(quantile: float) -> None:
    """Of a thousand noisy ticks after the first two hundred, the requested share is within the expectation."""
    pace, random = TickCostModel(quantile=quantile), Random(9)
    num_within = 0
    for tick in range(1200):
        seconds = noisy(random, cpu(4, 60, 1000))
        num_within += tick >= 200 and seconds <= pace.seconds(64, 1000)
        pace.observe(64, 1000, seconds)
    assert num_within / 1000 == pytest.approx(quantile, abs=0.03)


OBSERVATIONS = st.lists(
    st.tuples(st.integers(1, 4096), st.integers(0, 100_000), st.floats(0, 1e6, allow_nan=False), st.integers(0, 4096)),
    max_size=30,
)


SIZES = st.sampled_from([range(64), range(64, 513)]).flatmap(
    lambda kind: st.tuples(*(st.sampled_from(kind) for _ in range(2)))
)


@given(OBSERVATIONS, SIZES, st.integers(0, 5), st.integers(0, 50_000), st.integers(0, 50_000))
def test_more_of_a_kind_is_never_expected_to_take_less(
    observed: list[tuple[int, int, float, int]], sizes: tuple[int, int], num_whole: int, num_cells: int, more_cells: int
) -> None:
    """Whatever was observed: finite, positive, not falling with cells, outputs, nor tokens on either side of a tile."""
    pace = TickCostModel()
    for item in observed:
        pace.observe(*item)
    fewer, more = (512 * num_whole + size for size in sorted(sizes))
    seconds = pace.seconds(fewer, num_cells)
    assert 0 < seconds < math.inf
    assert pace.seconds(more, num_cells) >= seconds * (1 - 1e-12)
    assert pace.seconds(fewer, num_cells + more_cells) >= seconds * (1 - 1e-12)
    assert pace.seconds(fewer, num_cells, 1 + num_whole) >= seconds * (1 - 1e-12)


def test_a_tile_that_is_cheaper_than_less_is_learnt() -> None:
    """If 64 tokens and more cost half as much with the cells in use, a tick of 64 is expected to take less than a tick of 63."""
    pace, random = TickCostModel(), Random(9)

    def tiled(num_decode: int, num_prefill: int, num_cells: int) -> float:
        num_tokens = num_decode + num_prefill
        return 0.02 + 0.003 * num_tokens + num_tokens * num_cells * (1e-6 if num_tokens < 64 else 5e-7)

    observe_mixed(pace, random, tiled)
    assert pace.seconds(64, 3000) < 0.9 * pace.seconds(63, 3000)
    ticks = run_paced(pace, random, tiled, 0.25, 100)
    assert quantile(ticks, 0.99) <= 1.3


def test_both_kinds_of_ubatches_are_distinguished() -> None:
    """Passes of 100 tokens change nothing for passes of 10 beside the machine's speed."""
    pace = TickCostModel()
    for _ in range(30):
        pace.observe(10, 0, 0.02)
        pace.observe(100, 0, 0.3)
    assert pace.seconds(10, 0) / pace.state().margin == pytest.approx(0.02, rel=0.1)
    assert pace.seconds(100, 0) / pace.state().margin == pytest.approx(0.3, rel=0.1)
