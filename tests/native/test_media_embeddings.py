"""Embeddings of prompts with images, in this process and in a worker: as a context computes them, refused, cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.cluster_world import ClusterWorld
from tests.exact import EXACT
from tests.native.test_images import marked
from tests.native.test_media_projector import PAIRS
from tests.pictures import picture, png
from tests.polling import LONG_S
from tests.sounds import tone

from paceline import LLM, AsyncLLM, Audio, Image
from paceline.cluster.cluster_engine import ClusterEngine
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDied,
    InvalidParams,
    InvalidType,
    PacelineError,
    PromptTooLong,
    Unsupported,
)
from paceline.request import RequestOptions
from paceline.runtime import Context, Embedder, MediaProjector, Model
from paceline.runtime.embedder import MediaEmbedder, normalized
from paceline.testing.models import BertSpec, LlamaSpec, Qwen2VlSpec, Qwen25VisionSpec, UltravoxAudioSpec, write_model

pytestmark = pytest.mark.native

Vector = npt.NDArray[np.float32]
ENGINE: dict[str, Any] = {"n_ctx": 1024, "num_slots": 4, **EXACT}
CLOSE = 1e-3  # other cells are summed in another order
QUESTION = "what is it?"


@pytest.fixture(params=PAIRS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def files(kind: str, tmp_path: Path) -> tuple[Path, Path]:
    """A model, and beside it its projector."""
    text, vision = PAIRS[kind]
    return write_model(tmp_path / "model.gguf", text), write_model(tmp_path / "mmproj-model.gguf", vision)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    write_model(tmp_path / "mmproj-qwen.gguf", Qwen25VisionSpec())
    return write_model(
        tmp_path / "qwen.gguf", Qwen2VlSpec(), metadata={"qwen2vl.pooling_type": 3, "qwen2vl.context_length": 4096}
    )


def expected_vector(files: tuple[Path, Path], before: str, pixels: Any, after: str) -> Vector:
    """The last hidden state of a context that is given the texts and the embeddings one after another."""
    with Model.load(files[0]) as model, MediaProjector.load(files[1], model, n_threads=1) as projector:
        sizes = {"n_ctx": 1024, "n_batch": 512, "n_ubatch": 512, "n_outputs_max": 512}
        with Context(model, embeddings=True, pooling="none", **sizes, **EXACT) as context:
            position = 0

            def add(ids: list[int]) -> None:
                nonlocal position
                context.decode(ids, positions=range(position, position + len(ids)))
                position += len(ids)

            add(model.tokenizer.encode(before))
            for part in projector.encode_image(pixels):
                if part.tokens:
                    add(list(part.tokens))
                else:
                    assert part.embeddings is not None
                    context.decode_embeddings(
                        0, position, part.embeddings, places=part.places, is_causal=part.is_causal
                    )
                    position += part.num_positions
            ids = model.tokenizer.encode(after, add_special=False)
            add(ids)
            return normalized(context.embeddings(len(ids) - 1)[np.newaxis], "l2")[0]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_vector_is_the_last_hidden_state(files: tuple[Path, Path], isolation: str) -> None:
    """Of a prompt alone and among texts, in order; texts beside it have the vectors that they have without it."""
    pixels, other = picture(5, 100, 60), picture(6, 100, 60)
    expected = expected_vector(files, "hello", pixels, QUESTION)
    with LLM(files[0], isolation=isolation, **ENGINE) as llm:
        prompt = ["hello", Image(pixels), QUESTION]
        found = llm.embed(prompt, pooling="last")
        assert found.shape == (llm.model.n_embd_out,)
        assert np.allclose(found, expected, atol=CLOSE)
        assert np.array_equal(llm.embed(["hel", "lo", Image(png(pixels)), QUESTION], pooling="last"), found)
        texts = llm.embed(["a text", "another"], pooling="last")
        mixed = llm.embed(
            ["a text", prompt, ["hello", Image(other), QUESTION], "another", prompt, [1, 2, 3]], pooling="last"
        )
        assert np.allclose(mixed[[0, 3]], texts, atol=CLOSE)
        assert np.allclose(mixed[[1, 4]], found, atol=CLOSE)
        assert not np.allclose(mixed[2], found, atol=1e-2)
        assert np.allclose(llm.embed([prompt], pooling="last"), found, atol=CLOSE)
        scaled = llm.embed(prompt, pooling="last", dimensions=16, normalize="max_abs")
        assert scaled.shape == (16,)
        assert np.abs(scaled).max() == pytest.approx(1)


def test_texts_are_embedded_as_by_an_embedder(files: tuple[Path, Path]) -> None:
    """Also prompts that take several passes."""
    with Model.load(files[0]) as model:
        ids = [5 + number % 40 for number in range(700)]
        with (
            MediaEmbedder(model, max_tokens=1024, **EXACT) as media,
            Embedder(model, pooling="last", max_tokens=1024, **EXACT) as texts,
        ):
            for item in (ids[:7], ids):
                expected = texts.embed([item], normalize="none")[0]
                assert np.allclose(media.embed([item]), expected, atol=CLOSE)
                assert np.allclose(media.embed([item[:3], item[3:]]), expected, atol=CLOSE)


def test_an_item_of_several_passes_is_as_at_once(qwen: Path) -> None:
    """A large image, of which a pass of the embedder has a part."""
    with Model.load(qwen) as model, MediaProjector.load(qwen.parent / "mmproj-qwen.gguf", model) as projector:
        parts = projector.encode_image(picture(1, 1200, 1000))
        (item,) = [part for part in parts if not part.tokens]
        assert item.num_cells > 520
        with Context(
            model, embeddings=True, pooling="none", n_ctx=2048, n_batch=2048, n_ubatch=2048, n_outputs_max=2048, **EXACT
        ) as context:
            context.decode([1, 2, 3])
            assert item.embeddings is not None
            context.decode_embeddings(0, 3, item.embeddings, places=item.places)
            context.decode([7, 8], positions=[3 + item.num_positions, 4 + item.num_positions])
            expected = context.embeddings(1)
        with MediaEmbedder(model, max_tokens=4000, **EXACT) as embedder:
            assert np.allclose(embedder.embed([[1, 2, 3], item, [7, 8]]), expected, atol=CLOSE)
            with pytest.raises(InvalidParams, match="must end with a token"):
                embedder.embed([[1], item])
            with pytest.raises(PromptTooLong, match="max_tokens is 4000"):
                embedder.embed([[1] * 4000, item, [7]])
            embedder.reserve(4000)  # in a larger context
            assert np.allclose(embedder.embed([[1, 2, 3], item, [7, 8]]), expected, atol=CLOSE)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_models_own_pooling_is_taken(qwen: Path, isolation: str) -> None:
    """With pooling of the last token."""
    prompt = ["a", Image(picture(1)), "b"]
    with LLM(qwen, isolation=isolation, **ENGINE) as llm:
        assert np.array_equal(llm.embed(prompt), llm.embed(prompt, pooling="last"))
        assert llm.embed([prompt, "text"]).shape == (2, llm.model.n_embd_out)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_what_cannot_be_is_refused_and_the_engine_goes_on(qwen: Path, isolation: str) -> None:
    """By the part that is wrong."""
    good, damaged = Image(picture(1)), Image(png(picture(1))[:300])
    prompt: list[Any] = ["a", good, "b"]
    with LLM(qwen, isolation=isolation, max_embedding_tokens=900, **ENGINE) as llm:
        expected = llm.embed(prompt)
        refused: list[tuple[Any, dict[str, Any], type[PacelineError], str]] = [
            (["a", good, damaged, "b"], {}, InvalidParams, "image 1: the image file is damaged"),
            ([prompt, ["a", damaged, "b"]], {}, InvalidParams, "image 1: the image file is damaged"),
            (prompt, {"pooling": "mean"}, Unsupported, 'pooling "last", not "mean"'),
            (prompt, {"pooling": "cls"}, Unsupported, 'pooling "last", not "cls"'),
            (prompt, {"truncate": "left"}, InvalidParams, "truncate"),
            ([[*[good] * 65, "b"]], {}, InvalidParams, "a prompt may have 64 images and audio, not 65"),
            ([prompt] * 65, {}, InvalidParams, "an embedding request may have 64 images and audio, not 65"),
            (["a" * 2000, good, "b"], {}, PromptTooLong, "raise max_embedding_tokens"),
            (["a", prompt, [good, 17]], {}, InvalidType, r"texts\[2\]\[1\].*token id of its own"),
            ([[good, [99999]]], {}, InvalidParams, r"texts\[0\]\[1\]"),
        ]
        for texts, options, error, words in refused:
            with pytest.raises(error, match=words):
                llm.embed(texts, **options)
        with pytest.raises(Unsupported, match='pooling "last", not "rank"'):
            llm.classify([prompt])  # type: ignore[list-item]
        assert np.array_equal(llm.embed(prompt), expected)
        assert llm.generate(prompt, max_tokens=3).token_ids


def test_a_prompt_ends_with_a_token(tmp_path: Path) -> None:
    """If the model has no mark after an image."""
    text, vision = PAIRS["llava"]
    write_model(tmp_path / "mmproj.gguf", vision)
    with LLM(write_model(tmp_path / "llava.gguf", text), **ENGINE) as llm:
        with pytest.raises(InvalidParams, match=r"texts\[0\]: a prompt must end with a token"):
            llm.embed(["what is this?", Image(picture(1))], pooling="last")
        with pytest.raises(Unsupported, match='"last", this model\'s own is "mean"'):
            llm.embed([Image(picture(1)), "?"])
        assert llm.embed([Image(picture(1)), "?"], pooling="last").shape == (llm.model.n_embd_out,)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_model_that_takes_no_images_says_so(qwen: Path, tmp_path: Path, isolation: str) -> None:
    """One without its projector, and one that only embeds texts."""
    prompt: Any = ["a", Image(picture(1)), "b"]
    with LLM(qwen, mmproj=False, isolation=isolation, **ENGINE) as llm:
        with pytest.raises(Unsupported, match=r"texts\[0\]\[1\]: this model takes no images"):
            llm.embed(prompt)
        assert llm.embed("a").shape == (llm.model.n_embd_out,)
    with LLM(write_model(tmp_path / "bert.gguf", BertSpec()), mmproj=False, isolation=isolation) as llm:
        with pytest.raises(Unsupported, match="this model takes no images"):
            llm.embed(prompt)
        with Model.load(tmp_path / "bert.gguf") as model, pytest.raises(Unsupported, match="decoders"):
            MediaEmbedder(model)


def test_async_and_generation_beside_it(qwen: Path) -> None:
    """Many at once, with streams in between: each vector is the same as alone."""
    prompts: list[Any] = [["a", Image(picture(seed, 90, 60)), "b"] for seed in range(4)]

    async def run() -> None:
        async with AsyncLLM(qwen, **ENGINE) as llm:
            alone = [await llm.embed(prompt) for prompt in prompts]
            text = await llm.embed("text")
            words = llm.generate(["c", prompts[0][1], "d"], max_tokens=20, ignore_eos=True)
            *found, last, completion = await asyncio.gather(*map(llm.embed, prompts), llm.embed("text"), words)
            assert np.allclose(found, alone, atol=CLOSE)
            assert np.allclose(last, text, atol=CLOSE)
            assert len(completion.token_ids) == 20

    asyncio.run(run())


# ---- while something is encoded, and after a crash


@pytest.fixture(params=["thread", "process"])
def slow(request: pytest.FixtureRequest, qwen: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An engine with an encoder that takes for ever over black pictures."""
    monkeypatch.setattr(MediaProjector, "encode_images", MediaProjector.encode_images)
    monkeypatch.setattr(MediaProjector, "abort", MediaProjector.abort)
    instruments = ["tests.native.test_images:SlowEncoding"]
    with LLM(qwen, isolation=request.param, instruments=instruments, **ENGINE) as llm:
        yield llm


