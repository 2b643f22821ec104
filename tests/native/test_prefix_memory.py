"""Kept prefixes with every class of memory: reused KV gives the same as computing it, logits included."""

from __future__ import annotations

import random
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.exact import EXACT
from tests.native.conftest import TinyModels
from tests.native.contexts import goes_on
from tests.native.test_engine import MEMORY_CLASSES
from tests.possessions import Possessions
from tests.running_engine import LONG_S

from paceline import LLM, Completion, FinishReason
from paceline.errors import InvalidParams, PacelineError, StateError, Unsupported
from paceline.kv_cache import KVCache
from paceline.kv_cache.offload import TransferCost
from paceline.observability.metrics import Instrument
from paceline.runtime import Context, MemoryClass, Model
from paceline.runtime.context import CellState
from paceline.scheduling.records import TickRecord
from paceline.streaming import Stream
from paceline.testing.models import KINDS, Gemma3Spec, LlamaSpec, write_lora, write_model

pytestmark = pytest.mark.native

OPTIONS: dict[str, Any] = {**EXACT, "num_slots": 2, "n_ctx": 1024, "chunk_size": 32}
ASK: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 5}
TOLERANCE = 5e-5  # what batches of other shapes change; of most models a tenth of it was measured
# Its activations go through a table of half precision: tokens in other cells, nothing else, give 2e-3; a wrong one gives 7.
TOLERANCES = {"gemma3": 5e-3}


def ids(count: int, seed: int = 0) -> list[int]:
    result: list[int] = np.random.default_rng(seed).integers(0, 250, count).tolist()
    return result


class Load(Instrument):
    """Counts computed tokens."""

    def __init__(self) -> None:
        self.computed: Counter[int] = Counter()

    def tick_finished(self, record: TickRecord) -> None:
        for row in record.rows:
            self.computed[row.key] += row.num_tokens


def uncached(path: Path, prompt: list[int], **options: Any) -> Completion:
    """Return the output of a new engine without cached prefixes."""
    with LLM(path, **{**OPTIONS, **options}, cache_prompt=False) as llm:
        one = llm.generate(prompt, **ASK)
        assert one.usage.cached_tokens == 0
        return one


def assert_same(found: Completion, expected: Completion, kind: str = "llama") -> None:
    """Check for the same ids, and the same five best with the same logprobs."""
    tolerance = TOLERANCES.get(kind, TOLERANCE)
    assert found.token_ids == expected.token_ids
    assert found.logprobs is not None
    assert expected.logprobs is not None
    assert len(found.logprobs) == len(expected.logprobs) == len(expected.token_ids)
    for token, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert token.own == pytest.approx(other.own, abs=tolerance)
        assert token.token_ids == other.token_ids
        assert token.values == pytest.approx(other.values, abs=tolerance)


def cached(completion: Completion) -> tuple[int, str | None]:
    return completion.usage.cached_tokens, completion.usage.cached_from


@pytest.fixture
def nothing_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No idle cell may stay on the device."""
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: 0)


# ---- cached equals uncached


@pytest.mark.parametrize("kind", MEMORY_CLASSES)
def test_a_prompt_again_and_its_next_turn_are_as_if_computed(tiny_models: TinyModels, kind: str) -> None:
    """From the device if parts can be shared, else from a snapshot: ids and logprobs of an engine that computed all."""
    path, prompt, load = tiny_models(kind), ids(90), Load()
    with LLM(path, **OPTIONS, instruments=[load]) as llm:
        first = llm.generate(prompt, **ASK)
        again = llm.generate(prompt, **ASK)
        turn_prompt = [*prompt, *first.token_ids, *ids(7, 3)]
        turn = llm.generate(turn_prompt, **ASK)
        source = "device" if kind == "llama" else "host"
        assert cached(first) == (0, None)
        assert cached(again) == (89, source)
        assert cached(turn) == (90 + 11, source)
        assert list(load.computed.values()) == [90 + 11, 1 + 11, 1 + 7 + 11]
    assert_same(first, uncached(path, prompt), kind)
    assert_same(again, first, kind)
    assert_same(turn, uncached(path, turn_prompt), kind)


def test_a_model_of_windows_alone_has_states_and_no_cells(tmp_path: Path) -> None:
    """Every layer sees the last tokens only: states are kept at the ends of prompts, and ranges of cells are empty."""
    path, prompt = write_model(tmp_path / "windows.gguf", Gemma3Spec(n_layer=5)), ids(90)
    with LLM(path, **OPTIONS) as llm:
        first = llm.generate(prompt, **ASK)
        again = llm.generate(prompt, **ASK)
        turn_prompt = [*prompt, *first.token_ids, *ids(7, 3)]
        turn = llm.generate(turn_prompt, **ASK)
        assert [cached(item) for item in (first, again, turn)] == [(0, None), (89, "host"), (90 + 11, "host")]
    assert_same(again, first, "gemma3")
    assert_same(turn, uncached(path, turn_prompt), "gemma3")


@pytest.mark.parametrize("kind", MEMORY_CLASSES)
def test_a_prompt_that_goes_another_way_is_as_if_computed(
    tiny_models: TinyModels, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of a known prompt and another end: at once if parts can be shared, else from the second prompt of this kind on.

    On a busy machine a state may take as long as so small a model's prompt: here it takes nothing.
    """
    monkeypatch.setattr(TransferCost, "state_seconds", lambda *_: 0.0)
    path = tiny_models(kind)
    prompt = ids(LONG)
    others = [[*prompt[:130], *ids(30, seed)] for seed in (5, 6, 7)]
    with LLM(path, **OPTIONS) as llm:
        llm.generate(prompt, **ASK)
        found = [llm.generate(other, **ASK) for other in others]
        first, source = ((130, "device") if kind == "llama" else (0, None)), "device" if kind == "llama" else "host"
        assert [cached(completion) for completion in found] == [first, (130, source), (130, source)]
    for completion, other in zip(found, others, strict=True):
        assert_same(completion, uncached(path, other), kind)


