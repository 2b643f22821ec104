"""Prompts of segments: the cells of images, and the tokens around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.pictures import picture
from tests.sounds import wav_of_bytes

from paceline.engine.prompts import composed, embeddable, embedding_request, has_media, is_batch, is_single_text
from paceline.errors import InvalidParams, PromptTooLong, Unsupported
from paceline.media import MAX_SECONDS, Audio, Image
from paceline.request import RequestOptions
from paceline.runtime import MediaPart
from paceline.testing.fake_backend import FakeTokenizer

ONE, OTHER = Image(picture(1)), Image(picture(2))
PARTS = (
    MediaPart((1, 2), 0, 0, True, None, None),
    MediaPart((), 5, 3, False, None, None),
    MediaPart((3,), 0, 0, True, None, None),
    MediaPart((), 6, 6, True, None, None),
    MediaPart((4,), 0, 0, True, None, None),
)


class Tokenizer(FakeTokenizer):
    """Bytes, with a token in front of a prompt and one behind it."""

    add_bos, add_eos, bos = True, True, 201
    special_tokens = {"eos": 202}  # noqa: RUF012 - of this class alone


def compose(*segments: Any, **options: Any) -> Any:
    return composed(segments, Tokenizer(), RequestOptions(**options), lambda _: PARTS, 1000)


def test_images_stand_between_the_tokens_that_come_with_them() -> None:
    """Texts keep their tokens; bos and eos are at the ends alone."""
    found = compose("ab", "c", ONE, [7, 8], OTHER, "d")
    image = [1, 2, *[0] * 5, 3, *[0] * 6, 4]
    assert found.ids == [201, *b"abc", *image, 7, 8, *image, *b"d", 202]
    assert found.text_ids == [201, *b"abc", 1, 2, 3, 4, 7, 8, 1, 2, 3, 4, *b"d", 202]
    assert [(item.start, item.num_cells, item.num_positions, item.is_causal) for item in found.media] == [
        (6, 5, 3, False),
        (12, 6, 6, True),
        (23, 5, 3, False),
        (29, 6, 6, True),
    ]
    assert found.attachments == (ONE, OTHER)
    assert len({item.content_hash for item in found.media}) == 4
    assert found.media[0].content_hash == compose(ONE, "x").media[0].content_hash


def test_special_tokens_are_left_out_where_they_are_not_wanted() -> None:
    """As for texts."""
    assert compose(ONE, "x", add_special=False).ids[0] == 1


def test_one_prompt_is_told_from_many() -> None:
    """A list is one prompt if an image is directly in it."""
    assert has_media(["a", ONE])
    assert not has_media(["a", [ONE]])
    assert not has_media("a")
    assert not is_batch(["a", ONE])
    assert is_batch([["a", ONE], "b"])
    assert is_batch(["a", "b"])
    assert not is_batch([1, 2])


def test_a_prompt_that_is_too_long_says_how_much_of_it_is_images() -> None:
    """Which cannot be cut."""
    found = compose("ab", ONE, "d")
    found.check_length(len(found.ids))
    with pytest.raises(PromptTooLong, match=rf"\({len(found.ids)} tokens, 11 of them of images and audio") as raised:
        found.check_length(len(found.ids) - 1)
    assert (raised.value.num_tokens, raised.value.max_tokens) == (len(found.ids), len(found.ids) - 1)


def test_nothing_is_measured_behind_what_a_sequence_can_have() -> None:
    """Measuring takes a worker's time; a prompt that fits exactly is taken."""
    measured: list[object] = []

    def measure(extent: object) -> Any:
        measured.append(extent)
        return PARTS

    def compose_within(max_positions: int) -> Any:
        return composed([ONE, OTHER] * 32, Tokenizer(), RequestOptions(add_special=False), measure, max_positions)

    with pytest.raises(
        PromptTooLong, match=r"\(30 tokens before prompt\[2\], 22 of them of images and audio"
    ) as raised:
        compose_within(29)
    assert (raised.value.num_tokens, raised.value.max_tokens, len(measured)) == (30, 29, 2)
    assert len(compose_within(64 * 15).ids) == 64 * 15
    with pytest.raises(PromptTooLong, match="960 tokens, 704 of them"):
        compose_within(64 * 15 - 1)


