"""Prompts of segments: texts, token ids, images and audio, put together to the token ids and media items of a request.

Every text is tokenised by itself, as llama.cpp does it beside media; tokens that a model wants around an image or audio come
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, PacelineError, PromptTooLong
from paceline.kv_cache import MediaItem
from paceline.media import MAX_ATTACHMENTS, MAX_SECONDS, Attachment, Audio, MediaExtent, is_attachment
from paceline.request import RequestOptions

if TYPE_CHECKING:
    from paceline.runtime import MediaPart

MAX_BYTES: Final = 1 << 29
"""Most bytes of their files or pixels together: they are half of what a message to a worker may have."""

Measure: TypeAlias = "Callable[[MediaExtent], Sequence[MediaPart]]"
WayOut: TypeAlias = Callable[[int], str]


def _raise_n_ctx(_num_tokens: int) -> str:
    return "raise n_ctx"


@dataclass(frozen=True, slots=True)
class ComposedPrompt:
    """Token ids with zeros in the cells of items, the items, and the attachments that they are of, in order."""

    ids: list[int]
    media: tuple[MediaItem, ...]
    attachments: tuple[Attachment, ...]

    def __len__(self) -> int:
        """Return the number of its tokens and of the cells of its items."""
        return len(self.ids)

    def check_length(self, max_positions: int, before: str = "", way_out: WayOut = _raise_n_ctx) -> None:
        """Raise `PromptTooLong` where a sequence cannot have as many tokens.

        before: the segment that is not measured yet. way_out: returns how a sequence could have so many tokens.
        """
        num_tokens = len(self.ids)
        if num_tokens > max_positions:
            where = f" before {before}" if before else ""
            raise PromptTooLong(
                f"the prompt ({num_tokens} tokens{where}, {num_tokens - len(self.text_ids)} of them of images and audio) exceeds "
                f"the available context size ({max_positions} tokens); leave some out, {way_out(num_tokens)}, "
                "or set image_max_tokens where it has a meaning",
                num_tokens,
                max_positions,
            )

    @property
    def text_ids(self) -> list[int]:
        """The token ids without the cells of items."""
        ids, begin = [], 0
        for item in self.media:
            ids += self.ids[begin : item.start]
            begin = item.end
        return ids + self.ids[begin:]


class KeyedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """Token ids with the keys of media items in their cells, as the cache knows a prompt by, and those items."""

    ids: list[int]
    media: tuple[MediaItem, ...] = ()


def has_media(prompt: object) -> bool:
    """Whether this is a prompt of segments, of which one at least is an image or audio."""
    return isinstance(prompt, (list, tuple)) and any(map(is_attachment, prompt))


def composed(  # noqa: PLR0913 - names for messages
    segments: Sequence[Any],
    tokenizer: Any,
    options: RequestOptions,
    measure: Measure,
    max_positions: int,
    *,
    place: str = "prompt",
    way_out: WayOut = _raise_n_ctx,
) -> ComposedPrompt:
    """Put segments together. place: the prompt's name in messages.

    way_out: returns how a prompt of a number of tokens would be allowed.

    Raises `InvalidParams`, naming the segment, what `measure` raises, and `PromptTooLong` for more tokens than positions.
    """
    if options.truncate is not None:
        raise InvalidParams("truncate cuts texts, and this prompt has images or audio; leave it out")
    attachments = check_attachments(place, segments)
    ids: list[int] = [tokenizer.bos] if options.add_special and tokenizer.add_bos else []
    media: list[MediaItem] = []
    for index, segment in _joined(place, segments):
        name = f"{place}[{index}]"
        if is_attachment(segment):
            # measuring takes a while: none where the prompt is too long as it is
            ComposedPrompt(ids, tuple(media), attachments).check_length(max_positions, segment.name or name, way_out)
            _add_attachment(ids, media, segment, _measured(name, segment, measure))
        elif isinstance(segment, str):
            text = validation.text(name, segment)
            at_least = len(ids) + tokenizer.min_tokens(text)
            if at_least > max_positions:
                more = ", leave images or audio out, set image_max_tokens where it has a meaning" if media else ""
                raise PromptTooLong(
                    f"the prompt (at least {at_least} tokens) exceeds the available context size ({max_positions} tokens); "
                    f"shorten {name}{more}, or {way_out(at_least)}",
                    at_least,
                    max_positions,
                    is_counted=False,
                )
            ids += tokenizer.encode(text, add_special=False, parse_special=options.parse_special)
        else:
            ids += validation.token_ids(name, segment, tokenizer.n_vocab)
    if options.add_special and tokenizer.add_eos:
        ids.append(tokenizer.special_tokens["eos"])
    found = ComposedPrompt(ids, tuple(media), attachments)
    found.check_length(max_positions, way_out=way_out)
    return found


def check_attachments(place: str, segments: Sequence[Any], owner: str = "a prompt") -> tuple[Attachment, ...]:
    """Return the images and audio among segments. Raises `InvalidParams` where they are too many, too large or too long in all.

    place, owner: what has these segments.
    """
    attachments = tuple(filter(is_attachment, segments))
    if len(attachments) > MAX_ATTACHMENTS:
        raise InvalidParams(f"{owner} may have {MAX_ATTACHMENTS} images and audio, not {len(attachments)}")
    num_bytes = sum(len(one.data) for one in attachments)
    if num_bytes > MAX_BYTES:
        raise InvalidParams(
            f"the images and audio of {owner} may have {MAX_BYTES} bytes in all, not {num_bytes}; make them smaller"
        )
    _check_seconds(place, segments, owner)
    return attachments


def _check_seconds(place: str, segments: Sequence[Any], owner: str) -> None:
    """Raise `InvalidParams` where audio lasts too long in all, naming the first segment that is too much."""
    seconds = 0.0
    for index, segment in enumerate(segments):
        if isinstance(segment, Audio):
            seconds += segment.seconds
            if seconds > MAX_SECONDS:
                raise InvalidParams(
                    f"{segment.name or f'{place}[{index}]'}: the audio of {owner} may last {MAX_SECONDS} s in all, and with "
                    f"this one it lasts {seconds:.0f} s; leave some out, or send several requests"
                )


def _joined(place: str, segments: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return the segments with neighbouring texts as one, and indexes in the prompt. Raises `InvalidType` for others."""
    found: list[tuple[int, Any]] = []
    for index, one in enumerate(segments):
        is_ids = isinstance(one, Sequence) and not isinstance(one, (str, bytes, bytearray))
        if not isinstance(one, str) and not is_attachment(one) and not is_ids:
            kind = "a token id of its own; put ids into a list" if isinstance(one, Integral) else type(one).__name__
            raise InvalidType(f"{place}[{index}] must be a text, an Image, an Audio or a list of token ids, not {kind}")
        if isinstance(one, str) and found and isinstance(found[-1][1], str):
            found[-1] = found[-1][0], found[-1][1] + one
        else:
            found.append((index, one))
    return found


def _measured(name: str, attachment: Attachment, measure: Measure) -> Sequence[MediaPart]:
    try:
        return measure(attachment.extent)
    except PacelineError as error:
        raise type(error)(f"{attachment.name or name}: {error}") from error


def _add_attachment(ids: list[int], media: list[MediaItem], attachment: Attachment, parts: Sequence[MediaPart]) -> None:
    for number, part in enumerate(parts):
        ids += part.tokens
        if not part.tokens:
            content_hash = attachment.content_hash + number.to_bytes(2, "little")
            media.append(MediaItem(len(ids), part.num_cells, part.num_positions, content_hash, part.is_causal))
            ids += [0] * part.num_cells