@pytest.mark.parametrize("kind", MEMORY_CLASSES)
def test_what_is_before_a_control_token_is_shared_from_the_second_prompt_on(
    tiny_models: TinyModels, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a system prompt is; and a prompt that leaves its predecessor's last tokens out has all that is before these."""
    monkeypatch.setattr(TransferCost, "state_seconds", lambda *_: 0.0)  # as above
    path = tiny_models(kind)
    system, question = [token for token in ids(LONG) if token > 5], [token for token in ids(60, 2) if token > 5]
    with LLM(path, **OPTIONS) as llm:
        end = llm.tokenizer.eos
        assert end is not None
        prompts = [[*system, end, *question, end, 9, number] for number in (7, 8)]
        prompts += [[*system, end, *question[::-1], end, 9, 7]]
        found = [llm.generate(prompt, **ASK) for prompt in prompts]
    num_shared = len(system) + 1 + len(question)
    more = 2 if kind == "llama" else 0  # it parts there exactly, and reads the token that both have
    assert [completion.usage.cached_tokens for completion in found] == [0, num_shared + more, len(system) + more // 2]
    for completion, prompt in zip(found, prompts, strict=True):
        assert_same(completion, uncached(path, prompt), kind)


@pytest.mark.parametrize("kind", MEMORY_CLASSES)
def test_prompts_that_begin_alike_at_once_are_as_if_computed(tiny_models: TinyModels, kind: str) -> None:
    """Six on three slots: their common part is computed once, by the first of them; the others wait and share it."""
    path, load = tiny_models(kind), Load()
    prompts = [[*ids(LONG), *ids(20, seed)] for seed in range(1, 7)]
    with LLM(path, **{**OPTIONS, "num_slots": 3}, instruments=[load]) as llm:
        found = llm.generate(prompts, **ASK)
    assert [completion.usage.cached_tokens for completion in found] == [0, *[LONG] * 5]
    assert sum(load.computed.values()) == LONG + 6 * (20 + 11)
    for completion, prompt in zip(found, prompts, strict=True):
        assert_same(completion, uncached(path, prompt), kind)


@pytest.mark.parametrize("kind", MEMORY_CLASSES)
def test_forks_of_a_running_one_are_as_if_computed(tiny_models: TinyModels, kind: str) -> None:
    """They share with it while it generates, generated tokens too if they can be cut; its output is undisturbed."""
    path, prompt = tiny_models(kind), ids(LONG)
    long = {**ASK, "max_tokens": 300}
    with LLM(path, **{**OPTIONS, "num_slots": 4, "n_ctx": 2048}) as llm:
        stream = llm.stream(prompt, **long, max_buffered_tokens=100)  # it cannot be over before the forks
        generated: list[int] = []
        while len(generated) < 20:
            generated += stream.get().token_ids
        history = [*prompt, *generated[:15]]
        forks = llm.generate([[*history, *ids(4, seed)] for seed in (1, 2, 3)], **ASK)
        if kind == "llama":
            assert [cached(fork) for fork in forks] == [(LONG + 15, "running")] * 3
        else:  # the first from the place before the prompt's last token, the others from it
            assert {fork.usage.cached_tokens for fork in forks} <= {LONG - 1, LONG + 15}
        for chunk in stream:
            generated += chunk.token_ids
        alone = llm.generate(prompt, **long, cache_prompt=False)
    assert tuple(generated) == alone.token_ids
    for seed, fork in zip((1, 2, 3), forks, strict=True):
        assert_same(fork, uncached(path, [*history, *ids(4, seed)]), kind)


@pytest.mark.parametrize("kind", MEMORY_CLASSES)
def test_choices_that_share_a_prompt_are_as_if_computed(tiny_models: TinyModels, kind: str) -> None:
    """Three greedy choices on one prompt, copied while it runs, write three times the text of a single choice."""
    path, prompt = tiny_models(kind), ids(90)
    with LLM(path, **{**OPTIONS, "num_slots": 3}) as llm:
        found = llm.generate(prompt, **ASK, n=3)
        assert llm.stats().number("paceline_prefix_hit_tokens_total") == 2 * 89
    expected = uncached(path, prompt)
    for choice in found.choices:
        assert choice.token_ids == expected.token_ids
        assert choice.logprobs is not None
        assert expected.logprobs is not None
        assert [token.own for token in choice.logprobs] == pytest.approx(
            [token.own for token in expected.logprobs], abs=TOLERANCES.get(kind, TOLERANCE)
        )


@pytest.mark.usefixtures("nothing_idle")
def test_what_comes_from_host_memory_is_as_if_computed(tiny_models: TinyModels) -> None:
    """A prefix is offloaded in pieces while another request runs, and loaded again: all of it, and half of a piece."""
    path, prompt = tiny_models("llama"), ids(700)
    half = [*prompt[:300], *ids(20, 4)]
    with LLM(path, **OPTIONS) as llm:
        llm.generate(prompt, **ASK)
        llm.generate(ids(20, 9), **{**ASK, "max_tokens": 30}, cache_prompt=False)
        again = llm.generate(prompt, **ASK)
        assert cached(again) == (699, "host")
        llm.generate(ids(20, 9), **{**ASK, "max_tokens": 30}, cache_prompt=False)
        other = llm.generate(half, **ASK)
        assert cached(other) == (300, "host")
    assert_same(again, uncached(path, prompt))
    assert_same(other, uncached(path, half))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_made_way_comes_back_as_if_computed(tiny_models: TinyModels, kind: str) -> None:
    """Paths that drive each other off a small device are loaded into its fragments."""
    path, options = tiny_models(kind), {"n_ctx": 256, "num_slots": 2}
    prompts = [ids(90 + seed, seed) for seed in range(4)]
    with LLM(path, **{**OPTIONS, **options}) as llm:
        first = [llm.generate(prompt, **ASK) for prompt in prompts]
        again = [llm.generate(prompt, **ASK) for prompt in prompts]
        assert "host" in {completion.usage.cached_from for completion in again}
        assert [completion.usage.cached_tokens for completion in again] == [len(prompt) - 1 for prompt in prompts]
    for completion, other, prompt in zip(first, again, prompts, strict=True):
        assert_same(other, completion, kind)
        assert_same(completion, uncached(path, prompt, **options), kind)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "falcon-h1"])