def test_deadlines_and_cancels_end_requests_that_are_encoded_or_wait_for_it(slow: LLM) -> None:
    """At their time; texts go on meanwhile, and others are encoded then."""

    def begun(seed: int, value: int, **options: Any) -> Any:
        return slow.engine.embed([["a", marked(seed, value), "b"]], None, RequestOptions(**options))

    expected = slow.embed("text")
    first, behind = begun(1, 0), begun(2, 100, queue_timeout_s=0.3)
    dropped, last = begun(3, 100), begun(4, 100)
    assert dropped.cancel()
    assert np.array_equal(slow.embed("text"), expected)
    with pytest.raises(DeadlineExceeded):
        behind.result(LONG_S)
    assert not first.done()
    first.cancel()
    assert len(last.result(LONG_S)) == 1
    with pytest.raises(DeadlineExceeded):
        begun(7, 0, timeout_s=0.5).result(LONG_S)
    encoding = begun(5, 0)
    time.sleep(0.2)
    encoding.cancel()
    assert slow.embed(["a", marked(6, 100), "b"]).shape == expected.shape


def test_closing_ends_running_encodings(slow: LLM) -> None:
    """And waiting requests."""
    futures = [slow.engine.embed([["a", marked(seed, 0), "b"]], None, RequestOptions()) for seed in (1, 2)]
    time.sleep(0.3)
    slow.close()
    for future in futures:
        with pytest.raises((PacelineError, Cancelled)):
            future.result(30)