def test_audio_has_a_limit_of_seconds_together() -> None:
    """Of one prompt; nothing is measured of one that has more."""
    half = Audio(wav_of_bytes(bytes(MAX_SECONDS // 2 * 1000), 7, 1, 1000, 8))
    assert len(compose(half, "x", half).attachments) == 2
    with pytest.raises(
        InvalidParams, match=r"^prompt\[3\]: the audio of a prompt may last 1800 s in all.*lasts 1801 s"
    ):
        compose(half, "x", half, Audio(wav_of_bytes(bytes(1000), 7, 1, 1000, 8)))


def test_images_have_a_limit_of_bytes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gets them in one message."""
    size = len(ONE.data)
    monkeypatch.setattr("paceline.engine.prompts.MAX_BYTES", 2 * size)
    compose(ONE, ONE, "x")
    with pytest.raises(InvalidParams, match=f"{2 * size} bytes in all, not {3 * size}"):
        compose(ONE, ONE, ONE, "x")


def test_what_measuring_finds_wrong_names_the_segment() -> None:
    """And keeps its class."""

    def refuse(_image: Image) -> Any:
        raise Unsupported("this model's projector takes no images")

    with pytest.raises(Unsupported, match=r"prompt\[1\]: this model's projector"):
        composed(["a", ONE], Tokenizer(), RequestOptions(), refuse, 1000)
    with pytest.raises(InvalidParams, match="truncate"):
        compose(ONE, "x", truncate="left")


def test_errors_name_segments_as_the_caller_counts_them() -> None:
    """Also behind texts that are put together."""
    with pytest.raises(InvalidParams, match=r"prompt\[3\]"):
        compose("a", "b", ONE, [999999])


# ---- inputs to embed


def to_embed(*texts: Any, longest: int = 1000, **options: Any) -> Any:
    return embeddable(texts, Tokenizer(), RequestOptions(**options), longest, lambda _: PARTS)


@pytest.mark.parametrize(
    ("texts", "is_single"),
    [
        ("a", True),
        (["a", ONE, "b"], True),
        ([ONE], True),
        (["a", "b"], False),
        ([["a", ONE, "b"]], False),
        ([["a", ONE, "b"], "c"], False),
        ([[1, 2], [3]], False),
        ([1, 2], True),
        (np.array([1, 2]), True),
        (np.array(["a", "b"]), False),
        ([], False),
    ],
)
def test_token_ids_and_segments_with_an_image_are_one_input(texts: Any, is_single: bool) -> None:
    """A list of texts alone is several."""
    assert is_single_text(texts) is is_single


def test_items_of_a_request_start_where_its_texts_are_joined() -> None:
    """A prepared prompt is taken unchanged, and its length counts its cells."""
    found = to_embed("ab", ["c", ONE, "d"], [5, 6], [OTHER, "e"])
    assert [len(item) for item in found] == [2, 19, 2, 18]
    assert to_embed(*found) == found
    request = embedding_request(7, found, "last", RequestOptions())
    assert request.attachments == (ONE, OTHER)
    assert [item.start for item in request.media] == [2 + 4, 2 + 10, 23 + 3, 23 + 9]
    assert [len(request.media_of(index)) for index in range(4)] == [0, 2, 0, 2]
    assert request.longest_text == 2
    assert request.longest_media_prompt == 19
    assert request.largest_whole_item == 5


def test_inputs_with_images_are_refused_by_their_place() -> None:
    """With the option that would help."""
    with pytest.raises(PromptTooLong, match="raise max_embedding_tokens"):
        to_embed("a", ["b", ONE, "c"], longest=10)
    with pytest.raises(InvalidParams, match="truncate"):
        to_embed([ONE, "c"], truncate="left")
    with pytest.raises(InvalidParams, match=r"texts\[1\]\[1\]"):
        to_embed("a", [ONE, [999]])
    with pytest.raises(InvalidParams, match="an embedding request may have 64 images and audio, not 66"):
        to_embed(*[[ONE, "a"]] * 66)
    no_end = Tokenizer()
    no_end.add_eos = False
    with pytest.raises(InvalidParams, match=r"texts\[0\]: a prompt must end with a token"):
        embeddable([["a", ONE]], no_end, RequestOptions(), 1000, lambda _: PARTS[1:2])
