"""One attention operation on a CPU by our own kernel: the formula's outputs, and the same bits whatever is beside a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.native.attention_cases import LARGE, LATENT, MASKS, make, reference
from tests.sweeps import sampled

from paceline.errors import InvalidParams
from paceline.runtime import build_info
from paceline.runtime.attention import SingleAttention

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("own_attention"),
    pytest.mark.skipif(not build_info().own_attention, reason="built without it: another tree or compiler"),
]
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)

shapes = st.fixed_dictionaries(
    {
        "streams": st.integers(1, 2),
        "tokens": st.integers(1, 70),
        "cells": st.integers(1, 700),
        "kv_heads": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 4, 5, 7, 8, 71]),
        "dim_k": st.sampled_from([1, 8, 30, 64, 80]),
        "dim_v": st.sampled_from([1, 3, 8, 25, 64]),
    }
)


@QUIET
@given(
    shape=shapes,
    kind=st.sampled_from(MASKS),
    cell_type=st.sampled_from([np.float16, np.float32]),
    with_sinks=st.booleans(),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    max_bias=st.sampled_from([0.0, 0.0, 8.0]),
    n_threads=st.integers(1, 3),
)
@example(LARGE, "causal", np.float16, False, 0.0, 0.0, 2)
@example(LATENT, "causal", np.float16, False, 0.0, 0.0, 2)
def test_outputs_match_the_formula(
    shape: dict[str, int],
    kind: str,
    cell_type: type[np.floating[Any]],
    with_sinks: bool,
    softcap: float,
    max_bias: float,
    n_threads: int,
) -> None:
    """Any shape, mask, bias, cap and sinks: the formula's result, to single precision."""
    bias = max_bias if kind != "none" else 0.0
    one = make(shape, kind, cell_type, with_sinks=with_sinks, softcap=softcap, max_bias=bias)
    outputs, _ = one.run(n_threads=n_threads)
    assert np.allclose(outputs, reference(one), rtol=0, atol=5e-6)


