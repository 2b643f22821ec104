"""The form of a transcription, multipart/form-data: a file, and fields that are texts. Pure but for reading the body."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import UploadFile
from starlette.requests import Request

from paceline import validation
from paceline.errors import InvalidParams, Unsupported

_MAX_FIELDS: Final = 64
_FORMATS: Final = ("json", "text", "verbose_json")
_NEED_TIMES: Final = ("srt", "vtt", "diarized_json")
_INSTRUCTION: Final = "Transcribe audio to text"

FIELDS: Final[Mapping[str, str]] = {
    "file": "The audio: WAV, MP3 or FLAC.",
    "model": "A name from /v1/models. Any other is taken for the one model, with a warning.",
    "language": "The language of the audio, which is added to the instruction.",
    "prompt": f"The instruction, in place of {_INSTRUCTION!r}.",
    "response_format": "json, text or verbose_json, which has the duration and no segments.",
    "temperature": "0 to 2; 0 if absent.",
    "max_tokens": "Most tokens of the transcript.",
    "stream": "true: events transcript.text.delta and transcript.text.done.",
}
_UNSUPPORTED: Final = {
    "timestamp_granularities": "models here say no times",
    "include": "log-probabilities are not part of a transcript here",
    "chunking_strategy": "audio is taken as a whole",
    "known_speaker_names": "speakers are not told apart",
    "known_speaker_references": "speakers are not told apart",
}
_NO_CHOICE: Final = {
    "chunking_strategy": "auto",
    "timestamp_granularities": "segment",
}  # values that ask for nothing more


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionForm:
    """What a client sent. data: of the file. instruction: what the model is to do. warnings: of fields without a meaning."""

    data: bytes
    model: str | None
    language: str
    instruction: str
    response_format: str
    temperature: float
    max_tokens: int | None
    stream: bool
    warnings: tuple[str, ...]


async def read_form(request: Request) -> TranscriptionForm:
    """Read and check a form. Raises `InvalidParams` and `Unsupported`, naming the field, and `HTTPException` for no form."""
    try:
        form = await request.form(max_files=1, max_fields=_MAX_FIELDS)
    except UnicodeError:  # of some codecs; what others cannot read is taken for Latin-1
        raise InvalidParams("the charset of the form is not one that its fields can be read in; send UTF-8") from None
    try:
        items = [(name.removesuffix("[]"), value) for name, value in form.multi_items()]
        _check_names([name for name, _ in items])
        upload = form.get("file")
        if not isinstance(upload, UploadFile):
            raise InvalidParams("file is missing; send the audio as a part of multipart/form-data with a filename")
        texts = [(name, value) for name, value in items if isinstance(value, str) and value != ""]
        _check_supported(texts)
        return _checked(await upload.read(), dict(texts))
    finally:
        await form.close()


def _check_names(names: Sequence[str]) -> None:
    """Raise `InvalidParams` for a field that is there twice: which of its values is meant cannot be known."""
    twice = next((name for name, count in Counter(names).items() if count > 1 and name in FIELDS), None)
    if twice is not None:
        raise InvalidParams(f"{twice} is given {names.count(twice)} times; give it once")


def _check_supported(texts: Sequence[tuple[str, str]]) -> None:
    for name, value in texts:
        if name in _UNSUPPORTED and value != _NO_CHOICE.get(name):
            raise Unsupported(f"{name} is not supported: {_UNSUPPORTED[name]}; leave it out")


def _checked(data: bytes, texts: Mapping[str, str]) -> TranscriptionForm:
    kind = texts.get("response_format", "json")
    if kind in _NEED_TIMES:
        raise Unsupported(f"response_format {kind!r} needs times or speakers, which models here do not say; use json")
    validation.choice("response_format", kind, _FORMATS)
    stream = validation.choice("stream", texts.get("stream", "false").lower(), ("true", "false")) == "true"
    if stream and kind == "verbose_json":
        raise Unsupported("response_format 'verbose_json' is not streamed; use json")
    language = texts.get("language", "")
    instruction = texts.get("prompt", _INSTRUCTION) + (f" (language: {language})" if language else "")
    unknown = sorted(name for name in texts if name not in FIELDS and name not in _UNSUPPORTED)
    return TranscriptionForm(
        data=data,
        model=texts.get("model"),
        language=language,
        instruction=instruction,
        response_format=kind,
        temperature=validation.number("temperature", _number(texts, "temperature", float, 0.0), 0.0, 2.0),
        max_tokens=_max_tokens(texts),
        stream=stream,
        warnings=tuple(f"{name[:80]}: this field is not known; it was ignored" for name in unknown[:10]),
    )


def _max_tokens(texts: Mapping[str, str]) -> int | None:
    given = _number(texts, "max_tokens", int, None)
    return None if given is None else validation.integer("max_tokens", given, 1)


def _number(texts: Mapping[str, str], name: str, kind: type, default: Any) -> Any:
    if name not in texts:
        return default
    try:
        return kind(texts[name])
    except ValueError:
        raise InvalidParams(f"{name} must be a number, not {texts[name]!r:.80}") from None
