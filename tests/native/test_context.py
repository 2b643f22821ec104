"""`Context`: sizes, forward passes, guards, and that nothing is lost after an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.native.aborting import aborting
from tests.native.conftest import TinyModels

from paceline.errors import (
    Aborted,
    Closed,
    InvalidParams,
    InvalidType,
    NoKvSlot,
    NotEnoughMemory,
    PacelineError,
    PromptTooLong,
    Unsupported,
)  # fmt: skip
from paceline.params import SamplingParams
from paceline.runtime import Context, Model, Sampler, StepRow

pytestmark = pytest.mark.native

DECODERS = ["llama", "mixtral", "qwen2moe", "gemma3", "mamba", "falcon-h1", "lfm2"]


@pytest.fixture(scope="module")
def llama(tiny_models: TinyModels) -> Iterator[Model]:
    with Model.load(tiny_models("llama")) as model:
        yield model


@pytest.fixture
def context(llama: Model) -> Iterator[Context]:
    with Context(llama, n_ctx=512, n_batch=128, n_ubatch=64, n_seq_max=3, n_outputs_max=16, n_threads=1) as made:
        yield made


def goes_on(context: Context, seq_id: int = 0) -> None:
    """A context that still decodes and samples."""
    held = context.positions(seq_id)
    sampler = Sampler(SamplingParams(seed=1), context.native.model)
    row = StepRow(seq_id=seq_id, position=0 if held is None else held.last + 1, token_ids=[5, 6], samplers=(sampler,))
    draws = context.step([row]).rows[0].draws[0]
    assert draws.error is None
    assert len(draws.token_ids) == 1


# ---- sizes


def test_sizes_are_what_was_asked_for(llama: Model) -> None:
    """Cells are rounded up to 256; everything else is taken as it is."""
    with Context(llama, n_ctx=300, n_batch=100, n_ubatch=50, n_seq_max=4, n_outputs_max=7, n_threads=1) as context:
        assert (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max) == (512, 100, 50, 4)
        assert context.n_outputs_max == 7
        assert context.max_positions == 512
        assert (context.n_threads, context.n_threads_batch) == (1, 1)


def test_defaults_follow_from_the_model(llama: Model) -> None:
    """Without options the context is as large as the model was trained for."""
    with Context(llama) as context:
        assert context.n_ctx == llama.n_ctx_train
        assert context.n_batch <= context.n_ctx
        assert context.n_ubatch == 512
        assert context.n_seq_max == 1


def test_without_unified_cells_every_sequence_has_its_share(llama: Model) -> None:
    """n_ctx is divided among the sequences."""
    with Context(llama, n_ctx=1024, n_seq_max=4, kv_unified=False, n_threads=1) as context:
        assert context.max_positions == 256
        goes_on(context, 3)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        *[
            ({name: value}, InvalidParams, name)
            for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")
            for value in (0, -1, 2**31, 2**64)
        ],
        *[
            ({name: value}, InvalidType, name)
            for name in ("n_ctx", "n_batch", "n_seq_max")
            for value in (True, "512", 512.0)
        ],
        ({"n_ctx": 2**31 - 256}, NotEnoughMemory, "n_ctx"),
        ({"n_batch": 2000, "n_ctx": 512}, InvalidParams, "n_ctx is 512"),
        ({"n_ubatch": 200, "n_batch": 100}, InvalidParams, "n_batch is 100"),
        ({"n_seq_max": 257}, InvalidParams, "256"),
        ({"n_outputs_max": 0}, InvalidParams, "n_outputs_max"),
        ({"n_outputs_max": 3, "n_seq_max": 4}, InvalidParams, "n_outputs_max"),
        ({"n_threads": 0}, InvalidParams, "n_threads"),
        ({"n_threads": 513}, InvalidParams, "n_threads"),
        ({"rope_freq_base": float("nan")}, InvalidParams, "rope_freq_base"),
        ({"rope_freq_scale": float("inf")}, InvalidParams, "rope_freq_scale"),
        ({"rope_freq_scale": -1}, InvalidParams, "rope_freq_scale"),
        ({"yarn_ext_factor": -0.5}, InvalidParams, "yarn_ext_factor"),
        ({"rope_scaling": "yarm"}, InvalidParams, "yarn"),
        ({"type_k": "q3"}, InvalidParams, "type_k"),
        ({"type_v": "q8_0", "flash_attn": "off"}, InvalidParams, "requires flash_attn"),
        ({"flash_attn": True}, InvalidType, "flash_attn"),
        ({"pooling": "max"}, InvalidParams, "pooling"),
        ({"embeddings": "yes"}, InvalidType, "embeddings"),
        ({"embeddings": True, "pooling": "mean", "n_outputs_max": 1}, InvalidParams, "Embedder"),
        ({"embeddings": True, "pooling": "mean", "n_seq_max": 3, "n_outputs_max": 512}, InvalidParams, "multiple of 3"),
        ({"n_ctxx": 512}, InvalidType, "did you mean 'n_ctx'"),
    ],
    ids=str,
)
def test_a_bad_option_is_named(llama: Model, options: dict[str, object], error: type[Exception], words: str) -> None:
    """Each option out of its range or type raises with its name, and the model still makes contexts."""
    with pytest.raises(error, match=words):
        Context(llama, **options)
    with Context(llama, n_ctx=256, n_threads=1) as context:
        goes_on(context)


def test_a_context_beyond_the_machines_memory_is_refused_before_it_is_made(
    llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where little memory is free, the sizes and what they would take are in the error."""
    monkeypatch.setattr("paceline.runtime.context_options.available_memory", lambda: 3 << 20)
    with pytest.raises(NotEnoughMemory, match="MiB are free"):
        Context(llama, n_ctx=16384, type_k="f32", type_v="f32", flash_attn="off")
    with Context(llama, n_ctx=256, n_batch=32, n_ubatch=32) as context:
        goes_on(context)


