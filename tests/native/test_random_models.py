"""The tiny random models: they load, run, and are worth testing with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from paceline.errors import ModelLoadError
from paceline.runtime import Context, Embedder, MemoryClass, Model
from paceline.testing.models import (
    CHAT_TEMPLATE,
    KINDS,
    BertSpec,
    LlamaSpec,
    ModernBertSpec,
    Pooling,
    Typed,
    byte_level,
    every_value_type,
    numbered,
    write_lora,
    write_model,
    write_split_model,
)

TinyModels = Callable[..., Path]

DECODERS = [kind for kind in KINDS if kind not in ("bert", "modern-bert", "reranker", "t5")]
MEMORY = {
    "gemma3": MemoryClass.SLIDING_WINDOW,
    "gemma4": MemoryClass.SLIDING_WINDOW,
    "mamba": MemoryClass.RECURRENT,
    "rwkv6": MemoryClass.RECURRENT,
    "rwkv7": MemoryClass.RECURRENT,
    "falcon-h1": MemoryClass.HYBRID,
    "lfm2": MemoryClass.HYBRID,
    "granitehybrid": MemoryClass.HYBRID,
    "qwen35": MemoryClass.HYBRID,
    "bert": MemoryClass.NONE,
    "modern-bert": MemoryClass.NONE,
    "reranker": MemoryClass.NONE,
}
PROMPTS = [[257, 72, 101, 108, 108, 111], [80, 81, 82], [200, 100, 50, 25, 12, 6, 3, 1]]


def greedy(context: Context, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` tokens for each prompt, sequences 0, 1, ... in one batch; checks that all logits are finite."""
    lengths = [len(prompt) for prompt in prompts]
    ids = [seq_id for seq_id, prompt in enumerate(prompts) for _ in prompt]
    context.decode([token for prompt in prompts for token in prompt], seq_ids=ids)
    last = (np.cumsum(lengths) - 1).tolist()
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        rows = [context.logits(index) for index in last]
        assert all(np.isfinite(row).all() for row in rows)
        tokens = [int(row.argmax()) for row in rows]
        for text, token in zip(written, tokens, strict=True):
            text.append(token)
        context.decode(tokens, seq_ids=list(range(len(prompts))))
        last = list(range(len(prompts)))
    return written


def first_logits(model: Model, prompt: list[int]) -> npt.NDArray[np.float32]:
    with Context(model, n_ctx=256, n_threads=1) as context:
        context.decode(prompt)
        return context.logits(len(prompt) - 1)


