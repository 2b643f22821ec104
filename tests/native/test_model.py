"""`Model`: loading, its failures, and its facts."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from tests.native.conftest import TinyModels

from paceline.errors import Aborted, Closed, InvalidParams, InvalidType, ModelLoadError
from paceline.params import SamplingParams
from paceline.runtime import Context, MemoryClass, Model, Sampler
from paceline.testing.models import CHAT_TEMPLATE, KINDS, LlamaSpec, every_value_type, write_model, write_split_model

pytestmark = pytest.mark.native


def works(model: Model) -> None:
    """Check that a model still computes: one token in, finite logits out."""
    if model.memory_class is MemoryClass.NONE or model.has_encoder:
        return
    with Context(model, n_ctx=256, n_threads=1) as context:
        context.decode([1, 2, 3])
        assert np.isfinite(context.logits(2)).all()


def test_a_loaded_model_has_its_sizes(tiny_models: TinyModels) -> None:
    """Every introspection property agrees with the spec that the file was written from."""
    spec = LlamaSpec(n_layer=3, n_embd=64, n_head=4, n_head_kv=2, n_ctx_train=512)
    with Model.load(tiny_models(spec)) as model:
        sizes = (model.n_layer, model.n_embd, model.n_embd_out, model.n_head, model.n_head_kv, model.n_ctx_train)
        assert sizes == (3, 64, 64, 4, 2, 512)
        assert model.n_vocab == spec.vocabulary.size
        assert model.n_params == sum(int(np.prod(tensor.shape)) for tensor in spec.tensors())
        assert model.size_bytes == 4 * model.n_params
        assert model.ftype == "all F32" or "F32" in model.ftype
        assert model.desc.startswith("llama")
        assert model.n_swa == 0
        assert not model.has_encoder
        assert model.has_decoder


@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        ("llama", MemoryClass.ATTENTION),
        ("qwen2moe", MemoryClass.ATTENTION),
        ("gemma3", MemoryClass.SLIDING_WINDOW),
        ("gemma4", MemoryClass.SLIDING_WINDOW),
        ("mamba", MemoryClass.RECURRENT),
        ("rwkv7", MemoryClass.RECURRENT),
        ("falcon-h1", MemoryClass.HYBRID),
        ("lfm2", MemoryClass.HYBRID),
        ("bert", MemoryClass.NONE),
        ("modern-bert", MemoryClass.NONE),
        ("reranker", MemoryClass.NONE),
        ("t5", MemoryClass.ATTENTION),
    ],
)
def test_the_memory_class_follows_from_the_architecture(
    tiny_models: TinyModels, kind: str, memory: MemoryClass
) -> None:
    """Each kind of model names the memory that it keeps of a sequence."""
    with Model.load(tiny_models(kind)) as model:
        assert model.memory_class is memory
        assert model.is_recurrent == (memory is MemoryClass.RECURRENT)
        assert model.is_hybrid == (memory is MemoryClass.HYBRID)
        assert (model.n_swa > 0) == (memory is MemoryClass.SLIDING_WINDOW or kind == "modern-bert")
        assert model.has_encoder == (kind == "t5")
        assert model.has_decoder == (memory is not MemoryClass.NONE)


def test_metadata_is_a_mapping_of_every_scalar(tmp_path: Path) -> None:
    """Numbers, bools and texts of any length come out as text, and nothing can be written to it."""
    long = "ä" * 5000
    path = write_model(tmp_path / "m.gguf", LlamaSpec(), metadata=every_value_type() | {"test.long": long})
    with Model.load(path, vocab_only=True) as model:
        assert model.metadata["test.long"] == long
        assert model.metadata["general.architecture"] == "llama"
        with pytest.raises(TypeError):
            model.metadata["x"] = "y"  # type: ignore[index]


def test_chat_templates_are_found_by_name(tmp_path: Path) -> None:
    """The plain template is the default, others have their names, an unknown name has none."""
    extra = {"tokenizer.chat_template": CHAT_TEMPLATE, "tokenizer.chat_template.tool_use": "{{ tools }}"}
    with Model.load(write_model(tmp_path / "m.gguf", LlamaSpec(), metadata=extra), vocab_only=True) as model:
        assert model.chat_template() == CHAT_TEMPLATE
        assert model.chat_template("tool_use") == "{{ tools }}"
        assert model.chat_template("absent") is None
        assert dict(model.chat_templates) == {"default": CHAT_TEMPLATE, "tool_use": "{{ tools }}"}


def test_a_split_set_loads_from_its_first_part_and_equals_the_whole(tmp_path: Path) -> None:
    """A model in three files computes the same as in one file."""
    spec = LlamaSpec()
    whole = write_model(tmp_path / "whole.gguf", spec)
    parts = write_split_model(tmp_path / "parts.gguf", spec, parts=3)
    logits = []
    for path in (whole, parts[0], parts):
        with Model.load(path) as model, Context(model, n_ctx=256, n_threads=1) as context:
            context.decode([1, 2, 3])
            logits.append(context.logits(2))
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])


def test_a_missing_part_of_a_split_set_is_named(tmp_path: Path) -> None:
    """The error says which file is not there; a part that is not the first says which one is."""
    parts = write_split_model(tmp_path / "parts.gguf", LlamaSpec(), parts=3)
    with pytest.raises(ModelLoadError, match="load parts-00001-of-00003"):
        Model.load(parts[1])
    parts[2].unlink()
    with pytest.raises(ModelLoadError, match="parts-00003-of-00003"):
        Model.load(parts[0])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"GGML" + bytes(100), "does not begin with"),
        (b"GGUF", "."),
        (b"GGUF" + b"\xff" * 300, "."),
    ],
    ids=["missing", "empty", "other magic", "cut after the magic", "garbage"],
)
def test_invalid_model_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    """A missing, empty or senseless file raises ModelLoadError that names it."""
    path = tmp_path / "broken.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="broken.gguf") as caught:
        Model.load(path)
    assert words in str(caught.value)


def test_a_truncated_model_is_refused(tmp_path: Path, tiny_models: TinyModels) -> None:
    """A file that ends before its last tensor does raises ModelLoadError, and the whole one still loads."""
    data = tiny_models("llama").read_bytes()
    path = tmp_path / "cut.gguf"
    for share in (0.1, 0.5, 0.99):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ModelLoadError):
            Model.load(path)
    path.write_bytes(data)
    with Model.load(path) as model:
        works(model)


def test_values_that_would_end_the_process_are_refused(tmp_path: Path, tiny_models: TinyModels) -> None:
    """A model without layers, in its file or by an override, is a ModelLoadError that names the key."""
    path = write_model(tmp_path / "m.gguf", LlamaSpec(), metadata={"llama.block_count": 0})
    with pytest.raises(ModelLoadError, match="block_count"):
        Model.load(path)
    with pytest.raises(ModelLoadError, match="block_count"):
        Model.load(tiny_models("llama"), kv_overrides={"llama.block_count": 0})
    with Model.load(tiny_models("llama")) as model:
        works(model)


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    """A directory instead of a file raises ModelLoadError."""
    with pytest.raises(ModelLoadError, match="is a folder without a GGUF file"):
        Model.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"n_gpu_layers": -2}, InvalidParams, "n_gpu_layers"),
        ({"n_gpu_layers": True}, InvalidType, "n_gpu_layers"),
        ({"n_gpu_layers": "all"}, InvalidType, "n_gpu_layers"),
        ({"n_gpu_layers": 2**40}, InvalidParams, "n_gpu_layers"),
        ({"split_mode": "rows"}, InvalidParams, "did you mean 'row'"),
        ({"load_mode": "map"}, InvalidParams, "mmap"),
        ({"main_gpu": -1}, InvalidParams, "main_gpu"),
        ({"devices": ["CUDA7"]}, InvalidParams, "there is no device 'CUDA7'"),
        ({"devices": [3]}, InvalidType, "devices"),
        ({"tensor_split": [1.0] * 1000}, InvalidParams, "tensor_split"),
        ({"tensor_split": [float("nan")]}, InvalidParams, "tensor_split"),
        ({"vocab_only": 1}, InvalidType, "vocab_only"),
        ({"kv_overrides": {"k" * 200: 1}}, InvalidParams, "kv_overrides"),
        ({"kv_overrides": {"": 1}}, InvalidParams, "kv_overrides"),
        ({"kv_overrides": {"a": "x" * 200}}, InvalidParams, "kv_overrides"),
        ({"kv_overrides": {"a": 2**64}}, InvalidParams, "kv_overrides"),
        ({"kv_overrides": {"a": [1]}}, InvalidType, "kv_overrides"),
    ],
    ids=str,
)
def test_a_bad_option_is_named(
    tiny_models: TinyModels, options: dict[str, object], error: type[Exception], words: str
) -> None:
    """Each option out of its range or type raises an error with its name, and the file loads without it."""
    with pytest.raises(error, match=words):
        Model.load(tiny_models("llama"), **options)  # type: ignore[arg-type]
    with Model.load(tiny_models("llama")) as model:
        works(model)


def test_overrides_replace_metadata(tiny_models: TinyModels) -> None:
    """An override of each type is seen by llama.cpp when it reads the model."""
    with Model.load(
        tiny_models("llama"), kv_overrides={"llama.context_length": 96, "tokenizer.ggml.add_bos_token": True}
    ) as model:
        assert model.n_ctx_train == 96
        assert model.metadata["llama.context_length"] == "96"
        assert model.metadata["tokenizer.ggml.add_bos_token"] == "true"
        assert model.tokenizer.add_bos


def test_progress_goes_from_zero_to_one(tiny_models: TinyModels) -> None:
    """The callback sees rising shares that end at 1."""
    shares: list[float] = []
    Model.load(tiny_models("llama"), progress=shares.append).close()
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_callback_that_returns_false_cancels(tiny_models: TinyModels) -> None:
    """Returning False ends the load as Aborted; returning None goes on."""
    with pytest.raises(Aborted):
        Model.load(tiny_models("llama"), progress=lambda _: False)
    Model.load(tiny_models("llama"), progress=lambda _: None).close()


def test_an_exception_in_the_callback_comes_out_of_load(tiny_models: TinyModels) -> None:
    """The caller's own exception is raised, and the next load works."""

    def broken(_: float) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Model.load(tiny_models("llama"), progress=broken)
    with Model.load(tiny_models("llama")) as model:
        works(model)