@pytest.mark.parametrize("kind", ["mamba", "falcon-h1"])
def test_recurrent_models_have_half_the_sequences(tiny_models: TinyModels, kind: str) -> None:
    """Their snapshots take a sequence id each, which the error says."""
    with Model.load(tiny_models(kind)) as model:
        with pytest.raises(InvalidParams, match="at most 128"):
            Context(model, n_seq_max=129)
        with Context(model, n_ctx=512, n_seq_max=128, n_threads=1) as context:
            goes_on(context, 127)


def test_a_model_without_weights_has_no_context(tiny_models: TinyModels) -> None:
    """vocab_only is named in the error."""
    with Model.load(tiny_models("llama"), vocab_only=True) as model, pytest.raises(Unsupported, match="vocab_only"):
        Context(model, n_ctx=256)


# ---- decode


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
        tolerance = 2e-3 if kind == "gemma3" else 2e-4  # its six layers with four norms each carry rounding further
        assert np.allclose(context.logits(9), whole, atol=tolerance)
        context.remove(0)
        context.remove(1)
        both = [token for pair in zip(ids, reversed(ids), strict=True) for token in pair]
        context.decode(both, seq_ids=[0, 1] * 60)
        assert np.allclose(context.logits(118), whole, atol=tolerance)


def test_logits_are_there_for_what_was_asked(context: Context) -> None:
    """The word last means the last token of each sequence, all means all, bools mean exactly those."""
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
    """What was checked is what is computed, whoever writes to the caller's array meanwhile."""
    ids = np.ones(900, dtype=np.int32)
    seq_ids = np.zeros(900, dtype=np.int32)
    over = threading.Event()

    def scribble() -> None:
        while not over.is_set():
            ids[:], seq_ids[:] = 2**30, 2**30
            ids[:], seq_ids[:] = 1, 0

    with Context(llama, n_ctx=1024, n_batch=1024, n_threads=1) as context:
        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            for _ in range(30):
                try:
                    context.decode(ids, seq_ids=seq_ids)
                except InvalidParams:  # it was copied at a bad moment, and looked at then
                    continue
                context.clear()
        finally:
            over.set()
            thread.join()
        context.clear()
        goes_on(context)


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
    ids=str,
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
    """The error names the field; the sequence is where it was, and goes on with the same logits."""
    context.decode([1, 2])
    context.copy(0, 1)
    with pytest.raises(error, match=words):
        call(context)
    assert context.positions(0) == (0, 1)
    context.decode([9, 9], seq_ids=[0, 1])
    assert np.array_equal(context.logits(0), context.logits(1))
    goes_on(context)


