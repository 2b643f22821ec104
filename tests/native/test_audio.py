"""Prompts with audio: files as miniaudio decodes them, encoders, and engines in this process and in a worker."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exact import EXACT
from tests.native.conftest import TinyModels
from tests.native.test_media_projector import Less
from tests.pictures import picture
from tests.sounds import MP3_FRAME_SAMPLES, flac_file, int16, lame_frame, mp3_file, tone, wav_file, wav_of_bytes

from paceline import LLM, Audio, Conversation, Image
from paceline.errors import BatchError, Cancelled, InvalidParams, ModelLoadError, Unsupported
from paceline.params import SamplingParams
from paceline.runtime import Context, MediaPart, MediaProjector, Model, Sampler, decoded_samples, num_samples
from paceline.runtime.projector import MAX_AMPLITUDE
from paceline.runtime.step import StepRow
from paceline.testing.models import (
    CHAT_TEMPLATE,
    LlamaSpec,
    LlavaVisionSpec,
    Qwen2AudioSpec,
    Qwen2Spec,
    Qwen2VlSpec,
    UltravoxAudioSpec,
    write_model,
)

ENGINE: dict[str, Any] = {"n_ctx": 2048, "num_slots": 4, **EXACT}
GREEDY: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
QUESTION = "what is said?"
PAIRS: dict[str, tuple[Any, Any]] = {
    "ultravox": (LlamaSpec(n_ctx_train=2048), UltravoxAudioSpec()),
    "qwen2a": (Qwen2Spec(n_ctx_train=2048), Qwen2AudioSpec()),
    "m-rope": (Qwen2VlSpec(n_ctx_train=2048), UltravoxAudioSpec()),
}

SMALL = ("ultravox", "m-rope")  # which make 30 embeddings of half a minute, and not 750


@pytest.fixture(params=PAIRS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def files(kind: str, tmp_path: Path) -> tuple[Path, Path]:
    """A model, and beside it its projector."""
    text, audio = PAIRS[kind]
    model = write_model(tmp_path / "model.gguf", text, metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    return model, write_model(tmp_path / "mmproj-model.gguf", audio)


@pytest.fixture
def ultravox(tmp_path: Path) -> Path:
    text, audio = PAIRS["ultravox"]
    write_model(tmp_path / "mmproj-ultravox.gguf", audio)
    return write_model(tmp_path / "ultravox.gguf", text)


# ---- files


@pytest.mark.parametrize("rate", [16000, 24000])
def test_samples_match_the_file(rate: int) -> None:
    """Unchanged if the rate is the model's: integers are divided by 32768, channels are averaged."""
    stereo = tone(0.3, rate, channels=2)
    expected = int16(stereo).astype(np.float32).mean(axis=1) / 32768
    for data in (wav_file(int16(stereo), rate), flac_file(int16(stereo), rate)):
        assert np.allclose(decoded_samples(Audio(data), rate), expected, atol=1e-6)
    assert np.array_equal(decoded_samples(Audio(tone(0.3, rate), rate), rate), tone(0.3, rate))
    assert np.allclose(decoded_samples(Audio(int16(stereo), rate), rate), expected, atol=1e-6)
    wide = (int16(tone(0.3, rate)).astype("<i4") << 16).tobytes()
    assert np.allclose(decoded_samples(Audio(wav_of_bytes(wide, 1, 1, rate, 32)), rate), tone(0.3, rate), atol=1e-4)


@pytest.mark.parametrize(("file_rate", "rate"), [(8000, 16000), (44100, 16000), (48000, 24000), (11025, 16000)])
def test_other_rates_are_resampled(file_rate: int, rate: int) -> None:
    """A tone keeps its pitch and its loudness, and lasts as long; in pieces as at once."""
    audio = Audio(tone(6.0, file_rate, pitch=300), file_rate)
    found = decoded_samples(audio, rate)
    assert len(found) == num_samples(audio.num_frames, file_rate, rate)
    assert abs(len(found) - 6 * rate) <= 1
    spectrum = np.abs(np.fft.rfft(found[rate : 2 * rate]))
    assert int(spectrum.argmax()) == 300
    assert np.std(found[rate:-rate]) == pytest.approx(np.std(tone(1.0)), rel=0.02)


