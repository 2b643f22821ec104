"""The form of a transcription, multipart/form-data: a file, and fields that are texts. Pure but for reading the body."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import UploadFile
from starlette.requests import Request

from paceline import validation
from paceline.errors import InvalidParams, Unsupported
from paceline.server.dialects.request_body import FieldRules, cap_warnings, check_fields, without_fractions

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
    "temperature": "0 if absent.",
    "max_tokens": "Most tokens of the transcript; -1: until the context is full.",
    "stream": "true: events transcript.text.delta and transcript.text.done.",
}
# Fields whose result can only be missing: models here have no times, no log-probabilities of a transcript, no speakers.
_RULES: Final = FieldRules(
    without_effect=(
        "chunking_strategy", "include", "known_speaker_names", "known_speaker_references", "timestamp_granularities",
    ),
    harmless={"chunking_strategy": ("auto",), "timestamp_granularities": ("segment",)},
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionForm:
    """What a client sent. data: of the file. instruction: what the model is to do. warnings: about fields without an effect."""

    data: bytes
    model: str | None
    language: str
    instruction: str
    response_format: str
    temperature: float
    max_tokens: int | None
    stream: bool
    warnings: tuple[str, ...]


async def read_form(request: Request, *, strict: bool = False) -> TranscriptionForm:
    """Read and check a form. strict: refuse unknown fields.

    Raises `InvalidParams` and `Unsupported`, which name the field, `ApiException` for unknown fields, and `HTTPException` for
    no form.
    """
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
        asking = sorted(texts, key=lambda text: text[1] not in _RULES.harmless.get(text[0], ()))
        warnings = check_fields(
            dict(asking), FIELDS, _RULES, strict=strict
        )  # of several values one that asks for something
        return _checked(await upload.read(), dict(texts), warnings)
    finally:
        await form.close()


def _check_names(names: Sequence[str]) -> None:
    """Raise `InvalidParams` for a field that is there twice: which of its values is meant cannot be known."""
    twice = next((name for name, count in Counter(names).items() if count > 1 and name in FIELDS), None)
    if twice is not None:
        raise InvalidParams(f"{twice} is given {names.count(twice)} times; give it once")


def _checked(data: bytes, texts: Mapping[str, str], warnings: list[str]) -> TranscriptionForm:
    kind = texts.get("response_format", "json")
    if kind in _NEED_TIMES:
        raise Unsupported(f"response_format {kind!r} needs times or speakers, which models here do not say; use json")
    validation.choice("response_format", kind, _FORMATS)
    stream = validation.choice("stream", texts.get("stream", "false").lower(), ("true", "false")) == "true"
    if stream and kind == "verbose_json":
        raise Unsupported("response_format 'verbose_json' is not streamed; use json")
    language = texts.get("language", "")
    instruction = texts.get("prompt", _INSTRUCTION) + (f" (language: {language})" if language else "")
    return TranscriptionForm(
        data=data,
        model=texts.get("model"),
        language=language,
        instruction=instruction,
        response_format=kind,
        temperature=validation.number("temperature", _number(texts, "temperature", 0.0), 0.0),
        max_tokens=_max_tokens(texts),
        stream=stream,
        warnings=cap_warnings(warnings),
    )


def _max_tokens(texts: Mapping[str, str]) -> int | None:
    given = _number(texts, "max_tokens", -1.0)
    most = validation.integer("max_tokens", without_fractions(given), -1, 2**31 - 1)
    if most == 0:
        raise InvalidParams("max_tokens must be at least 1, or -1 for no limit, not 0")
    return None if most == -1 else most


def _number(texts: Mapping[str, str], name: str, default: float) -> float:
    if name not in texts:
        return default
    try:
        return float(texts[name])
    except ValueError:
        raise InvalidParams(f"{name} must be a number, not {texts[name]!r:.80}") from None
