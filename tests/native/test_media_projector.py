"""Projectors: invalid or damaged files, impossible images, and encodings of the others."""

from __future__ import annotations

import contextlib
import io
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import PIL.Image
import pytest
from tests.native.conftest import TinyModels
from tests.pictures import bmp, gif_header, jpeg_header, picture, png, png_of

from paceline.errors import Aborted, Cancelled, Closed, InvalidParams, InvalidType, ModelLoadError, Unsupported
from paceline.media import Image
from paceline.runtime import MediaPart, MediaProjector, Model, decoded_pixels
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
    write_model,
)
from paceline.testing.models.gguf_parts import Typed

PAIRS: dict[str, tuple[Any, Any]] = {
    "llava": (LlamaSpec(), LlavaVisionSpec()),
    "gemma3": (Gemma3Spec(), Gemma3VisionSpec()),
    "qwen2.5vl": (Qwen2VlSpec(), Qwen25VisionSpec()),
    "qwen3vl": (Qwen3VlSpec(), Qwen3VisionSpec()),
    "gemma4": (Gemma4Spec(), Gemma4VisionSpec()),
    "pixtral": (LlamaSpec(), PixtralVisionSpec()),
}


@pytest.fixture(params=PAIRS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def projector(kind: str, tiny_models: TinyModels) -> Iterator[MediaProjector]:
    text, vision = PAIRS[kind]
    with Model.load(tiny_models(text)) as model, MediaProjector.load(tiny_models(vision), model, n_threads=1) as found:
        yield found


def item_of(parts: list[MediaPart]) -> MediaPart:
    (item,) = [part for part in parts if not part.tokens]
    return item


def test_an_image_becomes_an_item_between_its_marks(projector: MediaProjector, kind: str) -> None:
    """Measured from its size alone it is as long; other pixels make other embeddings, equal pixels the same."""
    assert projector.modalities == {"image"}
    assert projector.sample_rate is None
    parts = projector.encode_image(picture(1))
    measured = projector.measure_image(60, 40)
    assert [(part.tokens, part.num_cells, part.num_positions) for part in parts] == [
        (measurement.tokens, measurement.num_cells, measurement.num_positions) for measurement in measured
    ]
    assert all(measurement.embeddings is None for measurement in measured)
    item = item_of(parts)
    assert item.embeddings is not None
    assert item.embeddings.shape == (item.num_cells, 128 if kind == "qwen3vl" else 64)  # with what one layer saw
    assert item.is_causal == (kind not in ("gemma3", "gemma4"))
    assert len(parts) == {"llava": 1, "pixtral": 2}.get(kind, 3)
    again, other = item_of(projector.encode_image(picture(1))), item_of(projector.encode_image(picture(2)))
    assert np.array_equal(again.embeddings, item.embeddings)  # type: ignore[arg-type]
    assert not np.allclose(other.embeddings, item.embeddings, atol=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("together", ["gemma4", "llava"])
def test_several_images_are_as_each_alone(tiny_models: TinyModels, together: str) -> None:
    """Computed together by Gemma 4's projector if they have one size, one after another by LLaVA's."""
    text, vision = PAIRS[together]
    images = [picture(1, 80, 64), picture(2, 80, 64), picture(3, 40, 64), picture(4, 80, 64)]
    with (
        Model.load(tiny_models(text)) as model,
        MediaProjector.load(tiny_models(vision), model, n_threads=1) as projector,
    ):
        found = [item_of(parts) for parts in projector.encode_images(images)]
        for item, pixels in zip(found, images, strict=True):
            alone = item_of(projector.encode_image(pixels))
            assert item.embeddings is not None
            assert alone.embeddings is not None
            np.testing.assert_allclose(item.embeddings, alone.embeddings, atol=2e-3 * np.abs(alone.embeddings).max())
        assert not np.allclose(found[0].embeddings, found[1].embeddings, atol=0.05)  # type: ignore[arg-type]
        assert projector.encode_images([]) == []
        with pytest.raises(InvalidType, match="height, width, 3"):
            projector.encode_images([images[0], np.zeros((4, 4, 1), np.uint8)])


def test_places_are_a_grid_with_m_rope(tiny_models: TinyModels) -> None:
    """Of width and height in merged patches; the item spans the longer side in positions."""
    text, vision = PAIRS["qwen2.5vl"]
    with Model.load(tiny_models(text)) as model, MediaProjector.load(tiny_models(vision), model) as found:
        for width, height in ((112, 56), (56, 112), (300, 20)):
            item = item_of(found.measure_image(width, height))
            assert item.places is not None
            rows, columns = item.places[:, 1].max() + 1, item.places[:, 2].max() + 1
            assert item.num_cells == rows * columns
            assert item.num_positions == max(rows, columns)
            assert not item.places[:, 0].any()
            assert len({tuple(place) for place in item.places.tolist()}) == item.num_cells


def test_limits_of_tokens_are_kept(tiny_models: TinyModels) -> None:
    """Limits of projectors that take images of any size."""
    text, vision = PAIRS["qwen2.5vl"]
    with Model.load(tiny_models(text)) as model:
        for least, most in ((40, 60), (None, 16), (30, None)):
            options = {"image_min_tokens": least, "image_max_tokens": most}
            with MediaProjector.load(tiny_models(vision), model, **options) as found:  # type: ignore[arg-type]
                for size in ((30, 30), (600, 400)):
                    cells = item_of(found.measure_image(*size)).num_cells
                    assert (least or 1) <= cells <= (most or 4096)
        with pytest.raises(InvalidParams, match="image_min_tokens must be at most image_max_tokens, 8, not 9"):
            MediaProjector.load(tiny_models(vision), model, image_min_tokens=9, image_max_tokens=8)


@pytest.mark.parametrize("size", [(1, 1), (1, 400), (400, 1), (16384, 1), (1, 16384), (2000, 10), (3, 2), (57, 55)])
def test_images_of_any_shape_are_encoded(projector: MediaProjector, size: tuple[int, int]) -> None:
    """Also sizes that a resize rounds to nothing, or the projector reports its limits; then it goes on."""
    try:
        item = item_of(projector.encode_image(picture(3, *size)))
        assert item.embeddings is not None
        assert np.isfinite(item.embeddings).all()
    except InvalidParams as error:
        assert str(error)  # noqa: PT017 - either is right
    assert item_of(projector.encode_image(picture(1))).num_cells


def test_wrong_pixels_are_refused(projector: MediaProjector) -> None:
    """And the next image is encoded as ever."""
    for wrong in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), "pixels"):
        with pytest.raises(InvalidType, match="pixels must"):
            projector.encode_image(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="16385 x 1"):
        projector.encode_image(np.zeros((1, 16385, 3), np.uint8))
    with pytest.raises(InvalidParams, match="width"):
        projector.measure_image(0, 5)
    with pytest.raises(Unsupported, match="no audio"):
        projector.encode_audio(np.zeros(100, np.float32))
    with pytest.raises(InvalidParams, match="finite"):
        projector.encode_audio(np.full(100, np.nan, np.float32))
    assert len(projector.encode_image(picture(1))) >= 1