def test_an_mp3_is_decoded_to_the_length_that_it_promises() -> None:
    """With and without a first frame that says so."""
    for data in (mp3_file(40), lame_frame(39, 576, 1000) + mp3_file(39)):
        audio = Audio(data)
        assert len(decoded_samples(audio, 44100)) == audio.num_frames
        assert not decoded_samples(audio, 16000).any()
    assert Audio(mp3_file(40)).num_frames == 40 * MP3_FRAME_SAMPLES


def test_damaged_audio_is_refused() -> None:
    """If frames are missing or overwritten, or are of another rate than the header's; then a whole file is decoded."""
    whole = flac_file(int16(tone(2.0)))
    scrambled = whole[:20_000] + bytes(40_000) + whole[60_000:]
    for data, words in (
        (whole[:20_000], "2.00 s by its header, and 0"),
        (scrambled, "2.00 s by its header, and"),
        (whole[:42] + bytes(30_000), "damaged"),
        (wav_file(np.full(8000, np.inf, np.float32)), "not finite"),
        (wav_file(np.full(8000, -1e30, np.float32)), "beyond 65,536, and sound lies between -1 and 1"),
    ):
        with pytest.raises(InvalidParams, match=words):
            decoded_samples(Audio(data), 16000)
    assert len(decoded_samples(Audio(whole), 16000)) == 32000


def test_decoding_can_be_cancelled() -> None:
    """Between pieces."""
    num_calls = 0

    def check() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        decoded_samples(Audio(tone(60.0), 16000), 16000, check)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([flac_file(int16(tone(1.0))), lame_frame(39, 576, 1000) + mp3_file(39), wav_file(int16(tone()))]),
    st.data(),
)
def test_no_damage_does_more_than_refuse_the_file(whole: bytes, data: st.DataObject) -> None:
    """Bytes that are overwritten anywhere, pieces that are left out."""
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 20))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    begin = data.draw(st.integers(0, len(damaged)))
    del damaged[begin : begin + data.draw(st.integers(0, 2000))]
    try:
        audio = Audio(bytes(damaged))
        assert len(decoded_samples(audio, 16000)) == num_samples(audio.num_frames, audio.rate, 16000)
    except InvalidParams:
        pass


# ---- projectors


@pytest.fixture
def projector(kind: str, tiny_models: TinyModels) -> Iterator[MediaProjector]:
    text, audio = PAIRS[kind]
    with Model.load(tiny_models(text)) as model, MediaProjector.load(tiny_models(audio), model, n_threads=1) as found:
        yield found


def items_of(parts: list[MediaPart]) -> list[MediaPart]:
    return [part for part in parts if not part.tokens]


def test_audio_becomes_an_item_for_each_half_minute(projector: MediaProjector, kind: str) -> None:
    """Measured from its length alone it is as long; other sound makes other embeddings, the same one the same."""
    assert projector.modalities == {"audio"}
    assert projector.sample_rate == 16000
    for seconds, count in ((0.1, 1), (5.0, 1), (31.0, 2)):
        samples = tone(seconds)
        parts = projector.encode_audio(samples)
        measured = projector.measure_audio(len(samples))
        assert [(part.tokens, part.num_cells, part.num_positions) for part in parts] == [
            (measurement.tokens, measurement.num_cells, measurement.num_positions) for measurement in measured
        ]
        assert all(measurement.embeddings is None for measurement in measured)
        items = items_of(parts)
        assert len(items) == count
        assert len(parts) - count == (2 if kind == "qwen2a" else 0)
        assert {item.num_cells for item in items} == {750 if kind == "qwen2a" else 30}
        assert all(item.is_causal and item.places is None for item in items)
    first, again = (items_of(projector.encode_audio(tone(1.0)))[0].embeddings for _ in range(2))
    other = items_of(projector.encode_audio(tone(1.0, pitch=700)))[0].embeddings
    assert np.array_equal(first, again)  # type: ignore[arg-type]
    assert not np.allclose(first, other, atol=0.1)  # type: ignore[arg-type]


def test_the_loudest_sound_has_embeddings(projector: MediaProjector) -> None:
    """They are numbers, from which a model computes text."""
    loud = decoded_samples(Audio(wav_file(tone(1.0) / np.abs(tone(1.0)).max() * MAX_AMPLITUDE)), 16000)
    for item in items_of(projector.encode_audio(loud)):
        assert item.embeddings is not None and np.isfinite(item.embeddings).all()


