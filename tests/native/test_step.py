"""`Context.step`: a pass and its draws in one call, with errors that are one row's alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.native.aborting import aborting
from tests.native.conftest import TinyModels

from paceline.errors import (
    Aborted,
    DecodeError,
    InvalidParams,
    InvalidType,
    NoKvSlot,
    PacelineError,
    SamplingError,
    Unsupported,
)
from paceline.params import SamplingParams
from paceline.runtime import Context, MaskSlots, Model, Sampler, StepRow

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> Iterator[Model]:
    with Model.load(tiny_models("llama")) as loaded:
        yield loaded


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with Context(model, n_ctx=1024, n_batch=256, n_seq_max=8, n_outputs_max=64, n_threads=1) as made:
        yield made


def greedy(model: Model, **options: Any) -> Sampler:
    return Sampler(SamplingParams(temperature=0, **options), model)


def alone(model: Model, prompt: list[int], count: int, **options: Any) -> list[int]:
    """Return a sampler's tokens with these options, alone."""
    with Context(model, n_ctx=512, n_threads=1) as context:
        return list(context.generate(Sampler(SamplingParams(**options), model), prompt, count))


def test_rows_of_a_batch_draw_the_same_as_alone(model: Model, context: Context) -> None:
    """Five sequences with samplers of their own, prefilled and decoded together, equal each by itself."""
    prompts = [[1 + i, 2, 3 * i + 4] + [7] * i for i in range(5)]
    options = [{"temperature": 0}, *({"temperature": 1.0, "seed": seed, "top_k": 20} for seed in range(4))]
    samplers = [Sampler(SamplingParams(**each), model) for each in options]  # type: ignore[arg-type]
    for sampler, prompt in zip(samplers, prompts, strict=True):
        sampler.accept_prompt(prompt)
    rows = [StepRow(seq_id=i, position=0, token_ids=prompts[i], samplers=(samplers[i],)) for i in range(5)]
    generated: list[list[int]] = [[] for _ in prompts]
    for _ in range(12):
        result = context.step(rows)
        for i, row in enumerate(result.rows):
            generated[i] += row.draws[0].token_ids
        rows = [
            StepRow(
                seq_id=i, position=row.position + len(row.token_ids), token_ids=generated[i][-1:], samplers=row.samplers
            )
            for i, row in enumerate(rows)
        ]
    assert generated == [alone(model, prompts[i], 12, **options[i]) for i in range(5)]  # type: ignore[arg-type]


def test_a_row_without_samplers_only_fills_memory(model: Model, context: Context) -> None:
    """Prefill beside decode: no logits are asked for, the sequence has moved on."""
    result = context.step(
        [
            StepRow(seq_id=0, position=0, token_ids=[1, 2, 3]),
            StepRow(seq_id=1, position=0, token_ids=[1, 2], samplers=(greedy(model),)),
        ]
    )
    assert result.rows[0].draws == ()
    assert len(result.rows[1].draws[0].token_ids) == 1
    assert context.positions(0) == (0, 2)


def test_a_sampler_has_accepted_what_it_drew(model: Model, context: Context) -> None:
    """Exactly once: the number of generated tokens is that of the draws."""
    sampler = greedy(model)
    context.step([StepRow(seq_id=0, position=0, token_ids=[1, 2], samplers=(sampler,))])
    assert sampler.num_generated == 1


def test_several_samplers_share_one_row_of_logits(model: Model, context: Context) -> None:
    """N choices of one prompt: each draws by its own seed and choice, as it would alone."""
    params = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=5)
    samplers = tuple(Sampler(params, model, choice=choice) for choice in range(6))
    draws = context.step([StepRow(seq_id=0, position=0, token_ids=[1, 2, 3], samplers=samplers)]).rows[0].draws
    context.decode([1, 2, 3], seq_ids=1)
    logits = context.logits(2)
    assert [draw.token_ids[0] for draw in draws] == [Sampler(params, model, choice=c).sample(logits) for c in range(6)]
    assert len({draw.token_ids for draw in draws}) > 1


