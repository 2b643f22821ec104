"""Images of requests: accepted images, and the names in errors."""

from __future__ import annotations

import base64
import re
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.media_requests import DATA, FILE, URL, image_part, request_media
from tests.pictures import bmp, gif_header, jpeg_header, picture, png_chunk, png_of
from tests.sounds import wav_of_bytes

from paceline.chat.conversation import OmittedAttachment
from paceline.errors import InvalidParams, PacelineError
from paceline.media import MAX_SECONDS, Image
from paceline.server.api_errors import ApiException, api_error_of
from paceline.server.request_media import remote_urls

PLACE = "messages[1].content[2]"
REMOTE = "https://images.example/cat.png"


def url_of(data: bytes, label: str = "image/png") -> str:
    return f"data:{label};base64,{base64.b64encode(data).decode()}"


def read(part: Any, **options: Any) -> Image | None:
    return request_media(**options).read_part(PLACE, part)


def complaint(part: Any, **options: Any) -> str:
    """The message of the 400 for a part."""
    with pytest.raises((PacelineError, ApiException)) as raised:
        read(part, **options)
    api_error = api_error_of(raised.value)
    assert api_error.status == 400
    return api_error.message


@pytest.mark.parametrize(
    "part",
    [
        image_part(),
        image_part(detail="low"),
        {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": {"url": DATA}},  # as llama-server takes it
        image_part(url_of(FILE, "")),
        image_part(url_of(FILE, "image/*")),
        image_part(url_of(FILE, "IMAGE/PNG;name=cat.png")),
    ],
)
def test_parts_with_an_image_are_read(part: Any) -> None:
    """It is called by its place in errors."""
    found = read(part)
    assert found is not None
    assert (found.data, found.name) == (FILE, f"{PLACE}.image_url")


@pytest.mark.parametrize(
    "part", [{"type": "text", "text": URL}, {"type": "image", "image": "/etc/hostname"}, 5, None, URL]
)
def test_other_parts_are_none(part: Any) -> None:
    """No path of the server's machine is ever opened."""
    assert read(part) is None


WIDE = png_of(b"", 50_000, 1)
NOTHING = png_of(b"", 0, 5)
BOMB = png_of(b"", 16384, 16384)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"url": url_of(WIDE)}, "may be 16384 pixels wide"),
        ({"url": url_of(BOMB)}, "and have 67108864 in all"),
        ({"url": url_of(NOTHING)}, "must have pixels"),
        ({"url": url_of(FILE[:20])}, "ends in the middle of its header"),
        ({"url": url_of(b"")}, "an empty file"),
        ({"url": url_of(b"<html>", "text/html")}, "not SVG or another text"),
        ({"url": url_of(FILE, "text/html")}, "are labelled as 'text/html'"),
        ({"url": url_of(FILE, "image/jpeg")}, "the data are a PNG, and are labelled as 'image/jpeg'"),
        ({"url": url_of(bmp(picture(1)), "image/png")}, "the data are a BMP"),
        ({"url": url_of(b"RIFF....WEBP", "image/webp")}, "not WebP"),
        ({"url": "data:image/png;base64,$$$"}, "not valid base64"),
        ({"url": "data:image/png"}, "must be a data URL"),
        ({"url": "file:///etc/passwd"}, "not valid base64"),
        ({"url": "/etc/passwd"}, "not valid base64|must be a PNG"),
        ({"url": ""}, "is empty"),
        ({"url": None}, "must be a"),
        ({"url": 5}, "must be a"),
        ({"url": REMOTE}, "fetches no images from the web, unless it is started with --media-domains"),
        ({"url": URL, "detail": "much"}, r"detail must be"),
        ({"url": URL, "uuid": "x"}, r"image_url.uuid is not known"),
        ({}, "must be a"),
        ([URL], "must be a"),
    ],
)
def test_images_that_cannot_be_are_refused_by_their_place(value: Any, words: str) -> None:
    """Before anything is decoded."""
    message = complaint({"type": "image_url", "image_url": value})
    assert message.startswith(f"{PLACE}.image_url")
    assert re.search(words, message)
    assert "image_url: image_url" not in message


def test_a_model_without_a_projector_takes_none() -> None:
    """A 400, also in APIs that have a 501; the message has the flag."""
    media = request_media(modalities=("text",))
    with pytest.raises(ApiException, match="takes no images.*--mmproj") as raised:
        media.read_part(PLACE, image_part())
    found = raised.value.api_error
    assert (found.status, found.code, found.param) == (400, "unsupported", "messages")


def test_a_chat_may_go_on_without_what_its_model_cannot_take() -> None:
    """Nothing is read or counted; unknown members are left to the conversation."""
    media = request_media(modalities=("text",), max_images=1, in_chat=True)
    for _ in range(3):
        omitted = media.read_part(PLACE, {**image_part(), "cache_control": {}})
        assert isinstance(omitted, OmittedAttachment)
        assert (omitted.modality, omitted.place) == ("image", f"{PLACE}.image_url")
        assert "takes no images" in str(omitted.error)
    heard = media.of_audio(PLACE, "no audio at all")
    assert isinstance(heard, OmittedAttachment)
    assert heard.text == "[audio omitted: this model cannot hear]"
    assert isinstance(media.of_url(PLACE, REMOTE), OmittedAttachment)
    seeing = request_media(in_chat=True)
    assert isinstance(seeing.read_part(PLACE, {**image_part(), "cache_control": {}}), Image)


