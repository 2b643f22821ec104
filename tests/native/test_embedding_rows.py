"""Passes over embeddings: in parts as at once, rolled back after a failure, by an engine's rows as by a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.exact import EXACT
from tests.native.conftest import TinyModels
from tests.native.test_media_projector import PAIRS, item_of
from tests.pictures import picture

from paceline.engine.arguments import engine_arguments
from paceline.engine.engine_factory import build
from paceline.engine.llama_backend import LlamaBackend
from paceline.errors import Aborted, InvalidParams, InvalidType, NoKvSlot, PromptTooLong, Unsupported
from paceline.kv_cache import MediaItem, PromptLayout
from paceline.runtime import Context, MediaPart, MediaProjector, Model
from paceline.sequence import Row

Logits = npt.NDArray[np.float32]
HEAD, TAIL = [1, 2, 3, 4, 5], [9, 8, 7]
CLOSE = 1e-3  # other cells are summed in another order, which six layers of a Gemma with four norms each carry further
SCRATCH = 3


@pytest.fixture(params=PAIRS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def model(kind: str, tiny_models: TinyModels) -> Iterator[Model]:
    with Model.load(tiny_models(PAIRS[kind][0])) as found:
        yield found


@pytest.fixture
def item(kind: str, model: Model, tiny_models: TinyModels) -> MediaPart:
    with MediaProjector.load(tiny_models(PAIRS[kind][1]), model, n_threads=1) as found:
        return item_of(found.encode_image(picture(1, 150, 90)))


@pytest.fixture
def make(model: Model) -> Iterator[Callable[..., Context]]:
    made: list[Context] = []

    def context(**options: Any) -> Context:
        made.append(Context(model, **{"n_ctx": 256, "n_batch": 96, "n_ubatch": 96, "n_seq_max": 4, **EXACT, **options}))
        return made[-1]

    yield context
    for item in made:
        item.close()


def add(context: Context, item: MediaPart, position: int, cells: slice, seq_id: int = 0) -> None:
    """Compute cells of an item that begins at a position."""
    assert item.embeddings is not None
    start = cells.start or 0
    context.decode_embeddings(
        seq_id,
        position + (start if item.places is None else 0),
        item.embeddings[cells],
        places=None if item.places is None else item.places[cells],
        is_causal=item.is_causal,
        scratch_seq_id=SCRATCH,
    )


def behind(context: Context, item: MediaPart, seq_id: int = 0) -> Logits:
    """The logits of text behind the item, which begins behind HEAD."""
    start = len(HEAD) + item.num_positions
    context.decode(TAIL, seq_ids=seq_id, positions=list(range(start, start + len(TAIL))))
    return context.logits(len(TAIL) - 1)


def whole(context: Context, item: MediaPart, seq_id: int = 0) -> Logits:
    context.decode(HEAD, seq_ids=seq_id)
    add(context, item, len(HEAD), slice(0, item.num_cells), seq_id)
    return behind(context, item, seq_id)


def test_an_image_is_seen(make: Callable[..., Context], item: MediaPart) -> None:
    """The logits behind it are others than behind the same positions of another."""
    context = make()
    expected = whole(context, item)
    assert item.embeddings is not None
    other = MediaPart((), item.num_cells, item.num_positions, item.is_causal, item.places, item.embeddings[::-1].copy())
    assert not np.allclose(whole(context, other, 1), expected, atol=1e-2)
    assert np.allclose(whole(context, item, 2), expected, atol=CLOSE)


@pytest.mark.parametrize("size", [1, 5])
def test_parts_are_as_the_whole(make: Callable[..., Context], item: MediaPart, size: int) -> None:
    """If attention is causal; otherwise they differ, so that they must not be cut."""
    context = make()
    expected = whole(context, item)
    context.decode(HEAD, seq_ids=1)
    for start in range(0, item.num_cells, size):
        add(context, item, len(HEAD), slice(start, start + size), 1)
    assert np.allclose(behind(context, item, 1), expected, atol=1e-3) == item.is_causal
    assert context.positions(SCRATCH) is None


def test_a_pass_that_fails_leaves_what_was_there(make: Callable[..., Context], item: MediaPart) -> None:
    """Also in the middle of an item of M-RoPE, all cells of which have one position."""
    expected = whole(make(), item)
    context = make(n_ctx=256)
    context.decode(HEAD)
    first = 4 if item.is_causal else 0
    if first:
        add(context, item, len(HEAD), slice(0, first))
    before = context.positions(0)
    room = 256 - len(HEAD) - first - (item.num_cells - first) // 2
    for start in range(0, room, 50):
        context.decode([7] * min(50, room - start), seq_ids=1)
    with pytest.raises(NoKvSlot) as raised:
        add(context, item, len(HEAD), slice(first, item.num_cells))
    assert "restored" not in str(raised.value)
    assert context.positions(0) == before
    assert context.positions(SCRATCH) is None
    context.remove(1)
    add(context, item, len(HEAD), slice(first, item.num_cells))
    assert np.allclose(behind(context, item), expected, atol=1e-3)


def test_a_copy_may_end_behind_an_item(make: Callable[..., Context], item: MediaPart) -> None:
    """If with M-RoPE no cell has the last position."""
    context = make()
    expected = whole(context, item)
    context.copy(0, 1, 0, len(HEAD) + item.num_positions)
    context.decode(HEAD, seq_ids=2)
    add(context, item, len(HEAD), slice(0, item.num_cells), 2)
    assert context.positions(1) == context.positions(2)
    assert np.allclose(behind(context, item, 1), expected, atol=CLOSE)
    context.remove(1)
    context.copy(2, 1, 0, len(HEAD) + item.num_positions)
    assert np.allclose(behind(context, item, 1), expected, atol=CLOSE)


def test_wrong_embeddings_are_refused(make: Callable[..., Context], item: MediaPart, kind: str) -> None:
    """With the error; then the right rows are computed."""
    context = make()
    context.decode(HEAD)
    vectors = item.embeddings
    assert vectors is not None
    for wrong in (vectors.astype(np.float64), vectors[0], vectors.T, None):
        with pytest.raises((InvalidType, InvalidParams), match="embeddings"):
            context.decode_embeddings(0, len(HEAD), wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="n_batch|n_ubatch"):
        context.decode_embeddings(0, len(HEAD), np.zeros((97, vectors.shape[1]), np.float32), is_causal=item.is_causal)
    with pytest.raises(InvalidParams, match="must be 5, where sequence 0 goes on, not 3"):
        context.decode_embeddings(0, 3, vectors)
    with pytest.raises(InvalidParams, match="seq_id"):
        context.decode_embeddings(99, 0, vectors)
    if item.places is not None:
        with pytest.raises(InvalidParams, match="places"):
            context.decode_embeddings(0, len(HEAD), vectors, places=item.places[:-1])
        with pytest.raises(InvalidParams, match=r"places\[0\]"):
            context.decode_embeddings(0, len(HEAD), vectors, places=item.places - 1)
        with pytest.raises(PromptTooLong):
            context.decode_embeddings(0, 255, vectors, places=item.places)
        context.decode_embeddings(0, len(HEAD), vectors[:2], places=item.places[:2])
        with pytest.raises(InvalidParams, match="scratch_seq_id"):
            context.decode_embeddings(0, len(HEAD), vectors[2:], places=item.places[2:])
        context.remove(0, len(HEAD))
    else:
        with pytest.raises(InvalidParams, match="M-RoPE"):
            context.decode_embeddings(0, len(HEAD), vectors, places=np.zeros((len(vectors), 3), np.int32))
        with pytest.raises(InvalidParams, match="must be 5"):
            context.decode_embeddings(0, 9, vectors)
    add(context, item, len(HEAD), slice(0, item.num_cells))
    assert np.allclose(behind(context, item), whole(make(), item), atol=CLOSE)


# ---- rows of an engine


@pytest.fixture
def backend(model: Model) -> Iterator[LlamaBackend]:
    made: Any = build(model, engine_arguments({"num_slots": 2, "n_ctx": 256, **EXACT})).backend
    yield made
    made.close()


def row_of(item: MediaPart, cells: range, embeddings: Any, seq_id: int = 0) -> Row:
    """A row of an item that stands behind HEAD."""
    media = MediaItem(len(HEAD), item.num_cells, item.num_positions, b"hash", item.is_causal)
    layout = PromptLayout((media,))
    request = SimpleNamespace(embeddings=embeddings)
    sequence: Any = SimpleNamespace(seq_id=seq_id, sampler=None, layout=layout, request=request)
    keys = media.key_tokens()[cells.start : cells.stop]
    return Row(sequence, len(HEAD), keys, False, [], None, media, cells.start)


def head_row(seq_id: int) -> Row:
    sequence: Any = SimpleNamespace(seq_id=seq_id, sampler=None, layout=PromptLayout(()))
    return Row(sequence, 0, HEAD, draws=False, targets=[], num_logprobs=None)


def test_rows_of_items_are_computed(backend: LlamaBackend, make: Callable[..., Context], item: MediaPart) -> None:
    """Two at once, a single failing row; parts of causal items."""
    backend.step([head_row(0), head_row(1)], ())
    cut = 3 if item.is_causal else item.num_cells
    good, bad = row_of(item, range(cut), {len(HEAD): item}), row_of(item, range(cut), {}, 1)
    outputs = backend.step([bad, good], ())
    assert isinstance(outputs[0].error, Unsupported)
    assert not outputs[0].computed
    assert outputs[1].error is None
    failed = backend.step([row_of(item, range(cut), InvalidParams("the image is damaged"), 1)], ())
    assert "the image is damaged" in str(failed[0].error)
    if cut < item.num_cells:
        backend.step([row_of(item, range(cut, item.num_cells), {len(HEAD): item})], ())
    context = backend._context
    assert context is not None
    assert np.allclose(behind(context, item), whole(make(), item), atol=1e-3)
    assert backend.positions(1) == len(HEAD)


def test_an_abort_ends_the_rows_that_are_left(
    backend: LlamaBackend, item: MediaPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows before it are computed."""
    backend.step([head_row(0), head_row(1)], ())
    calls: list[int] = []
    real = Context.decode_embeddings

    def decode(self: Context, seq_id: int, *args: Any, **options: Any) -> None:
        calls.append(seq_id)
        if len(calls) > 1:
            raise Aborted("the forward pass was aborted")
        real(self, seq_id, *args, **options)

    monkeypatch.setattr(Context, "decode_embeddings", decode)
    rows = [row_of(item, range(item.num_cells), {len(HEAD): item}, seq_id) for seq_id in (0, 1)]
    outputs = backend.step(rows, ())
    assert [type(output.error) for output in outputs] == [type(None), Aborted]
    assert calls == [0, 1]