def test_right_drafts_are_kept_and_one_more_is_drawn(model: Model, context: Context) -> None:
    """Guesses that are all right give a burst of all of them and the next token."""
    expected = alone(model, [1, 2, 3], 6, temperature=0)
    sampler = greedy(model)
    row = StepRow(seq_id=0, position=0, token_ids=[1, 2, 3, *expected[:4]], num_drafts=4, samplers=(sampler,))
    assert context.step([row]).rows[0].draws[0].token_ids == tuple(expected[:5])
    assert context.positions(0) == (0, 6)
    assert sampler.num_generated == 5


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_wrong_drafts_are_taken_out_of_memory(model: Model, context: Context, num_right: int) -> None:
    """Memory ends after the last right guess, and the sequence goes on as if there had been no drafts."""
    expected = alone(model, [1, 2, 3], 8, temperature=0)
    drafts = [*expected[:num_right], (expected[num_right] + 1) % 250, 9, 9]
    sampler = greedy(model)
    row = StepRow(seq_id=0, position=0, token_ids=[1, 2, 3, *drafts], num_drafts=len(drafts), samplers=(sampler,))
    drawn = list(context.step([row]).rows[0].draws[0].token_ids)
    assert drawn == expected[: num_right + 1]
    assert context.positions(0) == (0, 2 + num_right)
    while len(drawn) < 8:
        row = StepRow(seq_id=0, position=2 + len(drawn), token_ids=drawn[-1:], samplers=(sampler,))
        drawn += context.step([row]).rows[0].draws[0].token_ids
    assert drawn == expected


RECURRENT = ["mamba", "rwkv6", "rwkv7", "falcon-h1", "lfm2", "granitehybrid"]
EXACT: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "flash_attn": "off", "type_k": "f32", "type_v": "f32"}


def next_logits(context: Context, row: StepRow) -> np.ndarray:
    context.step([row])
    logits: np.ndarray = context.logits(len(row.token_ids) - 1)
    return logits


@pytest.mark.parametrize("num_right", [0, 2, 3])
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_row_with_a_wrong_draft_is_taken_back_from_recurrent_state(
    tiny_models: TinyModels, kind: str, num_right: int
) -> None:
    """Drawn tokens stand, memory is at the start of the row, and recomputation gives the earlier logits."""
    prompt = list(range(5, 25))
    with Model.load(tiny_models(kind)) as model, Context(model, n_seq_max=3, n_outputs_max=16, **EXACT) as context:
        expected = alone(model, prompt, 8, temperature=0)
        sampler, beside = greedy(model), greedy(model)
        context.step(
            [
                StepRow(seq_id=0, position=0, token_ids=prompt, samplers=(sampler,)),
                StepRow(seq_id=1, position=0, token_ids=[3, 4], samplers=(beside,)),
            ]
        )
        drafts = [*expected[1 : 1 + num_right], *[(expected[1 + num_right] + 1) % 250] * (3 - num_right)]
        rows = [
            StepRow(seq_id=0, position=20, token_ids=[expected[0], *drafts], num_drafts=3, samplers=(sampler,)),
            StepRow(seq_id=1, position=2, token_ids=[7], samplers=(beside,)),
        ]
        (drawn,) = context.step(rows).rows[0].draws
        assert list(drawn.token_ids) == expected[1 : 2 + num_right]
        assert drawn.is_taken_back == (num_right < 3)
        assert sampler.num_generated == 2 + num_right
        held = context.positions(0)
        assert held is not None
        assert held.last == (19 if num_right < 3 else 23)
        known = expected[: 2 + num_right][held.last - 19 :]
        found = next_logits(context, StepRow(seq_id=0, position=held.last + 1, token_ids=known, samplers=(sampler,)))
        context.decode([*prompt, *expected[: 2 + num_right]], seq_ids=2)
        assert found == pytest.approx(context.logits(20 + 1 + num_right), abs=1e-4)
        assert (
            context.step([StepRow(seq_id=1, position=3, token_ids=[8], samplers=(beside,))]).rows[0].draws[0].token_ids
        )