def test_a_closed_projector_says_so(projector: MediaProjector) -> None:
    """And closing twice does nothing."""
    projector.close()
    projector.close()
    projector.abort()
    with pytest.raises(Closed, match="was closed"):
        projector.encode_image(picture(1))
    assert "closed" in repr(projector)


def test_encoding_is_aborted_from_another_thread(tiny_models: TinyModels) -> None:
    """While other Python threads make progress; the next image is encoded."""
    spec = Qwen25VisionSpec(n_layer=24, n_embd=256, n_head=8, n_ff=512)
    with Model.load(tiny_models(Qwen2VlSpec())) as model, MediaProjector.load(tiny_models(spec), model) as found:
        outcome: list[BaseException | None] = []

        def encode() -> None:
            try:
                found.encode_image(picture(1, 1400, 1400))
                outcome.append(None)
            except Aborted as error:
                outcome.append(error)

        thread = threading.Thread(target=encode)
        thread.start()
        while thread.is_alive():
            found.abort()
            time.sleep(0.01)
        thread.join()
        assert isinstance(outcome[0], Aborted)
        with contextlib.suppress(Aborted):  # the last abort may have come too late for it
            found.encode_image(picture(1))
        found.abort()  # as one that comes before the encoder runs
        with pytest.raises(Aborted):
            found.encode_image(picture(1))
        assert item_of(found.encode_image(picture(1))).num_cells