HEADS: list[dict[str, int]] = [
    {},
    {"dim_v": 25},
    {"group": 1},
    {"group": 1, "dim_k": 40, "dim_v": 80},
    {"group": 2, "dim_k": 8},
    {"group": 3, "dim_k": 1, "dim_v": 3},
    {"group": 8},
    {"group": 24, "kv_heads": 1},
]
KINDS = ["causal", "sequences", "interleaved", "random", "mixed", "numbers"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cells", sampled([1000, 64, 5000], every=3))
@pytest.mark.parametrize("tokens", sampled([24, 70], every=2))
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_row_does_not_depend_on_what_is_computed_beside_it(
    kind: str, cells: int, tokens: int, heads: dict[str, int]
) -> None:
    """The same bits alone and in a batch, with one thread and with more, for any other rows.

    Cells are in the lanes of vectors if a token is alone; rows of several tokens if others see the same cells.
    """
    one = make({**LARGE, "tokens": tokens, "cells": cells, **heads}, kind)
    assert_rows_are_those_of_tokens_alone(one, (0, 13, tokens - 1))


@pytest.mark.parametrize("kind", ["causal", "mixed", "random"])
@pytest.mark.parametrize(
    "options",
    [
        {"cell_type": np.float32},
        {"spread": 30.0},
        {"spread": 3000.0},  # most weights are nothing, and so are factors
        {"softcap": 5.0},
        {"max_bias": 8.0},
        {"with_sinks": True},
    ],
    ids=str,
)
def test_bits_are_the_same_with_every_option(kind: str, options: dict[str, Any]) -> None:
    """Of cells of single precision, of scores that lie far apart, and with whatever else llama.cpp's models ask for."""
    for shape in ({"group": 1}, {"group": 7, "streams": 2}):
        one = make({**LARGE, "tokens": 30, "cells": 900, **shape}, kind, **options)
        assert_rows_are_those_of_tokens_alone(one, (0, 13, 29))


@pytest.mark.parametrize("kind", ["causal", "sequences"])
def test_bits_are_the_same_of_latent_heads(kind: str) -> None:
    """Many heads share keys, so that a token's rows fill vectors."""
    assert_rows_are_those_of_tokens_alone(make({**LATENT, "tokens": 9}, kind), (0, 4, 8))


def assert_rows_are_those_of_tokens_alone(one: SingleAttention, tokens: tuple[int, ...]) -> None:
    together, _ = one.run(n_threads=2)
    assert one.mask is not None
    for threads in (1, 3):
        assert np.array_equal(one.run(n_threads=threads)[0], together)
        for token in tokens:
            alone = replace(one, queries=one.queries[:, token : token + 1], mask=one.mask[:, token : token + 1])
            assert np.array_equal(alone.run(n_threads=threads)[0][:, 0], together[:, token])


def only_first(cells: int, seen: int, **change: Any) -> SingleAttention:
    """One token that sees the first cells of so many."""
    one = make({**LARGE, "tokens": 1, "cells": 9000}, "none")
    mask = np.full((1, 1, cells), -np.inf, np.float16)
    mask[..., :seen] = 0
    arrays = {"queries": one.queries, "keys": one.keys[:, :cells], "values": one.values[:, :cells], "mask": mask}
    return SingleAttention(scale=one.scale, **{**arrays, **change})


@pytest.mark.parametrize("seen", [200, 1500, 4000])
def test_a_row_does_not_depend_on_how_many_cells_there_are(seen: int) -> None:
    """Cells that it does not see, of other streams or of no sequence, change no bit."""
    outputs = [only_first(cells, seen).run(n_threads=threads)[0] for cells in (4000, 4352, 9000) for threads in (1, 4)]
    assert all(np.array_equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["keys", "values", "queries", "one key"])
@pytest.mark.parametrize("cells", sampled([128, 3000], every=2))
@pytest.mark.parametrize("group", sampled([1, 7, 24], every=2))
@pytest.mark.parametrize("kind", sampled(["sequences", "causal", "random", "mixed"], every=3))
def test_nonfinite_values_reach_only_rows_that_attend_to_them(
    bad: float, where: str, cells: int, group: int, kind: str
) -> None:
    """NaN and infinities in a cell or a query: rows that see it get NaN, the others the bits that they get without it."""
    one = make({**LARGE, "tokens": 20, "cells": cells, "group": group}, kind)
    clean, _ = one.run(n_threads=2)
    arrays = {name: getattr(one, name).copy() for name in ("queries", "keys", "values")}
    cell = cells - 5  # the first tokens of a prompt do not see it
    assert one.mask is not None
    sees = np.arange(20) == 2 if where == "queries" else one.mask[0, :, cell] == 0
    assert 0 < sees.sum() < 20
    if where == "queries":
        arrays["queries"][0, 2] = bad
    elif where == "one key":
        arrays["keys"][0, cell, :, 0] = bad
    else:
        arrays[where][0, cell] = bad
    spoiled, _ = SingleAttention(**arrays, mask=one.mask, scale=one.scale).run(n_threads=2)
    assert np.array_equal(spoiled[:, ~sees], clean[:, ~sees])
    if where != "one key":  # an infinite score of the sign that makes it count for nothing is a number
        assert not np.isfinite(spoiled[:, sees]).any()


def test_a_mask_that_is_no_number_gives_none() -> None:
    """The row is NaN, as with a key of NaN."""
    one = make({**LARGE, "tokens": 3, "cells": 100}, "numbers")
    assert one.mask is not None
    mask = one.mask.copy()
    mask[0, 1, 70] = np.nan
    outputs, _ = SingleAttention(
        queries=one.queries, keys=one.keys, values=one.values, mask=mask, scale=one.scale
    ).run()
    assert np.isnan(outputs[:, 1]).all()
    assert np.isfinite(outputs[:, [0, 2]]).all()


def test_large_scores_and_hidden_rows_give_numbers() -> None:
    """Scores of thousands, and rows that see nothing: no NaN; a row that sees nothing gives zeros."""
    one = make({**LARGE, "cells": 300}, "nothing", spread=3000.0)
    outputs, _ = one.run()
    assert np.allclose(outputs, reference(one), atol=2e-2)  # among such scores a rounding decides now and then
    assert not outputs[:, [0, 2, 3]].any()
    assert outputs[:, 1].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": np.zeros((1, 9, 2, 8), np.float64)}, "keys: float16 or float32 of 4"),
        ({"values": np.zeros((1, 9, 2, 8), np.float32)}, "one type"),
        ({"values": np.zeros((1, 8, 2, 8), np.float16)}, "same streams, cells and heads"),
        ({"queries": np.zeros((1, 3, 5, 8), np.float32)}, "multiple"),
        ({"queries": np.zeros((1, 0, 4, 8), np.float32)}, "empty"),
        ({"mask": np.zeros((1, 3, 8), np.float16)}, "mask: one value"),
        ({"mask": np.zeros((1, 3, 9), np.float32)}, "mask: float16 of 3 dimensions"),
        ({"mask": np.zeros((3, 9), np.float16)}, "mask: float16 of 3 dimensions"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks: one value"),
        ({"max_bias": 8.0}, "needs a mask"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    """The error names the array; ggml would end the process."""
    shape = {"tokens": 3, "cells": 9, "kv_heads": 2, "group": 2, "dim_k": 8, "dim_v": 8}
    fits = make(shape, "none")
    arrays = {"queries": fits.queries, "keys": fits.keys, "values": fits.values}
    with pytest.raises(InvalidParams, match=message):
        SingleAttention(**{**arrays, **change}).run()
    assert np.isfinite(SingleAttention(**arrays).run()[0]).all()