@pytest.mark.parametrize("kind", RECURRENT)
def test_right_drafts_are_taken_back_to_where_their_row_began(tiny_models: TinyModels, kind: str) -> None:
    """Until the sequence goes on, and whatever others do meanwhile; nowhere else."""
    prompt = list(range(5, 25))
    with Model.load(tiny_models(kind)) as model, Context(model, n_seq_max=3, n_outputs_max=16, **EXACT) as context:
        expected = alone(model, prompt, 8, temperature=0)
        sampler = greedy(model)
        context.step([StepRow(seq_id=0, position=0, token_ids=prompt, samplers=(sampler,))])
        row = StepRow(seq_id=0, position=20, token_ids=expected[:4], num_drafts=3, samplers=(sampler,))
        context.step([row])
        context.step([StepRow(seq_id=1, position=0, token_ids=[3, 4, 5])])
        with pytest.raises(Unsupported, match="cannot go back to position 22"):
            context.remove(0, 22)
        context.remove(0, 20)
        held = context.positions(0)
        assert held is not None
        assert held.last == 19
        found = next_logits(context, StepRow(seq_id=0, position=20, token_ids=expected[:2], samplers=(sampler,)))
        context.decode([*prompt, *expected[:2]], seq_ids=2)
        assert found == pytest.approx(context.logits(21), abs=1e-4)
        with pytest.raises(Unsupported, match="cannot go back to position 20"):
            context.remove(0, 20)
        assert context.positions(0) is not None


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_sequence_that_is_removed_behind_its_drafts_leaves_nothing(tiny_models: TinyModels, kind: str) -> None:
    """Neither cells nor a state: all of the context can be filled again, by a saved state as well."""
    prompt = list(range(5, 25))
    with Model.load(tiny_models(kind)) as model, Context(model, n_seq_max=2, n_outputs_max=16, **EXACT) as context:
        expected = alone(model, prompt, 8, temperature=0)
        sampler = greedy(model)
        context.step([StepRow(seq_id=0, position=0, token_ids=prompt, samplers=(sampler,))])
        saved = context.save_sequence(0)
        row = StepRow(seq_id=0, position=20, token_ids=expected[:4], num_drafts=3, samplers=(sampler,))
        for _ in range(3):
            context.step([row])
            context.load_sequence(0, saved)
            with pytest.raises(Unsupported, match="cannot go back"):
                context.remove(0, 5)
            sampler = greedy(model)
            row = msgspec.structs.replace(row, samplers=(sampler,))
        context.step([row])
        context.remove(0)
        for start in range(0, 512, 64):
            context.decode([1 + start % 200] * 64, seq_ids=1)
        assert context.positions(1) is not None


ROLLING = ["lfm2", "qwen35"]


@pytest.mark.parametrize("num_wrong", [1, 2, 3, 4])
@pytest.mark.parametrize("num_right", [0, 1, 3])
@pytest.mark.parametrize("kind", ROLLING)
def test_wrong_drafts_are_cut_from_states_that_llama_cpp_keeps(
    tiny_models: TinyModels, kind: str, num_right: int, num_wrong: int
) -> None:
    """As many as requested; beyond that the row is taken back. Copies, saves and further rows go on from the cut."""
    prompt = list(range(5, 25))
    options = {**EXACT, "n_seq_max": 4, "n_outputs_max": 32, "max_rollback": 3}
    with Model.load(tiny_models(kind)) as model, Context(model, **options) as context:
        assert context.max_rollback == 3
        expected = list(context.generate(greedy(model), prompt, 16))
        context.clear()
        sampler, drawn = greedy(model), [expected[0]]
        context.step(
            [
                StepRow(seq_id=0, position=0, token_ids=prompt, samplers=(sampler,)),
                StepRow(seq_id=1, position=0, token_ids=[3, 4]),
            ]
        )
        for turn in range(2):
            at = len(drawn)
            drafts = [*expected[at : at + num_right], *[(expected[at + num_right] + 1) % 250] * num_wrong]
            row = StepRow(
                seq_id=0, position=19 + at, token_ids=[drawn[-1], *drafts], num_drafts=len(drafts), samplers=(sampler,)
            )
            (draws,) = context.step([row, StepRow(seq_id=1, position=2 + turn, token_ids=[7])]).rows[0].draws
            drawn += draws.token_ids
            assert drawn == expected[: at + num_right + 1]
            assert draws.is_taken_back == (num_wrong == 4)
            if draws.is_taken_back:
                context.step([StepRow(seq_id=0, position=19 + at, token_ids=drawn[at - 1 : -1])])
        context.copy(0, 2)
        context.load_sequence(3, context.save_sequence(0))
        found = []
        for seq_id in (0, 2, 3):
            held = context.positions(seq_id)
            assert held is not None
            assert held.last == 18 + len(drawn)
            context.decode(drawn[-1:], seq_ids=seq_id)
            found.append(context.logits(0))
        context.remove(1)
        context.decode([*prompt, *drawn], seq_ids=1)
        for logits in found:
            assert logits == pytest.approx(context.logits(19 + len(drawn)), abs=2e-3)