# ---- files of projectors


def load(tiny_models: TinyModels, path: Path, text: Any = None) -> None:
    with Model.load(tiny_models(text or LlamaSpec())) as model:
        MediaProjector.load(path, model).close()


def test_a_model_is_no_projector(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Nor is a file that is not there, or no GGUF."""
    with pytest.raises(ModelLoadError, match="is not a multimodal projector.*'llama'"):
        load(tiny_models, tiny_models("llama"))
    with pytest.raises(ModelLoadError, match="no projector file"):
        load(tiny_models, tmp_path / "none.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(png(picture(1)))
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        load(tiny_models, other)


def test_a_projector_of_another_model_names_both_files(tiny_models: TinyModels) -> None:
    """And the widths that differ."""
    path = tiny_models(LlavaVisionSpec(n_embd_text=32))
    with pytest.raises(ModelLoadError, match=r"n_embd = 64.*n_embd = 32") as raised:
        load(tiny_models, path)
    assert str(path) in str(raised.value)
    assert str(tiny_models(LlamaSpec())) in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("clip.vision.patch_size", 0, "patch_size is 0"),
        ("clip.vision.patch_size", 57, "an image has 56 pixels"),
        ("clip.vision.image_size", 1 << 20, "image_size is 1048576"),
        ("clip.vision.image_size", None, "image_size is missing"),
        ("clip.vision.attention.head_count", 5, "a multiple of the 5 heads"),
        ("clip.vision.embedding_length", Typed(32, "INT32"), "type INT32.*UINT32"),
        ("clip.vision.attention.layer_norm_epsilon", Typed(1e-5, "FLOAT64"), "FLOAT64.*FLOAT32"),
        ("clip.vision.block_count", 100000, "block_count is 100000"),
        ("clip.vision.image_std", [0.5, 0.0, 0.5], "image_std has the value 0.0"),
        ("clip.vision.image_mean", [0.5, 0.5], "at least 3 elements"),
        ("clip.has_vision_encoder", False, "neither"),
        ("clip.has_vision_encoder", 1, "UINT32.*BOOL"),
        ("clip.use_gelu", "yes", "STRING.*BOOL"),
        ("clip.projector_type", "telepathy", "telepathy"),
        ("clip.projector_type", 5, "UINT32.*STRING"),
    ],
)
def test_wrong_metadata_is_refused_by_its_key(
    tiny_models: TinyModels, tmp_path: Path, key: str, value: Any, words: str
) -> None:
    """Before libmtmd aborts over it."""
    path = write_model(tmp_path / "mmproj.gguf", LlavaVisionSpec(), metadata={key: value})
    with pytest.raises(ModelLoadError, match=words):
        load(tiny_models, path)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("llava", "embedding_length", 64),
        ("llava", "patch_size", 7),
        ("llava", "image_size", 100),
        ("llava", "attention.head_count", 0),
        ("llava", "attention.layer_norm_epsilon", float("nan")),
        ("llava", "feed_forward_length", 1.5),
        ("gemma3", "projector.scale_factor", 3),
        ("gemma3", "image_size", 33),
        ("qwen2.5vl", "projection_dim", 100),
        ("qwen2.5vl", "projection_dim", "text"),
        ("qwen2.5vl", "n_wa_pattern", 1),
        ("qwen2.5vl", "block_count", 0),
        ("qwen2.5vl", "attention.head_count", 16),
        ("qwen3vl", "attention.head_count", 16),
        ("qwen3vl", "image_size", 112),
        ("gemma4", "attention.head_count", 16),
        ("gemma4", "projector.scale_factor", 3),
        ("pixtral", "attention.head_count", 16),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused(
    tiny_models: TinyModels, tmp_path: Path, kind: str, key: str, value: Any
) -> None:
    """On which encoders abort."""
    text, vision = PAIRS[kind]
    path = write_model(tmp_path / "mmproj.gguf", vision, metadata={f"clip.vision.{key}": value})
    with pytest.raises(ModelLoadError):
        load(tiny_models, path, text)


def test_an_image_may_not_have_more_places_than_there_are(tiny_models: TinyModels) -> None:
    """On which Gemma 4's encoder aborts; as many tokens as the tables allow are taken, also of an image of one row."""
    text, vision = PAIRS["gemma4"]
    with Model.load(tiny_models(text)) as model:
        with pytest.raises(ModelLoadError, match="lower image_max_tokens"):
            MediaProjector.load(tiny_models(vision), model, image_max_tokens=1121)
        with MediaProjector.load(tiny_models(vision), model, n_threads=1, image_max_tokens=1120) as found:
            assert item_of(found.encode_image(picture(1, 16384, 1))).num_cells <= 1120


class Less:
    """A spec without a tensor."""

    def __init__(self, spec: Any, missing: str) -> None:
        self._spec, self._missing = spec, missing
        self.architecture, self.vocabulary, self.metadata = spec.architecture, spec.vocabulary, spec.metadata

    def tensors(self) -> Iterator[Any]:
        return (tensor for tensor in self._spec.tensors() if tensor.name != self._missing)


def test_no_missing_tensor_ends_the_process(tiny_models: TinyModels, tmp_path: Path, kind: str) -> None:
    """Each is refused, or the encoder does without it."""
    text, vision = PAIRS[kind]
    num_refused = 0
    with Model.load(tiny_models(text)) as model:
        for tensor in vision.tensors():
            spec: Any = Less(vision, tensor.name)
            try:
                with MediaProjector.load(write_model(tmp_path / "mmproj.gguf", spec), model, n_threads=1) as found:
                    found.encode_image(picture(1))
            except ModelLoadError:
                num_refused += 1
    assert num_refused > 5


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_is_refused(tiny_models: TinyModels, tmp_path: Path, share: float) -> None:
    """Wherever it is cut."""
    whole = write_model(tmp_path / "mmproj.gguf", LlavaVisionSpec()).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelLoadError, match="cut off|ends in the middle|more than the rest"):
        load(tiny_models, cut)