def test_another_thread_cancels_a_load(tiny_models: TinyModels) -> None:
    """An event set while the load runs ends it as Aborted."""
    cancel, reached, seen = threading.Event(), threading.Event(), threading.Event()

    def wait_for_the_other(_: float) -> None:
        reached.set()
        seen.wait(30)

    def other() -> None:
        reached.wait(30)
        cancel.set()
        seen.set()

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(Aborted):
        Model.load(tiny_models("llama"), progress=wait_for_the_other, cancel=cancel)
    thread.join()


def test_a_closed_model_raises_closed_and_closing_twice_is_fine(tiny_models: TinyModels) -> None:
    """Every use after close raises Closed with the file's name."""
    model = Model.load(tiny_models("llama"))
    model.close()
    model.close()
    for use in (
        lambda: model.desc,
        lambda: model.tokenizer,
        lambda: Context(model),
        lambda: Sampler(SamplingParams(), model),
    ):
        with pytest.raises(Closed, match="llama"):
            use()
    assert "closed" in repr(model)


def test_what_was_made_from_a_model_outlives_it(tiny_models: TinyModels) -> None:
    """A tokenizer, a context and a sampler go on after the model was closed and collected."""
    model = Model.load(tiny_models("llama"))
    tokenizer, context = model.tokenizer, Context(model, n_ctx=256, n_threads=1)
    sampler = Sampler(SamplingParams(temperature=0), model)
    gone = weakref.ref(model)
    model.close()
    del model
    gc.collect()
    assert gone() is None
    ids = tokenizer.encode("hello")
    assert len(list(context.generate(sampler, ids, 5))) == 5


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_vocab_only_has_a_tokenizer_and_no_weights(tiny_models: TinyModels, kind: str) -> None:
    """Without weights every property can still be read and tokenising works."""
    with Model.load(tiny_models(kind), vocab_only=True) as model:
        facts = (model.n_head, model.n_head_kv, model.n_layer, model.n_ctx_train, model.memory_class, model.n_cls_out)
        assert len(facts) == 6
        assert model.tokenizer.encode("a b") != []


def test_fingerprints_distinguish_models(tiny_models: TinyModels) -> None:
    """The same file has the same fingerprint, other weights of the same shape have another."""
    prints = []
    for path in (tiny_models("llama"), tiny_models("llama"), tiny_models("llama", seed=1)):
        with Model.load(path) as model:
            prints.append(model.fingerprint)
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]
