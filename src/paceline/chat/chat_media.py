"""Images and audio of a conversation: the template renders marks in their place, and the prompt gets them back afterwards.

    messages with attachments ──> messages with marks ──template──> text with marks ──> token ids, Image, token ids, ...

A mark is a text that no message has. The template's text around a mark stays. The tokens that the model wants around an image
or audio are added by the engine. The texts of a message with attachments are joined as llama-server joins them: by line
breaks, with none next to an attachment.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from paceline.chat.message_parts import TEXT_MEMBERS, IgnoredMembers, check_attachment_part, text_of_part
from paceline.errors import InvalidParams, InvalidType, TemplateError
from paceline.media import Attachment, Image, is_attachment

if TYPE_CHECKING:
    from paceline.chat.chat_format import RenderedPrompt
    from paceline.runtime import Tokenizer

Segment: TypeAlias = Attachment | list[int]
"""A part of a prompt: an image or audio, or token ids of the text between two of them."""


@dataclass(frozen=True, slots=True)
class OmittedAttachment:
    """An image or audio that the model cannot take, and that was therefore not read.

    Attributes:
        modality: Its kind.
        place: Where the caller's request has it.
        error: The refusal, raised if the attachment is in the last user message.
    """

    modality: Literal["image", "audio"]
    place: str
    error: Exception | None = None

    @property
    def text(self) -> str:
        """The text that takes its place in the prompt."""
        sense = "see" if self.modality == "image" else "hear"
        return f"[{self.modality} omitted: this model cannot {sense}]"


PartReader: TypeAlias = Callable[[str, object], Attachment | OmittedAttachment | None]
"""Takes the place of a part, for errors, and the part; returns its attachment, or None if the part is of another kind.

Raises `InvalidParams` for a malformed attachment; the error names the place.
"""


class ChatMedia:
    """The images and audio of one conversation, in order, and their marks.

    A text replaces an attachment that the model cannot take, unless the attachment is in the last message of the user.
    """

    def __init__(
        self,
        messages: object,
        read_part: PartReader,
        nonce: str | None = None,
        modalities: Collection[str] = ("image", "audio"),
    ) -> None:
        """Replace the attachments of messages by marks.

        Args:
            messages: The conversation.
            read_part: Finds the attachments.
            nonce: Random text of every mark, which no message can guess. Turns with the same nonce render to the same text.
                None: a new one.
            modalities: Kinds that the model takes. Attachments of other kinds are left out of every message except the last
                one of the user, in which the engine refuses them.

        Raises:
            InvalidParams: An attachment is malformed, or in a message of the assistant.
            Exception: The error of an `OmittedAttachment` in the last message of the user.
        """
        self.attachments: list[Attachment] = []
        self._nonce = secrets.token_hex(16) if nonce is None else nonce
        self._read_part, self._modalities = read_part, modalities
        self._kept: dict[int, list[Any]] = {}  # contents with attachments, by message
        self._loaded: dict[int, list[Any]] = {}  # the same with an `Image` or `Audio` in place of each part that is one
        self._omitted: dict[str, list[OmittedAttachment]] = {}  # by modality
        self._ignored = IgnoredMembers()
        self._last_of_user = -1
        self.messages = messages  # with marks
        if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
            users = (index for index, message in enumerate(messages) if _role_of(message) == "user")
            self._last_of_user = max(users, default=-1)
            self.messages = [self._plain(index, message) for index, message in enumerate(messages)]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about attachments that were left out, and about members of parts beside attachments."""
        return (*map(_omission, self._omitted.values()), *self._ignored.warnings())

    def restored(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return parsed messages with their attachments in place of the marks, as they were given."""
        return _with_contents(messages, self._kept)

    def loaded(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return parsed messages with an `Image` or `Audio` in place of each mark."""
        return _with_contents(messages, self._loaded)

    def segments(self, rendered: RenderedPrompt, tokenizer: Tokenizer, begin: int = 0, first: int = 0) -> list[Segment]:
        """Return a rendered prompt, from a character on, as segments: token ids and attachments, from the first on.

        Raises `TemplateError` if the text has a mark not exactly once.
        """
        segments: list[Segment] = []
        for number, attachment in enumerate(self.attachments[first:], first):
            place = self._place(rendered.text, number, begin)
            segments += [_encoded(rendered, begin, place, tokenizer), attachment]
            begin = place + len(self._mark(number))
        segments.append(_encoded(rendered, begin, len(rendered.text), tokenizer))
        return [segment for segment in segments if segment != []]

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
        found = [self._read(index, f"{place}[{number}]", part) for number, part in enumerate(content)]
        if all(attachment is None for attachment in found):
            return message
        parts = [self._shown(part, attachment) for part, attachment in zip(content, found, strict=True)]
        self._kept[index] = list(content)
        self._loaded[index] = [
            attachment if is_attachment(attachment) else part for part, attachment in zip(content, found, strict=True)
        ]
        if not any(map(is_attachment, parts)):
            return {**message, "content": parts}
        if message.get("role") == "assistant":
            raise InvalidParams(f"{place}: images and audio are for messages to the model, not of the assistant")
        text, follows_mark = "", True
        for number, part in enumerate(parts):
            if is_attachment(part):
                text += self._mark(len(self.attachments))
                self.attachments.append(part)
            else:
                text += ("" if follows_mark else "\n") + self._text_of(f"{place}[{number}]", part)
            follows_mark = is_attachment(part)
        return {**message, "content": text}

    def _read(self, index: int, place: str, part: object) -> Attachment | OmittedAttachment | None:
        """Return the attachment of a part. Raises the refusal of one that may not be left out."""
        found = self._read_part(place, part)
        if found is not None and isinstance(part, Mapping):
            check_attachment_part(place, part, self._ignored)
        if is_attachment(found) and index != self._last_of_user:
            modality: Literal["image", "audio"] = "image" if isinstance(found, Image) else "audio"
            return found if modality in self._modalities else OmittedAttachment(modality, place)
        if isinstance(found, OmittedAttachment) and found.error is not None and index == self._last_of_user:
            raise found.error
        return found

    def _shown(self, part: object, found: Attachment | OmittedAttachment | None) -> object:
        """Return an attachment, or the text that takes its place; any other part itself."""
        if not isinstance(found, OmittedAttachment):
            return part if found is None else found
        self._omitted.setdefault(found.modality, []).append(found)
        return {"type": "text", "text": found.text}

    def _text_of(self, place: str, part: object) -> str:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(kind, str) or kind not in TEXT_MEMBERS:
            raise InvalidType(f"{place} must be a text part, an image or audio, not {kind!r:.80}")
        return text_of_part(place, part, self._ignored)[1]


def _role_of(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def _omission(omitted: Sequence[OmittedAttachment]) -> str:
    first = omitted[0]
    kind = "images" if first.modality == "image" else "audio"
    more = f" (and for {len(omitted) - 1} more)" if len(omitted) > 1 else ""
    return f"{first.place}: this model takes no {kind}; the prompt has {first.text!r} in its place{more}"


def _with_contents(messages: Sequence[Mapping[str, Any]], contents: Mapping[int, list[Any]]) -> list[dict[str, Any]]:
    return [
        {**message, "content": contents[index]} if index in contents else dict(message)
        for index, message in enumerate(messages)
    ]


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
