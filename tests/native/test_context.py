"""`Context`: forward passes, guards, and that nothing is lost after an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.native.conftest import TinyModels
from tests.native.contexts import DECODERS, goes_on

from paceline.errors import InvalidParams, InvalidType, NoKvSlot, PacelineError, PromptTooLong, Unsupported
from paceline.runtime import Context, Model, StepRow

pytestmark = pytest.mark.native


@pytest.mark.parametrize("kind", DECODERS)
def test_chunks_give_what_one_piece_gives(tiny_models: TinyModels, kind: str) -> None:
    """A prompt in pieces, or beside other sequences, has the logits of the prompt alone."""
    ids = np.random.default_rng(1).integers(0, 250, 60).tolist()
    exact = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}  # its kernels round by the size of the batch
    with (
        Model.load(tiny_models(kind)) as model,
        Context(model, n_ctx=512, n_seq_max=3, n_threads=1, **exact) as context,
    ):
        context.decode(ids)
        whole = context.logits(59)
        for piece in (ids[:17], ids[17:50], ids[50:]):
            context.decode(piece, seq_ids=1)
        # The six layers of a Gemma with four norms each carry rounding further.
        tolerance = 2e-3 if kind in ("gemma3", "gemma4") else 2e-4
        assert np.allclose(context.logits(9), whole, atol=tolerance)
        context.remove(0)
        context.remove(1)
        both = [token for pair in zip(ids, reversed(ids), strict=True) for token in pair]
        context.decode(both, seq_ids=[0, 1] * 60)
        assert np.allclose(context.logits(118), whole, atol=tolerance)


def test_logits_are_there_for_what_was_asked(context: Context) -> None:
    """The word last means the last token of each sequence, all means all, bools mean exactly the marked tokens."""
    context.decode([1, 2, 3, 4], seq_ids=[0, 1, 0, 1])
    for index, there in enumerate([False, False, True, True]):
        if there:
            assert context.logits(index).shape == (context.n_vocab,)
        else:
            with pytest.raises(InvalidParams, match=f"token {index} of the last batch has no output"):
                context.logits(index)
    context.decode([1, 2], wants_logits="all")
    assert not np.array_equal(context.logits(0), context.logits(1))
    context.decode([1, 2], wants_logits=[True, False])
    context.logits(0)
    context.decode([1], wants_logits="none")
    with pytest.raises(InvalidParams):
        context.logits(0)


def test_with_embeddings_every_token_counts_as_an_output(llama: Model) -> None:
    """A batch beyond n_outputs_max is refused, whatever outputs it wants, and a smaller one works."""
    with Context(llama, n_ctx=256, embeddings=True, pooling="none", n_outputs_max=4, n_threads=1) as context:
        with pytest.raises(InvalidParams, match="n_outputs_max is 4"):
            context.decode([1] * 5)
        context.decode([1] * 4)
        assert np.isfinite(context.embeddings(3)).all()


def test_an_array_that_changes_during_a_pass_changes_nothing(llama: Model) -> None:
    """The checked values are computed, even if another thread writes to the caller's array meanwhile."""
    ids = np.ones(900, dtype=np.int32)
    seq_ids = np.zeros(900, dtype=np.int32)
    over = threading.Event()

    def scribble() -> None:
        while not over.is_set():
            ids[:], seq_ids[:] = 2**30, 2**30
            ids[:], seq_ids[:] = 1, 0

    with Context(llama, n_ctx=1024, n_batch=1024, n_threads=1) as context:
        context.decode(ids, seq_ids=seq_ids)
        expected = context.logits(899)
        computed = refused = 0
        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            while computed < 10 or refused < 10:
                context.clear()
                try:
                    context.decode(ids, seq_ids=seq_ids)
                except InvalidParams:  # it was copied at a bad moment, and looked at then
                    refused += 1
                    assert context.positions(0) is None
                else:
                    computed += 1
                    assert context.positions(0) == (0, 899)
                    assert np.array_equal(context.logits(899), expected)
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: Context(None), "model must be a Model"),
        (lambda c: c.set_adapters([1]), "adapters"),
        (lambda c: c.step([None]), r"rows\[0\]"),
        (lambda c: c.step([StepRow(seq_id=0, position=0, token_ids=5)]), "token_ids"),
        (lambda c: c.step([StepRow(seq_id=0, position=0, token_ids=[1], samplers=(None,))]), "samplers"),
        (lambda c: c.step([StepRow(seq_id=0, position=0, token_ids=[1])], masks="x"), "masks"),
        (lambda c: Model.load(5), "path"),
        (lambda c: Model.load("x.gguf", kv_overrides=[1]), "kv_overrides"),
        (lambda c: Model.load(c.path, devices="CPU"), "devices"),
        (lambda c: Model.load(c.path, tensor_split=5), "tensor_split"),
    ],
)
def test_a_wrong_type_is_named(llama: Model, call: Callable[[Any], object], words: str) -> None:
    """InvalidType, which is a TypeError, with the field, not an error from somewhere inside."""
    with Context(llama, n_ctx=256, n_threads=1) as context:
        context.path = llama.paths[0]  # type: ignore[attr-defined]
        with pytest.raises(InvalidType, match=words):
            call(context)
        goes_on(context)


