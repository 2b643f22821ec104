"""Images and audio in a conversation: taken out of its messages before the template renders them, and put in again behind it.

    messages with attachments ──> messages with marks ──template──> text with marks ──> token ids, Image, token ids, ...

A mark is a text that no message has. What the template writes around it stays; what the model wants around an image or
audio comes with it. Where a message has one, its texts are joined as llama-server joins them: by line breaks, and none beside
it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, TemplateError
from paceline.media import Attachment

if TYPE_CHECKING:
    from paceline.chat.chat_format import RenderedPrompt
    from paceline.runtime import Tokenizer

Segment: TypeAlias = Attachment | list[int]
"""A part of a prompt: an image or audio, or the token ids of what stands around it."""
PartReader: TypeAlias = Callable[[str, object], Attachment | None]
"""Takes the place of a part, for messages, and the part; returns the attachment that it is, None for one of another kind.

Raises `InvalidParams` for an attachment that is none; the message names the place.
"""


class ChatMedia:
    """The images and audio of one conversation, in order, with the marks that stand for them."""

    def __init__(self, messages: object, read_part: PartReader, nonce: str | None = None) -> None:
        """Take them out.

        Args:
            messages: The conversation.
            read_part: Finds them.
            nonce: In every mark, and random, since nothing else may know it: turns that have the same one render to the same
                text. None: one of its own.

        Raises:
            InvalidParams: What `read_part` raises, and for an attachment where none may be.
        """
        self.attachments: list[Attachment] = []
        self._nonce = secrets.token_hex(16) if nonce is None else nonce
        self._read_part = read_part
        self._kept: dict[int, list[Any]] = {}  # contents with attachments, by message
        self._loaded: dict[int, list[Any]] = {}  # the same with an `Image` or `Audio` in place of each part that is one
        self.messages = messages  # with marks
        if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
            self.messages = [self._plain(index, message) for index, message in enumerate(messages)]

    def restored(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return parsed messages with their attachments in place of the marks, as they were given."""
        return _with_contents(messages, self._kept)

    def loaded(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return parsed messages with an `Image` or `Audio` in place of each mark."""
        return _with_contents(messages, self._loaded)

    def segments(self, rendered: RenderedPrompt, tokenizer: Tokenizer, begin: int = 0, first: int = 0) -> list[Segment]:
        """Return a rendered prompt, from a character on, as segments: token ids and attachments, from the first on.

        Raises `TemplateError` where a mark is not there once.
        """
        segments: list[Segment] = []
        for number, attachment in enumerate(self.attachments[first:], first):
            place = self._place(rendered.text, number, begin)
            segments += [_encoded(rendered, begin, place, tokenizer), attachment]
            begin = place + len(self._mark(number))
        segments.append(_encoded(rendered, begin, len(rendered.text), tokenizer))
        return [one for one in segments if not isinstance(one, list) or one]

    def with_marker(self, text: str, marker: str) -> str:
        """Return a rendered text with one marker in the place of every attachment. Raises `TemplateError` as `segments`."""
        begin = 0
        for number in range(len(self.attachments)):
            begin = self._place(text, number, begin)
            text = text[:begin] + marker + text[begin + len(self._mark(number)) :]
            begin += len(marker)
        return text

    def _place(self, text: str, number: int, begin: int) -> int:
        """Return where an attachment stands in a rendered text, from `begin` on."""
        mark = self._mark(number)
        place = text.find(mark, begin)
        if place < 0 or text.count(mark) != 1:
            raise TemplateError(
                f"the chat template renders image or audio {number} {text.count(mark)} times, or not in order; "
                "it is not made for messages like these"
            )
        return place

    def _mark(self, number: int) -> str:
        return f"[{self._nonce}:{number}]"

    def _plain(self, index: int, message: Any) -> Any:
        """Return a message with marks in place of its attachments, if it has any."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            return message
        place = f"messages[{index}].content"
        found = [self._read_part(f"{place}[{number}]", part) for number, part in enumerate(content)]
        if all(one is None for one in found):
            return message
        if message.get("role") == "assistant":
            raise InvalidParams(f"{place}: images and audio are for messages to the model, not of the assistant")
        text, follows_mark = "", True
        for number, (part, attachment) in enumerate(zip(content, found, strict=True)):
            if attachment is not None:
                text += self._mark(len(self.attachments))
                self.attachments.append(attachment)
            else:
                text += ("" if follows_mark else "\n") + _text_of(f"{place}[{number}]", part)
            follows_mark = attachment is not None
        self._kept[index] = list(content)
        self._loaded[index] = [part if one is None else one for part, one in zip(content, found, strict=True)]
        return {**message, "content": text}


def _with_contents(messages: Sequence[Mapping[str, Any]], contents: Mapping[int, list[Any]]) -> list[dict[str, Any]]:
    return [
        {**message, "content": contents[index]} if index in contents else dict(message)
        for index, message in enumerate(messages)
    ]


def _text_of(name: str, part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidType(f"{name} must be a text part, an image or audio, not {kind!r:.80}")
    unknown = next((key for key in part if key not in ("type", "text")), None)
    if unknown is not None:
        raise InvalidParams(f"{name}.{str(unknown)[:80]} is not known; a part of this type has type and text")
    return validation.text(f"{name}.text", part.get("text"))


def _encoded(rendered: RenderedPrompt, begin: int, end: int, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a part of the prompt; bos and eos only at its ends."""
    if begin == end and begin > 0:
        return []
    inputs = [
        (max(first, begin) - begin, min(last, end) - begin)
        for first, last in rendered.inputs
        if max(first, begin) < min(last, end)
    ]
    ids = tokenizer.encode_prompt(rendered.text[begin:end], inputs)
    if begin > 0 and tokenizer.add_bos and ids[:1] == [tokenizer.bos]:
        ids = ids[1:]
    if end < len(rendered.text) and tokenizer.add_eos and ids[-1:] == [tokenizer.special_tokens.get("eos")]:
        ids = ids[:-1]
    return ids
