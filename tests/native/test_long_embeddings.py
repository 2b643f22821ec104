"""Embedding and reranking by an engine: texts up to the trained length, and longer texts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.native.conftest import TinyModels

from paceline import LLM
from paceline.engine.prompts import embeddable, refuse_media
from paceline.errors import InvalidParams, NotEnoughMemory, PromptTooLong
from paceline.request import RequestOptions, Truncate
from paceline.testing.models import BertSpec, LlamaSpec

pytestmark = pytest.mark.native

TRAINED = 3000
ENCODER = BertSpec(n_ctx_train=TRAINED, n_layer=1)
DECODER = LlamaSpec(n_ctx_train=TRAINED, n_layer=1, pooling="last")


def ids(count: int) -> list[int]:
    result: list[int] = np.random.default_rng(0).integers(5, 100, count).tolist()
    return result


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("spec", [ENCODER, DECODER], ids=["encoder", "decoder"])
def test_texts_up_to_the_trained_length_are_embedded(
    tiny_models: TinyModels, spec: BertSpec | LlamaSpec, isolation: str
) -> None:
    """By default; one token more is refused by its length, and cut if truncate is set."""
    options = {"n_threads": 1, "flash_attn": "off", "num_slots": 1, "isolation": isolation}
    with LLM(tiny_models(spec), **options) as llm:  # type: ignore[arg-type]
        assert llm.limits.max_embedding_tokens == TRAINED
        short = llm.embed([ids(5)])
        whole = llm.embed([ids(TRAINED)])
        assert np.isfinite(whole).all()
        longer = ids(TRAINED + 1)
        with pytest.raises(
            PromptTooLong, match=r"text 1 is too large: it has 3001 tokens, .* \(3000 tokens\).*truncate"
        ):
            llm.embed([ids(5), longer])
        assert np.allclose(llm.embed([longer], truncate="right"), whole, atol=2e-3)
        assert np.allclose(llm.embed([longer], truncate="left"), llm.embed([longer[1:]]), atol=2e-3)
        assert np.allclose(llm.embed([ids(5)], truncate="middle"), short, atol=2e-3)
        with pytest.raises(InvalidParams, match="truncate"):
            llm.embed([ids(5)], truncate="both")


@pytest.mark.parametrize(
    ("side", "cut"), [("right", [1, 5, 6, 7, 2]), ("left", [1, 8, 9, 10, 2]), ("middle", [1, 5, 9, 10, 2])]
)
def test_the_tokens_at_both_ends_stay(side: Truncate, cut: list[int]) -> None:
    """Bos in front and eos or sep at the end, at which models pool; a limit of nothing more keeps the fitting part."""
    options = RequestOptions(truncate=side)
    special = {"bos": 1, "eos": 2}
    text = [1, 5, 6, 7, 8, 9, 10, 2]
    tokenizer = SimpleNamespace(special_tokens=special, n_vocab=20)
    assert embeddable([text, [3]], tokenizer, options, 5, refuse_media) == [cut, [3]]
    assert embeddable([text], tokenizer, options, 2, refuse_media) == [[1, 5]]
    assert len(embeddable([text[1:-1]], tokenizer, options, 5, refuse_media)[0]) == 5


def test_the_longest_text_is_an_option(tiny_models: TinyModels) -> None:
    """Lower than the model's length; above it the option is refused with both numbers."""
    with LLM(tiny_models(ENCODER), n_threads=1, max_embedding_tokens=20) as llm:
        assert llm.embed([ids(20)]).shape == (1, 64)
        with pytest.raises(PromptTooLong, match=r"21 tokens, .* \(20 tokens\)"):
            llm.embed([ids(21)])
    with pytest.raises(InvalidParams, match="max_embedding_tokens must be at most 3000, .*not 3001"):
        LLM(tiny_models(ENCODER), max_embedding_tokens=3001)


def test_a_document_that_is_too_long_is_cut_and_its_query_is_not(tiny_models: TinyModels) -> None:
    """Truncating takes tokens from the document; a query that does not fit is refused all the same."""
    document = "one two three " * 40
    with LLM(tiny_models(BertSpec(pooling="rank")), n_threads=1, max_embedding_tokens=60) as llm:
        with pytest.raises(PromptTooLong, match=r"documents\[1\] with the query is too large"):
            llm.rerank("a query", ["short", document])
        scores = llm.rerank("a query", ["short", document], truncate="right")
        assert sorted(score.index for score in scores) == [0, 1]
        other = llm.rerank("a query", [document + "four"], truncate="right")[0].score
        assert other == pytest.approx(next(score.score for score in scores if score.index == 1), abs=1e-3)
        with pytest.raises(PromptTooLong, match=r"the query, with nothing of documents\[0\], is too large"):
            llm.rerank(document, ["short"], truncate="right")
        assert len(llm.rerank("a query", ["short"])) == 1


def test_a_text_without_memory_fails_alone(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """NotEnoughMemory for the long text, and the engine embeds and generates on."""
    with LLM(tiny_models(DECODER), n_threads=1, num_slots=1) as llm:
        before = llm.embed([ids(5)])
        monkeypatch.setattr("paceline.runtime.context_options.available_memory", lambda: 1 << 20)
        with pytest.raises(NotEnoughMemory, match="a text of 2900 tokens"):
            llm.embed([ids(2900)])
        assert np.allclose(llm.embed([ids(5)]), before, atol=2e-3)
        assert len(llm.generate(ids(5), max_tokens=3, ignore_eos=True).token_ids) == 3
