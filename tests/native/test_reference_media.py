"""Greedy generation about images and audio against llama.cpp's own tool, built from the same source, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.exact import EXACT
from tests.native.media_tool import MediaTool, build_media_tool
from tests.pictures import picture, png
from tests.sounds import int16, tone, wav_file

from paceline import LLM, Audio, Image
from paceline.testing.models import (
    Gemma3Spec,
    Gemma3VisionSpec,
    Gemma4Spec,
    Gemma4VisionSpec,
    LlamaSpec,
    LlavaVisionSpec,
    PixtralVisionSpec,
    Qwen2VlSpec,
    Qwen3VisionSpec,
    Qwen3VlSpec,
    Qwen25VisionSpec,
    UltravoxAudioSpec,
    numbered,
    write_model,
)

pytestmark = pytest.mark.native

BEFORE, AFTER, COUNT = [7, 12, 5, 120], [33, 4, 290, 18], 60
SIZES = [(56, 56), (200, 90), (40, 130)]
KINDS: dict[str, tuple[Any, Any]] = {
    "gemma 3": (Gemma3Spec(vocabulary=numbered()), Gemma3VisionSpec()),
    "gemma 4": (Gemma4Spec(vocabulary=numbered()), Gemma4VisionSpec()),
    "qwen 2.5 vl": (Qwen2VlSpec(vocabulary=numbered()), Qwen25VisionSpec()),
    "qwen 3 vl": (Qwen3VlSpec(vocabulary=numbered()), Qwen3VisionSpec()),
    "llava": (LlamaSpec(vocabulary=numbered()), LlavaVisionSpec()),
    "pixtral": (LlamaSpec(vocabulary=numbered()), PixtralVisionSpec()),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> MediaTool:
    return build_media_tool(tmp_path_factory.mktemp("reference"))


def generated(model: Path, media: Image | Audio) -> list[int]:
    """Return an engine's text about it."""
    with LLM(model, n_ctx=1024, num_slots=2, **EXACT) as llm:
        found = llm.generate([BEFORE, media, AFTER], max_tokens=COUNT, temperature=0).token_ids
    return list(found)


@pytest.mark.usefixtures("llama_cpp_kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_about_images_equals_that_of_llama_cpp(tmp_path: Path, reference: MediaTool, kind: str) -> None:
    """Images of three shapes are encoded, placed and attended to as in llama.cpp; each has an output of its own."""
    text, vision = KINDS[kind]
    model, projector = write_model(tmp_path / "model.gguf", text), write_model(tmp_path / "mmproj-model.gguf", vision)
    outputs = set()
    for seed, size in enumerate(SIZES):
        path = tmp_path / "image.png"
        path.write_bytes(png(picture(seed, *size)))
        expected = reference.generate(model, projector, BEFORE, path, AFTER, COUNT)
        assert generated(model, Image(path)) == expected
        assert len(expected) > 20
        outputs.add(tuple(expected))
    assert len(outputs) == len(SIZES)


@pytest.mark.usefixtures("llama_cpp_kernels")
def test_greedy_output_about_audio_equals_that_of_llama_cpp(tmp_path: Path, reference: MediaTool) -> None:
    """Decoded, resampled and encoded as there, with Whisper's encoder as Ultravox has it."""
    model = write_model(tmp_path / "model.gguf", LlamaSpec(vocabulary=numbered(), n_ctx_train=1024))
    projector = write_model(tmp_path / "mmproj-model.gguf", UltravoxAudioSpec())
    outputs = set()
    for pitch, rate in ((220.0, 16000), (880.0, 44100)):
        path = tmp_path / "sound.wav"
        path.write_bytes(wav_file(int16(tone(0.5, rate, pitch)), rate))
        expected = reference.generate(model, projector, BEFORE, path, AFTER, COUNT)
        assert generated(model, Audio(path)) == expected
        assert len(expected) > 20
        outputs.add(tuple(expected))
    assert len(outputs) == 2