# ---- image files


@pytest.mark.parametrize("write", [png, bmp])
def test_files_are_decoded_to_their_pixels(write: Callable[[Any], bytes]) -> None:
    """Row by row."""
    assert np.array_equal(decoded_pixels(Image(write(picture(4, 33, 21)))), picture(4, 33, 21))
    assert np.array_equal(decoded_pixels(Image(picture(4, 33, 21))), picture(4, 33, 21))


def test_damaged_image_files_are_refused() -> None:
    """Truncated, with data for other images, or with data that unfold to gigabytes; then a whole one is decoded."""
    whole = png(picture(1))
    for end in (33, 45, 200, len(whole) - 20):
        with pytest.raises(InvalidParams, match="damaged|read"):
            decoded_pixels(Image(whole[:end]))
    with pytest.raises(InvalidParams, match="damaged"):
        decoded_pixels(Image(png_of(b"\0" * 100, 60, 40)))
    started = time.monotonic()
    with pytest.raises(InvalidParams, match="unfold to more than"):
        decoded_pixels(Image(png_of(bytes(200_000_000), 16, 16)))
    assert time.monotonic() - started < 30
    flipped = bytearray(whole)
    flipped[60] ^= 255
    with pytest.raises(InvalidParams, match="damaged"):
        decoded_pixels(Image(bytes(flipped)))
    mislabelled = bytearray(bmp(picture(1)))
    struct.pack_into("<H", mislabelled, 28, 77)
    with pytest.raises(InvalidParams, match="image"):
        decoded_pixels(Image(bytes(mislabelled)))
    assert decoded_pixels(Image(whole)).shape == (40, 60, 3)


