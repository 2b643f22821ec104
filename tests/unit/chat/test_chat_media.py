"""Images of a conversation: marks for the template, and segments of the rendering."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pictures import picture

from paceline.chat import RenderedPrompt, next_turn
from paceline.chat.chat_request import TokenHistory
from paceline.chat.conversation import ChatMedia, OmittedAttachment
from paceline.chat_client.chat_call import parsed_with_attachments, read_attachment
from paceline.errors import InvalidParams, TemplateError, Unsupported
from paceline.media import Image
from paceline.server.request_media import known_attachment

NONCE = "0123456789abcdef"
ONE, OTHER = Image(picture(1)), Image(picture(2))


class Tokenizer:
    """Characters, negative if messages brought them; a bos in front and an eos at the end."""

    add_bos, add_eos, bos = True, True, 1000
    special_tokens = {"eos": 1001}  # noqa: RUF012 - of this class alone

    def encode_prompt(self, text: str, inputs: list[tuple[int, int]]) -> list[int]:
        marked = {place for begin, end in inputs for place in range(begin, end)}
        return [1000, *(-ord(item) if place in marked else ord(item) for place, item in enumerate(text)), 1001]


TOKENIZER: Any = Tokenizer()


def chat_media(messages: Any, nonce: str = NONCE) -> ChatMedia:
    """As the library's chats read them."""
    return ChatMedia(messages, read_attachment, nonce)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_unknown_members_of_texts_are_reported_beside_an_image() -> None:
    """As they are in messages without one."""
    content = [{**text("a"), "colour": "red", "cache_control": {}}, ONE]
    images = chat_media([{"role": "user", "content": content}])
    assert images.warnings == ("messages[0].content[0].colour has no effect here and was ignored",)
    url = {"url": ONE.to_url(), "detail": "low", "uuid": 5}
    shown = [{"type": "image_url", "image_url": url, "cache_control": {}}, {"type": "image", "image": ONE, "detail": 5}]
    assert chat_media([{"role": "user", "content": shown}]).warnings == (
        "messages[0].content[0].image_url.uuid has no effect here and was ignored",
        "messages[0].content[1].detail has no effect here and was ignored",
    )


def test_a_model_that_cannot_see_gets_a_text_in_place_of_images() -> None:
    """In earlier turns, results of tools and the assistant's messages; the last message of the user keeps its own."""
    parts = [text("a"), ONE, OTHER, text("b")]
    messages: Any = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [ONE]},
        {"role": "user", "content": [ONE]},
        {"role": "tool", "content": [ONE]},
    ]
    images = ChatMedia(messages, read_attachment, NONCE, modalities=("text", "audio"))
    placeholder = text("[image omitted: this model cannot see]")
    shown: Any = images.messages
    assert [message["content"] for message in shown[:2]] == [
        [text("a"), placeholder, placeholder, text("b")],
        [placeholder],
    ]
    assert shown[3]["content"] == [placeholder]
    assert images.attachments == [ONE]
    assert images.restored(shown) == messages
    (warning,) = images.warnings
    assert warning == (
        "messages[0].content[1]: this model takes no images; the prompt has '[image omitted: this model cannot see]' in its "
        "place (and for 3 more)"
    )


def test_an_attachment_that_was_not_read_is_refused_in_the_last_message_of_the_user() -> None:
    """By the error that it brings, unless it is of an earlier turn."""
    omitted = OmittedAttachment("audio", "x", Unsupported("x: no audio"))
    message = {"role": "user", "content": [omitted, text("a")]}
    turn = next_turn([message, {"role": "user", "content": "b"}], read_part=known_attachment)
    assert turn.media is None
    assert turn.messages[0]["content"] == [text("[audio omitted: this model cannot hear]"), text("a")]
    assert turn.warnings == (
        "x: this model takes no audio; the prompt has '[audio omitted: this model cannot hear]' in its place",
    )
    with pytest.raises(Unsupported, match="x: no audio"):
        next_turn([message], read_part=known_attachment)


def test_contents_become_texts_with_marks() -> None:
    """Texts are joined by line breaks, except texts beside an image; messages without images are unchanged."""
    plain = {"role": "system", "content": "be brief"}
    content = [text("a"), text("b"), ONE, text("c"), OTHER]
    images = chat_media([plain, {"role": "user", "content": content, "name": "x"}])
    assert images.attachments == [ONE, OTHER]
    messages: Any = images.messages
    assert messages[0] is plain
    before, first, rest = messages[1]["content"].partition("[")
    assert (before, first) == ("a\nb", "[")
    assert rest.split("]")[1].startswith("c[")
    assert messages[1]["name"] == "x"
    assert images.restored(messages)[1]["content"] == content
    assert images.restored(messages)[0] == plain
    assert chat_media("no messages").messages == "no messages"


def test_marks_cannot_be_guessed() -> None:
    """Each conversation has others."""
    found = {str(chat_media([{"role": "user", "content": [ONE]}], TokenHistory().nonce).messages) for _ in range(5)}
    assert len(found) == 5


