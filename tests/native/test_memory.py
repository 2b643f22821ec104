"""Memory of sequences: removing, copying, keeping, saving and restoring, by the abilities of each class of memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.exact import EXACT
from tests.native.conftest import TinyModels

from paceline.errors import InvalidParams, InvalidType, StateError, Unsupported
from paceline.runtime import Context, Model

pytestmark = pytest.mark.native

ALL = ["llama", "gemma3", "mamba", "falcon-h1", "lfm2"]
CUTTABLE = ["llama", "gemma3"]
RECURRENT = ["mamba", "falcon-h1", "lfm2"]


def ids(count: int, seed: int = 0) -> list[int]:
    result: list[int] = np.random.default_rng(seed).integers(0, 250, count).tolist()
    return result


def after(context: Context, seq_id: int, token: int = 42) -> np.ndarray:
    """Return the logits that a sequence gives when it continues with a token."""
    context.decode([token], seq_ids=seq_id)
    return context.logits(0)


@pytest.fixture(params=ALL)
def model(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[Model]:
    with Model.load(tiny_models(request.param)) as loaded:
        yield loaded


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with Context(model, n_ctx=512, n_seq_max=4, **EXACT) as made:
        yield made


def test_an_empty_sequence_has_no_positions(context: Context) -> None:
    """None before the first token and after removal; the last position in between."""
    assert context.positions(1) is None
    context.decode(ids(5), seq_ids=1)
    assert context.positions(1) is not None
    assert context.positions(1).last == 4  # type: ignore[union-attr]
    context.remove(1)
    assert context.positions(1) is None


def test_a_copy_goes_on_like_the_original(context: Context) -> None:
    """A shared sequence has the original's logits, and later changes of either leave the other alone."""
    context.decode(ids(40))
    context.copy(0, 1)
    expected = after(context, 0)
    assert np.allclose(after(context, 1), expected, atol=2e-3)
    context.decode(ids(20, seed=9))
    context.remove(0)
    context.decode(ids(40), seq_ids=2)
    context.decode([42], seq_ids=2)
    assert np.allclose(after(context, 1, 7), after(context, 2, 7), atol=2e-3)


def test_a_copy_needs_an_empty_target(context: Context) -> None:
    """Otherwise positions would stand there twice; nothing is changed."""
    context.decode(ids(4))
    context.decode(ids(2), seq_ids=1)
    with pytest.raises(InvalidParams, match="remove it first"):
        context.copy(0, 1)
    assert context.positions(1) is not None
    assert context.positions(1).last == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", CUTTABLE)
def test_a_cut_sequence_goes_on_as_if_it_had_never_been_longer(tiny_models: TinyModels, kind: str) -> None:
    """Removing the end and going on equals the shorter sequence."""
    with Model.load(tiny_models(kind)) as model, Context(model, n_ctx=512, n_seq_max=2, **EXACT) as context:
        context.decode(ids(30))
        context.remove(0, 20)
        assert context.positions(0).last == 19  # type: ignore[union-attr]
        context.decode(ids(30)[:20], seq_ids=1)
        assert np.allclose(after(context, 0), after(context, 1), atol=2e-3)


@pytest.mark.parametrize("kind", CUTTABLE)
def test_a_prefix_can_be_shared(tiny_models: TinyModels, kind: str) -> None:
    """The first positions of a running sequence serve another one, which goes its own way."""
    with Model.load(tiny_models(kind)) as model, Context(model, n_ctx=512, n_seq_max=3, **EXACT) as context:
        context.decode(ids(25))
        context.copy(0, 1, end=10)
        context.decode(ids(12, seed=4), seq_ids=1)
        context.decode(ids(25)[:10] + ids(12, seed=4), seq_ids=2)
        assert np.allclose(after(context, 1), after(context, 2), atol=2e-3)


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_state_is_neither_cut_nor_copied_in_part(tiny_models: TinyModels, kind: str) -> None:
    """Both raise Unsupported and leave the sequence as it was."""
    with Model.load(tiny_models(kind)) as model, Context(model, n_ctx=512, n_seq_max=3, **EXACT) as context:
        context.decode(ids(12))
        context.copy(0, 2)
        with pytest.raises(Unsupported, match="recurrent"):
            context.remove(0, 6)
        with pytest.raises(Unsupported, match="recurrent"):
            context.copy(0, 1, end=6)
        assert context.positions(1) is None
        assert np.allclose(after(context, 0), after(context, 2), atol=2e-3)


def test_without_unified_cells_nothing_is_shared(llama: Model) -> None:
    """Each sequence has a buffer of its own; copying raises Unsupported and changes nothing, saving and loading works."""
    with Context(llama, n_ctx=1024, n_seq_max=2, kv_unified=False, **EXACT) as context:
        context.decode(ids(20))
        for end in (None, 5):
            with pytest.raises(Unsupported, match="kv_unified"):
                context.copy(0, 1, end=end)
        assert context.positions(1) is None
        context.load_sequence(1, context.save_sequence(0))
        assert np.allclose(after(context, 0), after(context, 1), atol=1e-5)


