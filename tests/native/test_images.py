"""Prompts with images, in an engine of this process and in a worker: as llama.cpp computes them, cached, cancelled, refused."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.exact import EXACT
from tests.native.conftest import TinyModels
from tests.native.test_media_projector import PAIRS
from tests.pictures import picture, png

from paceline import LLM, AsyncLLM, Conversation, FinishReason, Image
from paceline.clock import MonotonicClock
from paceline.engine.backend import Executor
from paceline.engine.core import Stop, Submit
from paceline.engine.media_encoder import EncodingInbox, MediaEncoder
from paceline.errors import (
    Aborted,
    BatchError,
    Cancelled,
    DecodeError,
    EngineDied,
    InvalidParams,
    InvalidType,
    ModelLoadError,
    PromptTooLong,
    StateError,
    Unsupported,
)
from paceline.kv_cache import MediaItem
from paceline.observability.metrics import Instrument
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Context, MediaPart, MediaProjector, Model, Sampler
from paceline.runtime.step import StepRow
from paceline.sequence import Request
from paceline.testing.fake_backend import FakeBackend
from paceline.testing.models import CHAT_TEMPLATE, BertSpec, LlavaVisionSpec, Qwen2VlSpec, Qwen25VisionSpec, write_model

ENGINE: dict[str, Any] = {"n_ctx": 1024, "num_slots": 4, **EXACT}
_ANY_SIZE = ("qwen2.5vl", "qwen3vl", "gemma4", "pixtral")
GREEDY: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
QUESTION = "what is it?"


@pytest.fixture(params=PAIRS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def files(kind: str, tmp_path: Path) -> tuple[Path, Path]:
    """A model, and beside it its projector."""
    text, vision = PAIRS[kind]
    model = write_model(tmp_path / "model.gguf", text, metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    return model, write_model(tmp_path / "mmproj-model.gguf", vision)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    write_model(tmp_path / "mmproj-qwen.gguf", Qwen25VisionSpec())
    return write_model(tmp_path / "qwen.gguf", Qwen2VlSpec())


def expected_ids(files: tuple[Path, Path], before: str, pixels: Any, after: str, count: int = 10) -> list[int]:
    """Return a context's generated tokens, given the texts and the embeddings in order."""
    with Model.load(files[0]) as model, MediaProjector.load(files[1], model, n_threads=1) as projector:
        with Context(model, n_ctx=1024, n_batch=512, n_ubatch=512, n_seq_max=2, **EXACT) as context:
            sampler, position = Sampler(SamplingParams(temperature=0, ignore_eos=True), model), 0

            def compute(ids: list[int]) -> int:
                row = StepRow(seq_id=0, position=position, token_ids=ids, samplers=(sampler,))
                return context.step([row]).rows[0].draws[0].token_ids[0]

            def add(ids: list[int]) -> None:
                nonlocal position
                context.step([StepRow(seq_id=0, position=position, token_ids=ids)])
                position += len(ids)

            add(model.tokenizer.encode(before, parse_special=True))
            for part in projector.encode_image(pixels):
                if part.tokens:
                    add(list(part.tokens))
                else:
                    assert part.embeddings is not None
                    context.decode_embeddings(
                        0, position, part.embeddings, places=part.places, is_causal=part.is_causal, scratch_seq_id=1
                    )
                    position += part.num_positions
            ids = model.tokenizer.encode(after, add_special=False, parse_special=True)
            found: list[int] = []
            for _ in range(count):
                found.append(compute(ids))
                position, ids = position + len(ids), found[-1:]
            return found


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_engine_generates_what_a_context_does(files: tuple[Path, Path], isolation: str) -> None:
    """From a prompt and from a chat; the projector beside the model is found."""
    pixels = picture(5, 100, 60)
    expected = expected_ids(files, "hello", pixels, QUESTION)
    turn = expected_ids(files, "<|im_start|>user\n", pixels, f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    with LLM(files[0], isolation=isolation, **ENGINE) as llm:
        assert llm.model.modalities == {"text", "image"}
        found = llm.generate(["hello", Image(pixels), QUESTION], **GREEDY)
        assert list(found.token_ids) == expected
        assert list(llm.generate(["hel", "lo", Image(pixels), QUESTION], **GREEDY).token_ids) == expected
        url = "data:image/png;base64," + base64.b64encode(png(pixels)).decode()
        text = {"type": "text", "text": QUESTION}
        for part in (
            Image(pixels),
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image", "image": pixels},
        ):
            reply = llm.chat([{"role": "user", "content": [part, text]}], **GREEDY)
            assert reply.content == llm.tokenizer.decode(turn)
            assert reply.messages[0]["content"][0] is part
        with llm.stream(["hello", Image(png(pixels)), QUESTION], **GREEDY) as stream:
            assert [token_id for chunk in stream for token_id in chunk.token_ids] == expected
        both = llm.generate([["hello", Image(pixels), QUESTION], "plain", ["hello", Image(pixels), QUESTION]], **GREEDY)
        assert [list(both[0].token_ids), list(both[2].token_ids)] == [expected, expected]
        choices = llm.generate(["hello", Image(pixels), QUESTION], n=2, **GREEDY).choices
        assert [list(choice.token_ids) for choice in choices] == [expected, expected]


def test_the_same_picture_is_encoded_once(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And found in the KV cache with all before it, also by another question."""
    encoded: list[Any] = []
    real = MediaProjector.encode_images
    monkeypatch.setattr(
        MediaProjector, "encode_images", lambda self, images: (encoded.extend(images), real(self, images))[1]
    )
    with LLM(qwen, **ENGINE) as llm:
        one, other = Image(picture(1, 200, 100)), Image(picture(2, 200, 100))
        first = llm.generate(["hello", one, QUESTION], **GREEDY)
        questions = [["hello", one, f"question {number}"] for number in range(4)]
        found = llm.generate(questions, **GREEDY)
        assert len(encoded) == 1
        cells = sum(token_id < 0 for token_id in first.prompt_token_ids)
        assert cells > 10
        assert all(completion.usage.cached_tokens > cells for completion in found)
        assert len({completion.token_ids for completion in found}) == 4
        again = llm.generate(["hello", other, QUESTION], **GREEDY)
        assert len(encoded) == 2
        assert again.usage.cached_tokens < cells
        assert again.token_ids != first.token_ids
        salted = llm.generate(["hello", one, QUESTION], cache_salt="other", **GREEDY)
        assert salted.usage.cached_tokens == 0
        assert len(encoded) == 3  # or the time it takes would tell of others' images


def test_no_memory_for_embeddings_costs_time_alone(qwen: Path) -> None:
    """The same picture is encoded again."""
    with LLM(qwen, media_cache_bytes=0, cache_prompt=False, **ENGINE) as llm:
        prompt = ["hello", Image(picture(1)), QUESTION]
        assert llm.generate(prompt, **GREEDY).token_ids == llm.generate(prompt, **GREEDY).token_ids


def test_pictures_that_have_to_make_way_are_computed_again(files: tuple[Path, Path]) -> None:
    """In a memory for two of them, with eight at once that share it: each generates the same as alone."""
    prompts = [["hello", Image(picture(seed, 150, 90)), QUESTION] for seed in (1, 2, 3, 4)] * 2
    options = {**GREEDY, "max_tokens": 40}
    with LLM(files[0], cache_prompt=False, **ENGINE) as llm:
        alone = [llm.generate(prompt, **options).token_ids for prompt in prompts[:4]] * 2
    with LLM(files[0], **{**ENGINE, "n_ctx": 256, "num_slots": 4}) as llm:
        for _ in range(2):
            assert [completion.token_ids for completion in llm.generate(prompts, **options)] == alone


def test_speculation_proposes_no_images(files: tuple[Path, Path]) -> None:
    """If the last tokens came before, directly in front of an image; the output is the same as without."""
    prompt = ["hello hello hello", Image(picture(1)), "hello hello hello", Image(picture(2)), "hello hello hello"]
    options = {**GREEDY, "max_tokens": 40}
    with LLM(files[0], swa_full=True, **ENGINE) as llm:
        expected = llm.generate(prompt, **options).token_ids
    with LLM(files[0], swa_full=True, speculation="ngram:size_n=1", **ENGINE) as llm:
        assert llm.generate(prompt, **options).token_ids == expected


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_what_cannot_be_is_refused_and_the_engine_goes_on(qwen: Path, isolation: str) -> None:
    """By the part that is wrong; of several prompts the others are generated."""
    good = Image(picture(1))
    damaged = Image(png(picture(1))[:300])
    with LLM(qwen, isolation=isolation, **ENGINE) as llm:
        expected = llm.generate(["a", good, "b"], **GREEDY).token_ids
        with pytest.raises(InvalidParams, match="image 1: the image file is damaged"):
            llm.generate(["a", good, damaged, "b"], **GREEDY)
        with pytest.raises(BatchError) as raised:
            llm.generate([["a", good, "b"], ["a", damaged, "b"], "plain"], **GREEDY)
        outcomes = raised.value.outcomes
        assert [isinstance(outcome, InvalidParams) for outcome in outcomes] == [False, True, False]
        assert outcomes[0].token_ids == expected  # type: ignore[union-attr]
        with pytest.raises(InvalidParams, match="64 images and audio, not 100"):
            llm.generate([*[good] * 100, "b"], **GREEDY)
        with pytest.raises(InvalidParams, match="truncate"):
            llm.generate(["a", good, "b"], truncate="left", **GREEDY)
        with pytest.raises(Unsupported, match="prompt_logprobs"):
            llm.generate(["a", good, "b"], prompt_logprobs=1, **GREEDY)
        with pytest.raises(PromptTooLong):
            llm.generate(["a" * 2000, good, "b"], **GREEDY)
        for wrong, words in ((17, r"prompt\[1\].*token id of its own"), (b"x", "bytes"), (None, "NoneType")):
            with pytest.raises(InvalidType, match=words):
                llm.generate([good, wrong], **GREEDY)
        with pytest.raises(InvalidParams, match=r"prompt\[1\]"):
            llm.generate([good, [99999]], **GREEDY)
        streamed: dict[int, list[int]] = {0: [], 1: []}
        with (
            pytest.raises(BatchError, match="image 0: the image file is damaged"),
            llm.stream([["a", good, "b"], ["a", damaged, "b"]], **GREEDY) as streams,
        ):
            for index, chunk in streams:
                streamed[index] += chunk.token_ids
        assert streamed == {0: list(expected), 1: []}
        with pytest.raises(Unsupported, match="state_folder"):
            llm.save_prefix("name", ["a", good])
        for content, error, words in (
            ([{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}], InvalidParams, "data URL"),
            ([{"type": "image_url"}], InvalidParams, r"messages\[0\].content\[0\].image_url is missing"),
            ([{"type": "image", "image": b"nothing"}], InvalidParams, r"content\[0\].image: an image must be"),
            ([good, {"type": "input_video"}], InvalidType, r"content\[1\] must be a text part, an image or audio"),
            ([good, "text"], InvalidType, r"content\[1\]"),
            ([{"type": "image_url", "image_url": {"url": None}}], InvalidType, r"image_url.url"),
        ):
            with pytest.raises(error, match=words):
                llm.chat([{"role": "user", "content": content}], chat_template="chatml", **GREEDY)
        with pytest.raises(InvalidParams, match="not of the assistant"):
            llm.chat([{"role": "assistant", "content": [good]}], chat_template="chatml", **GREEDY)
        assert llm.generate(["a", good, "b"], **GREEDY).token_ids == expected


def test_a_prompt_ends_with_a_token(tmp_path: Path) -> None:
    """If the model has no mark after an image."""
    text, vision = PAIRS["llava"]
    write_model(tmp_path / "mmproj.gguf", vision)
    with LLM(write_model(tmp_path / "llava.gguf", text), **ENGINE) as llm:
        with pytest.raises(InvalidParams, match="must end with a token"):
            llm.generate(["what is this?", Image(picture(1))], **GREEDY)
        assert llm.generate([Image(picture(1)), "?"], **GREEDY).token_ids


def test_streams_go_on_while_a_picture_is_encoded_and_its_cancel_ends_it(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes; then another one is encoded."""
    real, began, may_go = MediaProjector.encode_images, threading.Event(), threading.Event()

    def encode(self: MediaProjector, images: Any) -> list[list[MediaPart]]:
        began.set()
        assert may_go.wait(60)
        return real(self, images)

    monkeypatch.setattr(MediaProjector, "encode_images", encode)
    with LLM(qwen, **ENGINE) as llm:
        pictured = llm.stream(["a", Image(picture(1)), "b"], max_tokens=5, ignore_eos=True)
        assert began.wait(60)
        others = llm.generate(["one", "two"], max_tokens=50, ignore_eos=True)
        assert all(len(other.token_ids) == 50 for other in others)
        assert llm.slots().num_processing == 0
        pictured.cancel()
        may_go.set()
        chunks = list(pictured)
        assert chunks[-1].finish_reason is FinishReason.CANCELLED
        assert not any(chunk.token_ids for chunk in chunks)
        assert len(llm.generate(["a", Image(picture(2)), "b"], **GREEDY).token_ids) == 10


def test_closing_ends_an_encoding(tmp_path: Path) -> None:
    """Its stream ends, and the process can."""
    write_model(tmp_path / "mmproj.gguf", Qwen25VisionSpec(n_layer=24, n_embd=256, n_head=8, n_ff=512))
    llm = LLM(write_model(tmp_path / "m.gguf", Qwen2VlSpec(n_ctx_train=8192)), **{**ENGINE, "n_ctx": 8192})
    stream = llm.stream(["a", Image(picture(1, 1400, 1400)), "b"], max_tokens=5)
    time.sleep(0.3)
    llm.close()
    assert list(stream)[-1].finish_reason is not None


def test_requests_go_on_in_the_next_worker(qwen: Path) -> None:
    """With their pictures, which are encoded again."""
    prompt = ["hello", Image(picture(3)), QUESTION]
    with LLM(qwen, isolation="process", **ENGINE) as llm:
        options = {**GREEDY, "max_tokens": 60}
        expected = llm.generate(prompt, **options).token_ids
        with llm.stream(prompt, **options) as stream:
            chunks = iter(stream)
            first = next(chunks)
            pid: Any = llm.engine.worker_pid  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGKILL)
            rest = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert (*first.token_ids, *rest) == expected


def test_async(qwen: Path) -> None:
    """With the same results as the other."""

    async def run() -> tuple[Any, Any]:
        async with AsyncLLM(qwen, **ENGINE) as llm:
            prompt = ["hello", Image(picture(3)), QUESTION]
            found = await llm.generate(prompt, **GREEDY)
            async with llm.stream(prompt, **GREEDY) as stream:
                return found.token_ids, tuple([token_id async for chunk in stream for token_id in chunk.token_ids])

    whole, streamed = asyncio.run(run())
    assert whole == streamed
    assert len(whole) == 10


# ---- which projector


def test_a_model_without_a_projector_takes_no_images(tiny_models: TinyModels, tmp_path: Path) -> None:
    """With the way to get a projector; also if its projector is left out, or if there are two."""
    model = write_model(tmp_path / "model.gguf", Qwen2VlSpec())
    for options in ({}, {"mmproj": False}, {"isolation": "process"}):
        with LLM(model, **options, **ENGINE) as llm:
            assert llm.model.modalities == {"text"}
            with pytest.raises(Unsupported, match="mmproj"):
                llm.generate(["a", Image(picture(1)), "b"])
            assert llm.generate("a", max_tokens=3).token_ids
    with pytest.raises(ModelLoadError, match="has none"):
        LLM(model, mmproj=True, **ENGINE)
    one = write_model(tmp_path / "mmproj-a.gguf", Qwen25VisionSpec())
    with LLM(model, mmproj=True, **ENGINE) as llm:
        assert "image" in llm.model.modalities
    with LLM(model, mmproj=False, **ENGINE) as llm:
        assert "image" not in llm.model.modalities
    write_model(tmp_path / "mmproj-b.gguf", Qwen25VisionSpec())
    for isolation in ("thread", "process"):
        with LLM(model, isolation=isolation, **ENGINE) as llm:
            assert "image" not in llm.model.modalities
            with pytest.raises(Unsupported, match=r"mmproj-a\.gguf, mmproj-b\.gguf"):
                llm.generate(["a", Image(picture(1)), "b"])
    with pytest.raises(ModelLoadError, match="has 2: mmproj-a.gguf, mmproj-b.gguf"):
        LLM(model, mmproj=True, **ENGINE)
    with LLM(model, mmproj=one, **ENGINE) as llm:
        assert "image" in llm.model.modalities


def test_a_projector_of_another_model_is_left_where_it_was_found_and_refused_where_it_was_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder may hold several models."""
    model = write_model(tmp_path / "model.gguf", Qwen2VlSpec())
    other = write_model(tmp_path / "mmproj.gguf", LlavaVisionSpec(n_embd_text=32))
    with caplog.at_level(logging.WARNING, "paceline.engine"), LLM(model, **ENGINE) as llm:
        assert llm.model.modalities == {"text"}
    assert "mmproj.gguf" in caplog.text
    for isolation in ("thread", "process"):
        with pytest.raises(ModelLoadError, match="n_embd = 32"):
            LLM(model, mmproj=other, isolation=isolation, **ENGINE)
    with pytest.raises(ModelLoadError, match="no projector file"):
        LLM(model, mmproj=tmp_path / "none.gguf", **ENGINE)


def test_a_model_that_generates_nothing_takes_no_projector(tmp_path: Path) -> None:
    """One that was given is refused, one that is there is left."""
    model = write_model(tmp_path / "bert.gguf", BertSpec())
    projector = write_model(tmp_path / "mmproj.gguf", LlavaVisionSpec())
    with pytest.raises(Unsupported, match="generates no text"):
        LLM(model, mmproj=projector)
    with LLM(model) as llm:
        assert llm.model.modalities == {"text"}


def test_limits_of_tokens_that_a_projector_does_not_keep_are_refused(files: tuple[Path, Path], kind: str) -> None:
    """For a projector of a fixed size, its number; for a projector of any size, images have at least and at most that many."""
    if kind not in _ANY_SIZE:
        for options in ({"image_min_tokens": 5000}, {"image_max_tokens": 1}):
            with pytest.raises(
                InvalidParams, match="has no effect with the projector mmproj-model.gguf.* takes 16 tokens"
            ):
                LLM(files[0], **options, **ENGINE)
        return
    with LLM(files[0], image_min_tokens=100, image_max_tokens=200, **ENGINE) as llm:
        for side in (20, 2000):
            used = llm.generate(["a", Image(picture(1, side, side)), "b"], max_tokens=1).usage.prompt_tokens
            assert 100 <= used <= 240  # rows and columns are rounded


def test_the_callers_model_stays_as_it_was(qwen: Path) -> None:
    """Engines of one model may have other projectors."""
    with Model.load(qwen) as model:
        with LLM(model, **ENGINE) as llm, LLM(model, mmproj=False, **ENGINE) as other:
            assert llm.model.modalities == {"image", "text"}
            assert other.model.modalities == model.modalities == {"text"}
            assert llm.model.desc == model.desc
        assert model.tokenizer.encode("a")


def test_wrong_options_are_refused(qwen: Path) -> None:
    """Before anything is loaded, as far as that can be."""
    for options, words in (
        ({"mmproj": 5}, "mmproj"),
        ({"image_max_tokens": 0}, "image_max_tokens"),
        ({"media_cache_bytes": -1}, "media_cache_bytes"),
        ({"mmproj_offload": "yes"}, "mmproj_offload"),
        ({"image_min_tokens": 9, "image_max_tokens": 8}, "image_min_tokens"),
    ):
        with pytest.raises((InvalidParams, InvalidType), match=words):
            LLM(qwen, **options, **ENGINE)


# ---- the guide


def test_every_block_of_the_guide_runs(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its snippets work, with each kind of projector."""
    page = Path(__file__).parents[2] / "docs/guide/media.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(files[0].parent)
    Path("cat.png").write_bytes(png(picture(1)))
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number}", "exec", dont_inherit=True), names)
    assert len(blocks) == 6
    assert "['image', 'text']" in capsys.readouterr().out