@pytest.mark.parametrize("n_ctx", [256, 2048])
@pytest.mark.parametrize("kind", ROLLING)
def test_passes_that_fail_behind_a_cut_leave_the_state_where_it_was(
    tiny_models: TinyModels, kind: str, n_ctx: int
) -> None:
    """Without cells, or aborted in the middle, for this sequence and for one that is not in the pass."""
    prompt = list(range(5, 25))
    options = {**EXACT, "n_ctx": n_ctx, "n_seq_max": 4, "n_outputs_max": 32, "max_rollback": 3}
    with Model.load(tiny_models(kind)) as model, Context(model, **options) as context:
        expected = list(context.generate(greedy(model), prompt, 8))
        context.clear()
        samplers = [greedy(model), greedy(model)]
        context.step(
            [
                StepRow(seq_id=seq_id, position=0, token_ids=prompt, samplers=(sampler,))
                for seq_id, sampler in enumerate(samplers)
            ]
        )
        drafts = [expected[1], (expected[2] + 1) % 250, 9]
        rows = [
            StepRow(seq_id=seq_id, position=20, token_ids=[expected[0], *drafts], num_drafts=3, samplers=(sampler,))
            for seq_id, sampler in enumerate(samplers)
        ]
        assert [row.draws[0].token_ids for row in context.step(rows).rows] == [tuple(expected[1:3])] * 2
        further = StepRow(seq_id=0, position=22, token_ids=[expected[2], *[9] * (n_ctx - 60)])
        if n_ctx == 256:
            with pytest.raises(NoKvSlot):
                context.step([further, StepRow(seq_id=2, position=0, token_ids=[7] * 50)])
        else:
            with aborting(context), pytest.raises(Aborted):
                context.step([further])
        found = []
        for seq_id in (0, 1):
            context.decode(expected[2:3], seq_ids=seq_id)
            found.append(context.logits(0))
        context.decode([*prompt, *expected[:3]], seq_ids=3)
        for logits in found:
            assert logits == pytest.approx(context.logits(22), abs=2e-3)


@pytest.mark.parametrize("kind", ["mamba", "falcon-h1", "llama", "gemma3"])
def test_no_states_are_kept_where_llama_cpp_has_none(tiny_models: TinyModels, kind: str) -> None:
    """Asking for them has no effect then, and the context says so."""
    with Model.load(tiny_models(kind)) as model, Context(model, **EXACT, max_rollback=3) as context:
        assert context.max_rollback == 0


@pytest.mark.parametrize("value", [-1, 7, 1.5])
def test_states_beyond_a_ubatch_are_refused(tiny_models: TinyModels, value: Any) -> None:
    """With the option's name and its bounds."""
    with Model.load(tiny_models("lfm2")) as model:
        with pytest.raises(PacelineError, match="max_rollback"):
            Context(model, **EXACT, n_batch=8, n_ubatch=8, max_rollback=value)
        with Context(model, **EXACT, n_batch=8, n_ubatch=8, max_rollback=6) as context:
            context.decode(list(range(8)))


