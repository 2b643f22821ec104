"""M-RoPE: a row may begin behind the sequence's next position, as text behind an image does; other models refuse that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.exact import EXACT
from tests.native.conftest import TinyModels

from paceline import LLM
from paceline.engine.arguments import engine_arguments
from paceline.engine.engine_factory import build
from paceline.engine.llama_backend import LlamaBackend
from paceline.errors import InvalidParams, NoKvSlot, PromptTooLong, StateError
from paceline.kv_cache import TEXT_LAYOUT, MediaItem, PromptLayout
from paceline.params import SamplingParams
from paceline.runtime import Context, Model, Sampler
from paceline.runtime.step import StepRow
from paceline.sequence import Row
from paceline.testing.models import Qwen2VlSpec, write_model

pytestmark = pytest.mark.native

Logits = npt.NDArray[np.float32]
Make = Callable[..., Context]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = write_model(tmp_path_factory.mktemp("qwen2vl") / "qwen2vl.gguf", Qwen2VlSpec())
    with Model.load(path) as found:
        yield found


@pytest.fixture
def make(model: Model) -> Iterator[Make]:
    made: list[Context] = []

    def context(**options: int) -> Context:
        sizes = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_seq_max": 4}
        made.append(Context(model, **{**sizes, **EXACT, **options}))
        return made[-1]

    yield context
    for item in made:
        item.close()


def ids(count: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 250, count).tolist()
    return found


HEAD, TAIL = ids(10, 1), ids(6, 2)
GAP = range(15, 21)  # positions of the tail, which leave out five


def decode(context: Context, tokens: list[int], first: int, seq_id: int = 0) -> Logits:
    """Compute a row from a position on and return the logits behind it."""
    context.decode(tokens, seq_ids=seq_id, positions=list(range(first, first + len(tokens))))
    return context.logits(len(tokens) - 1)


def test_a_row_may_begin_at_a_later_position(make: Make) -> None:
    """In one part or in several, alone or beside others, with the same logits; at the next position they are others."""
    context = make()
    decode(context, HEAD, 0)
    expected = decode(context, TAIL, 15)
    assert context.positions(0) == (0, 20)
    decode(context, HEAD, 0, seq_id=1)
    decode(context, TAIL[:2], 15, seq_id=1)
    assert np.allclose(decode(context, TAIL[2:], 17, seq_id=1), expected, atol=1e-4)
    decode(context, HEAD, 0, seq_id=2)
    context.decode([*ids(4, 3), *TAIL], seq_ids=[3] * 4 + [2] * 6, positions=[*range(4), *GAP], wants_logits="last")
    assert np.allclose(context.logits(9), expected, atol=1e-4)
    plain = make()
    decode(plain, HEAD, 0)
    assert not np.allclose(decode(plain, TAIL, 10), expected, atol=1e-2)


def test_what_counts_is_the_distance(make: Make) -> None:
    """Rotations are relative: the same tokens as far from each other, later, have the same logits."""
    context = make()
    decode(context, HEAD, 0)
    expected = decode(context, TAIL, 15)
    decode(context, HEAD, 40, seq_id=1)
    assert np.allclose(decode(context, TAIL, 55, seq_id=1), expected, atol=1e-3)
    assert context.positions(1) == (40, 60)


def test_a_step_takes_rows_with_later_positions(make: Make, model: Model) -> None:
    """And draws as from a decode."""
    context = make()
    decode(context, HEAD, 0)
    expected = int(np.argmax(decode(context, TAIL, 15)))
    context.step([StepRow(seq_id=1, position=0, token_ids=HEAD)])
    sampler = Sampler(SamplingParams(temperature=0), model)
    result = context.step([StepRow(seq_id=1, position=15, token_ids=TAIL, samplers=(sampler,))])
    assert result.rows[0].draws[0].token_ids == (expected,)


@pytest.mark.parametrize("end", [10, 12, 15, 18, 21])
def test_copies_are_cut_by_position(make: Make, end: int) -> None:
    """With and without a cell at the place; later tokens have the logits of a sequence that was never longer."""
    context = make()
    decode(context, HEAD, 0)
    decode(context, TAIL, 15)
    context.copy(0, 1, 0, end)
    decode(context, HEAD, 0, seq_id=2)
    if end > 15:
        decode(context, TAIL[: end - 15], 15, seq_id=2)
    assert context.positions(1) == context.positions(2)
    more = ids(3, 4)
    assert np.allclose(decode(context, more, 25, seq_id=1), decode(context, more, 25, seq_id=2), atol=1e-4)


def test_saved_ranges_have_their_positions(make: Make) -> None:
    """A sequence that is loaded in two parts, or whole, goes on like the saved sequence."""
    context = make()
    decode(context, HEAD, 0)
    decode(context, TAIL, 15)
    parts = [context.save_cells(0, first, end, scratch_seq_id=3) for first, end in ((0, 8), (8, 21))]
    for part in parts:
        context.load_cells(1, part, part.start, part.end, scratch_seq_id=3)
    context.load_sequence(2, context.save_sequence(0))
    assert context.positions(0) == context.positions(1) == context.positions(2) == (0, 20)
    more = ids(3, 4)
    expected = decode(context, more, 30)
    assert np.allclose(decode(context, more, 30, seq_id=1), expected, atol=1e-4)
    assert np.allclose(decode(context, more, 30, seq_id=2), expected, atol=1e-4)


def test_a_range_that_ends_without_a_cell_is_refused_when_it_is_loaded(make: Make) -> None:
    """An error, and no wrong positions."""
    context = make()
    decode(context, HEAD, 0)
    decode(context, TAIL, 15)
    state = context.save_cells(0, 0, 15, scratch_seq_id=3)
    with pytest.raises(StateError):
        context.load_cells(1, state, 0, 15, scratch_seq_id=3)
    assert [context.positions(seq_id) for seq_id in (1, 3)] == [None, None]


def test_a_pass_that_fails_leaves_the_sequence_where_it_was(make: Make) -> None:
    """Also if it would have left positions out."""
    context = make(n_ctx=256)
    decode(context, HEAD, 0)
    for start in range(0, 240, 60):
        decode(context, ids(60, start), start, seq_id=1)
    with pytest.raises(NoKvSlot) as raised:
        decode(context, TAIL + ids(4, 9), 15)
    assert "restored" not in str(raised.value)
    assert context.positions(0) == (0, 9)
    context.remove(1)
    found = decode(context, TAIL, 15)
    decode(context, HEAD, 0, seq_id=2)
    assert np.allclose(found, decode(context, TAIL, 15, seq_id=2), atol=1e-4)


def test_positions_that_cannot_be_are_refused(make: Make) -> None:
    """After the end of the context, before the end of the sequence, and left out within a row."""
    context = make()
    decode(context, HEAD, 0)
    with pytest.raises(PromptTooLong):
        decode(context, TAIL, context.max_positions - 5)
    for first in (0, 9):
        with pytest.raises(InvalidParams, match="must be 10"):
            decode(context, TAIL, first)
    with pytest.raises(InvalidParams, match="must be 16, where sequence 0 goes on, not 18"):
        context.decode([1, 2], positions=[15, 18])
    assert context.positions(0) == (0, 9)


@pytest.fixture
def engine_parts(model: Model) -> Iterator[tuple[LlamaBackend, Context]]:
    built: Any = build(model, engine_arguments({"num_slots": 2, "n_ctx": 256, **EXACT}))
    yield built.backend, built.context
    built.backend.close()


def row_of(token_ids: list[int], position: int, layout: PromptLayout = TEXT_LAYOUT) -> Row:
    sequence: Any = SimpleNamespace(seq_id=0, sampler=None, layout=layout)
    return Row(sequence, position, token_ids, draws=False, targets=[], num_logprobs=None)


def test_an_engine_refuses_a_row_of_text_that_leaves_positions_out(engine_parts: tuple[LlamaBackend, Context]) -> None:
    """Cells would be missing there, which is not noticed otherwise; text behind an image may."""
    backend, context = engine_parts
    with pytest.raises(InvalidParams, match="must be 0, where sequence 0 goes on, not 3"):
        backend.step([row_of(HEAD, 3)], ())
    backend.step([row_of(HEAD, 0)], ())
    for position in (0, 9, 11, 15):
        with pytest.raises(InvalidParams, match=f"must be 10, where sequence 0 goes on, not {position}"):
            backend.step([row_of(TAIL, position)], ())
    assert context.positions(0) == (0, 9)
    backend.step([row_of(TAIL[:2], 10)], ())
    backend.step([row_of(TAIL[2:], 15, PromptLayout((MediaItem(12, 4, 3, b"hash"),)))], ())
    assert context.positions(0) == (0, 18)


def test_an_engine_generates_text_with_m_rope(model: Model) -> None:
    """With others and from the cache it is the same as alone."""
    with LLM(model, num_slots=2, n_ctx=256, **EXACT) as llm:
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        alone = llm.generate(HEAD * 6, **options).token_ids
        both = llm.generate([HEAD * 6, [*HEAD * 5, *TAIL], HEAD * 6], **options)
        assert [completion.token_ids for completion in (both[0], both[2])] == [alone, alone]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "falcon-h1"])
def test_other_models_have_every_position(tiny_models: TinyModels, kind: str) -> None:
    """Theirs have no gaps, and llama.cpp would end the pass."""
    with Model.load(tiny_models(kind)) as found, Context(found, n_ctx=64, n_threads=1) as context:
        decode(context, HEAD, 0)
        with pytest.raises(InvalidParams, match="must be 10, where sequence 0 goes on, not 15"):
            decode(context, TAIL, 15)
        with pytest.raises(InvalidParams, match="must be 10, where sequence 0 goes on, not 15"):
            context.step([StepRow(seq_id=0, position=15, token_ids=TAIL)])
        assert context.positions(0) is not None
        decode(context, TAIL, 10)