def test_a_full_context_refuses_and_goes_on_after_a_removal(context: Context) -> None:
    """Beyond the last position it is PromptTooLong; where others hold the cells, NoKvSlot; both change nothing."""
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
    """A model with a table of positions refuses those beyond it, where llama.cpp would read past the table's end."""
    from paceline.runtime import Embedder
    from paceline.testing.models import BertSpec

    with Model.load(tiny_models(BertSpec(n_ctx_train=16))) as model, Embedder(model) as embedder:
        assert embedder.max_tokens == 16
        with pytest.raises(PromptTooLong, match=r"texts\[1\]"):
            embedder.embed([[1, 2], [1] * 17])
        assert np.isfinite(embedder.embed([[1] * 16])).all()


# ---- abort and rollback


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "falcon-h1", "lfm2"])
def test_an_aborted_pass_leaves_every_row_where_it_was(tiny_models: TinyModels, kind: str) -> None:
    """Whenever the abort comes, the sequence goes on with exactly the logits it would have had."""
    rng = np.random.default_rng(3)
    start, more = rng.integers(0, 250, 64).tolist(), rng.integers(0, 250, 900).tolist()
    with (
        Model.load(tiny_models(kind)) as model,
        Context(model, n_ctx=1024, n_batch=1024, n_ubatch=32, n_threads=1) as context,
    ):
        context.decode(start)
        before = context.save_sequence(0)
        context.decode([5])
        expected = context.logits(0)
        context.load_sequence(0, before)
        for delay in (0, 0.001, 0.002, 0.003):
            with aborting(context, after_s=delay), pytest.raises(Aborted):
                for _ in range(1000):  # a fast machine may finish a pass before the abort comes
                    context.decode(more)
                    context.load_sequence(0, before)
            assert context.positions(0) is not None
            assert context.positions(0).last == 63  # type: ignore[union-attr]
        context.decode([5])
        assert np.allclose(context.logits(0), expected, atol=1e-5)


def test_an_abort_with_nothing_running_does_nothing(context: Context) -> None:
    """The next pass is not hit by an abort that came before it."""
    context.abort()
    goes_on(context)


# ---- threads


def test_calls_from_two_threads_take_turns(llama: Model) -> None:
    """Two threads on one context both get right answers."""
    with Context(llama, n_ctx=512, n_seq_max=2, n_threads=1) as context:
        context.decode([1, 2, 3])
        expected = context.logits(2)
        context.clear()
        errors: list[BaseException] = []

        def work(seq_id: int) -> None:
            try:
                for _ in range(20):
                    context.decode([1, 2, 3], seq_ids=seq_id)
                    context.remove(seq_id)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seq_id,)) for seq_id in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        context.decode([1, 2, 3])
        assert np.allclose(context.logits(2), expected, atol=1e-5)


def test_the_number_of_threads_changes_nothing(llama: Model) -> None:
    """More threads compute the same."""
    with Context(llama, n_ctx=256, n_threads=1) as context:
        context.decode([1, 2, 3])
        expected = context.logits(2)
        context.set_threads(2, 3)
        assert (context.n_threads, context.n_threads_batch) == (2, 3)
        context.clear()
        context.decode([1, 2, 3])
        assert np.allclose(context.logits(2), expected, atol=1e-5)


def test_a_closed_context_says_so(llama: Model) -> None:
    """Every use after close raises Closed; closing twice is fine."""
    context = Context(llama, n_ctx=256)
    context.close()
    context.close()
    for use in (
        lambda: context.decode([1]),
        lambda: context.n_ctx,
        lambda: context.positions(0),
        context.abort,
    ):
        with pytest.raises(Closed):
            use()


def test_closing_during_a_pass_lets_it_finish(llama: Model) -> None:
    """The memory is freed when the running call returns, not under it."""
    context = Context(llama, n_ctx=1024, n_batch=1024, n_threads=1)
    started = threading.Event()
    results: list[object] = []

    def work() -> None:
        native = context.native
        ids = np.ones(1000, dtype=np.int32)
        started.set()
        native.decode(
            ids, np.arange(1000, dtype=np.int32), np.zeros(1000, dtype=np.int32), np.ones(1000, dtype=np.uint8) * 0
        )
        results.append("finished")

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(30)
    context.close()
    thread.join()
    assert results == ["finished"]


# ---- generate