@pytest.mark.parametrize("num_right", [0, 2])
def test_a_pass_that_fails_takes_drafts_back_with_all_else(tiny_models: TinyModels, num_right: int) -> None:
    """If there are no cells for a row and its drafts, a hybrid model is unchanged, and goes on."""
    prompt = list(range(5, 25))
    with Model.load(tiny_models("falcon-h1")) as model:
        with Context(model, n_seq_max=2, n_outputs_max=16, **{**EXACT, "n_ctx": 256}) as context:
            expected = alone(model, prompt, 8, temperature=0)
            sampler = greedy(model)
            context.step([StepRow(seq_id=0, position=0, token_ids=prompt, samplers=(sampler,))])
            context.decode([9] * 234, seq_ids=1, wants_logits="none")
            drafts = [*expected[1 : 1 + num_right], *[(expected[1 + num_right] + 1) % 250] * (3 - num_right)]
            row = StepRow(seq_id=0, position=20, token_ids=[expected[0], *drafts], num_drafts=3, samplers=(sampler,))
            with pytest.raises(NoKvSlot):
                context.step([row])
            assert sampler.num_generated == 1
            context.remove(1)
            (drawn,) = context.step([row]).rows[0].draws
            assert list(drawn.token_ids) == expected[1 : 2 + num_right]
            assert drawn.is_taken_back


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
@pytest.mark.parametrize("length", [20, 31, 32, 33, 63, 100])
def test_wrong_drafts_are_cut_from_a_window(tiny_models: TinyModels, kind: str, length: int) -> None:
    """It still has the cells that the next token attends to, at each place, beside other sequences that take cells."""
    prompt = [1 + (7 * index) % 240 for index in range(length)]
    with Model.load(tiny_models(kind)) as model, Context(model, n_seq_max=3, n_outputs_max=32, **EXACT) as context:
        expected = list(context.generate(greedy(model), prompt, 40))
        context.clear()
        sampler, drawn = greedy(model), [expected[0]]
        context.step(
            [
                StepRow(seq_id=0, position=0, token_ids=prompt, samplers=(sampler,)),
                StepRow(seq_id=1, position=0, token_ids=[9] * 50),
            ]
        )
        while len(drawn) < 30:
            at = len(drawn)
            num_right = at % 4
            drafts = [*expected[at : at + num_right], *[(expected[at + num_right] + 1) % 250] * 8]
            position = length + at - 1
            row = StepRow(
                seq_id=0, position=position, token_ids=[drawn[-1], *drafts], num_drafts=len(drafts), samplers=(sampler,)
            )
            other = StepRow(seq_id=1, position=49 + at, token_ids=[9] * 1) if at == 1 else None
            (draws,) = context.step([row] if other is None else [row, other]).rows[0].draws
            assert draws.error is None
            assert not draws.is_taken_back
            drawn += draws.token_ids
            assert drawn == expected[: len(drawn)]
        row = StepRow(seq_id=0, position=length + len(drawn) - 1, token_ids=drawn[-1:], samplers=(sampler,))
        found = next_logits(context, row)
        context.decode([*prompt, *drawn], seq_ids=2)
        assert found == pytest.approx(context.logits(length + len(drawn) - 1), abs=5e-3)


def test_drafts_that_push_a_window_on_in_a_long_pass_fail_their_row(tiny_models: TinyModels) -> None:
    """In a pass of several ubatches a later ubatch may take cells that a sequence would need again; the others are served."""
    with Model.load(tiny_models("gemma3")) as model:
        with Context(model, n_seq_max=2, n_outputs_max=64, n_batch=256, n_ubatch=32, **EXACT) as context:
            prompt = [1 + (7 * index) % 240 for index in range(100)]
            sampler, beside = greedy(model), greedy(model)
            context.step([StepRow(seq_id=0, position=0, token_ids=prompt, samplers=(sampler,))])
            rows = [
                StepRow(seq_id=0, position=100, token_ids=[5] * 41, num_drafts=40, samplers=(sampler,)),
                StepRow(seq_id=1, position=0, token_ids=[*prompt, *prompt], samplers=(beside,)),
            ]
            first, second = [row.draws[0] for row in context.step(rows).rows]
            assert isinstance(first.error, DecodeError)
            assert "n_ubatch = 32" in str(first.error)
            assert second.error is None
            assert context.positions(0) is None