def test_an_array_of_logits_is_the_callers(context: Context) -> None:
    """Neither later passes nor writing to it reach through: a kept array stays as it was."""
    context.decode([1])
    first = context.logits(0)
    kept = first.copy()
    context.decode([2, 3])
    context.logits(1)
    assert np.array_equal(first, kept)
    first[:] = np.nan
    goes_on(context)
    context.close()
    assert np.isnan(first).all()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: c.decode([]), InvalidParams, "1 to 128 tokens"),
        (lambda c: c.decode([1] * 129), InvalidParams, "1 to 128 tokens"),
        (lambda c: c.decode([-1]), InvalidParams, r"token_ids\[0\]"),
        (lambda c: c.decode([1, c.n_vocab]), InvalidParams, r"token_ids\[1\]"),
        (lambda c: c.decode([2**40]), InvalidParams, r"token_ids\[0\]"),
        (lambda c: c.decode([True]), InvalidType, r"token_ids\[0\]"),
        (lambda c: c.decode([1.0]), InvalidType, r"token_ids\[0\]"),
        (lambda c: c.decode("abc"), InvalidType, "token_ids"),
        (lambda c: c.decode(None), InvalidType, "token_ids"),
        (lambda c: c.decode(np.array([1.5])), InvalidType, "token_ids"),
        (lambda c: c.decode(np.array([[1]])), InvalidType, "token_ids"),
        (lambda c: c.decode([1], seq_ids=3), InvalidParams, "n_seq_max"),
        (lambda c: c.decode([1], seq_ids=-1), InvalidParams, "seq_id"),
        (lambda c: c.decode([1], seq_ids=[0, 0]), InvalidParams, "seq_ids must have 1"),
        (lambda c: c.decode([1], seq_ids=True), InvalidType, "seq_ids"),
        (lambda c: c.decode([1], positions=[7]), InvalidParams, r"positions\[0\] must be 2"),
        (lambda c: c.decode([1], positions=[0]), InvalidParams, r"positions\[0\] must be 2"),
        (lambda c: c.decode([1], positions=[-1]), InvalidParams, r"positions\[0\]"),
        (lambda c: c.decode([1, 1], positions=[2, 4]), InvalidParams, r"positions\[1\] must be 3"),
        (lambda c: c.decode([1], positions=[2, 3]), InvalidParams, "of one length"),
        (lambda c: c.decode([1] * 17, wants_logits="all"), InvalidParams, "n_outputs_max is 16"),
        (lambda c: c.decode([1], wants_logits="some"), InvalidParams, "wants_logits"),
        (lambda c: c.decode([1], wants_logits=[1]), InvalidType, "wants_logits"),
        (lambda c: c.decode([1], wants_logits=[True, True]), InvalidParams, "of one length"),
        (lambda c: c.logits(-1), InvalidParams, "index"),
        (lambda c: c.logits(5), InvalidParams, "token 5"),
        (lambda c: c.logits(True), InvalidType, "index"),
        (lambda c: c.embeddings(0), Unsupported, "embeddings=True"),
        (lambda c: c.encode([1]), Unsupported, "encoder"),
        (lambda c: c.remove(3), InvalidParams, "n_seq_max"),
        (lambda c: c.remove(0, -1), InvalidParams, "start"),
        (lambda c: c.copy(0, 0), InvalidParams, "both 0"),
        (lambda c: c.copy(0, 7), InvalidParams, "to_seq_id"),
        (lambda c: c.keep(9), InvalidParams, "seq_id"),
        (lambda c: c.positions(9), InvalidParams, "seq_id"),
        (lambda c: c.set_threads(0), InvalidParams, "n_threads"),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_a_bad_call_is_refused_and_loses_nothing(
    context: Context, call: Callable[[Context], object], error: type[PacelineError], words: str
) -> None:
    """The error names the field; the sequence is unchanged, and goes on with the same logits."""
    context.decode([1, 2])
    context.copy(0, 1)
    with pytest.raises(error, match=words):
        call(context)
    assert context.positions(0) == (0, 1)
    context.decode([9, 9], seq_ids=[0, 1])
    assert np.array_equal(context.logits(0), context.logits(1))
    goes_on(context)