# ---- the encoder


class StandIn:
    """A projector that waits until it may encode."""

    def __init__(self) -> None:
        self.may_go, self.is_encoding = threading.Event(), threading.Event()
        self.num_encoded = 0
        self.is_aborted = False

    def encode_images(self, images: list[Any]) -> list[list[Any]]:
        self.is_encoding.set()
        while not self.may_go.wait(0.01):
            if self.is_aborted:
                self.is_aborted = False
                raise Aborted("aborted")
        self.num_encoded += len(images)
        return [[MediaPart((), 4, 4, True, None, np.full((4, 8), image.mean(), np.float32))] for image in images]

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.abort()


@pytest.fixture
def stand_in() -> tuple[StandIn, MediaEncoder]:
    projector: Any = StandIn()
    return projector, MediaEncoder(projector, 300)


def test_embeddings_are_kept_within_their_bytes(stand_in: tuple[StandIn, MediaEncoder]) -> None:
    """The least recently used are evicted first; an item that is too large alone is not kept."""
    projector, encoder = stand_in
    projector.may_go.set()
    media = [MediaItem(3, 4, 4, b"x")]

    def encode(seed: int) -> int:
        before = projector.num_encoded
        found = encoder.encode(seed, [Image(picture(seed))], media)
        assert found[3].embeddings is not None
        assert not found[3].embeddings.flags.writeable
        return projector.num_encoded - before

    assert [encode(1), encode(2), encode(1), encode(3), encode(1), encode(2)] == [1, 1, 0, 1, 0, 1]


