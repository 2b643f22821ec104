"""Sliding-window models with a full-size window cache: prefixes are shared in parts, as with attention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.exact import EXACT
from tests.native.conftest import TinyModels
from tests.native.contexts import goes_on
from tests.native.test_prefix_memory import ASK, OPTIONS, assert_same, cached, ids, nothing_idle, uncached
from tests.running_engine import LONG_S

from paceline import LLM, Completion
from paceline.errors import InvalidParams, StateError, Unsupported
from paceline.runtime import Context, MemoryClass, Model
from paceline.runtime.context import CellState
from paceline.testing.models import Gemma3Spec

pytestmark = pytest.mark.native

__all__ = ["nothing_idle"]

N_SWA = 32
FULL: dict[str, Any] = {**OPTIONS, "swa_full": True}
# The activations of Gemma 3 go through a table of half precision, so the order of cells alone gives 2e-3.
TOLERANCE = 5e-3


@pytest.fixture(scope="module")
def gemma(tiny_models: TinyModels) -> Iterator[Model]:
    with Model.load(tiny_models(Gemma3Spec(n_swa=N_SWA))) as model:
        yield model


@pytest.fixture
def context(gemma: Model) -> Iterator[Context]:
    with Context(gemma, n_ctx=1024, n_batch=256, n_ubatch=64, n_seq_max=4, swa_full=True, **EXACT) as made:
        yield made


def after(context: Context, seq_id: int, token: int = 42) -> np.ndarray:
    context.decode([token], seq_ids=seq_id)
    return context.logits(0)


def alone(model: Model, token_ids: list[int], token: int = 42) -> np.ndarray:
    """Return the logits of a context that computed all of it in one sequence."""
    with Context(model, n_ctx=1024, n_batch=256, n_ubatch=64, **EXACT) as context:
        for start in range(0, len(token_ids), 256):
            context.decode(token_ids[start : start + 256], wants_logits="none")
        return after(context, 0, token)


def computed(context: Context, token_ids: list[int], seq_id: int = 0) -> None:
    for start in range(0, len(token_ids), 256):
        context.decode(token_ids[start : start + 256], seq_ids=seq_id, wants_logits="none")


def own_logprobs(completion: Completion) -> list[float]:
    assert completion.logprobs is not None
    return [token.own for token in completion.logprobs]


# ---- an engine


def test_a_system_prompt_with_another_ending_hits(gemma: Model) -> None:
    """A part of another request's tokens, far before the window, is shared; ids and logprobs are as if computed."""
    system = ids(300)
    first, second = [*system, *ids(60, 1)], [*system, *ids(30, 2)]
    with LLM(gemma, **FULL) as llm:
        assert llm.limits.can_share_part
        llm.generate(first, **ASK)
        found = llm.generate(second, **ASK)
        again = llm.generate(first, **ASK)
        assert cached(found) == (300, "device")
        assert cached(again) == (359, "device")
    assert_same(found, uncached(gemma.paths[0], second), "gemma3")
    assert_same(again, uncached(gemma.paths[0], first), "gemma3")


def test_without_the_option_no_part_is_shared(gemma: Model) -> None:
    """The window's own cells are all there is."""
    with LLM(gemma, **OPTIONS) as llm:
        assert not llm.limits.can_share_part
        llm.generate([*ids(300), *ids(60, 1)], **ASK)
        assert cached(llm.generate([*ids(300), *ids(30, 2)], **ASK)) == (0, None)


def test_forks_of_a_running_request_share_with_it(gemma: Model) -> None:
    """From before the window of the running sequence, which goes on undisturbed."""
    prompt, long = ids(90), {**ASK, "max_tokens": 300}
    with LLM(gemma, **{**FULL, "num_slots": 4}) as llm:
        stream = llm.stream(prompt, **long, max_buffered_tokens=100)
        generated: list[int] = []
        while len(generated) < 80:
            generated += stream.get(LONG_S).token_ids
        early, late = prompt[:40], [*prompt, *generated[:15]]
        forks = llm.generate([[*early, *ids(4, 1)], [*late, *ids(4, 2)]], **ASK)
        assert [cached(fork) for fork in forks] == [(40, "running"), (105, "running")]
        for chunk in stream:
            generated += chunk.token_ids
        undisturbed = llm.generate(prompt, **long, cache_prompt=False)
    assert tuple(generated) == undisturbed.token_ids
    for start, seed, fork in ((early, 1, forks[0]), (late, 2, forks[1])):
        assert_same(fork, uncached(gemma.paths[0], [*start, *ids(4, seed)]), "gemma3")