def written(kind: str, **options: Any) -> bytes:
    """A file as Pillow writes it, of a picture that compresses well."""
    smooth = np.add.outer(np.arange(40), np.arange(60)).astype(np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(np.dstack([smooth, smooth[::-1], smooth])).save(file, kind, **options)
    return file.getvalue()


FILES = [
    written("jpeg"),
    written("jpeg", progressive=True),
    written("jpeg", restart_marker_blocks=2),
    written("gif"),
    written("bmp"),
]


@pytest.mark.parametrize("whole", FILES)
def test_files_that_were_cut_are_refused(whole: bytes) -> None:
    """Wherever that is behind the header; a whole one is decoded as Pillow does."""
    expected = np.asarray(PIL.Image.open(io.BytesIO(whole)).convert("RGB")).astype(int)
    assert np.abs(decoded_pixels(Image(whole)).astype(int) - expected).max() <= 8
    for missing in (2, 3, 50, len(whole) // 4, len(whole) // 2):
        with pytest.raises(InvalidParams, match="damaged"):
            decoded_pixels(Image(whole[:-missing]))


def test_a_bmp_from_top_to_bottom_is_decoded() -> None:
    """Its height is negative."""
    flipped = bytearray(bmp(picture(4, 33, 21)))
    struct.pack_into("<i", flipped, 22, -21)
    assert np.array_equal(decoded_pixels(Image(bytes(flipped))), picture(4, 33, 21)[::-1])


def test_a_png_is_unfolded_in_small_pieces_until_it_is_not_wanted() -> None:
    """The rest of its data is not copied for each piece of a megabyte, and a check may end it."""
    image = Image(png_of(bytes(8000 * 24001), 8000, 8000))
    with mock.patch("paceline.runtime.projector.zlib.decompressobj") as make:
        fed: list[int] = []
        inflater = zlib.decompressobj()

        def decompress(data: bytes, most: int) -> bytes:
            fed.append(len(data))
            return inflater.decompress(data, most)

        make.return_value = mock.Mock(decompress=decompress, eof=False, unconsumed_tail=b"")
        with contextlib.suppress(InvalidParams):
            decoded_pixels(image)
    assert len(fed) > 1
    assert max(fed) <= 1 << 16
    with pytest.raises(Cancelled):
        decoded_pixels(image, mock.Mock(side_effect=[None, None, Cancelled("enough")]))


def test_a_png_of_many_empty_chunks_is_refused_before_it_takes_memory() -> None:
    """A file of half a megabyte could else hold a list of a thousand times as many objects, and nothing would end it."""
    file = png(picture(1, 8, 8))
    empty = struct.pack(">I4sI", 0, b"IDAT", zlib.crc32(b"IDAT"))
    assert decoded_pixels(Image(file[:33] + empty * 1000 + file[33:])).shape == (8, 8, 3)
    many = Image(file[:33] + empty * 100_000 + file[33:])
    with pytest.raises(InvalidParams, match="100000 chunks, and this one has more"):
        decoded_pixels(many)
    with pytest.raises(Cancelled):
        decoded_pixels(many, mock.Mock(side_effect=[None] * 1000 + [Cancelled("enough")]))


def test_a_gif_of_tiny_blocks_is_refused() -> None:
    """Each of them is a step in Python, for a byte."""
    with pytest.raises(InvalidParams, match="more than 1048576 blocks"):
        decoded_pixels(Image(gif_header(5, 5) + b"\x2c" + bytes(8) + b"\0\2" + b"\1\0" * ((1 << 20) + 1)))


def test_a_jpeg_of_too_many_scans_is_refused() -> None:
    """Each goes over all pixels."""
    with pytest.raises(InvalidParams, match="has 500"):
        decoded_pixels(Image(jpeg_header(2000, 2000, 0xC2) + b"\xff\xda\0\x02" * 500))