def test_images_of_one_size_are_encoded_at_once(stand_in: tuple[StandIn, MediaEncoder]) -> None:
    """Neighbouring images; an image that comes twice, and a cached image, are encoded once."""
    projector, _ = stand_in
    encoder, groups = MediaEncoder(projector, 1 << 20), []  # type: ignore[arg-type]
    projector.may_go.set()
    real = projector.encode_images
    projector.encode_images = lambda images: (groups.append(len(images)), real(images))[1]  # type: ignore[method-assign]
    wide, tall = (60, 40), (40, 60)
    shapes = [(1, wide), (2, wide), (3, wide), (4, tall), (5, wide), (1, wide), (6, wide)]
    media = [MediaItem(10 * index, 4, 4, b"x") for index in range(len(shapes))]
    images = [Image(picture(seed, *size)) for seed, size in shapes]
    found = encoder.encode(1, images, media)
    assert groups == [3, 1, 1, 1]
    values = [float(found[item.start].embeddings[0, 0]) for item in media]  # type: ignore[index]
    assert values == [pytest.approx(picture(seed, *size).mean()) for seed, size in shapes]
    assert encoder.encode(2, [images[6], Image(picture(7)), images[0]], media[:3])[10].embeddings is not None
    assert groups == [3, 1, 1, 1, 1]