def test_wrong_samples_are_refused(projector: MediaProjector) -> None:
    """And the next audio is encoded as ever."""
    for wrong, words in (
        (tone(0.05), "1600 to"),
        (np.full(16000, np.inf, np.float32), "finite"),
        (tone(1.0).astype(np.float64), "float32"),
        (tone(1.0, channels=2), "1 axes"),
    ):
        with pytest.raises(InvalidParams, match=words):
            projector.encode_audio(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="1600 to 57600000 samples, not 57600001"):
        projector.measure_audio(57600001)
    with pytest.raises(Unsupported, match="no images"):
        projector.measure_image(50, 50)
    assert items_of(projector.encode_audio(tone(1.0)))


def test_no_missing_tensor_ends_the_process(tiny_models: TinyModels, tmp_path: Path, kind: str) -> None:
    """Each is refused, or the encoder does without it."""
    text, audio = PAIRS[kind]
    num_refused = 0
    with Model.load(tiny_models(text)) as model:
        for tensor in audio.tensors():
            spec: Any = Less(audio, tensor.name)
            try:
                with MediaProjector.load(write_model(tmp_path / "mmproj.gguf", spec), model, n_threads=1) as found:
                    found.encode_audio(tone())
            except ModelLoadError:
                num_refused += 1
    assert num_refused > 15


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("ultravox", "projector.stack_factor", 8),
        ("ultravox", "projector.stack_factor", 0),
        ("ultravox", "projector.stack_factor", None),
        ("ultravox", "projector.stack_factor", 1 << 30),
        ("ultravox", "num_mel_bins", 80),
        ("ultravox", "num_mel_bins", 0),
        ("qwen2a", "num_mel_bins", 300),
        ("qwen2a", "num_mel_bins", None),
        ("qwen2a", "embedding_length", 64),
        ("qwen2a", "block_count", 0),
        ("qwen2a", "block_count", 2),
        ("qwen2a", "attention.head_count", 0),
        ("qwen2a", "feed_forward_length", 32),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused(
    tiny_models: TinyModels, tmp_path: Path, kind: str, key: str, value: Any
) -> None:
    """On which encoders abort."""
    text, audio = PAIRS[kind]
    path = write_model(tmp_path / "mmproj.gguf", audio, metadata={f"clip.audio.{key}": value})
    with Model.load(tiny_models(text)) as model, pytest.raises(ModelLoadError, match="mmproj.gguf"):
        MediaProjector.load(path, model)


# ---- engines


def expected_ids(files: tuple[Path, Path], before: str, samples: Any, after: str, count: int = 10) -> list[int]:
    """Return a context's generated tokens, given the texts and the embeddings in order."""
    with Model.load(files[0]) as model, MediaProjector.load(files[1], model, n_threads=1) as projector:
        with Context(model, n_ctx=2048, n_batch=512, n_ubatch=512, n_seq_max=2, **EXACT) as context:
            sampler, position = Sampler(SamplingParams(temperature=0, ignore_eos=True), model), 0

            def add(ids: list[int]) -> None:
                nonlocal position
                context.step([StepRow(seq_id=0, position=position, token_ids=ids)])
                position += len(ids)

            add(model.tokenizer.encode(before, parse_special=True))
            for part in projector.encode_audio(samples):
                if part.tokens:
                    add(list(part.tokens))
                    continue
                assert part.embeddings is not None
                for begin in range(0, part.num_cells, 512):
                    cells = part.embeddings[begin : begin + 512]
                    context.decode_embeddings(0, position, cells, is_causal=part.is_causal, scratch_seq_id=1)
                    position += len(cells)
            ids = model.tokenizer.encode(after, add_special=False, parse_special=True)
            found: list[int] = []
            for _ in range(count):
                row = StepRow(seq_id=0, position=position, token_ids=ids, samplers=(sampler,))
                found.append(context.step([row]).rows[0].draws[0].token_ids[0])
                position, ids = position + len(ids), found[-1:]
            return found


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_engine_generates_what_a_context_does(files: tuple[Path, Path], isolation: str) -> None:
    """From a file and an array, streamed, for several choices; the projector beside the model is found."""
    samples = int16(tone(1.0)).astype(np.float32) / 32768
    expected = expected_ids(files, "hello", samples, QUESTION)
    with LLM(files[0], isolation=isolation, **ENGINE) as llm:
        assert llm.model.modalities == {"text", "audio"}
        for audio in (Audio(int16(tone(1.0)), 16000), Audio(flac_file(int16(tone(1.0))))):
            found = llm.generate(["hello", audio, QUESTION], **GREEDY)
            assert list(found.token_ids) == expected
        assert sum(token_id < 0 for token_id in found.prompt_token_ids) in (30, 750)
        with llm.stream(["hello", audio, QUESTION], **GREEDY) as stream:
            assert [token_id for chunk in stream for token_id in chunk.token_ids] == expected
        choices = llm.generate(["hello", audio, QUESTION], n=2, **GREEDY).choices
        assert [list(choice.token_ids) for choice in choices] == [expected, expected]