def test_images_are_counted() -> None:
    """Over all parts of a request; the excess image is named."""
    media = request_media(max_images=2)
    media.of_base64("images[0]", DATA)
    media.of_url("images[1]", URL)
    with pytest.raises(InvalidParams, match=r"images\[2\]: a request may have 2 images and audio \(--max-images\)"):
        media.of_url("images[2]", URL)
    assert "may have 0 images" in complaint(image_part(), max_images=0)


def test_the_seconds_of_audio_are_counted() -> None:
    """Over all parts of a request; the excess image is named."""
    media = request_media(modalities=("text", "audio"))
    data = base64.b64encode(wav_of_bytes(bytes(MAX_SECONDS // 2 * 1000 + 1000), 7, 1, 1000, 8)).decode()
    media.of_audio("audio[0]", {"data": data})
    with pytest.raises(InvalidParams, match=r"^audio\[1\]: the audio of a request may last 1800 s in all.* 1802 s"):
        media.of_audio("audio[1]", {"data": data})


def test_base64_of_mime_is_read() -> None:
    """Broken into lines, in a data URL with its label in capitals, and with a detected kind of file."""
    lines = base64.encodebytes(FILE).decode()
    assert request_media().of_url("a", f"data:image/png;BASE64,{lines}").data == FILE
    assert request_media().of_data("a", lines).data == FILE
    sound = base64.encodebytes(wav_of_bytes(bytes(4000), 7, 1, 8000, 8)).decode()
    assert request_media(modalities=("text", "audio")).of_data("a", sound).format == "wav"
    assert request_media(modalities=("text", "audio")).of_data("a", f"\n{sound[:77]}{sound[77:]}").format == "wav"


def test_a_label_beside_base64_has_to_be_right() -> None:
    """As in a data URL."""
    assert request_media().of_base64("a", DATA, "image/png").format == "png"
    with pytest.raises(InvalidParams, match="a: the data are a PNG"):
        request_media().of_base64("a", DATA, "image/gif")


def test_what_was_fetched_is_an_image_or_says_why_not() -> None:
    """By the place of its part."""
    assert read(image_part(REMOTE), fetched={REMOTE: FILE}) is not None
    failed = complaint(image_part(REMOTE), fetched={REMOTE: InvalidParams("the URL is too far")})
    assert failed == f"{PLACE}.image_url: the URL is too far"
    assert "must be a PNG" in complaint(image_part(REMOTE), fetched={REMOTE: b"<html>"})
    assert "was not fetched" in complaint(image_part(REMOTE), fetched={})


def test_urls_are_found_in_the_shapes_of_every_api() -> None:
    """Each once, in order, at most so many; data and other texts are none."""
    body = [
        {
            "role": "user",
            "content": [image_part("https://a/1"), image_part(URL), {"type": "text", "text": "https://a/0"}],
        },
        {
            "content": [
                {"type": "image_url", "image_url": "HTTP://a/2"},
                {"type": "input_image", "image_url": "https://a/3"},
            ]
        },
        {
            "content": [
                {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": "https://a/4"}}]}
            ]
        },
        {"content": [{"type": "input_file", "file_url": "https://a/5"}, image_part("https://a/1")]},
        {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "https://a/6"}},
        {"content": [{"type": "image", "source": {"type": "base64", "url": "https://a/7"}}, image_part(5)]},  # type: ignore[arg-type]
    ]
    assert remote_urls(body, 10) == [f"{'HTTP://a' if number == 2 else 'https://a'}/{number}" for number in range(1, 7)]
    assert remote_urls(body, 2) == ["https://a/1", "HTTP://a/2"]
    assert remote_urls(body, 0) == []
    deep: Any = image_part("https://a/1")
    for _ in range(100_000):
        deep = [deep]
    assert remote_urls(deep, 10) == ["https://a/1"]


BEGINNINGS = [
    FILE[:33],
    bmp(picture(1))[:60],
    gif_header(9, 9),
    jpeg_header(9, 9),
    b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 7, 7, 8, 2, 0, 0, 0)),
]


@given(
    st.sampled_from(BEGINNINGS), st.binary(max_size=40), st.integers(0, 60), st.lists(st.integers(0, 2**16), max_size=4)
)
def test_any_header_is_an_image_or_a_clear_error(begin: bytes, more: bytes, cut: int, flips: list[int]) -> None:
    """Headers with bytes changed, cut and added; nothing but `InvalidParams` that begins with the place."""
    data = bytearray(begin[:cut] + more)
    for flip in flips:
        if data:
            data[flip % len(data)] ^= 1 + flip // 256 % 255
    try:
        found = request_media().of_base64("here", base64.b64encode(data).decode())
    except InvalidParams as error:
        outcome = str(error)
    else:
        outcome = "here" if 1 <= found.width <= 16384 and 1 <= found.height <= 16384 else f"{found.width} pixels wide"
    assert outcome.startswith("here")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["image_url", "url", URL, REMOTE, "x", ""]),
    lambda one: (
        st.lists(one, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "image_url", "url", "detail", "text"]), one, max_size=4)
    ),
    max_leaves=8,
)


@given(JSON | st.builds(lambda value: {"type": "image_url", "image_url": value}, JSON))
def test_any_part_is_an_image_another_part_or_a_400(part: Any) -> None:
    """Whatever JSON it is."""
    try:
        found = read(part)
    except (PacelineError, ApiException) as error:
        api_error = api_error_of(error)
        outcome = api_error.status == 400 and api_error.message.startswith(PLACE)
    else:
        outcome = found is None or found.data == FILE
    assert outcome
    assert isinstance(remote_urls(part, 3), list)