@pytest.mark.parametrize("weights", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_in_every_weight_type(tiny_models: TinyModels, kind: str, weights: str) -> None:
    """Each kind of model loads with F32, F16 and Q8_0 weights and reports its kind."""
    with Model.load(tiny_models(kind, weights=weights)) as model:
        assert model.metadata["general.architecture"] == KINDS[kind].architecture
        assert model.n_vocab == KINDS[kind].vocabulary.size
        assert model.has_encoder == (kind == "t5")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_memory_class(tiny_models: TinyModels, kind: str) -> None:
    """Windows, recurrent states and their mixtures are distinguished from plain attention, and an encoder has no memory."""
    with Model.load(tiny_models(kind)) as model:
        assert model.memory_class is MEMORY.get(kind, MemoryClass.ATTENTION)


@pytest.mark.parametrize("kind", DECODERS)
def test_every_decoder_writes_the_same_alone_and_in_a_batch(tiny_models: TinyModels, kind: str) -> None:
    """Forty greedy tokens of three sequences are the same whether they are decoded alone or together."""
    with Model.load(tiny_models(kind)) as model:
        with Context(model, n_ctx=512, n_seq_max=3, n_threads=1) as context:
            together = greedy(context, PROMPTS, 40)
        alone = []
        for prompt in PROMPTS:
            with Context(model, n_ctx=512, n_threads=1) as context:
                alone += greedy(context, [prompt], 40)
    assert together == alone


@pytest.mark.parametrize("kind", DECODERS)
def test_what_a_decoder_writes_is_varied_and_hardly_ever_ends(tiny_models: TinyModels, kind: str) -> None:
    """Greedy text has many different tokens, no control tokens, and depends on the whole prompt."""
    with Model.load(tiny_models(kind)) as model, Context(model, n_ctx=512, n_seq_max=2, n_threads=1) as context:
        first, second = greedy(context, [[1, 2, 3, 4, 5, 6, 7, 8], [9, 2, 3, 4, 5, 6, 7, 8]], 60)
    assert len(set(first)) > 20
    assert not set(first) & set(KINDS[kind].vocabulary.control)
    assert first != second


def test_the_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    """A model is a pure function of spec, seed and weight type; another seed is another model."""
    spec = LlamaSpec()
    one, two, other = (
        write_model(tmp_path / f"{i}.gguf", spec, seed=seed).read_bytes() for i, seed in enumerate((5, 5, 6))
    )
    assert one == two
    assert one != other


def test_a_split_set_is_the_same_model(tmp_path: Path) -> None:
    """A set of three parts loads from its first part and gives the single file's output."""
    parts = write_split_model(tmp_path / "tiny.gguf", LlamaSpec(), parts=3)
    assert [part.name for part in parts] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    whole = write_model(tmp_path / "whole.gguf", LlamaSpec())
    with Model.load(parts[0]) as split, Model.load(whole) as single:
        assert np.array_equal(first_logits(split, PROMPTS[0]), first_logits(single, PROMPTS[0]))


def test_parts_that_cannot_be_even_are_refused(tmp_path: Path) -> None:
    """More parts than tensors, or one part, is a ValueError and writes nothing."""
    for parts in (1, 1000):
        with pytest.raises(ValueError, match=f"into {parts} parts"):
            write_split_model(tmp_path / "tiny.gguf", LlamaSpec(), parts=parts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["llama", "gemma3", "falcon-h1"])
def test_an_adapter_changes_the_output_of_a_model(tiny_models: TinyModels, tmp_path: Path, kind: str) -> None:
    """A random LoRA adapter moves the logits clearly, and taking it away brings the old logits back."""
    path = write_lora(tmp_path / "lora.gguf", KINDS[kind])
    with Model.load(tiny_models(kind)) as model, Context(model, n_ctx=256, n_threads=1) as context:
        plain = first_logits(model, PROMPTS[0])
        context.set_adapters({model.load_adapter(path): 1.0})
        context.decode(PROMPTS[0])
        changed = context.logits(len(PROMPTS[0]) - 1)
        context.set_adapters({})
        context.clear()
        context.decode(PROMPTS[0])
        again = context.logits(len(PROMPTS[0]) - 1)
    assert np.abs(changed - plain).max() > 0.5
    assert np.allclose(again, plain, atol=1e-4)


def test_metadata_is_added_replaced_and_left_out(tmp_path: Path) -> None:
    """Metadata given to the writer is in the file: added, in the place of the spec's, or missing if it is None."""
    extra = {**every_value_type(), "tokenizer.chat_template": CHAT_TEMPLATE, "llama.context_length": 77}
    with Model.load(write_model(tmp_path / "a.gguf", LlamaSpec(), metadata=extra)) as model:
        assert model.n_ctx_train == 77
        assert model.chat_template() == CHAT_TEMPLATE
        assert model.metadata["test.uint64"] == "18446744073709551615"
        assert model.metadata["test.int64"] == "-9223372036854775808"
        assert model.metadata["test.string"] == "naïve ☃ 🎈"
    without = write_model(tmp_path / "b.gguf", LlamaSpec(), metadata={"llama.block_count": None})
    with pytest.raises(ModelLoadError, match="block_count"):
        Model.load(without)


def test_text_that_is_not_utf8_is_read_with_replacement_characters(tmp_path: Path) -> None:
    """Metadata and error messages with bytes that are no UTF-8 show U+FFFD in their place."""
    odd = {"general.name": Typed(b"caf\xe9", "STRING"), "tokenizer.chat_template": Typed(b"\xff{{ x }}", "STRING")}
    with Model.load(write_model(tmp_path / "a.gguf", LlamaSpec(), metadata=odd)) as model:
        assert model.metadata["general.name"] == "caf\ufffd"
        assert model.chat_template() == "\ufffd{{ x }}"
    unknown = {"tokenizer.ggml.model": Typed(b"\xfe", "STRING")}
    with pytest.raises(ModelLoadError, match="unknown tokenizer: '\ufffd'"):
        Model.load(write_model(tmp_path / "b.gguf", LlamaSpec(), metadata=unknown))


def test_a_numbered_vocabulary_decodes_to_its_ids(tmp_path: Path) -> None:
    """Token 17 of a numbered vocabulary reads `<17>`."""
    assert dict(numbered().metadata)["tokenizer.ggml.tokens"][17] == "<17>"
    with Model.load(write_model(tmp_path / "n.gguf", LlamaSpec(vocabulary=numbered(64)))) as model:
        assert model.n_vocab == 64


def test_byte_tokens_have_the_id_of_their_byte() -> None:
    """In the byte-level vocabulary token 65 is the letter A, and all tokens differ."""
    tokens = dict(byte_level().metadata)["tokenizer.ggml.tokens"]
    assert tokens[65] == "A"
    assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("spec", [BertSpec, ModernBertSpec])
def test_embeddings_of_different_texts_differ(
    tmp_path: Path, spec: type[BertSpec | ModernBertSpec], pooling: Pooling
) -> None:
    """A random encoder gives finite, different vectors for different texts."""
    path = write_model(tmp_path / "encoder.gguf", spec(pooling=pooling))
    with Model.load(path) as model, Embedder(model, n_threads=1) as embedder:
        vectors = embedder.embed([[2, 40, 41, 3], [2, 50, 3], [2, 40, 42, 3]])
    assert vectors.shape == (3, 64)
    assert np.isfinite(vectors).all()
    assert (vectors @ vectors.T)[np.triu_indices(3, 1)].max() < 0.99