# ---- log-probabilities


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_logprobs_match_the_models_distribution(model: Model, context: Context) -> None:
    """Own and k most likely, per row as asked, before temperature and truncation."""
    params = SamplingParams(temperature=0.3, top_k=2, seed=1)
    rows = [
        StepRow(seq_id=0, position=0, token_ids=[1, 2, 3], samplers=(Sampler(params, model),), num_logprobs=4),
        StepRow(seq_id=1, position=0, token_ids=[1, 2, 3], samplers=(Sampler(params, model),), num_logprobs=0),
        StepRow(seq_id=2, position=0, token_ids=[1, 2, 3], samplers=(Sampler(params, model),)),
    ]
    result = context.step(rows)
    context.decode([1, 2, 3], seq_ids=3)
    expected = log_softmax(context.logits(2))
    token = result.rows[0].draws[0].token_ids[0]
    logprobs = result.rows[0].draws[0].logprobs
    assert logprobs is not None
    assert logprobs.own[0] == pytest.approx(expected[token], abs=1e-3)
    assert logprobs.ids[0].tolist() == np.argsort(-expected, kind="stable")[:4].tolist()
    assert np.allclose(logprobs.values[0], np.sort(expected)[::-1][:4], atol=1e-3)
    only_own = result.rows[1].draws[0].logprobs
    assert only_own is not None
    assert only_own.ids.shape == (1, 0)
    assert only_own.own[0] == pytest.approx(logprobs.own[0], abs=1e-3)
    assert result.rows[2].draws[0].logprobs is None


def test_prompt_tokens_are_scored_against_their_successors(model: Model, context: Context) -> None:
    """Scores over two chunks equal those from the logits of every position."""
    prompt = [5, 6, 7, 8, 9, 10]
    context.decode(prompt, seq_ids=7, wants_logits="all")
    expected = [float(log_softmax(context.logits(i))[prompt[i + 1]]) for i in range(5)]
    first = context.step(
        [StepRow(seq_id=0, position=0, token_ids=prompt[:4], targets=prompt[1:5], num_logprobs=2)]
    ).rows[0]
    row = StepRow(seq_id=0, position=4, token_ids=prompt[4:], targets=prompt[5:], samplers=(greedy(model),))
    second = context.step([row]).rows[0]
    assert first.scored is not None
    assert second.scored is not None
    assert np.allclose([*first.scored.own, *second.scored.own], expected, atol=1e-3)
    assert first.scored.ids.shape == (4, 2)
    assert second.draws[0].token_ids


# ---- masks