def test_a_worker_that_dies_is_replaced_and_the_vectors_come(qwen: Path) -> None:
    """Of waiting requests; a picture that kills the encoder ends its own request alone."""
    prompts: list[Any] = [["a", marked(seed, 100), "b"] for seed in (1, 2, 3)]
    with LLM(qwen, isolation="process", instruments=["tests.native.test_images:SlowEncoding"], **ENGINE) as llm:
        expected = llm.embed(prompts)
        pid: Any = llm.engine.worker_pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)
        future = llm.engine.embed(prompts, None, RequestOptions())
        os.kill(pid, signal.SIGKILL)
        assert np.allclose(normalized(np.stack(future.result(60)), "l2"), expected, atol=CLOSE)
        with pytest.raises(EngineDied, match="SIGABRT"):
            llm.embed(["a", marked(4, 255), "b"])
        assert np.allclose(llm.embed(prompts), expected, atol=CLOSE)


# ---- a cluster


class WorkerReplicas(ClusterWorld):
    """Replicas with workers with a vision model."""

    def __init__(self, model: Path, *names: str) -> None:
        self._model = model
        super().__init__(*names)

    def _make(self, name: str) -> None:
        self.replicas[name] = WorkerEngine(self._model, ENGINE)  # type: ignore[assignment]
        self.members[name] = None

    def engine(self, **options: Any) -> ClusterEngine:
        return ClusterEngine([str(self._model)], {**ENGINE, **options}, self._make_calls)