def test_an_image_of_several_that_cannot_be_encoded_is_named(stand_in: tuple[StandIn, MediaEncoder]) -> None:
    """The others of its size are not to blame."""
    projector, encoder = stand_in
    projector.may_go.set()
    real = projector.encode_images

    def encode(images: list[Any]) -> list[list[Any]]:
        if any(pixels[0, 0].max() == 0 for pixels in images):
            raise DecodeError("too dark")
        return real(images)

    projector.encode_images = encode  # type: ignore[method-assign]
    media = [MediaItem(10 * index, 4, 4, b"x") for index in range(3)]
    with pytest.raises(DecodeError, match="image 1: too dark"):
        encoder.encode(1, [Image(picture(1)), marked(2, 0), Image(picture(3))], media)
    assert encoder.encode(2, [Image(picture(1)), Image(picture(2))], media[:2])[10].embeddings is not None


def test_an_abort_that_was_for_another_request_is_tried_again(stand_in: tuple[StandIn, MediaEncoder]) -> None:
    """One that was for this request ends it, and so does closing."""
    from paceline.errors import Aborted

    projector, encoder = stand_in
    outcome: list[Any] = []

    def encode(key: int) -> threading.Thread:
        def run() -> None:
            try:
                outcome.append(encoder.encode(key, [Image(picture(key))], [MediaItem(0, 4, 4, b"x")]))
            except Exception as error:
                outcome.append(error)

        projector.is_encoding.clear()
        thread = threading.Thread(target=run)
        thread.start()
        assert projector.is_encoding.wait(10)
        return thread

    thread = encode(1)
    projector.abort()
    encoder.cancel(77)
    projector.may_go.set()
    thread.join(10)
    assert isinstance(outcome.pop(), dict)
    projector.may_go.clear()
    thread = encode(2)
    encoder.cancel(2)
    thread.join(10)
    assert isinstance(outcome.pop(), Cancelled)
    thread = encode(3)
    encoder.close()
    thread.join(10)
    assert isinstance(outcome.pop(), Aborted)