def test_a_chat_has_audio(tmp_path: Path) -> None:
    """As an object, as whatever `Audio` takes, and as OpenAI's input_audio; wrong parts are named."""
    text, audio = PAIRS["ultravox"]
    path = write_model(tmp_path / "model.gguf", text, metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    files = path, write_model(tmp_path / "mmproj-model.gguf", audio)
    samples = int16(tone(1.0)).astype(np.float32) / 32768
    expected = expected_ids(files, "<|im_start|>user\n", samples, f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    given = Audio(int16(tone(1.0)), 16000)
    question = {"type": "text", "text": QUESTION}
    with LLM(path, **ENGINE) as llm:
        for part in (
            given,
            {"type": "audio", "audio": wav_file(int16(tone(1.0)))},
            {"type": "input_audio", "input_audio": {"data": given.to_base64(), "format": "wav"}},
            {"type": "input_audio", "input_audio": given},
        ):
            reply = llm.chat([{"role": "user", "content": [part, question]}], **GREEDY)
            assert reply.content == llm.tokenizer.decode(expected)
        talk = Conversation(llm)
        assert talk.say([given, question], **GREEDY).content == llm.tokenizer.decode(expected)
        talk.save(tmp_path / "talk.json")
        again = Conversation.load(llm, tmp_path / "talk.json")
        assert again.messages[0]["content"][0].content_hash == given.content_hash
        assert talk.say("and now?", **GREEDY).usage.completion_tokens == 10
        for wrong, words in (
            ({"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}, r"content\[0\].input_audio: data"),
            ({"type": "input_audio", "input_audio": "x"}, r"content\[0\].input_audio: it must be an object"),
            ({"type": "input_audio", "input_audio": {"data": given.to_base64(), "format": "mp3"}}, "format is 'mp3'"),
            ({"type": "audio", "audio": "/no/such.wav"}, r"content\[0\].audio: .*no/such.wav"),
            ({"type": "audio"}, r"content\[0\].audio is missing"),
        ):
            with pytest.raises(InvalidParams, match=words):
                llm.chat([{"role": "user", "content": [wrong, question]}], **GREEDY)


@pytest.mark.parametrize("kind", SMALL)
def test_long_audio_is_several_items(files: tuple[Path, Path]) -> None:
    """Of half a minute each, one after another."""
    samples = tone(40.0)
    with LLM(files[0], **ENGINE) as llm:
        found = llm.generate(["hello", Audio(samples, 16000), QUESTION], **GREEDY)
    assert list(found.token_ids) == expected_ids(files, "hello", samples, QUESTION)


def test_the_same_sound_is_encoded_once(ultravox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And found in the KV cache with all before it; another tenant or salt has it encoded again."""
    encoded: list[Any] = []
    real = MediaProjector.encode_audio
    monkeypatch.setattr(
        MediaProjector, "encode_audio", lambda self, samples: (encoded.append(samples), real(self, samples))[1]
    )
    with LLM(ultravox, **ENGINE) as llm:
        one = Audio(tone(1.0), 16000)
        first = llm.generate(["hello", one, QUESTION], **GREEDY)
        found = llm.generate([["hello", one, f"question {number}"] for number in range(4)], **GREEDY)
        assert len(encoded) == 1
        assert all(completion.usage.cached_tokens > 30 for completion in found)
        other = llm.generate(["hello", Audio(tone(1.0, pitch=700), 16000), QUESTION], **GREEDY)
        assert len(encoded) == 2
        assert other.usage.cached_tokens < 30
        assert other.token_ids != first.token_ids
        for options in ({"cache_salt": "other"}, {"tenant": "other"}):
            assert llm.generate(["hello", one, QUESTION], **options, **GREEDY).usage.cached_tokens == 0
        assert len(encoded) == 4


@pytest.mark.parametrize("kind", SMALL)
def test_audio_that_has_to_make_way_is_computed_again(files: tuple[Path, Path]) -> None:
    """In a memory for two of them, with eight at once that share it: each generates the same as alone."""
    prompts = [["hello", Audio(tone(1.0, pitch=200 * seed), 16000), QUESTION] for seed in (1, 2, 3, 4)] * 2
    options = {**GREEDY, "max_tokens": 40}
    with LLM(files[0], cache_prompt=False, **ENGINE) as llm:
        alone = [llm.generate(prompt, **options).token_ids for prompt in prompts[:4]] * 2
    with LLM(files[0], **{**ENGINE, "n_ctx": 256}) as llm:
        assert [completion.token_ids for completion in llm.generate(prompts, **options)] == alone


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_what_cannot_be_is_refused_and_the_engine_goes_on(ultravox: Path, isolation: str) -> None:
    """By the part that is wrong; of several prompts the others are generated."""
    good = Audio(tone(), 16000)
    damaged = Audio(flac_file(int16(tone(2.0)))[:20_000])
    with LLM(ultravox, isolation=isolation, **ENGINE) as llm:
        expected = llm.generate(["a", good, "b"], **GREEDY).token_ids
        with pytest.raises(InvalidParams, match="audio 1: the audio file is damaged"):
            llm.generate(["a", good, damaged, "b"], **GREEDY)
        with pytest.raises(BatchError) as raised:
            llm.generate([["a", good, "b"], ["a", damaged, "b"], "plain"], **GREEDY)
        assert [isinstance(outcome, InvalidParams) for outcome in raised.value.outcomes] == [False, True, False]
        with pytest.raises(InvalidParams, match="64 images and audio, not 100"):
            llm.generate([*[good] * 100, "b"], **GREEDY)
        with pytest.raises(Unsupported, match=r"prompt\[1\]: this model's projector takes no images"):
            llm.generate(["a", Image(picture(1)), "b"], **GREEDY)
        assert llm.generate(["a", good, "b"], **GREEDY).token_ids == expected


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("vision", [None, LlavaVisionSpec()])
def test_a_model_that_does_not_hear_says_so(tmp_path: Path, isolation: str, vision: Any) -> None:
    """Without a projector, and with one for images."""
    path = write_model(tmp_path / "model.gguf", LlamaSpec())
    if vision is not None:
        write_model(tmp_path / "mmproj-model.gguf", vision)
    with LLM(path, isolation=isolation, **{**ENGINE, "n_ctx": 256}) as llm:
        with pytest.raises(Unsupported, match=r"prompt\[1\]: this model.* takes no audio"):
            llm.generate(["a", Audio(tone(), 16000), "b"], **GREEDY)
        assert len(llm.generate("a", **GREEDY).token_ids) == 10


def test_requests_go_on_in_the_next_worker(ultravox: Path) -> None:
    """With their audio, which is encoded again."""
    prompt = ["hello", Audio(mp3_file(20), None), Audio(tone(), 16000), QUESTION]
    with LLM(ultravox, isolation="process", **ENGINE) as llm:
        options = {**GREEDY, "max_tokens": 60}
        expected = llm.generate(prompt, **options).token_ids
        with llm.stream(prompt, **options) as stream:
            chunks = iter(stream)
            first = next(chunks)
            pid: Any = llm.engine.worker_pid  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGKILL)
            rest = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert (*first.token_ids, *rest) == expected


# ---- the guide


@pytest.mark.parametrize("kind", SMALL)
def test_every_block_of_the_guide_runs(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its snippets work."""
    page = Path(__file__).parents[2] / "docs/guide/audio.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(files[0].parent)
    Path("speech.mp3").write_bytes(mp3_file(40))
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number}", "exec", dont_inherit=True), names)
    assert len(blocks) == 4
    assert capsys.readouterr().out.count("\n") >= 3
