"""POST /v1/audio/transcriptions: the form, multipart/form-data, and the transcript of its audio.

On the event loop; the file's header is read, and the prompt made, in threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from paceline import validation
from paceline.chat import ChatChunk, ChatCompletion, ChatOptions, next_turn
from paceline.errors import InvalidParams, PacelineError, Unsupported
from paceline.media import Audio
from paceline.sampling_table import API_DEFAULTS
from paceline.server.api_errors import OPENAI_FORM, invalid_request
from paceline.server.dialects.dialect import ChatGeneration, DialectReply, model_warning, serve
from paceline.server.dialects.request_body import FieldRules, cap_warnings, check_fields, warned, without_fractions
from paceline.server.json_bodies import OPENAI_STREAMS
from paceline.server.request_media import known_attachment
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service
from paceline.server.sse import EventWriter
from paceline.streaming import Usage

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


async def _read_form(request: Request, *, strict: bool) -> tuple[bytes, dict[str, str], list[str]]:
    """Return the file of a form, its texts, and warnings about fields without an effect. strict: refuse unknown fields.

    Raises `InvalidParams`, which names the field, `ApiException` for unknown fields, and `HTTPException` for no form.
    """
    try:
        form = await request.form(max_files=1, max_fields=_MAX_FIELDS)
    except UnicodeError:  # of some codecs; other unreadable charsets are taken for Latin-1
        raise InvalidParams("the charset of the form is not one that its fields can be read in; send UTF-8") from None
    try:
        items = [(name.removesuffix("[]"), value) for name, value in form.multi_items()]
        names = Counter(name for name, _ in items)
        twice = next((name for name, count in names.items() if count > 1 and name in FIELDS), None)
        if twice is not None:
            raise InvalidParams(f"{twice} is given {names[twice]} times; give it once")
        upload = form.get("file")
        if not isinstance(upload, UploadFile):
            raise InvalidParams("file is missing; send the audio as a part of multipart/form-data with a filename")
        texts = [(name, value) for name, value in items if isinstance(value, str) and value != ""]
        asking = sorted(texts, key=lambda text: text[1] not in _RULES.harmless.get(text[0], ()))
        warnings = check_fields(dict(asking), FIELDS, _RULES, strict=strict)  # of several values one that asks
        return await upload.read(), dict(texts), warnings
    finally:
        await form.close()


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


_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        name: {"type": "string", "description": text} | ({"format": "binary"} if name == "file" else {})
                        for name, text in FIELDS.items()
                    },
                }
            }
        },
    }
}


ROUTES = Routes(RouteFacts(errors=OPENAI_FORM, model="required", takes_forms=True), tags=["OpenAI"])


@ROUTES.post(
    "/audio/transcriptions", summary="As /v1/audio/transcriptions", responses=OPENAI_STREAMS, openapi_extra=_BODY
)
@ROUTES.post("/v1/audio/transcriptions", summary="Turn speech into text", responses=OPENAI_STREAMS, openapi_extra=_BODY)
async def transcribe(request: Request) -> Response:
    """Have the model write down what is said, as OpenAI's endpoint, for models that take audio."""
    return await serve(request, _parse(request))


async def _parse(request: Request) -> ChatGeneration:
    service = Service.of(request.scope)
    data, texts, ignored = await _read_form(request, strict=service.settings.strict_fields)
    kind, language = texts.get("response_format", "json"), texts.get("language", "")
    if kind in _NEED_TIMES:
        raise Unsupported(f"response_format {kind!r} needs times or speakers, which models here do not say; use json")
    validation.choice("response_format", kind, _FORMATS)
    stream = validation.choice("stream", texts.get("stream", "false").lower(), ("true", "false")) == "true"
    if stream and kind == "verbose_json":
        raise Unsupported("response_format 'verbose_json' is not streamed; use json")
    instruction = texts.get("prompt", _INSTRUCTION) + (f" (language: {language})" if language else "")
    temperature = validation.number("temperature", _number(texts, "temperature", 0.0), 0.0)
    max_tokens = _max_tokens(texts)
    if "audio" not in service.engine().model.modalities:
        message = (
            "this model takes no audio; start the server with one that hears and its multimodal projector (--mmproj)"
        )
        raise invalid_request(message, "file", Unsupported.code)
    audio = await asyncio.to_thread(_read, data)
    base = service.sampling(API_DEFAULTS["chat"])
    warnings = [*cap_warnings(ignored), *model_warning(service, texts.get("model"))]
    talk = [{"role": "user", "content": [{"type": "text", "text": instruction}, audio]}]
    seconds = audio.seconds
    return ChatGeneration(
        params=dataclasses.replace(
            base, temperature=temperature, max_tokens=base.max_tokens if max_tokens is None else max_tokens
        ),
        options=service.options(request, texts.get("model")),
        streaming=stream,
        reply=lambda running: _TranscriptReply(kind, language, seconds, running.prompts[0], warnings),
        make_turn=lambda: next_turn(talk, read_part=known_attachment),
        chat=ChatOptions(kwargs=service.template_variables({})),
        num_bytes=len(instruction),
    )


def _read(data: bytes) -> Audio:
    try:
        return Audio(data, name="file")
    except PacelineError as error:
        raise type(error)(f"file: {error}") from None


@dataclass(frozen=True, slots=True)
class _TranscriptReply(DialectReply):
    kind: str
    language: str
    seconds: float
    prompt_ids: tuple[int, ...]
    warnings: list[str]

    @property
    def media_type(self) -> str:
        """text/plain for the format "text"."""
        return "text/plain" if self.kind == "text" else "application/json"

    def events(self) -> EventWriter:
        """Return the encoder of the stream's events."""
        return _TranscriptEvents(self)

    def whole(self, completion: ChatCompletion) -> bytes:
        """Encode a response that is not streamed."""
        text = completion.choices[0].message.content
        if self.kind == "text":
            return f"{text}\n".encode()
        body = self.transcript(text, completion.usage)
        if self.kind == "verbose_json":
            body |= {"task": "transcribe", "language": self.language, "duration": self.seconds}
        return msgspec.json.encode(body)

    def transcript(self, text: str, usage: Usage) -> dict[str, Any]:
        """Return the members of a whole transcript."""
        num_audio = sum(token < 0 for token in self.prompt_ids)
        return {
            "text": text,
            "usage": {
                "type": "tokens",
                "input_tokens": usage.prompt_tokens,
                "input_token_details": {"audio_tokens": num_audio, "text_tokens": usage.prompt_tokens - num_audio},
                "output_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        } | warned(self.warnings)


class _TranscriptEvents(EventWriter):
    """The events of a transcript: each new piece of its text, then the whole."""

    def __init__(self, reply: _TranscriptReply) -> None:
        self._reply = reply
        self._text: list[str] = []

    def __call__(self, prompt: int, chunk: ChatChunk) -> list[bytes]:  # noqa: ARG002 - there is one prompt
        texts = [delta.content for delta in chunk.deltas if delta.content]
        self._text += texts
        events: list[dict[str, Any]] = [{"type": "transcript.text.delta", "delta": text} for text in texts]
        if chunk.usage is not None:
            done = self._reply.transcript("".join(self._text), chunk.usage)
            events.append({"type": "transcript.text.done"} | done)
        return [msgspec.json.encode(event) for event in events]