@pytest.mark.parametrize("namespace", [("one", None), (None, "salt")])
def test_embeddings_are_kept_for_their_namespace(
    stand_in: tuple[StandIn, MediaEncoder], namespace: tuple[str | None, str | None]
) -> None:
    """Another tenant or salt has the image encoded again."""
    projector, encoder = stand_in
    projector.may_go.set()
    for number in range(2):
        for key in ((None, None), namespace):
            encoder.encode(number, [Image(picture(1))], [MediaItem(0, 4, 4, b"x")], key)
    assert projector.num_encoded == 2


def test_a_cancel_from_before_its_call_and_behind_its_last_node_is_seen(stand_in: tuple[StandIn, MediaEncoder]) -> None:
    """Whatever the projector was told."""
    projector, encoder = stand_in
    projector.may_go.set()
    media = [MediaItem(0, 4, 4, b"x")]
    with pytest.raises(Cancelled):
        encoder.encode(1, [Image(picture(1))], media, (), lambda: True)
    assert projector.num_encoded == 0
    with pytest.raises(Cancelled):
        encoder.encode(2, [Image(picture(1))], media, (), lambda: projector.num_encoded > 0)
    assert projector.num_encoded == 1


def test_a_stop_ends_all_that_waits_to_be_encoded(stand_in: tuple[StandIn, MediaEncoder]) -> None:
    """At once, before the encoder is closed; each request goes on to the engine, with the reason."""
    projector, encoder = stand_in
    inbox = EncodingInbox(8, None, encoder, MonotonicClock())
    for key in range(3):
        request: Any = Request(
            key=key,
            prompt=[0] * 5,
            params=SamplingParams(),
            options=RequestOptions(),
            samplers=[],
            submitted_s=0.0,
            vocabulary=FakeBackend().vocabulary,
            media=(MediaItem(0, 4, 4, b"x"),),
            attachments=(Image(picture(key)),),
        )
        inbox.submit(request, 4)
    assert projector.is_encoding.wait(10)
    inbox.put(Stop())
    found: list[Any] = []
    for _ in range(1000):
        found += inbox.take()
        if len(found) == 4:
            break
        time.sleep(0.01)
    assert [type(item) for item in found] == [Stop, Submit, Submit, Submit]
    assert all(isinstance(item.request.embeddings, Aborted) for item in found[1:])
    assert projector.num_encoded == 0
    inbox.close_encoder()