def test_a_full_context_refuses_and_goes_on_after_a_removal(context: Context) -> None:
    """Beyond the last position it is PromptTooLong; if others hold the cells, NoKvSlot; both change nothing."""
    for _ in range(4):
        context.decode([1] * 128)
    with pytest.raises(PromptTooLong, match="must be below 512"):
        context.decode([1])
    with pytest.raises(NoKvSlot, match="n_ctx 512"):
        context.decode([1], seq_ids=1)
    assert context.positions(0) == (0, 511)
    assert context.positions(1) is None
    context.remove(0, 500)
    goes_on(context, 1)


def test_learned_positions_end_where_they_were_learned(tiny_models: TinyModels) -> None:
    """A model with a table of positions refuses positions beyond it; llama.cpp would read past the table's end."""
    from paceline.runtime import Embedder
    from paceline.testing.models import BertSpec

    with Model.load(tiny_models(BertSpec(n_ctx_train=16))) as model, Embedder(model) as embedder:
        assert embedder.max_tokens == 16
        with pytest.raises(PromptTooLong, match=r"texts\[1\]"):
            embedder.embed([[1, 2], [1] * 17])
        assert np.isfinite(embedder.embed([[1] * 16])).all()


def test_operations_are_timed(llama: Model) -> None:
    """Each operation of the passes since the last call, all layers together; logits equal those of a context without it."""
    sizes: dict[str, Any] = {"n_ctx": 256, "n_outputs_max": 3, "n_threads": 1}
    with Context(llama, **sizes) as plain, Context(llama, times_operations=True, **sizes) as timed:
        for context in (plain, timed):
            context.decode([1, 2, 3], wants_logits="all")
        assert np.array_equal(timed.logits(2), plain.logits(2))
        times = {(timing.operation, timing.name): timing for timing in timed.operation_times()}
        up, norm = times["MUL_MAT", "ffn_up"], times["RMS_NORM", "norm"]
        assert up.num_times == llama.n_layer
        assert norm.num_times == 2 * llama.n_layer + 1
        weights = up.num_products / 3  # of both layers, times three tokens
        assert weights % (llama.n_layer * llama.n_embd) == 0
        assert up.num_bytes > 4 * weights
        assert norm.num_products == 0
        assert norm.num_bytes == 4 * 2 * 3 * llama.n_embd * norm.num_times  # read and written
        assert all(time.seconds > 0 for time in times.values())
        assert timed.operation_times() == []
        with pytest.raises(Unsupported, match="times_operations=True"):
            plain.operation_times()
    with pytest.raises(InvalidType, match="times_operations"):
        Context(llama, n_ctx=256, times_operations="yes")  # type: ignore[arg-type]