def test_a_rendered_prompt_becomes_segments() -> None:
    """Text from messages stays marked in every piece; bos and eos are at the ends alone."""
    images = chat_media([{"role": "user", "content": [text("a"), ONE, OTHER, text("b")]}])
    content = images.messages[0]["content"]  # type: ignore[index]
    rendered = RenderedPrompt(f"<{content}>", inputs=((1, 1 + len(content)),))
    assert images.segments(rendered.text, rendered.inputs, TOKENIZER) == [
        [1000, ord("<"), -ord("a")],
        ONE,
        OTHER,
        [-ord("b"), ord(">"), 1001],
    ]


def test_an_image_at_the_beginning_has_its_bos() -> None:
    """Which the template leaves to the tokenizer."""
    images = chat_media([{"role": "user", "content": [ONE]}])
    content = images.messages[0]["content"]  # type: ignore[index]
    assert images.segments(content + "x", (), TOKENIZER) == [[1000], ONE, [ord("x"), 1001]]


def test_a_prompt_can_be_taken_from_a_place_on() -> None:
    """With the images behind it, and without a bos."""
    images = chat_media([{"role": "user", "content": [ONE]}, {"role": "user", "content": [OTHER]}])
    first, second = (message["content"] for message in images.messages)  # type: ignore[attr-defined]
    rendered = RenderedPrompt(f"{first}<{second}>")
    assert images.segments(rendered.text, rendered.inputs, TOKENIZER, len(first), 1) == [
        [ord("<")],
        OTHER,
        [ord(">"), 1001],
    ]


def test_parts_are_loaded() -> None:
    """For a conversation that goes on when files have changed; other messages are checked as ever."""
    parts = [{"type": "image", "image": picture(1)}, text("a")]
    (message, other) = parsed_with_attachments(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]
    )
    assert message["content"][0].content_hash == ONE.content_hash
    assert message["content"][1] == text("a")
    assert other == {"role": "assistant", "content": "b"}
    with pytest.raises(InvalidParams, match="role"):
        parsed_with_attachments([{"content": "x"}])


@pytest.mark.parametrize("template", ["", "{0}{0}", "{1}{0}"])
def test_a_template_that_loses_an_image_is_refused(template: str) -> None:
    """Or repeats one, or changes their order."""
    images = chat_media([{"role": "user", "content": [ONE]}, {"role": "user", "content": [OTHER]}])
    contents = [message["content"] for message in images.messages]  # type: ignore[attr-defined]
    with pytest.raises(TemplateError, match="renders image or audio [01]"):
        images.segments(template.format(*contents), (), TOKENIZER)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"type": "image_url", "image_url": {"url": "ftp://x"}},
            r"messages\[0\].content\[1\].image_url.url: .*data URL",
        ),
        ({"type": "image_url", "image_url": "data:,x"}, r"image_url: an image must be"),
        ({"type": "image", "image": "/no/such.png"}, r"content\[1\].image: .*no/such.png"),
        ({"type": "image"}, r"content\[1\].image is missing"),
        ({"type": "text"}, r"content\[1\].text"),
        ({"type": "input_audio"}, r"content\[1\].input_audio is missing"),
        ({"type": "input_video"}, r"content\[1\] must be a text part, an image or audio, not 'input_video'"),
        (5, r"content\[1\] must be a text part, an image or audio, not 'int'"),
    ],
)
def test_wrong_parts_are_named(part: Any, words: str) -> None:
    """By their places."""
    with pytest.raises(InvalidParams, match=words):
        chat_media([{"role": "user", "content": [ONE, part]}])


def test_the_assistant_shows_none() -> None:
    """Models write no images."""
    with pytest.raises(InvalidParams, match="not of the assistant"):
        chat_media([{"role": "assistant", "content": [ONE]}])


def test_a_turn_has_its_images_or_none() -> None:
    """Without a reader, image parts are refused; nothing is read from the machine of a server then."""
    content = [text("a"), {"type": "image", "image": "/etc/hostname"}]
    with pytest.raises(Unsupported, match=r"messages\[0\].content\[1\].type"):
        next_turn([{"role": "user", "content": content}])
    turn = next_turn([{"role": "user", "content": [text("a"), ONE]}], read_part=read_attachment)
    assert turn.media is not None
    assert turn.media.attachments == [ONE]
    assert next_turn([{"role": "user", "content": [text("a")]}], read_part=read_attachment).media is None


def test_a_marker_can_stand_for_every_image() -> None:
    """In the text that the template renders."""
    media = chat_media([{"role": "user", "content": [text("a"), ONE, OTHER, text("b")]}])
    content = media.messages[0]["content"]  # type: ignore[index]
    assert media.with_marker(f"<{content}>", "{1}") == "<a{1}{1}b>"
    with pytest.raises(TemplateError, match="renders image or audio 0 0 times"):
        media.with_marker("", "{1}")