def test_a_cluster_embeds_images(qwen: Path) -> None:
    """With the results of a single engine, also if the replica dies; errors of an image reach the caller."""
    prompts: list[Any] = [["a", Image(picture(1)), "b"], "text", ["c", Image(picture(2)), "d"]]
    with LLM(qwen, **ENGINE) as llm:
        expected = llm.embed(prompts)
    world = WorkerReplicas(qwen, "one", "two")
    engine = world.engine()
    try:
        found = engine.embed(prompts, None, RequestOptions()).result(60)
        assert np.allclose(normalized(np.stack(found), "l2"), expected, atol=CLOSE)
        damaged = engine.embed([["a", Image(png(picture(1))[:300]), "b"]], None, RequestOptions())
        with pytest.raises(InvalidParams, match="image 0: the image file is damaged"):
            damaged.result(60)
        with pytest.raises(Unsupported, match='pooling "last", not "mean"'):
            engine.embed(prompts, "mean", RequestOptions()).result(60)
        world.preferred = ("one",)
        world.dies_of.append(("one", "submit"))
        found = engine.embed(prompts, None, RequestOptions()).result(60)
        assert np.allclose(normalized(np.stack(found), "l2"), expected, atol=CLOSE)
    finally:
        engine.close()
        world.close()


def test_audio_is_embedded_too(tmp_path: Path) -> None:
    """Another sound changes the vector, and the same sound does not."""
    write_model(tmp_path / "mmproj.gguf", UltravoxAudioSpec())
    with LLM(write_model(tmp_path / "model.gguf", LlamaSpec(pooling="last")), **ENGINE) as llm:
        heard = [Audio(tone(1.0, pitch=pitch), 16000) for pitch in (300, 700, 300)]
        found = llm.embed([["hear", message, QUESTION] for message in heard])
        assert np.allclose(found[0], found[2], atol=CLOSE)
        assert not np.allclose(found[0], found[1], atol=1e-2)