@pytest.mark.parametrize("kind", DECODERS)
def test_generate_equals_a_loop_of_decode_and_argmax(tiny_models: TinyModels, kind: str) -> None:
    """Greedy generation is what decoding and taking the highest logit gives, one token after the other."""
    with Model.load(tiny_models(kind)) as model, Context(model, n_ctx=512, n_seq_max=2, n_threads=1) as context:
        sampler = Sampler(SamplingParams(temperature=0), model)
        prompt = [1, 2, 3, 4, 5]
        generated = list(context.generate(sampler, prompt, 20))
        expected, tokens = [], prompt
        for _ in range(20):
            context.decode(tokens, seq_ids=1)
            tokens = [int(np.argmax(context.logits(len(tokens) - 1)))]
            expected += tokens
        assert generated == expected


def test_generate_checks_at_the_call(llama: Model, context: Context) -> None:
    """A prompt that is empty or too long raises before anything is iterated."""
    sampler = Sampler(SamplingParams(temperature=0), llama)
    with pytest.raises(InvalidParams, match="empty"):
        context.generate(sampler, [])
    with pytest.raises(PromptTooLong, match="600 tokens"):
        context.generate(sampler, [1] * 600)
    with pytest.raises(InvalidParams, match="max_tokens"):
        context.generate(sampler, [1], -1)
    assert context.positions(0) is None
    goes_on(context)


def test_generate_ends_when_the_context_is_full(llama: Model) -> None:
    """Without a limit it goes on until no position is left: cells minus prompt, plus the token that needs none."""
    with Context(llama, n_ctx=256, n_batch=64, n_threads=1) as context:
        sampler = Sampler(SamplingParams(temperature=0, ignore_eos=True, max_tokens=None), llama)
        assert len(list(context.generate(sampler, [1] * 200))) == 57


def test_generate_ends_by_what_its_params_say(llama: Model) -> None:
    """Without a number of its own the params' max_tokens counts; a stop token ends it and is not yielded."""
    with Context(llama, n_ctx=256, n_threads=1) as context:
        tokens = list(context.generate(Sampler(SamplingParams(temperature=0, max_tokens=7), llama), [1, 2, 3]))
        assert len(tokens) == 7
        index = next(i for i, token in enumerate(tokens) if i > 0 and token not in tokens[:i])
        context.clear()
        stopping = Sampler(SamplingParams(temperature=0, stop_token_ids=[tokens[index]]), llama)
        assert list(context.generate(stopping, [1, 2, 3], 7)) == tokens[:index]


def test_generate_goes_on_from_what_the_sequence_holds(llama: Model) -> None:
    """A second call continues: the last token of the first is given as the next prompt."""
    with Context(llama, n_ctx=512, n_seq_max=2, n_threads=1) as context:
        whole = list(context.generate(Sampler(SamplingParams(temperature=0), llama), [1, 2, 3], 10, seq_id=1))
        sampler = Sampler(SamplingParams(temperature=0), llama)
        first = list(context.generate(sampler, [1, 2, 3], 4))
        assert first + list(context.generate(sampler, [first[-1]], 6)) == whole


def test_an_end_token_ends_generation_and_is_not_yielded(llama: Model) -> None:
    """A model whose third greedy token is declared the end yields two."""
    with Context(llama, n_ctx=256, n_threads=1) as context:
        tokens = list(context.generate(Sampler(SamplingParams(temperature=0), llama), [1, 2, 3], 10))
    index = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i > 0)
    path = llama.paths[0]
    with Model.load(path, kv_overrides={"tokenizer.ggml.eos_token_id": tokens[index]}) as ending:
        with Context(ending, n_ctx=256, n_threads=1) as context:
            assert (
                list(context.generate(Sampler(SamplingParams(temperature=0), ending), [1, 2, 3], 10)) == tokens[:index]
            )


def test_an_encoder_decoder_model_generates(tiny_models: TinyModels) -> None:
    """The encoder runs on the prompt, the decoder begins with its start token, and one sequence is all it takes."""
    with Model.load(tiny_models("t5")) as model:
        with pytest.raises(Unsupported, match="one sequence"):
            Context(model, n_ctx=256, n_seq_max=2)
        with Context(model, n_ctx=256, n_threads=1) as context:
            with pytest.raises(InvalidParams, match="encode"):
                context.decode([1])
            sampler = Sampler(SamplingParams(temperature=0, ignore_eos=True), model)
            first = list(context.generate(sampler, [5, 6, 7], 8))
            context.clear()
            assert first == list(
                context.generate(Sampler(SamplingParams(temperature=0, ignore_eos=True), model), [5, 6, 7], 8)
            )
            context.clear()
            assert first != list(
                context.generate(Sampler(SamplingParams(temperature=0, ignore_eos=True), model), [99, 6, 7], 8)
            )