def mask_of(model: Model, allowed: list[int]) -> np.ndarray:
    words = np.zeros((model.n_vocab + 31) // 32, dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words


def test_a_mask_filled_during_the_pass_is_obeyed(model: Model, context: Context) -> None:
    """The step waits for its slot, which another thread fills later, and draws only allowed tokens."""
    masks = MaskSlots(2, model.n_vocab)
    masks.clear(1)

    def fill() -> None:
        masks.words(1)[:] = mask_of(model, [77])
        masks.ready(1)

    thread = threading.Timer(0.05, fill)
    thread.start()
    rows = [
        StepRow(seq_id=0, position=0, token_ids=[1], samplers=(greedy(model),)),
        StepRow(seq_id=1, position=0, token_ids=[1], samplers=(greedy(model),), mask_slots=(1,)),
    ]
    result = context.step(rows, masks=masks)
    thread.join()
    assert result.rows[1].draws[0].token_ids == (77,)
    assert result.rows[0].draws[0].error is None


def test_masks_share_one_deadline_and_hear_an_abort(model: Model, context: Context) -> None:
    """Eight masks that never come take one timeout, not eight; an abort ends the wait at once."""
    masks = MaskSlots(8, model.n_vocab)
    rows = [StepRow(seq_id=i, position=0, token_ids=[1], samplers=(greedy(model),), mask_slots=(i,)) for i in range(8)]
    begin = time.perf_counter()
    result = context.step(rows, masks=masks, mask_timeout_s=1.5)
    assert time.perf_counter() - begin < 10, "eight of them, one after the other, would take 12 s"
    assert all(isinstance(row.draws[0].error, SamplingError) for row in result.rows)
    again = [msgspec.structs.replace(row, position=1) for row in rows]
    with aborting(context, after_s=0.1):
        result = context.step(again, masks=masks, mask_timeout_s=3600)
    assert all(isinstance(row.draws[0].error, Aborted) for row in result.rows)


def test_targets_may_be_an_array(model: Model, context: Context) -> None:
    """Arrays count as sequences everywhere in a row."""
    row = StepRow(
        seq_id=0, position=0, token_ids=np.array([1, 2], dtype=np.int32), targets=np.array([2, 3], dtype=np.int32)
    )
    scored = context.step([row]).rows[0].scored
    assert scored is not None
    assert scored.own.shape == (2,)


def test_each_draft_position_has_its_mask(model: Model, context: Context) -> None:
    """A draft that its mask forbids is not drawn, whatever the model would have liked."""
    expected = alone(model, [1, 2, 3], 3, temperature=0)
    masks = MaskSlots(3, model.n_vocab)
    for slot, allowed in enumerate([[expected[0]], [200], [1]]):
        masks.words(slot)[:] = mask_of(model, allowed)
        masks.ready(slot)
    row = StepRow(
        seq_id=0,
        position=0,
        token_ids=[1, 2, 3, *expected[:2]],
        num_drafts=2,
        samplers=(greedy(model),),
        mask_slots=(0, 1, 2),
    )
    assert context.step([row], masks=masks).rows[0].draws[0].token_ids == (expected[0], 200)
    assert context.positions(0) == (0, 3)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda masks: masks.ready(0), "allowed|possible|mask"),
        (lambda masks: masks.fail(0, "the schema is broken"), "the schema is broken"),
        (lambda masks: masks.clear(0), "was not filled in time"),
    ],
    ids=["nothing allowed", "failed", "never filled"],
)
def test_a_row_that_cannot_draw_fails_alone(
    model: Model, context: Context, prepare: Callable[[MaskSlots], None], words: str
) -> None:
    """Its neighbour draws; its own sampler has not moved and can draw in the next step."""
    masks = MaskSlots(1, model.n_vocab)
    prepare(masks)
    broken, fine = greedy(model), greedy(model)
    rows = [
        StepRow(seq_id=0, position=0, token_ids=[1, 2], samplers=(broken,), mask_slots=(0,)),
        StepRow(seq_id=1, position=0, token_ids=[1, 2], samplers=(fine,)),
    ]
    result = context.step(rows, masks=masks, mask_timeout_s=0.05)
    error = result.rows[0].draws[0].error
    assert isinstance(error, SamplingError)
    assert any(word in str(error) for word in words.split("|"))
    assert result.rows[0].draws[0].token_ids == ()
    assert broken.num_generated == 0
    assert len(result.rows[1].draws[0].token_ids) == 1
    again = context.step([StepRow(seq_id=0, position=2, token_ids=[3], samplers=(broken,))])
    assert again.rows[0].draws[0].error is None