def test_recurrent_states_are_copied_without_unified_cells(tiny_models: TinyModels) -> None:
    """They lie in no buffers of cells; a hybrid model, which has both, wants kv_unified."""
    with Model.load(tiny_models("mamba")) as model, Context(model, n_seq_max=2, kv_unified=False, **EXACT) as context:
        context.decode(ids(20))
        context.copy(0, 1)
        assert np.allclose(after(context, 0), after(context, 1), atol=1e-5)
    with Model.load(tiny_models("lfm2")) as model, pytest.raises(Unsupported, match="kv_unified"):
        Context(model, n_seq_max=2, kv_unified=False)


@pytest.mark.parametrize(("start", "end"), [(0, 6), (6, None), (3, 2)])
def test_a_copy_of_what_is_not_held_is_refused(llama: Model, start: int, end: int | None) -> None:
    """Nothing is clamped: the error has the source's length."""
    with Context(llama, n_ctx=256, n_seq_max=2, **EXACT) as context:
        context.decode(ids(5))
        with pytest.raises(InvalidParams, match="at most 5"):
            context.copy(0, 1, start, end)
        assert context.positions(1) is None
        assert np.isfinite(after(context, 0)).all()


def test_only_the_end_of_a_sequence_is_removed(llama: Model) -> None:
    """Start beyond the end does nothing; start 0 removes all."""
    with Context(llama, n_ctx=256, **EXACT) as context:
        context.decode(ids(5))
        context.remove(0, 99)
        assert context.positions(0) == (0, 4)
        context.remove(0, 0)
        assert context.positions(0) is None


def test_keep_and_clear_empty_the_others_and_all(context: Context) -> None:
    """Keep leaves one sequence as it was, clear none."""
    for seq_id in range(3):
        context.decode(ids(6), seq_ids=seq_id)
    context.keep(1)
    assert [context.positions(seq_id) is None for seq_id in range(3)] == [True, False, True]
    context.decode(ids(6), seq_ids=0)
    assert np.allclose(after(context, 0), after(context, 1), atol=2e-3)
    context.clear()
    assert [context.positions(seq_id) for seq_id in range(3)] == [None] * 3


def test_sliding_windows_forget_their_first_positions(tiny_models: TinyModels) -> None:
    """Once the window has moved on, the first position rises; with swa_full it does not."""
    with Model.load(tiny_models("gemma3")) as model:
        firsts = []
        for swa_full in (False, True):
            with Context(model, n_ctx=1024, n_batch=64, n_ubatch=64, swa_full=swa_full, **EXACT) as context:
                for _ in range(8):
                    context.decode(ids(64))
                firsts.append(context.positions(0).first)  # type: ignore[union-attr]
        assert firsts[0] > 0
        assert firsts[1] == 0


# ---- state


def test_a_saved_sequence_goes_on_in_another_context(model: Model) -> None:
    """Bytes of one context restore in another, under another id, with the token ids that were given along."""
    with Context(model, n_ctx=512, n_seq_max=2, **EXACT) as one:
        one.decode(ids(30))
        data = one.save_sequence(0, token_ids=ids(30))
        expected = after(one, 0)
    with Context(model, n_ctx=768, n_seq_max=3, **EXACT) as other:
        other.decode(ids(10, seed=5), seq_ids=2)
        assert other.load_sequence(2, data) == tuple(ids(30))
        assert np.allclose(after(other, 2), expected, atol=2e-3)


def test_a_partial_state_brings_a_sequence_back_that_has_gone_on(model: Model) -> None:
    """Windows and recurrent state alone, restored after 20 more tokens, give the logits of the earlier point."""
    with Context(model, n_ctx=512, n_seq_max=2, **EXACT) as context:
        context.decode(ids(40))
        part = context.save_sequence(0, partial=True)
        assert len(part) <= len(context.save_sequence(0))
        context.decode(ids(40), seq_ids=1)
        expected = after(context, 1)
        context.decode(ids(20, seed=8))
        context.load_sequence(0, part)
        assert context.positions(0).last == 39  # type: ignore[union-attr]
        assert np.allclose(after(context, 0), expected, atol=2e-3)


def test_a_partial_state_needs_a_sequence_that_holds_its_point(model: Model) -> None:
    """Onto an empty or shorter sequence it is refused, and that sequence goes on unchanged."""
    with Context(model, n_ctx=512, n_seq_max=3, **EXACT) as context:
        context.decode(ids(40))
        part = context.save_sequence(0, partial=True)
        for seq_id, held in ((1, 0), (2, 10)):
            if held:
                context.decode(ids(held), seq_ids=seq_id)
            with pytest.raises(StateError, match="holds positions up to"):
                context.load_sequence(seq_id, part)
        assert context.positions(1) is None
        context.decode(ids(10), seq_ids=1)
        assert np.allclose(after(context, 2), after(context, 1), atol=2e-3)


def test_an_empty_sequence_can_be_saved(context: Context) -> None:
    """Saving and restoring nothing gives an empty sequence."""
    data = context.save_sequence(3)
    context.decode(ids(4), seq_ids=1)
    context.load_sequence(1, data)
    assert context.positions(1) is None