def test_the_preempted_go_on_as_if_they_had_never_stopped(
    tiny_models: TinyModels, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight that each need half of the cells: logprobs as alone, and nearly nothing is computed twice.

    A busy machine may find it cheaper to compute so small a model again: here transfers cost nothing.
    """
    monkeypatch.setattr(TransferCost, "round_trip_seconds", lambda *_: 0.0)
    path, options = tiny_models(kind), {"num_slots": 8, "n_ctx": 256}
    prompts = [ids(60, seed) for seed in range(8)]
    ask = {**ASK, "max_tokens": 60}
    load = Load()
    with LLM(path, **{**OPTIONS, **options}, instruments=[load]) as llm:
        together = llm.generate(prompts, **ask)
        num_preempted = llm.stats().number("paceline_preemptions_total")
    assert num_preempted > 0 or kind == "falcon-h1"
    assert sum(load.computed.values()) <= 8 * (60 + 59) + num_preempted
    with LLM(path, **{**OPTIONS, "num_slots": 1, "n_ctx": 256}) as llm:
        for completion, prompt in zip(together, prompts, strict=True):
            assert completion.finish_reason is FinishReason.LENGTH
            assert_same(completion, llm.generate(prompt, **ask, cache_prompt=False), kind)


def test_a_part_of_a_large_saved_range_fails_no_request(tiny_models: TinyModels) -> None:
    """A few tokens of a long range are wanted while there is no room for all of it: they are computed."""
    path = tiny_models("llama")
    with LLM(path, **{**OPTIONS, "n_ctx": 256}) as llm:
        llm.generate(ids(200), **ASK)
        stream = llm.stream(ids(100, 1), **{**ASK, "max_tokens": 100})
        stream.get()
        short_prompt = [*ids(200)[:20], 3, 4]
        short = llm.generate(short_prompt, **ASK)
        assert sum(len(chunk.token_ids) for chunk in stream) > 0
        assert stream.finish_reason is FinishReason.LENGTH
    assert_same(short, uncached(path, short_prompt))


def test_adapters_do_not_share_with_the_base_model(tiny_models: TinyModels, tmp_path: Path) -> None:
    """The same prompt with and without, and with another scale: each computes its own, and writes the same as alone."""
    path = tiny_models("llama")
    lora = {"a": write_lora(tmp_path / "a.gguf", KINDS["llama"], seed=1)}
    sets: list[dict[str, float]] = [{}, {"a": 1.0}, {"a": 0.5}]
    prompt = ids(60)
    with LLM(path, **OPTIONS, lora=lora) as llm:
        first = [llm.generate(prompt, **ASK, lora=adapters) for adapters in sets]
        again = [llm.generate(prompt, **ASK, lora=adapters) for adapters in sets]
        assert [cached(completion) for completion in first] == [(0, None)] * 3
        assert [cached(completion) for completion in again] == [(59, "device")] * 3
    assert len({completion.token_ids for completion in first}) == 3
    for completion, other, scales in zip(first, again, sets, strict=True):
        assert_same(other, completion)
        with LLM(path, **OPTIONS, lora=lora) as llm:
            assert_same(completion, llm.generate(prompt, **ASK, lora=scales))


def test_salts_share_nothing_on_a_real_context(tiny_models: TinyModels) -> None:
    """Salts and tenants share nothing; each finds its own prefixes."""
    with LLM(tiny_models("llama"), **OPTIONS) as llm:
        for options in ({}, {"cache_salt": "s"}, {"tenant": "s"}, {"cache_prompt": False}):
            assert cached(llm.generate(ids(60), **ASK, **options)) == (0, None)
        for options in ({}, {"cache_salt": "s"}, {"tenant": "s"}):
            assert cached(llm.generate(ids(60), **ASK, **options)) == (59, "device")
        assert cached(llm.generate(ids(60), **ASK, cache_prompt=False)) == (0, None)


def test_an_engine_without_cache_shares_nothing_between_requests(tiny_models: TinyModels) -> None:
    """`cache_prompt=False` holds for every request of the engine."""
    with LLM(tiny_models("llama"), **OPTIONS, cache_prompt=False) as llm:
        llm.generate(ids(60), **ASK)
        assert cached(llm.generate(ids(60), **ASK)) == (0, None)


def test_an_encoder_embeds_and_has_nothing_to_keep(tiny_models: TinyModels) -> None:
    """The same text twice gives the same vector; there is no memory to take anything from."""
    with LLM(tiny_models("bert"), n_threads=1) as llm:
        one, two = (llm.embed("the same text", pooling="mean") for _ in range(2))
        assert np.array_equal(one, two)
        assert llm.stats().number("paceline_prefix_hit_tokens_total") == 0


# ---- cells of a context


@pytest.fixture(params=MEMORY_CLASSES)
def any_context(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[Context]:
    with Model.load(tiny_models(request.param)) as model, Context(model, n_ctx=256, n_seq_max=4, **EXACT) as context:
        yield context


@pytest.fixture
def llama_context(tiny_models: TinyModels) -> Iterator[Context]:
    with Model.load(tiny_models("llama")) as model, Context(model, n_ctx=256, n_seq_max=4, **EXACT) as context:
        yield context


def after(context: Context, seq_id: int, token: int = 42) -> np.ndarray:
    context.decode([token], seq_ids=seq_id)
    return context.logits(0)


def test_saved_cells_go_on_like_the_original(any_context: Context) -> None:
    """Whole, into another sequence and other cells: the same logits but for the order in which they are added up."""
    any_context.decode(ids(40))
    state = any_context.save_cells(0, 0, 40, scratch_seq_id=3)
    rest = any_context.save_state(0, 40) if any_context.has_state_apart else None
    assert state.nbytes > 0
    assert any_context.positions(3) is None
    any_context.load_cells(1, state, 0, 40, scratch_seq_id=3)
    if rest is not None:
        any_context.load_state(1, rest, 40)
    assert any_context.positions(1).last == 39  # type: ignore[union-attr]
    assert np.allclose(after(any_context, 1), after(any_context, 0), atol=2e-4)
    goes_on(any_context)


# ---- states beside cells


APART = ("gemma3", "gemma4", "falcon-h1", "lfm2", "granitehybrid")
LONG = 150  # more than the windows of the models


@pytest.fixture(params=APART)
def context_with_states(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[Context]:
    with Model.load(tiny_models(request.param)) as model, Context(model, n_ctx=1024, n_seq_max=4, **EXACT) as context:
        assert context.has_state_apart
        assert model.n_swa < LONG
        yield context


def decode(context: Context, tokens: list[int], seq_id: int = 0) -> None:
    for start in range(0, len(tokens), 50):
        context.decode(tokens[start : start + 50], seq_ids=seq_id)


def test_a_checkpoint_on_shared_cells_goes_on_as_if_computed(context_with_states: Context) -> None:
    """Cells of a sequence that has gone on since, and the state of an earlier place: logits as if computed, of both."""
    context, prompt = context_with_states, ids(LONG)
    decode(context, prompt)
    state = context.save_state(0, LONG)
    other = ids(20, 9)
    decode(context, other)
    context.copy_cells(0, 1, LONG)
    with pytest.raises(InvalidParams, match="without their state"):
        context.decode([1], seq_ids=1, positions=[LONG])
    context.load_state(1, state, LONG)
    assert context.positions(1).last == LONG - 1  # type: ignore[union-attr]
    decode(context, ids(10, 5), 1)
    found = after(context, 1)
    going_on = after(context, 0)
    context.clear()
    decode(context, [*prompt, *ids(10, 5)])
    assert np.allclose(found, after(context, 0), atol=5e-3)
    decode(context, [*prompt, *other], 2)
    assert np.allclose(going_on, after(context, 2), atol=5e-3)


def test_cells_of_ranges_and_a_checkpoint_go_on_as_if_computed(context_with_states: Context) -> None:
    """A copy of the first, loaded ranges behind it in parts of parts, the state of a place between: then as if computed."""
    context, prompt = context_with_states, ids(LONG + 30)
    decode(context, prompt[:LONG])
    state = context.save_state(0, LONG)
    decode(context, prompt[LONG:])
    saved = [context.save_cells(0, *bounds, scratch_seq_id=3) for bounds in ((20, 90), (90, LONG + 30))]
    context.copy_cells(0, 1, 30)
    context.remove(0)
    decode(context, ids(100, 7))  # elsewhere in memory
    context.load_cells(1, saved[0], 30, 90, scratch_seq_id=3)
    context.load_cells(1, saved[1], 90, LONG, scratch_seq_id=3)
    context.load_state(1, state, LONG)
    assert context.positions(3) is None
    found = after(context, 1)
    context.clear()
    decode(context, prompt[:LONG])
    assert np.allclose(found, after(context, 0), atol=5e-3)
    goes_on(context)


@pytest.mark.parametrize("kind", ["llama", *APART])
def test_a_part_of_a_saved_range_goes_on_as_if_saved_alone(tiny_models: TinyModels, kind: str) -> None:
    """Its first, middle and last tokens, each cut from it after it has left the device: logits as if computed."""
    options: dict[str, Any] = {**EXACT, "swa_full": kind == "llama"}
    with Model.load(tiny_models(kind)) as model, Context(model, n_ctx=1024, n_seq_max=4, **options) as context:
        check_cuts(context)


def test_a_part_of_a_range_of_a_full_window_goes_on_as_if_saved_alone(tiny_models: TinyModels) -> None:
    """The range is in pieces no longer than the window."""
    with (
        Model.load(tiny_models("gemma3")) as model,
        Context(model, n_ctx=1024, n_seq_max=4, swa_full=True, **EXACT) as context,
    ):
        assert model.n_swa < LONG // 2
        check_cuts(context)


def check_cuts(context: Context) -> None:
    prompt = ids(LONG)
    decode(context, prompt)
    state = context.save_state(0, LONG) if context.has_state_apart else None
    whole = context.save_cells(0, 0, LONG, scratch_seq_id=3)
    alone = context.save_cells(0, 20, 60, scratch_seq_id=3)
    context.clear()
    decode(context, ids(100, 7))  # elsewhere in memory
    bounds = [(0, 20), (20, 60), (60, 61), (61, LONG)]
    parts = [context.cut_cells(whole, *bound, scratch_seq_id=3) for bound in bounds]
    assert context.positions(3) is None
    assert (parts[1].start, parts[1].end, parts[1].nbytes) == (20, 60, alone.nbytes)
    parts[1] = context.cut_cells(parts[1], 20, 60, scratch_seq_id=3)  # all of it
    for part, bound in zip(parts, bounds, strict=True):
        context.load_cells(1, part, *bound, scratch_seq_id=3)
    if state is not None:
        context.load_state(1, state, LONG)
    found = after(context, 1)
    context.clear()
    decode(context, prompt)
    assert np.allclose(found, after(context, 0), atol=5e-3)
    goes_on(context)


def test_cells_at_other_positions_than_a_range_says_are_refused(any_context: Context) -> None:
    """A range made by hand: neither loaded nor cut, and the sequence and the others are unchanged."""
    context = any_context
    if context.memory_class is not MemoryClass.ATTENTION and not context.has_state_apart:
        pytest.skip("no ranges")
    decode(context, ids(60))
    bounds = ((0, 20), (20, 40), (30, 40), (25, 35), (10, 40))
    saved = [context.save_cells(0, *bound, scratch_seq_id=3) for bound in bounds]
    context.load_cells(1, saved[0], 0, 20, scratch_seq_id=3)
    for other in saved[2:]:
        wrong = CellState(20, 40, other.payload)
        for end in (40, 30):
            with pytest.raises(StateError):
                context.load_cells(1, wrong, 20, end, scratch_seq_id=3)
        if other.start > 20:  # of the others these positions are there
            with pytest.raises(StateError):
                context.cut_cells(wrong, 20, 36, scratch_seq_id=3)
    for start, end in ((19, 30), (30, 41), (30, 30)):
        with pytest.raises(InvalidParams):
            context.cut_cells(saved[1], start, end, scratch_seq_id=3)
    with pytest.raises(InvalidParams):
        context.cut_cells(saved[1], 20, 30, scratch_seq_id=0)
    assert context.positions(3) is None
    context.load_cells(1, saved[1], 20, 40, scratch_seq_id=3)
    goes_on(context)


def test_cells_and_states_that_do_not_belong_together_are_refused(context_with_states: Context) -> None:
    """Too few cells, a sequence that has a state, missing cells: typed errors, and existing sequences go on."""
    context = context_with_states
    decode(context, ids(LONG))
    state = context.save_state(0, LONG)
    cells = context.save_cells(0, 0, 60, scratch_seq_id=3)
    context.copy_cells(0, 1, LONG - 10)
    for wrong in (
        lambda: context.load_state(1, state, LONG),
        lambda: context.load_state(1, state, LONG - 10),
        lambda: context.copy_cells(0, 1, 10),
        lambda: context.copy_cells(0, 0, 10),
        lambda: context.copy_cells(0, 2, LONG + 1),
        lambda: context.copy_cells(0, 2, 0),
        lambda: context.copy_cells(1, 2, 5),
        lambda: context.copy_cells(2, 1, 5),
        lambda: context.copy(1, 2),
        lambda: context.remove(1, 5),
        lambda: context.save_state(1, LONG - 10),
        lambda: context.save_sequence(1),
        lambda: context.load_cells(0, cells, 0, 60, scratch_seq_id=3),
        lambda: context.load_cells(1, cells, 0, 60, scratch_seq_id=3),
        lambda: context.load_cells(2, cells, 0, 60, scratch_seq_id=1),
        lambda: context.save_cells(0, 0, 10, scratch_seq_id=1),
        lambda: context.save_state(0, LONG - 1),
    ):
        with pytest.raises(PacelineError):
            wrong()
    context.remove(1)
    context.copy_cells(0, 1, LONG)
    context.load_state(1, state, LONG)
    goes_on(context, 1)
    goes_on(context)


def test_a_long_series_of_checkpoints_loses_no_cell(context_with_states: Context) -> None:
    """Copied, loaded and removed more often than there are cells: the same cells are free afterwards as before."""
    context = context_with_states
    decode(context, ids(LONG))
    state = context.save_state(0, LONG)
    cells = context.save_cells(0, 0, LONG, scratch_seq_id=3)
    for _ in range(30):
        context.copy_cells(0, 1, LONG)
        context.load_state(1, state, LONG)
        context.load_cells(2, cells, 0, LONG, scratch_seq_id=3)
        context.load_state(2, state, LONG)
        goes_on(context, 1)
        goes_on(context, 2)
        context.remove(1)
        context.remove(2)
    decode(context, ids(1024 - 2 * LONG, 3), 1)
    assert context.positions(2) is None


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_memory_without_states_beside_cells_says_so(tiny_models: TinyModels, kind: str) -> None:
    """Attention is cells alone, recurrent memory a state alone."""
    with Model.load(tiny_models(kind)) as model, Context(model, n_ctx=256, n_seq_max=4, **EXACT) as context:
        assert not context.has_state_apart
        context.decode(ids(40))
        with pytest.raises(Unsupported, match="apart from a state"):
            context.copy_cells(0, 1, 10)
        if kind == "mamba":
            context.load_state(1, context.save_state(0, 40), 40)
            assert np.allclose(after(context, 1), after(context, 0), atol=2e-4)


# ---- ranges


def test_ranges_are_put_together(llama_context: Context) -> None:
    """Saved from two sequences, loaded in parts of parts behind a copy, and used after their sources are gone."""
    context = llama_context
    context.decode(ids(60))
    context.copy(0, 1, 0, 20)
    states = [context.save_cells(0, start, end, scratch_seq_id=3) for start, end in ((10, 35), (35, 60))]
    expected = after(context, 0)
    context.remove(0)
    context.decode(ids(50, 8), seq_ids=0)  # elsewhere in memory
    context.load_cells(1, states[0], 20, 35, scratch_seq_id=3)
    context.load_cells(1, states[1], 35, 50, scratch_seq_id=3)
    context.load_cells(1, states[1], 50, 60, scratch_seq_id=3)
    assert context.positions(1) is not None
    assert (context.positions(1).first, context.positions(1).last) == (0, 59)  # type: ignore[union-attr]
    assert np.allclose(after(context, 1), expected, atol=TOLERANCE)
    assert context.positions(3) is None
    goes_on(context, 1)


def mapped_pages() -> int:
    """Return the size of this process's address space; 0 if the system does not report it."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) if statm.exists() else 0


@pytest.mark.parametrize("num_tokens", [255, 600])
def test_states_of_megabytes_are_whole_and_give_their_memory_back(tmp_path: Path, num_tokens: int) -> None:
    """At 8 KiB a token they are no small blocks."""
    path = write_model(tmp_path / "wide.gguf", LlamaSpec(n_embd=512, n_head=8, n_head_kv=8, n_ff=64), seed=1)
    with Model.load(path) as model, Context(model, n_ctx=2048, n_seq_max=4, **EXACT) as context:
        context.decode(ids(num_tokens + 1)[:512])
        if num_tokens >= 512:
            context.decode(ids(num_tokens + 1)[512:])
        state = context.save_cells(0, 0, num_tokens, scratch_seq_id=3)
        assert state.nbytes >= num_tokens * 8192
        part = context.cut_cells(state, 10, num_tokens - 10, scratch_seq_id=3)
        assert np.array_equal(part.payload, context.save_cells(0, 10, num_tokens - 10, scratch_seq_id=3).payload)
        context.load_cells(1, state, 0, num_tokens, scratch_seq_id=3)
        context.remove(0, num_tokens)
        assert np.allclose(after(context, 1), after(context, 0), atol=TOLERANCE)
        saved = mapped_pages()
        for _ in range(30):
            context.save_sequence(0)
        assert (mapped_pages() - saved) * resource.getpagesize() < 10 * state.nbytes


@pytest.mark.parametrize(
    ("seq_id", "start", "end", "scratch"),
    [
        (9, 0, 10, 3),
        (0, 0, 10, 9),
        (0, 0, 10, 0),
        (0, 0, 10, 1),
        (0, 0, 41, 3),
        (0, 41, 42, 3),
        (0, 5, 5, 3),
        (0, 6, 5, 3),
        (2, 0, 1, 3),
        (-1, 0, 10, 3),
        (0, -1, 10, 3),
        (0, 0, 2**31 - 1, 3),
    ],
)
def test_cells_that_are_not_there_are_not_saved(
    llama_context: Context, seq_id: int, start: int, end: int, scratch: int
) -> None:
    """Unknown ids, a scratch sequence that holds something, ranges beyond the end, empty or backwards."""
    context = llama_context
    context.decode(ids(40))
    context.decode(ids(5), seq_ids=1)
    with pytest.raises(PacelineError):
        context.save_cells(seq_id, start, end, scratch_seq_id=scratch)
    assert [context.positions(i) is None for i in range(4)] == [False, False, True, True]
    goes_on(context)


@pytest.mark.parametrize(
    ("seq_id", "start", "end", "scratch"),
    [
        (9, 20, 30, 3),
        (2, 20, 30, 9),
        (2, 20, 30, 2),
        (2, 20, 30, 1),
        (2, 19, 30, 3),
        (2, 21, 30, 3),
        (2, 20, 41, 3),
        (2, 20, 20, 3),
        (2, 20, 19, 3),
        (0, 40, 41, 3),
        (1, 5, 10, 3),
    ],
)
def test_cells_that_do_not_fit_are_not_loaded(
    llama_context: Context, seq_id: int, start: int, end: int, scratch: int
) -> None:
    """After another end than theirs, beyond the saved range, through a scratch sequence in use: nothing is changed."""
    context = llama_context
    context.decode(ids(40))
    context.decode(ids(5), seq_ids=1)
    context.copy(0, 2, 0, 20)
    state = context.save_cells(0, 10, 40, scratch_seq_id=3)
    before = [context.positions(i) for i in range(4)]
    with pytest.raises(PacelineError):
        context.load_cells(seq_id, state, start, end, scratch_seq_id=scratch)
    assert [context.positions(i) for i in range(4)] == before
    context.load_cells(2, state, 20, 40, scratch_seq_id=3)
    assert np.allclose(after(context, 2), after(context, 0), atol=TOLERANCE)


def test_a_range_without_room_is_not_loaded(llama_context: Context) -> None:
    """The whole saved range needs room for a moment; without it, StateError, and all is as before."""
    context = llama_context
    context.decode(ids(150))
    state = context.save_cells(0, 0, 150, scratch_seq_id=3)
    with pytest.raises(StateError, match="does not fit"):
        context.load_cells(1, state, 0, 10, scratch_seq_id=3)
    assert context.positions(1) is None
    assert context.positions(3) is None
    goes_on(context)
    context.remove(0)
    context.load_cells(1, state, 0, 10, scratch_seq_id=3)
    goes_on(context, 1)


@pytest.mark.parametrize("damage", ["short", "empty", "noise", "wrong range"])
def test_damaged_cells_are_not_loaded(llama_context: Context, damage: str) -> None:
    """Cut, empty, made up, or said to be of another range: an error, no crash, and the context goes on."""
    context = llama_context
    context.decode(ids(40))
    state = context.save_cells(0, 0, 40, scratch_seq_id=3)
    payload, end = state.payload, 40
    if damage == "short":
        payload = payload[: len(payload) // 2]
    elif damage == "empty":
        payload = payload[:0]
    elif damage == "noise":
        payload = np.random.default_rng(0).integers(0, 256, len(payload)).astype(np.uint8)
    else:
        end = 39
    with pytest.raises(PacelineError):
        context.load_cells(1, CellState(0, end, payload), 0, end, scratch_seq_id=3)
    assert context.positions(1) is None
    assert context.positions(3) is None
    goes_on(context)


@pytest.mark.parametrize("kind", [kind for kind in MEMORY_CLASSES if kind not in ("llama", *APART)])
def test_parts_of_what_is_only_saved_whole_are_refused(tiny_models: TinyModels, kind: str) -> None:
    """Recurrent state: neither saved nor loaded in part, and the sequences go on."""
    with Model.load(tiny_models(kind)) as model, Context(model, n_ctx=256, n_seq_max=4, **EXACT) as context:
        context.decode(ids(40))
        for start, end in ((0, 39), (1, 40), (0, 41), (5, 5)):
            with pytest.raises((Unsupported, InvalidParams)):
                context.save_cells(0, start, end, scratch_seq_id=3)
        state = context.save_cells(0, 0, 40, scratch_seq_id=3)
        for start, end in ((0, 39), (1, 40), (0, 41)):
            with pytest.raises((Unsupported, InvalidParams)):
                context.load_cells(1, state, start, end, scratch_seq_id=3)
        assert context.positions(1) is None
        goes_on(context)


def test_cells_are_the_same_object_for_every_caller(llama_context: Context) -> None:
    """Saved bytes cannot be changed through a reference."""
    llama_context.decode(ids(10))
    state = llama_context.save_cells(0, 0, 10, scratch_seq_id=3)
    with pytest.raises(ValueError, match="read-only"):
        state.payload[0] = 1


# ---- for a long time


@pytest.mark.full
@pytest.mark.parametrize("kind", [None, "llama", "gemma3", "falcon-h1"])
def test_nothing_is_lost_in_a_long_run(
    tiny_models: TinyModels, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random prefixes, salts, choices and cancels: no slot, sequence id, cell, saved byte, thread or file is left over."""
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: 100)
    before = Possessions.now()
    rng = random.Random(7)
    model = None if kind is None else tiny_models(kind)
    budget = 400_000
    options = {**EXACT, "num_slots": 4, "n_ctx": 600, "host_cache_bytes": budget, "max_queue": 1000}
    with LLM(model, **options) as llm:
        num_vocabulary = llm.model.n_vocab
        stems = [[rng.randrange(3, num_vocabulary) for _ in range(120)] for _ in range(5)]
        expected: dict[tuple[int, ...], tuple[int, ...]] = {}
        for _ in range(40):
            streams: list[tuple[list[int], Stream]] = []
            for _ in range(12):
                prompt = rng.choice(stems)[: rng.randrange(1, 120)] + [
                    rng.randrange(3, 200) for _ in range(rng.randrange(4))
                ]
                stream = llm.stream(
                    prompt,
                    temperature=0,
                    max_tokens=rng.randrange(1, 40),
                    n=rng.choice([1, 1, 1, 3]),
                    cache_salt=rng.choice(["", "", "s"]),
                    cache_prompt=rng.random() < 0.9,
                    priority=rng.randrange(-2, 3),
                )
                streams.append((prompt, stream))
            for prompt, stream in streams:
                if rng.random() < 0.3:
                    stream.get()
                    stream.close()
                    continue
                chunks = list(stream)
                assert chunks[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP), chunks[-1].error
                text = tuple(token for chunk in chunks if chunk.choice == 0 for token in chunk.token_ids)
                if kind is not None:
                    known = expected.setdefault(tuple(prompt), text)
                    assert all(entry == other for entry, other in zip(known, text, strict=False))
            for _, stream in streams:
                assert stream.wait_released(LONG_S)
        llm.generate("settle", max_tokens=1)
        check_nothing_lost(llm, budget)
        assert llm.stats().number("paceline_prefix_hit_tokens_total") > 0
    del llm, stream, streams
    assert Possessions.now().gained_since(before) == []


def check_nothing_lost(llm: LLM, budget: int) -> None:
    """Check an idle engine's internal state."""
    snapshot = llm.stats()
    assert snapshot.resident == snapshot.queued == 0
    scheduler = llm._engine._thread._engine.scheduler
    scheduler.check()
    assert scheduler._slots.num_free == 4
    assert not scheduler._requests
    assert scheduler.kv_cache.host_bytes <= budget
    assert (
        len(scheduler.kv_cache._offloader) + scheduler.kv_cache._cells.seq_ids.num_free == scheduler._limits.num_seq_ids
    )