# ---- guards


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"token_ids": []}, InvalidParams, "num_tokens must be at least 1"),
        ({"token_ids": [10**6]}, InvalidParams, "token_ids"),
        ({"token_ids": [-1]}, InvalidParams, "token_ids"),
        ({"token_ids": [2**40]}, InvalidParams, "token_ids"),
        ({"token_ids": [1.5]}, InvalidType, "token_ids"),
        ({"token_ids": [True]}, InvalidType, "token_ids"),
        ({"token_ids": ["1"]}, InvalidType, "token_ids"),
        ({"seq_id": 8}, InvalidParams, "n_seq_max"),
        ({"seq_id": -1}, InvalidParams, "seq_ids"),
        ({"position": 5}, InvalidParams, "positions"),
        ({"num_drafts": 1}, InvalidParams, "num_drafts"),
        ({"num_drafts": -1}, InvalidParams, "num_drafts"),
        ({"targets": [1, 2]}, InvalidParams, "num_scored"),
        ({"targets": [10**6]}, InvalidParams, "targets"),
        ({"num_logprobs": -2}, InvalidParams, "num_logprobs"),
        ({"num_logprobs": 1001}, InvalidParams, "num_logprobs"),
        ({"mask_slots": (0,)}, InvalidParams, "mask_slots"),
        ({"mask_slots": (0, 0)}, InvalidParams, "mask_slots"),
    ],
    ids=str,
)
def test_a_bad_row_is_refused_before_anything_moves(
    model: Model, context: Context, change: dict[str, Any], error: type[PacelineError], words: str
) -> None:
    """The other row's sequence and both samplers are unchanged, and the step works once the row is mended."""
    first, second = greedy(model), greedy(model)
    good = StepRow(seq_id=0, position=0, token_ids=[1, 2], samplers=(first,))
    row = StepRow(seq_id=1, position=0, token_ids=[1], samplers=(second,))
    with pytest.raises(error, match=words):
        context.step([good, msgspec.structs.replace(row, **change)])
    assert (context.positions(0), context.positions(1)) == (None, None)
    assert (first.num_generated, second.num_generated) == (0, 0)
    assert all(item.draws[0].token_ids for item in context.step([good, row]).rows)


def test_one_sequence_has_one_row_and_one_sampler_one_place(model: Model, context: Context) -> None:
    """Two rows of a sequence, or a sampler given twice, are refused; so is an empty step."""
    sampler = greedy(model)
    row = StepRow(seq_id=0, position=0, token_ids=[1], samplers=(sampler,))
    with pytest.raises(InvalidParams, match="more than one row"):
        context.step([row, msgspec.structs.replace(row, samplers=())])
    with pytest.raises(InvalidParams, match="stands twice"):
        context.step([row, msgspec.structs.replace(row, seq_id=1)])
    with pytest.raises(InvalidParams, match="1 to 256 tokens"):
        context.step([])
    context.step([row])


def test_a_sampler_of_another_vocabulary_is_refused(context: Context, vocabulary: Model) -> None:
    """Sizes of both vocabularies are in the error."""
    with Sampler(SamplingParams(temperature=0), vocabulary) as other, pytest.raises(InvalidParams, match="32000"):
        context.step([StepRow(seq_id=0, position=0, token_ids=[1], samplers=(other,))])


def test_an_aborted_step_moves_no_sampler(model: Model) -> None:
    """The draws of a step that was aborted did not happen; the same step again gives the undisturbed result."""
    ids = np.random.default_rng(0).integers(0, 250, 1000).astype(np.int32)
    with Context(model, n_ctx=1024, n_batch=1024, n_ubatch=32, n_threads=1) as context:
        expected = (
            context.step([StepRow(seq_id=0, position=0, token_ids=ids, samplers=(greedy(model),))]).rows[0].draws[0]
        )
        context.clear()
        sampler = greedy(model)
        row = StepRow(seq_id=0, position=0, token_ids=ids, samplers=(sampler,))
        with aborting(context), pytest.raises(Aborted):
            context.step([row])
        assert sampler.num_generated == 0
        assert context.step([row]).rows[0].draws[0].token_ids == expected.token_ids


def test_many_rows_of_a_large_vocabulary_draw_in_parallel_the_same(tiny_models: TinyModels) -> None:
    """Above the threshold for worker threads the draws equal those of one row a step."""
    from paceline.testing.models import LlamaSpec, numbered

    with Model.load(tiny_models(LlamaSpec(vocabulary=numbered(60000), n_embd=32, n_head=2, n_head_kv=1))) as model:
        params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(12)]
        with Context(model, n_ctx=512, n_seq_max=12, n_outputs_max=12, n_threads=2) as context:
            rows = [
                StepRow(seq_id=i, position=0, token_ids=[i + 1], samplers=(Sampler(params[i], model),))
                for i in range(12)
            ]
            together = [row.draws[0].token_ids for row in context.step(rows).rows]
            context.clear()
            single = [msgspec.structs.replace(rows[i], samplers=(Sampler(params[i], model),)) for i in range(12)]
            assert together == [context.step([row]).rows[0].draws[0].token_ids for row in single]
