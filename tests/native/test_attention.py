"""Attention on a CPU by our own kernel, against the formula in double precision and against llama.cpp's."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.native.conftest import TinyModels

from paceline.errors import InvalidParams
from paceline.runtime import Context, Model, build_info
from paceline.runtime.attention import SingleAttention, kernel, use_kernel, use_kernel_of_environment
from paceline.testing.models import Gemma3Spec, LlamaSpec, ModelSpec, Qwen2Spec

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not build_info().own_attention, reason="built without it: another tree or compiler"),
]
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
Array = npt.NDArray[np.floating[Any]]


@pytest.fixture(autouse=True)
def ours() -> Iterator[None]:
    before = kernel()
    use_kernel("paceline")
    yield
    use_kernel(before)


def reference(one: SingleAttention) -> Array:
    """Softmax of scaled scores by the formula, in double precision."""
    num_heads, num_kv_heads = one.queries.shape[2], one.keys.shape[2]
    keys, values = (np.repeat(a.astype(np.float64), num_heads // num_kv_heads, 2) for a in (one.keys, one.values))
    scores = np.einsum("sthd,schd->shtc", one.queries.astype(np.float64), keys) * one.scale
    if one.softcap:
        scores = one.softcap * np.tanh(scores / one.softcap)
    if one.mask is not None:
        slopes = np.array([slope(head, num_heads, one.max_bias) for head in range(num_heads)])
        scores = scores + slopes[None, :, None, None] * one.mask.astype(np.float64)[:, None]
    largest = scores.max(-1, keepdims=True)
    if one.sinks is not None:
        largest = np.maximum(largest, one.sinks[None, :, None, None])
    largest = np.where(np.isinf(largest), 0, largest)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    if one.sinks is not None:
        total = total + np.exp(one.sinks[None, :, None, None] - largest)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("shtc,schd->sthd", weights, values)


def slope(head: int, num_heads: int, max_bias: float) -> float:
    """ALiBi (Press et al. 2022), for numbers of heads that are no power of two as well."""
    if max_bias <= 0:
        return 1.0
    power = 2 ** int(np.log2(num_heads))
    if head < power:
        return float((2.0 ** (-max_bias / power)) ** (head + 1))
    return float((2.0 ** (-max_bias / 2 / power)) ** (2 * (head - power) + 1))


MASKS = [
    "none", "causal", "sequences", "interleaved", "window", "random", "nothing", "numbers", "drafts", "mixed", "hidden",
]  # fmt: skip


def mask_of(kind: str, shape: tuple[int, int, int], rng: np.random.Generator) -> npt.NDArray[np.float16] | None:
    _, tokens, cells = shape
    token, cell = np.arange(tokens)[:, None], np.arange(cells)[None, :]
    if kind == "none":
        return None
    if kind == "numbers":
        return rng.normal(size=shape).astype(np.float16)
    seen = {
        "causal": cell <= cells - tokens + token,
        "sequences": cell * tokens // cells == token,
        "interleaved": cell % tokens == token,  # as streams that decode beside each other leave them
        "window": (cell > token) & (cell <= token + cells // 3),
        "random": rng.random((tokens, cells)) < 0.4,
        "nothing": (token % 3 == 1) & (cell > 70),
        "drafts": cell % 4 == token // 4,  # four tokens of each stream
        # streams, a prompt, and streams again
        "mixed": np.where((token < 8) | (token > tokens - 4), cell % tokens == token, cell <= cells - tokens + token),
        "hidden": np.zeros((tokens, cells), bool),
    }[kind]
    return np.broadcast_to(np.where(seen, np.float16(0), np.float16(-np.inf)), shape)


def make(
    shape: dict[str, int], kind: str, cell_type: type[np.floating[Any]] = np.float16, seed: int = 0, **options: Any
) -> SingleAttention:
    rng = np.random.default_rng(seed)
    streams, tokens, cells = shape.get("streams", 1), shape["tokens"], shape["cells"]
    kv_heads, group, dim_k, dim_v = shape["kv_heads"], shape["group"], shape["dim_k"], shape["dim_v"]
    with_sinks = options.pop("with_sinks", False)
    spread = options.pop("spread", 1.0)
    return SingleAttention(
        queries=(spread * rng.normal(size=(streams, tokens, kv_heads * group, dim_k))).astype(np.float32),
        keys=rng.normal(size=(streams, cells, kv_heads, dim_k)).astype(cell_type),
        values=rng.normal(size=(streams, cells, kv_heads, dim_v)).astype(cell_type),
        mask=mask_of(kind, (streams, tokens, cells), rng),
        sinks=rng.normal(size=kv_heads * group).astype(np.float32) if with_sinks else None,
        scale=dim_k**-0.5,
        **options,
    )


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
LARGE = {"tokens": 9, "cells": 4500, "kv_heads": 2, "group": 7, "dim_k": 64, "dim_v": 64}
LATENT = {"tokens": 2, "cells": 300, "kv_heads": 1, "group": 128, "dim_k": 576, "dim_v": 512}


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
def test_outputs_are_those_of_the_formula(
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
@pytest.mark.parametrize("cells", [64, 1000, 5000])
@pytest.mark.parametrize("tokens", [24, 70])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_row_does_not_depend_on_what_is_computed_beside_it(
    kind: str, cells: int, tokens: int, heads: dict[str, int]
) -> None:
    """The same bits alone and in a batch, with one thread and with more, whatever the other rows are.

    Cells are in the lanes of vectors where a token is alone, rows of several tokens beside others that see the same cells.
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
    assert all(np.array_equal(one, outputs[0]) for one in outputs)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["keys", "values", "queries", "one key"])
