"""`Embedder`: encoders and decoders, packing, pooling, normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.native.conftest import TinyModels
from tests.sweeps import sampled

from paceline.errors import (
    Closed,
    InvalidParams,
    InvalidType,
    NotEnoughMemory,
    PacelineError,
    PromptTooLong,
    Unsupported,
)
from paceline.runtime import Context, Embedder, Model
from paceline.testing.models import KINDS, BertSpec, LlamaSpec

pytestmark = pytest.mark.native

TEXTS = ["one", "two three", "a longer text than the others", "x"]


@pytest.fixture(scope="module")
def bert(tiny_models: TinyModels) -> Iterator[Model]:
    with Model.load(tiny_models("bert")) as model:
        yield model


@pytest.mark.parametrize("kind", ["bert", "modern-bert", "embedding-llama", "llama", "gemma3", "mamba", "lfm2"])
def test_packed_texts_have_the_vectors_they_have_alone(tiny_models: TinyModels, kind: str) -> None:
    """Many texts in one batch equal one text a batch, for encoders, decoders and recurrent models."""
    with Model.load(tiny_models(kind)) as model, Embedder(model, n_threads=1, flash_attn="off") as embedder:
        together = embedder.embed(TEXTS)
        assert together.shape == (4, model.n_embd_out)
        assert together.dtype == np.float32
        assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
        alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
        assert np.allclose(together, alone, atol=2e-3)
        assert not np.allclose(together[0], together[1], atol=1e-2)


def test_more_texts_than_a_batch_holds_come_in_order(bert: Model) -> None:
    """Texts are split over passes by token count and by number of texts."""
    texts = [[1 + i % 90, 2, 3 + i % 50] * (1 + i % 7) for i in range(50)]
    options = {"n_threads": 1, "flash_attn": "off"}
    with Embedder(bert, max_tokens=32, max_texts=5, **options) as small, Embedder(bert, **options) as large:
        assert np.allclose(small.embed(texts), large.embed(texts), atol=1e-4)


def test_poolings_are_what_they_are_called(llama: Model) -> None:
    """mean, cls and last of the vectors that "none" gives for each token."""
    ids = [5, 6, 7, 8]
    options = {"n_threads": 1, "flash_attn": "off"}
    with Embedder(llama, pooling="none", **options) as each:
        tokens = each.embed_tokens([ids])[0]
        assert tokens.shape == (4, llama.n_embd_out)
    for pooling, expected in (("mean", tokens.mean(axis=0)), ("cls", tokens[0]), ("last", tokens[3])):
        with Embedder(llama, pooling=pooling, **options) as embedder:  # type: ignore[arg-type]
            assert np.allclose(embedder.embed([ids], normalize="none")[0], expected, atol=1e-3)


def test_the_pooling_is_the_models(tiny_models: TinyModels, llama: Model) -> None:
    """The file's pooling is taken, and mean if it names none."""
    with Model.load(tiny_models("embedding-llama")) as model, Embedder(model) as embedder:
        assert embedder.pooling == "last"
    with Embedder(llama) as embedder:
        assert embedder.pooling == "mean"


def test_a_reranker_scores(tiny_models: TinyModels) -> None:
    """Pooling "rank" gives a score a text, as the head made it."""
    with Model.load(tiny_models("reranker")) as model, Embedder(model, n_threads=1) as embedder:
        assert embedder.pooling == "rank"
        scores = embedder.embed(TEXTS)
        assert scores.shape == (4, 1)
        assert len(set(scores[:, 0].tolist())) == 4
        assert np.array_equal(scores, embedder.embed(TEXTS, normalize="none"))


def test_a_model_without_a_head_has_no_scores(llama: Model) -> None:
    """Pooling "rank" is refused if the file has no classification head."""
    with pytest.raises(Unsupported, match="classification head"):
        Embedder(llama, pooling="rank")


def test_encoder_decoder_models_embed_nothing(tiny_models: TinyModels) -> None:
    """They are refused by their kind."""
    with Model.load(tiny_models("t5")) as model, pytest.raises(Unsupported, match="encoder-decoder"):
        Embedder(model)


def test_normalisations_have_their_norm(bert: Model) -> None:
    """l2 makes length 1, max_abs a greatest component of 1, and both keep the direction."""
    with Embedder(bert, n_threads=1) as embedder:
        raw = embedder.embed(TEXTS, normalize="none")
        assert np.allclose(
            embedder.embed(TEXTS, normalize="l2"), raw / np.linalg.norm(raw, axis=1, keepdims=True), atol=1e-5
        )
        assert np.allclose(np.abs(embedder.embed(TEXTS, normalize="max_abs")).max(axis=1), 1)


def test_no_texts_give_no_vectors(bert: Model) -> None:
    """An empty list is an empty array of the right width."""
    with Embedder(bert) as embedder:
        assert embedder.embed([]).shape == (0, embedder.dimension)