@pytest.mark.usefixtures("nothing_idle")
def test_parts_come_back_from_host_memory(gemma: Model) -> None:
    """All of a prefix, and half of one, that moved out while another request ran."""
    prompt, other = ids(600), {**ASK, "max_tokens": 30, "cache_prompt": False}
    half = [*prompt[:300], *ids(20, 4)]
    with LLM(gemma, **FULL) as llm:
        llm.generate(prompt, **ASK)
        llm.generate(ids(20, 9), **other)
        again = llm.generate(prompt, **ASK)
        assert cached(again) == (599, "host")
        llm.generate(ids(20, 9), **other)
        found = llm.generate(half, **ASK)
        assert cached(found) == (300, "host")
    assert_same(again, uncached(gemma.paths[0], prompt), "gemma3")
    assert_same(found, uncached(gemma.paths[0], half), "gemma3")


def test_many_on_few_cells_are_as_alone(gemma: Model) -> None:
    """Eight that each need half of the cells are preempted, go on from host memory, and end as each does alone."""
    options = {"num_slots": 8, "n_ctx": 256}
    prompts = [[*ids(40), *ids(20, seed)] for seed in range(1, 9)]
    ask = {**ASK, "max_tokens": 60}
    with LLM(gemma, **{**FULL, **options}) as llm:
        together = llm.generate(prompts, **ask)
        assert llm.stats().number("paceline_preemptions_total") > 0
    with LLM(gemma, **{**OPTIONS, "num_slots": 1, "n_ctx": 256}) as llm:
        for completion, prompt in zip(together, prompts, strict=True):
            expected = llm.generate(prompt, **ask, cache_prompt=False)
            assert completion.token_ids == expected.token_ids
            assert own_logprobs(completion) == pytest.approx(own_logprobs(expected), abs=TOLERANCE)


# ---- its context


def test_a_full_window_is_attention_memory(gemma: Model, context: Context) -> None:
    """The context says so; the model, and a context without the option or without one pool, say sliding window."""
    assert context.memory_class is MemoryClass.ATTENTION
    assert gemma.memory_class is MemoryClass.SLIDING_WINDOW
    for options in ({}, {"swa_full": True, "kv_unified": False}):
        with Context(gemma, n_ctx=512, n_seq_max=2, **options, **EXACT) as other:  # type: ignore[arg-type]
            assert other.memory_class is MemoryClass.SLIDING_WINDOW


def test_a_copied_part_goes_on_as_if_computed(gemma: Model, context: Context) -> None:
    """From the middle of a sequence beyond its window, with another ending."""
    computed(context, ids(400))
    context.copy(0, 1, 0, 150)
    computed(context, ids(40, 3), 1)
    assert np.allclose(after(context, 1), alone(gemma, [*ids(400)[:150], *ids(40, 3)]), atol=TOLERANCE)
    assert np.allclose(after(context, 0), alone(gemma, ids(400)), atol=TOLERANCE)


def test_positions_behind_the_window_outlast_gaps_in_memory(gemma: Model, context: Context) -> None:
    """While others leave and come, free cells are used and no sequence loses early positions, though its window left them."""
    for seed in range(3):
        computed(context, ids(100, seed), seed)
    for _ in range(12):
        context.decode(ids(4, 9), seq_ids=0, wants_logits="none")
    for seed in range(5):
        context.remove(1)
        computed(context, ids(150 + 40 * seed, 20 + seed), 1)
        context.remove(2)
        computed(context, ids(60, 30 + seed), 2)
    assert [context.positions(seq_id).first for seq_id in range(3)] == [0, 0, 0]  # type: ignore[union-attr]
    context.copy(0, 3, 0, 50)
    assert np.allclose(after(context, 3), alone(gemma, ids(100)[:50]), atol=TOLERANCE)