@pytest.mark.parametrize("cells", [128, 3000])
@pytest.mark.parametrize("group", [1, 7, 24])
@pytest.mark.parametrize("kind", ["sequences", "causal", "random", "mixed"])
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


def test_the_kernel_can_be_chosen() -> None:
    """Both compute the same but for rounding, and the last setting selects the kernel."""
    one = make(LARGE, "causal")
    ours, _ = one.run()
    use_kernel("llama.cpp")
    assert kernel() == "llama.cpp"
    theirs, _ = one.run()
    assert np.allclose(ours, theirs, atol=5e-3)
    assert not np.array_equal(ours, theirs)
    with pytest.raises(InvalidParams, match="kernel must be 'paceline' or 'llama.cpp', not 'vllm'"):
        use_kernel("vllm")  # type: ignore[arg-type]
    assert kernel() == "llama.cpp"


def test_the_choice_may_change_at_any_time() -> None:
    """While operations run on several threads: each is computed by one of the two, whole."""
    passes = [make({**LARGE, "tokens": tokens, "cells": 700}, "causal") for tokens in (1, 9, 70)]
    wanted = [reference(one) for one in passes]
    is_over = threading.Event()

    def change() -> None:
        for number in itertools.count():
            use_kernel("paceline" if number % 2 else "llama.cpp")
            if is_over.is_set():
                return

    def run(index: int) -> bool:
        return all(np.allclose(passes[index].run(n_threads=3)[0], wanted[index], atol=2e-2) for _ in range(150))

    with ThreadPoolExecutor(4) as threads:
        changing = threads.submit(change)
        found = [threads.submit(run, index) for index in range(3)]
        try:
            results = [future.result() for future in found]
        finally:
            is_over.set()
        changing.result()
    assert results == [True, True, True]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("llama.cpp", "llama.cpp"), ("paceline", "paceline"), ("", "paceline"), ("best", "InvalidParams")],
)
def test_the_environment_chooses(word: str, expected: str) -> None:
    """PACELINE_CPU_ATTENTION selects the kernel; another name is refused."""
    script = (
        "from paceline.runtime.attention import kernel\n"
        "try:\n    print(kernel())\n"
        "except Exception as error:\n    print(type(error).__name__)"
    )
    environment = {**os.environ, "PACELINE_CPU_ATTENTION": word}
    completed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == expected


def test_a_context_reads_the_environment(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown kernel name raises when a context is made, and changes nothing."""
    use_kernel_of_environment.cache_clear()
    monkeypatch.setenv("PACELINE_CPU_ATTENTION", "best")
    with pytest.raises(InvalidParams, match="PACELINE_CPU_ATTENTION must be 'paceline' or 'llama.cpp', not 'best'"):
        Context(llama, n_ctx=256)
    with pytest.raises(InvalidParams, match="PACELINE_CPU_ATTENTION must be 'paceline' or 'llama.cpp', not 'best'"):
        kernel()
    monkeypatch.delenv("PACELINE_CPU_ATTENTION")
    Context(llama, n_ctx=256).close()


def last_logits(model: Model, pieces: int, **options: Any) -> npt.NDArray[np.float32]:
    """Of the last of 150 tokens, given in pieces of so many."""
    tokens = [(7 * i) % 200 + 3 for i in range(150)]
    with Context(model, n_ctx=512, n_batch=256, n_ubatch=256, **options) as context:
        for start in range(0, len(tokens), pieces):
            piece = tokens[start : start + pieces]
            context.decode(piece)
        return context.logits(len(piece) - 1)


SPECS = [kind(n_head_kv=heads) for kind in (LlamaSpec, Gemma3Spec, Qwen2Spec) for heads in (1, 4)]  # of four heads


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.architecture}-{spec.n_head_kv}")
def test_a_models_logits_are_those_without_flash_attention(tiny_models: TinyModels, spec: ModelSpec) -> None:
    """Prompts in pieces, and token by token: the logits of plain attention, but for cells of half precision."""
    with Model.load(tiny_models(spec)) as model:
        wanted = last_logits(model, 150, flash_attn="off", type_k="f32", type_v="f32")
        for pieces in (150, 40, 1):
            assert np.allclose(last_logits(model, pieces, flash_attn="on"), wanted, atol=0.05)  # of logits up to 9


def test_logits_do_not_depend_on_how_a_prompt_was_cut(tiny_models: TinyModels) -> None:
    """In one pass or token by token the same, but for keys that round another way."""
    with Model.load(tiny_models(LlamaSpec(n_head_kv=1))) as model:
        whole = last_logits(model, 150, flash_attn="on")
        for pieces in (64, 7, 1):
            assert np.allclose(last_logits(model, pieces, flash_attn="on"), whole, atol=1e-3)


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