@pytest.mark.parametrize(
    ("texts", "error", "words"),
    [
        ("a text", InvalidType, "put a single one into a list"),
        (["ok", 3], InvalidType, r"texts\[1\]"),
        (["ok", []], InvalidParams, r"texts\[1\] has no tokens"),
        ([[1, -1]], InvalidParams, r"texts\[0\]\[1\]"),
        ([[10**6]], InvalidParams, r"texts\[0\]\[0\]"),
        (["\ud800"], InvalidParams, r"texts\[0\]"),
        (["ok", [1] * 999], PromptTooLong, r"texts\[1\] is too large: it has 999 tokens"),
    ],
    ids=str,
)
def test_a_bad_text_is_named_and_the_next_call_works(
    bert: Model, texts: object, error: type[PacelineError], words: str
) -> None:
    """Index and reason are in the error."""
    with Embedder(bert, n_threads=1) as embedder:
        with pytest.raises(error, match=words):
            embedder.embed(texts)  # type: ignore[arg-type]
        assert np.isfinite(embedder.embed(TEXTS)).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"pooling": "max"}, InvalidParams, "pooling"),
        ({"max_tokens": 0}, InvalidParams, "max_tokens"),
        ({"max_tokens": 10**6}, InvalidParams, "max_tokens"),
        ({"max_texts": 0}, InvalidParams, "max_texts"),
        ({"n_batch": 5}, InvalidParams, "max_tokens"),
        ({"n_bach": 5}, InvalidType, "n_batch"),
    ],
    ids=str,
)
def test_a_bad_option_is_named(bert: Model, options: dict[str, object], error: type[PacelineError], words: str) -> None:
    """Options of the context that follow from others, and unknown options, are refused."""
    with pytest.raises(error, match=words):
        Embedder(bert, **options)  # type: ignore[arg-type]


def test_each_way_of_asking_needs_its_pooling(bert: Model) -> None:
    """A vector a text and a vector a token are different calls; the error names the right call."""
    with Embedder(bert, pooling="none") as embedder, pytest.raises(InvalidParams, match="embed_tokens"):
        embedder.embed(TEXTS)
    with Embedder(bert, pooling="mean") as embedder, pytest.raises(InvalidParams, match="none"):
        embedder.embed_tokens(TEXTS)


def test_embedding_context_gives_hidden_states_of_tokens(llama: Model) -> None:
    """A context with embeddings and no pooling has a row for every wanted token."""
    options = {"n_threads": 1, "flash_attn": "off"}
    with Context(llama, n_ctx=256, embeddings=True, pooling="none", n_outputs_max=8, **options) as context:
        context.decode([5, 6, 7, 8], wants_logits="all")
        rows = np.stack([context.embeddings(i) for i in range(4)])
    with Embedder(llama, pooling="none", **options) as embedder:
        assert np.allclose(rows, embedder.embed_tokens([[5, 6, 7, 8]])[0], atol=1e-3)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("kind", sampled(["llama", "gemma3", "mamba", "lfm2", "bert"], every=4))
def test_a_long_text_has_the_vector_of_one_pass(tiny_models: TinyModels, kind: str, pooling: str) -> None:
    """In pieces or at once, in any context: every pooling equals the pooling of all tokens' vectors."""
    spec = replace(KINDS[kind], n_ctx_train=4096)  # type: ignore[type-var]
    options = {"n_threads": 1, "flash_attn": "off"}
    ids = np.random.default_rng(1).integers(5, 100, 2500).tolist()
    with Model.load(tiny_models(spec)) as model:
        with Embedder(model, pooling=pooling, **options) as embedder:  # type: ignore[arg-type]
            short = embedder.embed([ids[:9]])
            found = embedder.embed([ids[:9], ids, ids[:5]], normalize="none")
            assert np.allclose(embedder.embed([ids[:9]]), short, atol=2e-3)
        with Embedder(model, pooling="none", **options) as each:
            rows = each.embed_tokens([ids])[0]
            assert rows.shape == (2500, model.n_embd_out)
    pooled = {"mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1]}[pooling]
    assert np.allclose(found[1], pooled, atol=5e-3)


def test_the_trained_length_is_embedded(tiny_models: TinyModels) -> None:
    """By default, if the model was trained for more than the first context holds; one token more is refused."""
    spec = LlamaSpec(n_ctx_train=5000, n_layer=1)
    with Model.load(tiny_models(spec)) as model, Embedder(model, n_threads=1) as embedder:
        assert embedder.max_tokens == 5000
        assert np.isfinite(embedder.embed([[5] * 5000])).all()
        with pytest.raises(PromptTooLong, match="5001 tokens, and max_tokens is 5000"):
            embedder.embed([[5] * 5001])


def test_a_text_without_memory_fails_alone(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory is short for a long text, it is refused by its length, and shorter texts are embedded."""
    spec = BertSpec(n_ctx_train=8192, n_layer=1)
    with Model.load(tiny_models(spec)) as model, Embedder(model, n_threads=1) as embedder:
        before = embedder.embed([[5, 6]])
        monkeypatch.setattr("paceline.runtime.context_options.available_memory", lambda: 1 << 20)
        with pytest.raises(NotEnoughMemory, match="a text of 8000 tokens"):
            embedder.embed([[5] * 8000])
        assert np.allclose(embedder.embed([[5, 6]]), before, atol=1e-4)
        monkeypatch.undo()
        assert np.isfinite(embedder.embed([[5] * 8000])).all()


def test_a_closed_embedder_raises_closed(bert: Model) -> None:
    """Closed, and closing twice is fine."""
    embedder = Embedder(bert)
    embedder.close()
    embedder.close()
    with pytest.raises(Closed):
        embedder.embed(TEXTS)


def test_a_position_table_bounds_the_text(tiny_models: TinyModels) -> None:
    """By default the longest text has the model's trained length."""
    with Model.load(tiny_models(LlamaSpec(n_ctx_train=64))) as model, Embedder(model) as embedder:
        assert embedder.max_tokens == 64
