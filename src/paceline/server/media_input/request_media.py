"""The images and audio of one HTTP request, read from the parts of any API within limits; every error names its part.

Headers alone are read here, for format and size: pixels and samples are decoded where the model is. One thread at a time, not
on the event loop: base64 of many megabytes takes a while.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

from paceline import validation
from paceline.chat.conversation import OmittedAttachment
from paceline.errors import InvalidParams, PacelineError, Unsupported
from paceline.media import MAX_SECONDS, Attachment, Audio, Image, audio_format, is_attachment
from paceline.media.source_bytes import decoded_base64, without_breaks
from paceline.server.api_errors import ApiException, invalid_request
from paceline.server.media_input.remote_urls import is_remote

_FORMATS: Final = {
    "image/png": "png",
    "image/jpeg": "jpeg",
    "image/jpg": "jpeg",
    "image/gif": "gif",
    "image/bmp": "bmp",
    "image/x-ms-bmp": "bmp",
}
_ANY_FORMAT: Final = ("", "application/octet-stream", "image/*")
_DETAILS: Final = ("auto", "low", "high", "original")
_MAX_SHOWN: Final = 80  # characters

Fetched = Mapping[str, bytes | PacelineError]
"""What was fetched from the web, by URL: the bytes of a file, or why there are none."""


class RequestMedia:
    """Reads the images and audio of one request, and counts them.

    In a chat, the methods return an `OmittedAttachment` for an attachment that the model cannot take.
    """

    def __init__(
        self,
        modalities: Callable[[], Collection[str]],
        *,
        max_images: int,
        fetched: Fetched | None = None,
        in_chat: bool = False,
    ) -> None:
        """Begin with none.

        Args:
            modalities: Returns what the model takes, see `Model.modalities`; called when there is one.
            max_images: Most images and audio of the request.
            fetched: What its URLs are; None: this server fetches nothing.
            in_chat: Whether the attachments are of a conversation. `ChatMedia` then decides about attachments that the model
                cannot take and about unknown members; otherwise both are errors.
        """
        self._modalities, self._max_images, self._fetched = modalities, max_images, fetched
        self._in_chat = in_chat
        self._num_images, self._num_seconds = 0, 0.0

    def read_part(self, place: str, part: object) -> Attachment | OmittedAttachment | None:
        """Return the image or audio of a part of OpenAI's chats; None for other parts. A `PartReader`.

        Raises `InvalidParams`, and `ApiException` (400) where the server or its model takes none such.
        """
        if isinstance(part, Mapping) and part.get("type") == "input_audio":
            self._check_members(place, part, ("type", "input_audio"))
            return self.of_audio(f"{place}.input_audio", part.get("input_audio"))
        if not isinstance(part, Mapping) or part.get("type") != "image_url":
            return None
        self._check_members(place, part, ("type", "image_url"))
        place, value = f"{place}.image_url", part.get("image_url")
        if isinstance(value, Mapping):
            self._check_members(place, value, ("url", "detail"))
            check_detail(place, value.get("detail"))
            value = value.get("url")
        return self.of_url(place, value)

    def of_url(self, place: str, url: object) -> Image | OmittedAttachment:
        """Return the image of a data URL, of base64 alone, or of a URL that was fetched. Raises as `read_part`."""
        if (omitted := self._begin(place)) is not None:
            return omitted
        text = validation.text(place, url)
        if is_remote(text):
            return self._read(place, lambda: Image(self._fetched_bytes(place, text), name=place))
        if not text.startswith("data:"):
            return self._of_base64(place, text)
        image = self._read(place, lambda: Image.from_url(text, name=place))
        _check_label(place, text[len("data:") :].partition(",")[0].partition(";")[0], image)
        return image

    def of_audio(self, place: str, value: object) -> Audio | OmittedAttachment:
        """Return the audio of an object with data in base64 and their format. Raises as `read_part`."""
        if (omitted := self._begin(place, "audio")) is not None:
            return omitted
        try:
            audio = Audio.from_part(value, name=place)
        except PacelineError as error:
            raise type(error)(f"{place}: {error}") from None
        self._num_seconds += audio.seconds
        if self._num_seconds > MAX_SECONDS:
            raise InvalidParams(
                f"{place}: the audio of a request may last {MAX_SECONDS} s in all, and with this one it lasts "
                f"{self._num_seconds:.0f} s; leave some out, or send several requests"
            )
        return audio

    def of_data(self, place: str, data: object) -> Attachment | OmittedAttachment:
        """Return the image or audio of a file in base64, as it begins. Raises as `read_part`."""
        text = validation.text(place, data)
        begin = without_breaks(text[:_MAX_SHOWN])
        begin = begin[: len(begin) // 4 * 4]
        try:
            is_audio = audio_format(decoded_base64(place, begin)) is not None
        except PacelineError:
            is_audio = False  # `of_base64` says what is wrong
        return self.of_audio(place, {"data": text}) if is_audio else self.of_base64(place, text)

    def of_base64(self, place: str, data: object, media_type: str = "") -> Image | OmittedAttachment:
        """Return the image of a file in base64. media_type: what it is labelled as; empty: it has no label."""
        if (omitted := self._begin(place)) is not None:
            return omitted
        image = self._of_base64(place, validation.text(place, data))
        _check_label(place, media_type, image)
        return image

    def _of_base64(self, place: str, data: str) -> Image:
        if not data:
            raise InvalidParams(f"{place} is empty; give it an image")
        return self._read(place, lambda: Image.from_url(f"data:;base64,{data}", name=place))

    def _begin(self, place: str, modality: Literal["image", "audio"] = "image") -> OmittedAttachment | None:
        """Count an attachment. Returns an `OmittedAttachment`, outside of chats raises, if the model takes none of its kind."""
        if modality not in self._modalities():
            kind = "images" if modality == "image" else modality
            refusal = _refusal(
                f"{place}: this model takes no {kind}; start the server with its multimodal projector (--mmproj), or leave "
                f"{kind} out"
            )
            if self._in_chat:
                return OmittedAttachment(modality, place, refusal)
            raise refusal
        self._num_images += 1
        if self._num_images > self._max_images:
            raise InvalidParams(
                f"{place}: a request may have {self._max_images} images and audio (--max-images); leave some out"
            )
        return None

    def _check_members(self, place: str, value: Mapping[Any, Any], known: Collection[str]) -> None:
        for name, member in value.items():
            if not self._in_chat and name not in known and member is not None:
                raise InvalidParams(f"{place}.{str(name)[:_MAX_SHOWN]} is not known; there are {', '.join(known)}")

    def _fetched_bytes(self, place: str, url: str) -> bytes:
        if self._fetched is None:
            raise _refusal(
                f"{place}: this server fetches no images from the web, unless it is started with --media-domains; send the data "
                "themselves"
            )
        found = self._fetched.get(url)
        if found is None:
            raise InvalidParams("the URL was not fetched; send the data themselves")
        if isinstance(found, PacelineError):
            raise found
        return found

    @staticmethod
    def _read(place: str, read: Callable[[], Image]) -> Image:
        try:
            return read()
        except PacelineError as error:
            raise type(error)(f"{place}: {str(error).removeprefix('image_url ')}") from None


def known_attachment(_place: str, part: object) -> Attachment | OmittedAttachment | None:
    """Return a part that was read before; the `PartReader` of conversations that come from other shapes."""
    return part if is_attachment(part) or isinstance(part, OmittedAttachment) else None


def check_detail(place: str, detail: object) -> None:
    """Check how closely OpenAI's models look; it has no effect on others. Raises `InvalidParams`."""
    if detail is not None:
        validation.choice(f"{place}.detail", detail, _DETAILS)


def _check_label(place: str, label: str, image: Image) -> None:
    """Raise `InvalidParams` where the data are of another format than they are labelled as."""
    given = label.strip().lower()
    if given not in _ANY_FORMAT and _FORMATS.get(given) != image.format:
        raise InvalidParams(
            f"{place}: the data are a {image.format.upper()}, and are labelled as {given[:_MAX_SHOWN]!r}; label them as "
            f"image/{image.format}"
        )


def _refusal(message: str) -> ApiException:
    """Return a 400 also in APIs that have a 501: without the image the request would be served."""
    return invalid_request(message, message.partition("[")[0].partition(":")[0], Unsupported.code)
