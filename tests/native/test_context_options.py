"""`Context`: its options, their defaults and refusals."""

from __future__ import annotations

import pytest
from tests.native.conftest import TinyModels
from tests.native.contexts import goes_on

from paceline.errors import InvalidParams, InvalidType, NotEnoughMemory, Unsupported
from paceline.runtime import Context, Model

pytestmark = pytest.mark.native


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
    """If little memory is free, the error has the sizes and the needed memory."""
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
