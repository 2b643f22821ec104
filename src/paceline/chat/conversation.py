"""A conversation: the roles, fields and contents of its messages, their images and audio, and the end of its prompt.

    messages with attachments ──> messages with marks ──template──> text with marks ──> token ids, Image, token ids, ...

A mark is a text that no message has. The text of the template around a mark stays. The engine adds the tokens that the model
wants around an image or audio. The texts of a message with attachments are joined as llama-server joins them: by line breaks,
with none next to an attachment. Pure; any thread. Knows no template and no model.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from paceline import validation
from paceline.chat.message_parts import (
    TEXT_MEMBERS,
    THINKING_TYPES,
    IgnoredMembers,
    check_attachment_part,
    checked_json,
    refuse_unsupported,
    text_of_part,
)
from paceline.errors import InvalidParams, InvalidType, TemplateError
from paceline.media import Attachment, Image, is_attachment

if TYPE_CHECKING:
    from paceline.runtime import Tokenizer

Ranges: TypeAlias = Sequence[tuple[int, int]]
Segment: TypeAlias = Attachment | list[int]
"""A part of a prompt: an image or audio, or token ids of the text between two of them."""


@dataclass(frozen=True, slots=True)
class OmittedAttachment:
    """An image or audio that the model cannot take, and that was therefore not read.

    Attributes:
        modality: Its kind.
        place: Its place in the request.
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
            nonce: Random text of every mark. Turns with the same nonce render to the same text. None: a new nonce.
            modalities: Kinds that the model takes. Other attachments are left out of all messages except the user's last message.

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
            roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
            self._last_of_user = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
            self.messages = [self._plain(index, message) for index, message in enumerate(messages)]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about attachments that were left out, and about members of parts beside attachments."""
        omitted = (
            f"{first.place}: this model takes no {'images' if modality == 'image' else 'audio'}; the prompt has "
            f"{first.text!r} in its place{f' (and for {len(more)} more)' if more else ''}"
            for modality, (first, *more) in self._omitted.items()
        )
        return (*omitted, *self._ignored.warnings())

    def restored(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return parsed messages with their attachments in place of the marks, as they were given."""
        return _with_contents(messages, self._kept)

    def loaded(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return parsed messages with an `Image` or `Audio` in place of each mark."""
        return _with_contents(messages, self._loaded)

    def segments(
        self, text: str, inputs: Ranges, tokenizer: Tokenizer, begin: int = 0, first: int = 0
    ) -> list[Segment]:
        """Return a rendered prompt as segments: token ids and attachments.

        Args:
            text: The prompt.
            inputs: Ranges of the text that came from the messages.
            tokenizer: The model's.
            begin: The character from which the prompt is returned.
            first: The first attachment after that character.

        Raises:
            TemplateError: The text does not have each mark exactly once.
        """
        segments: list[Segment] = []
        for number, attachment in enumerate(self.attachments[first:], first):
            place = self._place(text, number, begin)
            segments += [_encoded(text, inputs, begin, place, tokenizer), attachment]
            begin = place + len(self._mark(number))
        segments.append(_encoded(text, inputs, begin, len(text), tokenizer))
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
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            return message
        place = f"messages[{index}].content"
        found = [self._read(index, f"{place}[{number}]", part) for number, part in enumerate(content)]
        if all(attachment is None for attachment in found):
            return message
        parts, loaded = list[Any](), list[Any]()
        for part, attachment in zip(content, found, strict=True):
            loaded.append(attachment if is_attachment(attachment) else part)
            if isinstance(attachment, OmittedAttachment):
                self._omitted.setdefault(attachment.modality, []).append(attachment)
                parts.append({"type": "text", "text": attachment.text})
            else:
                parts.append(loaded[-1])
        self._kept[index], self._loaded[index] = list(content), loaded
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
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                if not isinstance(kind, str) or kind not in TEXT_MEMBERS:
                    raise InvalidType(f"{place}[{number}] must be a text part, an image or audio, not {kind!r:.80}")
                text += "" if follows_mark else "\n"
                text += text_of_part(f"{place}[{number}]", part, self._ignored)[1]
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


def _with_contents(messages: Sequence[Mapping[str, Any]], contents: Mapping[int, list[Any]]) -> list[dict[str, Any]]:
    return [
        {**message, "content": contents[index]} if index in contents else dict(message)
        for index, message in enumerate(messages)
    ]


def _encoded(text: str, inputs: Ranges, begin: int, end: int, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a part of the prompt; bos and eos only at its ends."""
    if begin == end and begin > 0:
        return []
    within = [
        (max(first, begin) - begin, min(last, end) - begin)
        for first, last in inputs
        if max(first, begin) < min(last, end)
    ]
    ids = tokenizer.encode_prompt(text[begin:end], within)
    if begin > 0 and tokenizer.add_bos and ids[:1] == [tokenizer.bos]:
        ids = ids[1:]
    if end < len(text) and tokenizer.add_eos and ids[-1:] == [tokenizer.special_tokens.get("eos")]:
        ids = ids[:-1]
    return ids


MAX_MESSAGES = 16_384
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_TOOL_CALLS = 1024
MAX_ARGUMENTS_DEPTH = 64
MAX_ARGUMENTS_BYTES = 16 << 20

# The members that are read, and members that SDKs and providers add to messages and that say nothing to a model. The text of
# `thinking_blocks` and `reasoning_details` is in `reasoning_content` or `reasoning` as well.
_KNOWN_MEMBERS = frozenset(
    (
        "role content name refusal tool_calls tool_call_id function_call reasoning_content reasoning thinking prefix "
        "annotations cache_control citations created_at encrypted_content finish_reason id index logprobs metadata model parsed "
        "phase provider_metadata provider_options provider_specific_fields providerMetadata providerOptions reasoning_details "
        "reasoning_signature response_metadata status stop_reason thinking_blocks timestamp token_ids type usage usage_metadata "
        "weight"
    ).split()
)
_KNOWN_CALL_MEMBERS = frozenset(
    (
        "id type function custom index cache_control caller extra_content provider_specific_fields status thought_signature"
    ).split()
)
_KNOWN_FUNCTION_MEMBERS = frozenset("name arguments parsed_arguments index description".split())

_PLAIN_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def parse_messages(
    messages: object, name: str = "messages", ignored: IgnoredMembers | None = None
) -> list[dict[str, Any]]:
    """Check a conversation and return its messages as plain mappings.

    Each has `role` and `content`, and, if given, `name`, `reasoning_content`, `tool_calls` and `tool_call_id`.

    Args:
        messages: A list of messages. A role is a word of `ROLES`, or another plain word for models that know more. A content
            is a text or a list of text parts {"type": "text", "text": ...}; one that is null or missing is empty, or an
            assistant's `refusal`. An assistant's message may have `tool_calls`, with arguments as JSON text or an object,
            or the older `function_call`, and `reasoning_content` (or `reasoning`, `thinking`). The role "function" is that of
            "tool". Members of other names change nothing.
        name: The name of the list in error messages.
        ignored: Collects the members that have no effect here; None: they are not reported.

    Raises:
        InvalidParams: A message is malformed, or none has a content; the error names the place, for example
            messages[2].content[0].text.
        Unsupported: A message has a known part that is not supported: images, audio, files.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        example = '[{"role": "user", "content": "Hello!"}]'
        raise InvalidType(f"{name} must be a list of messages, such as {example}, not {type(messages).__name__}")
    if not messages:
        raise InvalidParams(f"{name} must have at least one message: an empty list is a conversation without any")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParams(f"{name} must have at most {MAX_MESSAGES} messages, not {len(messages)}; leave some out")
    ignored = IgnoredMembers() if ignored is None else ignored
    parsed = [_parse_message(f"{name}[{index}]", message, ignored) for index, message in enumerate(messages)]
    said = ("refusal", "tool_calls", "function_call", "content")
    if not any(isinstance(message.get("content"), str) or any(map(message.get, said)) for message in messages):
        raise InvalidParams(
            f"{name}[0].content is missing or empty, as in every message; give a text or a list of parts"
        )
    return parsed


def _parse_message(place: str, message: object, ignored: IgnoredMembers) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidType(f"{place} must be an object with role and content, not {type(message).__name__}")
    if "role" not in message:
        raise InvalidParams(f"{place}.role is missing; it is one of {', '.join(map(repr, ROLES))}")
    role = validation.text(f"{place}.role", message["role"])
    if not _PLAIN_ROLE.fullmatch(role):
        near = role.strip().lower()
        hint = f"; did you mean {near!r}?" if near in ROLES else ""
        raise InvalidParams(
            f"{place}.role must be one of {', '.join(map(repr, ROLES))}, or a plain word, not {role[:80]!r}{hint}"
        )
    role = "tool" if role == "function" else role
    ignored.check(place, "message", message, _KNOWN_MEMBERS)
    content, thoughts = _parse_content(place, role, message, ignored)
    parsed: dict[str, Any] = {"role": role, "content": content}
    if message.get("name") is not None:
        parsed["name"] = validation.text(f"{place}.name", message["name"])
    member = next((name for name in ("reasoning_content", "reasoning", "thinking") if message.get(name)), None)
    reasoning = "" if member is None else validation.text(f"{place}.{member}", message[member])
    if reasoning or thoughts:
        parsed["reasoning_content"] = reasoning or thoughts
    calls = _parse_calls(place, role, message, ignored)
    if calls:
        parsed["tool_calls"] = calls
    if message.get("tool_call_id"):
        parsed["tool_call_id"] = validation.text(f"{place}.tool_call_id", message["tool_call_id"])
    return parsed


def _parse_content(
    place: str, role: str, message: Mapping[Any, Any], ignored: IgnoredMembers
) -> tuple[str | list[dict[str, str]], str]:
    """Return the content without the parts with an assistant's thinking, and the thinking."""
    content = message.get("content")
    if content is None and role == "assistant" and message.get("refusal") is not None:
        return validation.text(f"{place}.refusal", message["refusal"]), ""
    place = f"{place}.content"
    if isinstance(content, str):
        return validation.text(place, content), ""
    if content is None or content == []:
        return "", ""
    if not isinstance(content, list):
        raise InvalidType(f"{place} must be a text or a list of text parts, not {type(content).__name__}")
    thoughts, parts = [], []
    for index, part in enumerate(content):
        kind, text = text_of_part(f"{place}[{index}]", part, ignored)
        if role == "assistant" and kind in THINKING_TYPES:
            thoughts.append(text)
        else:
            parts.append({"type": "text", "text": text})
    return parts or "", "\n\n".join(thoughts)


def _parse_calls(
    place: str, role: str, message: Mapping[Any, Any], ignored: IgnoredMembers
) -> list[dict[str, Any]] | None:
    """Return the calls of a message, or its single call in the older form `function_call`."""
    calls, older = message.get("tool_calls"), message.get("function_call")
    name = f"{place}.tool_calls" if calls or not older else f"{place}.function_call"
    if not calls and not older:
        return None
    if role != "assistant":
        raise InvalidParams(f"{name} is for messages of the role assistant, not {role!r}")
    if not calls:
        return [{"type": "function", "function": _parse_function(name, older, ignored)}]
    if not isinstance(calls, list):
        raise InvalidType(f"{name} must be a list of tool calls, not {type(calls).__name__}")
    if len(calls) > MAX_TOOL_CALLS:
        raise InvalidParams(f"{name} must be at most {MAX_TOOL_CALLS} calls, not {len(calls)}")
    return [_parse_call(f"{name}[{index}]", call, ignored) for index, call in enumerate(calls)]


def _parse_call(place: str, call: object, ignored: IgnoredMembers) -> dict[str, Any]:
    kind = call.get("type") if isinstance(call, Mapping) else None
    if kind not in (None, "function", "custom"):
        refuse_unsupported(f"{place}.type", f"calls of the type {str(kind)[:80]!r}")
    member = "custom" if kind == "custom" else "function"
    if not isinstance(call, Mapping) or not isinstance(call.get(member), Mapping):
        raise InvalidType(f"{place} must be an object with id, type and {member}")
    ignored.check(place, "call", call, _KNOWN_CALL_MEMBERS)
    function = call[member]
    if member == "custom":
        arguments = {"input": validation.text(f"{place}.custom.input", function.get("input"))}
        function = {"name": function.get("name"), "arguments": arguments}
    parsed: dict[str, Any] = {"type": "function", "function": _parse_function(f"{place}.{member}", function, ignored)}
    if call.get("id"):
        parsed["id"] = validation.text(f"{place}.id", call["id"])
    return parsed


def _parse_function(place: str, function: object, ignored: IgnoredMembers) -> dict[str, str]:
    if not isinstance(function, Mapping):
        raise InvalidType(f"{place} must be an object with name and arguments, not {type(function).__name__}")
    ignored.check(place, "function", function, _KNOWN_FUNCTION_MEMBERS)
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        plain = checked_json(f"{place}.arguments", arguments, MAX_ARGUMENTS_DEPTH, MAX_ARGUMENTS_BYTES)
        arguments = json.dumps(plain, ensure_ascii=False)
    name = validation.text(f"{place}.name", function.get("name"))
    text = "" if arguments is None else validation.text(f"{place}.arguments", arguments)
    return {
        "name": name,
        "arguments": text if text.strip() else "{}",
    }  # clients spell calls without arguments in three ways


@dataclass(frozen=True, slots=True)
class Turn:
    """Parsed messages and the end of their prompt.

    Attributes:
        messages: The messages, with marks in place of attachments.
        add_generation_prompt: As in `ChatFormat.render`.
        continue_final_message: As in `ChatFormat.render`.
        media: The attachments; None if the messages have texts alone.
        warnings: Sentences about parts of the conversation that were left out or changed.
    """

    messages: Sequence[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    media: ChatMedia | None = None
    warnings: tuple[str, ...] = ()


def next_turn(
    messages: object,
    *,
    continues: bool | None = None,
    generates: bool | None = None,
    prefills: bool = False,
    read_part: PartReader | None = None,
) -> Turn:
    """Parse a conversation and decide how its prompt ends.

    Args:
        messages: The conversation, see `parse_messages`.
        continues: `continue_final_message` of the request; None if it has none.
        generates: `add_generation_prompt` of the request; None if it has none.
        prefills: Whether a last message of the role assistant is continued when the request does not say. A message with
            calls is not, and a message with a true `prefix` is continued in any case.
        read_part: Finds the images among the parts of contents; None: messages have none.

    Raises:
        InvalidParams: A message is malformed, or options contradict each other.
        Unsupported: A message has parts that are known, and not read here.
    """
    media = None if read_part is None else ChatMedia(messages, read_part)
    ignored = IgnoredMembers()
    given: Any = messages if media is None else media.messages
    parsed = parse_messages(given, ignored=ignored)
    warnings = (*(() if media is None else media.warnings), *ignored.warnings())
    turn = Turn(parsed, media=media if media is not None and media.attachments else None, warnings=warnings)
    continued = replace(turn, add_generation_prompt=False, continue_final_message=True)
    last, prefix = parsed[-1], given[-1].get("prefix")
    has_prefix = (
        prefix is not None
        and last["role"] == "assistant"
        and validation.boolean(f"messages[{len(parsed) - 1}].prefix", prefix)
    )
    if continues:
        if generates:
            raise InvalidParams(
                "add_generation_prompt and continue_final_message exclude each other; set one of them to false"
            )
        return continued
    may_continue = has_prefix or (prefills and not last.get("tool_calls"))
    if continues is False or not may_continue or last["role"] != "assistant":
        return replace(turn, add_generation_prompt=generates is not False)
    if len(parsed) > 1 and parsed[-2]["role"] == "assistant" and not has_prefix:
        raise InvalidParams("messages end with two of the assistant's, and only one can be continued; join them")
    content = last["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    says_more = has_prefix and ("tool_calls" in last or "reasoning_content" in last)
    if len(parsed) > 1 and not any(texts) and not says_more:
        return replace(turn, messages=parsed[:-1])
    return continued