def test_files_hold_what_bytes_hold(llama: Model, tmp_path: Path) -> None:
    """A file is written whole, replaces the last file, leaves nothing beside it, and restores."""
    path = tmp_path / "slot.bin"
    path.write_bytes(b"old")
    with Context(llama, n_ctx=256, n_seq_max=2, **EXACT) as context:
        context.decode(ids(10))
        size = context.save_sequence_file(path, 0, token_ids=ids(10))
        assert path.stat().st_size == size
        assert [entry.name for entry in tmp_path.iterdir()] == ["slot.bin"]
        assert context.load_sequence_file(path, 1) == tuple(ids(10))
        assert np.allclose(after(context, 0), after(context, 1), atol=2e-3)
        with pytest.raises(StateError, match=r"missing\.bin"):
            context.load_sequence_file(tmp_path / "missing.bin", 1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "not a saved sequence"),
        (lambda data: b"GGUF" + data[4:], "not a saved sequence"),
        (lambda data: data[:-1], "is damaged: it has"),
        (lambda data: data + b"x", "is damaged: it has"),
        (lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:], "checksum"),
        (lambda data: data[:-5] + b"\xff" + data[-4:], "checksum"),
        (lambda data: data[:4] + struct.pack("<H", 9) + data[6:], "version 9"),
        (lambda data: bytes(np.random.default_rng(0).integers(0, 256, 500, dtype=np.uint8)), "not a saved sequence"),
    ],
    ids=["empty", "other magic", "short", "long", "token changed", "state changed", "version", "random"],
)
def test_damaged_bytes_are_refused_and_lose_nothing(context: Context, damage, words: str) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """StateError names the reason; the sequence it was meant for goes on as it was."""
    context.decode(ids(8))
    context.copy(0, 1)
    data = context.save_sequence(0, token_ids=ids(8))
    with pytest.raises(StateError, match=words):
        context.load_sequence(1, damage(data))
    assert np.allclose(after(context, 0), after(context, 1), atol=2e-3)


def test_states_of_other_models_and_layouts_are_refused(tiny_models: TinyModels, llama: Model) -> None:
    """Other weights, or other cell types, have another fingerprint."""
    with Context(llama, n_ctx=256, **EXACT) as context:
        context.decode(ids(8))
        data = context.save_sequence(0)
    with Model.load(tiny_models("llama", seed=1)) as other, Context(other, n_ctx=256, **EXACT) as context:
        with pytest.raises(StateError, match="another model"):
            context.load_sequence(0, data)
    others = ({"type_k": "f16"}, {"rope_freq_base": 5000.0}, {"rope_scaling": "linear"}, {"kv_unified": False})
    for other_options in others:
        with Context(llama, n_ctx=256, **EXACT | other_options) as context:
            with pytest.raises(StateError, match="another kind of context"):
                context.load_sequence(0, data)
    # As Phi 3: a context that is longer than this one was for training has other rope factors.
    with Model.load(llama.paths[0], kv_overrides={"llama.rope.scaling.original_context_length": 256}) as stretched:
        with Context(stretched, n_ctx=256, **EXACT) as context:
            context.decode(ids(8))
            short = context.save_sequence(0)
        with (
            Context(stretched, n_ctx=512, **EXACT) as context,
            pytest.raises(StateError, match="another kind of context"),
        ):
            context.load_sequence(0, short)
    with Model.load(llama.paths[0], kv_overrides={"llama.rope.freq_base": 5000.0}) as other:
        with Context(other, n_ctx=256, **EXACT) as context, pytest.raises(StateError, match="kv_overrides"):
            context.load_sequence(0, data)


def test_a_state_that_does_not_fit_leaves_an_empty_sequence(llama: Model) -> None:
    """More cells than are free: StateError says so, and all other sequences are untouched."""
    with Context(llama, n_ctx=512, n_batch=512, **EXACT) as large:
        large.decode(ids(400))
        data = large.save_sequence(0)
    with Context(llama, n_ctx=512, n_batch=512, n_seq_max=2, **EXACT) as context:
        context.decode(ids(200))
        with pytest.raises(StateError, match="does not fit"):
            context.load_sequence(1, data)
        assert context.positions(1) is None
        assert context.positions(0) == (0, 199)
        assert np.isfinite(after(context, 0)).all()


def test_bad_arguments_of_saving_are_named(context: Context) -> None:
    """Sequence id, token ids and types are checked before anything is written."""
    context.decode(ids(3))
    with pytest.raises(InvalidParams, match="seq_id"):
        context.save_sequence(9)
    with pytest.raises(InvalidParams, match="token_ids"):
        context.save_sequence(0, token_ids=[-1])
    with pytest.raises(InvalidType, match="partial"):
        context.save_sequence(0, partial=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="data must be bytes"):
        context.load_sequence(0, "text")  # type: ignore[arg-type]
    with pytest.raises(StateError, match="cannot write the saved sequence"):
        context.save_sequence_file("/nowhere/at/all.bin", 0)
    assert np.isfinite(after(context, 0)).all()