# ---- conversations


def test_a_conversation_about_a_picture_computes_new_tokens(qwen: Path, tmp_path: Path) -> None:
    """Each prompt begins with the tokens of the turn before; it is saved with its picture, forked and taken back."""
    write_model(qwen, Qwen2VlSpec(), metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    picture_file = tmp_path / "one.png"
    picture_file.write_bytes(png(picture(1)))
    with LLM(qwen, **ENGINE) as llm:
        talk = Conversation(llm, "be brief", **GREEDY)
        talk.say("hello")
        for content in (
            [{"type": "image", "image": picture_file}, {"type": "text", "text": QUESTION}],
            "which colour?",
            [Image(picture(2)), {"type": "text", "text": "and this?"}],
            "thank you",
        ):
            before = talk.token_ids
            with talk.stream(content) as stream:
                reply = stream.collect()
            assert reply.prompt_token_ids[: len(before)] == before
            assert reply.usage.cached_tokens >= len(before) - 1
            assert talk.token_ids == (*reply.prompt_token_ids, *reply.choices[0].token_ids)
            picture_file.unlink(missing_ok=True)  # it was read when it was said
        path = tmp_path / "talk.json"
        talk.save(path)
        loaded, fork = Conversation.load(llm, path, **GREEDY), talk.fork()
        expected = talk.say("once more").content
        assert fork.say("once more").content == expected
        assert loaded.say("once more").content == llm.chat(loaded.messages[:-1], **GREEDY).content
        assert talk.undo() == "once more"
        assert talk.undo() == "thank you"
        said: Any = talk.undo()
        assert isinstance(said[0], Image)
        assert talk.say(said).messages[-2]["content"] == said


def test_a_bad_picture_leaves_a_conversation_as_it_was(qwen: Path) -> None:
    """If its header shows it, and if only the later data do."""
    write_model(qwen, Qwen2VlSpec(), metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    with LLM(qwen, **ENGINE) as llm:
        talk = Conversation(llm, **GREEDY)
        talk.say([Image(picture(1)), {"type": "text", "text": QUESTION}])
        before = talk.messages, talk.token_ids
        damaged = Image(png(picture(2))[:-60])
        for content, words in (
            ([{"type": "image", "image": b"no image"}], r"content\[0\].image: an image must be"),
            ([damaged, {"type": "text", "text": "?"}], "damaged"),
            ([{"type": "input_video"}, Image(picture(1))], "input_video"),
            ([], "content is missing"),
            (5, "content"),
        ):
            with pytest.raises((InvalidParams, InvalidType), match=words):
                talk.say(content)  # type: ignore[arg-type]
        assert (talk.messages, talk.token_ids) == before
        with pytest.raises(InvalidParams, match="not of the assistant"):
            Conversation(llm, messages=[{"role": "assistant", "content": [damaged]}])
        assert talk.say("go on").content


# ---- deadlines, cancels and blame while something is encoded


class SlowEncoding(Instrument):
    """Has a separate process encode a picture with a black first pixel until it is aborted, and die at a white first pixel."""

    def __init__(self) -> None:
        encode, aborted = MediaProjector.encode_images, threading.Event()
        abort = MediaProjector.abort

        def slow(self: MediaProjector, images: Any) -> list[list[MediaPart]]:
            if any(pixels[0, 0].max() == 0 for pixels in images):
                assert aborted.wait(60)
                aborted.clear()
                raise Aborted("aborted")
            if any(pixels[0, 0].min() == 255 for pixels in images):
                time.sleep(0.3)
                os.abort()
            return encode(self, images)

        def noted(self: MediaProjector) -> None:
            aborted.set()
            abort(self)

        MediaProjector.encode_images, MediaProjector.abort = slow, noted  # type: ignore[method-assign]


def marked(seed: int, value: int) -> Image:
    """A picture with a first pixel that `SlowEncoding` knows."""
    pixels = picture(seed)
    pixels[0, 0] = value
    return Image(pixels)


@pytest.fixture(params=["thread", "process"])
def slow(request: pytest.FixtureRequest, qwen: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An engine with an encoder that takes for ever over black pictures."""
    monkeypatch.setattr(MediaProjector, "encode_images", MediaProjector.encode_images)
    monkeypatch.setattr(MediaProjector, "abort", MediaProjector.abort)
    instruments = ["tests.native.test_images:SlowEncoding"]
    with LLM(qwen, isolation=request.param, instruments=instruments, **ENGINE) as llm:
        yield llm


def test_deadlines_and_cancels_end_requests_that_wait_for_an_encoding(slow: LLM) -> None:
    """At their time, whatever is encoded before them, and also during their own encoding; others are encoded then."""
    first = slow.stream(["a", marked(1, 0), "b"], max_tokens=5, timeout_s=1.5)
    behind = slow.stream(["a", marked(2, 100), "b"], max_tokens=5, ttft_timeout_s=0.3)
    queued = slow.stream(["a", marked(3, 100), "b"], max_tokens=5, queue_timeout_s=0.6)
    dropped = slow.stream(["a", marked(4, 100), "b"], max_tokens=5)
    last = slow.stream(["a", marked(5, 100), "b"], **GREEDY)
    start = time.monotonic()
    dropped.cancel()
    found = [(list(item)[-1].finish_reason, time.monotonic() - start) for item in (dropped, behind, queued, first)]
    reasons = [reason for reason, _ in found]
    assert reasons == [FinishReason.CANCELLED, *[FinishReason.DEADLINE] * 3]
    assert found[2][1] < 1.4  # before the one that is encoded
    assert len(list(last)[-1].token_ids) > 0
    assert last.finish_reason is FinishReason.LENGTH
    cancelled = slow.stream(["a", marked(6, 0), "b"], max_tokens=5)
    time.sleep(0.2)
    cancelled.cancel()
    assert list(cancelled)[-1].finish_reason is FinishReason.CANCELLED
    assert slow.generate(["a", marked(7, 100), "b"], **GREEDY).token_ids


def test_stopping_ends_running_encodings_in_a_worker_too(slow: LLM) -> None:
    """And waiting requests."""
    streams = [slow.stream(["a", marked(seed, 0), "b"], max_tokens=5) for seed in (1, 2)]
    time.sleep(0.3)
    slow.close()
    assert {list(stream)[-1].finish_reason for stream in streams} == {FinishReason.SHUTDOWN}


def test_a_picture_that_kills_the_encoder_ends_its_own_request_only(qwen: Path) -> None:
    """Neighbours, with pictures and without, go on in the next worker with the tokens that they would have had."""
    options = {**GREEDY, "max_tokens": 150}
    good, text = ["hello", marked(1, 100), QUESTION], "hello there"
    instruments = ["tests.native.test_images:SlowEncoding"]
    with LLM(qwen, isolation="process", instruments=instruments, **ENGINE) as llm:
        expected = [llm.generate(item, **options).token_ids for item in (good, text)]
        streams = [llm.stream(item, **options) for item in (good, text)]
        readers = [iter(stream) for stream in streams]
        begun = [next(reader) for reader in readers]
        bad = llm.stream(["a", marked(2, 255), "b"], **options)
        with pytest.raises(EngineDied, match="SIGABRT"):
            list(bad)
        assert bad.finish_reason is FinishReason.ERROR
        for reader, first, ids in zip(readers, begun, expected, strict=True):
            rest = [token for chunk in reader for token in chunk.token_ids]
            assert (*first.token_ids, *rest) == ids
        assert llm.generate(good, **options).token_ids == expected[0]


class DyingToMeasure(Instrument):
    """Has a process of its own die in a pass when it is asked how many cells a picture of 77 pixels takes."""

    def __init__(self) -> None:
        measure, run = MediaProjector.measure_image, Executor.run

        def slowly(self: Executor, plan: Any) -> Any:
            if not plan.is_empty:
                time.sleep(0.4)
            return run(self, plan)

        Executor.run = slowly  # type: ignore[method-assign]

        def dying(self: MediaProjector, width: int, height: int) -> list[MediaPart]:
            if width == 77:
                time.sleep(0.3)
                os.abort()
            return measure(self, width, height)

        MediaProjector.measure_image = dying  # type: ignore[method-assign]


def test_a_picture_that_kills_what_measures_it_is_blamed_on_no_stream(qwen: Path) -> None:
    """Workers die of it twice while streams run, which go on; its caller hears why, and others are served."""
    options = {**GREEDY, "max_tokens": 5}
    with LLM(qwen, isolation="process", instruments=["tests.native.test_images:DyingToMeasure"], **ENGINE) as llm:
        texts = ("hello there", "and you")
        expected = [llm.generate(text, **options).token_ids for text in texts]
        streams = [llm.stream(text, **options) for text in texts]
        readers = [iter(stream) for stream in streams]
        begun = [next(reader) for reader in readers]
        with pytest.raises(EngineDied, match="SIGABRT"):
            llm.generate(["a", Image(png(picture(1, 77, 33))), "b"], **options)
        for reader, first, ids in zip(readers, begun, expected, strict=True):
            rest = [token for chunk in reader for token in chunk.token_ids]
            assert (*first.token_ids, *rest) == ids
        assert llm.generate(texts[0], **options).token_ids == expected[0]


# ---- choices, preemption, replay, files


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_choices_about_a_picture_share_it(qwen: Path, isolation: str) -> None:
    """It is in memory once; each choice is the same as alone; so after preemption and replay."""
    prompts = [["hello", Image(picture(seed, 150, 90)), QUESTION] for seed in (1, 2, 3)]
    options = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True, "n": 3}
    with LLM(qwen, **ENGINE) as llm:
        expected = [[choice.token_ids for choice in llm.generate(prompt, **options).choices] for prompt in prompts]
        assert len(set(expected[0])) == 3
    crowded = {**ENGINE, "n_ctx": 256, "num_slots": 8}
    with LLM(qwen, isolation=isolation, **crowded) as llm:
        found = llm.generate(prompts, **options)
        assert [[choice.token_ids for choice in completion.choices] for completion in found] == expected
        if isolation == "process":
            with llm.stream(prompts[0], **options) as stream:
                chunks = iter(stream)
                seen = [next(chunks) for _ in range(4)]
                pid: Any = llm.engine.worker_pid  # type: ignore[attr-defined]
                os.kill(pid, signal.SIGKILL)
                seen += chunks
            ids = [tuple(t for event in seen if event.choice == choice for t in event.token_ids) for choice in range(3)]
            assert ids == expected[0]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_prefixes_with_pictures_are_saved(files: tuple[Path, Path], tmp_path: Path, isolation: str) -> None:
    """Another engine goes on from them without computing the pictures again, also from a part of the saved prefix."""
    images = [Image(picture(seed, 150, 90)) for seed in (1, 2)]
    prompt = ["hello", images[0], "and then", images[1], QUESTION]
    others = [["hello", images[0], "and then", images[1], "another question"], ["hello", images[0], "nothing else"]]
    options: dict[str, Any] = {"isolation": isolation, "state_folder": tmp_path, "swa_full": True, **ENGINE}
    with LLM(files[0], **options) as llm:
        first = llm.generate(prompt, **GREEDY)
        expected = [llm.generate(other, cache_prompt=False, **GREEDY).token_ids for other in others]
        for other in others:  # which cuts what is saved at once
            llm.generate(other, **GREEDY)
        num_saved = llm.save_prefix("seen", prompt)
        assert num_saved >= first.usage.prompt_tokens - 1
        with pytest.raises(InvalidParams):
            llm.save_prefix("keys", list(first.prompt_token_ids))
        with pytest.raises(StateError, match="nothing of this prompt"):
            llm.save_prefix("unseen", ["hello", Image(picture(3, 150, 90)), QUESTION], cache_salt="x")
    with LLM(files[0], **options) as llm:
        ids = llm.load_prefix("seen")
        assert ids == list(first.prompt_token_ids)[:num_saved]
        again = llm.generate(prompt, **GREEDY)
        assert again.token_ids == first.token_ids
        assert again.usage.cached_tokens >= num_saved - 1
        for other, tokens in zip(others, expected, strict=True):
            found = llm.generate(other, **GREEDY)
            assert found.token_ids == tokens
            assert found.usage.cached_tokens > sum(token < 0 for token in found.prompt_token_ids)


def test_a_prefix_with_pictures_belongs_to_its_projector(tmp_path: Path) -> None:
    """With another projector the same pictures differ; the file reports it, and also if its list of pictures was damaged."""
    text, vision = PAIRS["llava"]
    model, projector = write_model(tmp_path / "model.gguf", text), tmp_path / "mmproj-model.gguf"
    prompt = ["hello", Image(picture(1)), QUESTION]
    write_model(projector, vision)
    with LLM(model, state_folder=tmp_path, **ENGINE) as llm:
        llm.generate(prompt, **GREEDY)
        llm.save_prefix("seen", prompt)
    file = tmp_path / "seen"
    whole = file.read_bytes()
    with LLM(model, state_folder=tmp_path, **ENGINE) as llm:
        for place in (16, 22, 40, len(whole) // 2):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(StateError):
                llm.load_prefix("seen")
        for size in (18, 30, 60):
            file.write_bytes(whole[:size])
            with pytest.raises(StateError):
                llm.load_prefix("seen")
        file.write_bytes(whole)
        assert llm.load_prefix("seen")
    write_model(projector, vision, seed=7)
    with LLM(model, state_folder=tmp_path, **ENGINE) as llm:
        with pytest.raises(StateError, match="another model"):
            llm.load_prefix("seen")
        assert len(llm.generate(prompt, **GREEDY).token_ids) == 10