def test_a_sequence_can_be_cut_anywhere(gemma: Model, context: Context) -> None:
    """Back beyond the window, and going on from there is as if nothing had come after."""
    computed(context, ids(400))
    context.remove(0, 100)
    assert np.allclose(after(context, 0), alone(gemma, ids(400)[:100]), atol=TOLERANCE)


def test_saved_ranges_bring_all_positions_along(gemma: Model, context: Context) -> None:
    """Saved in odd ranges and loaded in others, parts from the middle go on as if computed."""
    computed(context, ids(300))
    bounds = [0, 7, 70, 71, 200, 300]
    states = [context.save_cells(0, start, end, scratch_seq_id=3) for start, end in pairwise(bounds)]
    context.remove(0)
    computed(context, ids(50, 8), 2)
    for state in states:
        middle = (state.start + state.end + 1) // 2
        context.load_cells(1, state, state.start, middle, scratch_seq_id=3)
        if middle < state.end:
            context.load_cells(1, state, middle, state.end, scratch_seq_id=3)
    assert context.positions(1) == (0, 299)
    assert context.positions(3) is None
    for size in (300, 180, 33, 5):
        context.copy(1, 0, 0, size)
        assert np.allclose(after(context, 0), alone(gemma, ids(300)[:size]), atol=TOLERANCE)
        context.remove(0)


def test_a_damaged_range_leaves_the_sequence_as_it_was(gemma: Model, context: Context) -> None:
    """With any missing parts, the existing sequences go on."""
    computed(context, ids(200))
    state = context.save_cells(0, 50, 200, scratch_seq_id=3)
    context.copy(0, 1, 0, 50)
    for size in (0, 4, 1000, len(state.payload) - 1):
        damaged = CellState(state.start, state.end, state.payload[:size].copy())
        with pytest.raises(StateError):
            context.load_cells(1, damaged, 50, 200, scratch_seq_id=3)
        assert context.positions(1) == (0, 49)
    assert np.allclose(after(context, 1), alone(gemma, ids(200)[:50]), atol=TOLERANCE)


def test_a_whole_state_holds_its_window_and_no_more(gemma: Model, context: Context) -> None:
    """llama.cpp leaves the rest out: it goes on, and operations that need the rest are refused."""
    computed(context, ids(200))
    context.load_sequence(1, context.save_sequence(0))
    assert np.allclose(after(context, 1), after(context, 0), atol=TOLERANCE)
    with pytest.raises(Unsupported, match="sliding window"):
        context.copy(1, 2, 0, 100)
    with pytest.raises(Unsupported, match="sliding window"):
        context.save_cells(1, 0, 100, scratch_seq_id=3)
    context.remove(1)
    goes_on(context)


def test_keep_and_clear_give_all_cells_back(context: Context) -> None:
    """Kept sequences keep their early positions; emptied sequences leave room for as much again."""
    computed(context, ids(400), 0)
    computed(context, ids(400, 1), 1)
    context.keep(1)
    computed(context, ids(400, 2), 2)
    assert context.positions(1) == (0, 399)
    context.clear()
    for seq_id in range(2):
        computed(context, ids(500, seq_id), seq_id)
        assert context.positions(seq_id) == (0, 499)


def test_more_sequences_than_can_be_pinned_are_refused(gemma: Model) -> None:
    """Every one needs two ids of llama.cpp's 256."""
    with pytest.raises(InvalidParams, match=r"n_seq_max must be at most 128 .*swa_full"):
        Context(gemma, n_ctx=512, n_seq_max=129, swa_full=True, **EXACT)
    with pytest.raises(InvalidParams, match="num_slots must be at most 127"):
        LLM(gemma, num_slots=128, n_ctx=512, swa_full=True)
