"""POST /v1/audio/transcriptions. On the event loop; the file's header is read, and the prompt made, in threads."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from paceline.chat import ChatChunk, ChatCompletion, ChatOptions, Turn, next_turn
from paceline.errors import PacelineError, Unsupported
from paceline.media import Audio
from paceline.server.api_errors import invalid_request, openai_error_event
from paceline.server.dialects.openai.parsing import CHAT_DEFAULTS
from paceline.server.dialects.openai.transcription_form import FIELDS, TranscriptionForm, read_form
from paceline.server.dialects.running_chat import RunningChat, start_chat
from paceline.server.json_bodies import OPENAI_STREAMS
from paceline.server.media_input.request_media import known_attachment
from paceline.server.service import Service
from paceline.server.sse import EventStream
from paceline.streaming import Usage

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


def routes(service: Service) -> APIRouter:
    """Return the route, under both of llama-server's paths."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        "/audio/transcriptions", summary="As /v1/audio/transcriptions", responses=OPENAI_STREAMS, openapi_extra=_BODY
    )
    @router.post(
        "/v1/audio/transcriptions", summary="Turn speech into text", responses=OPENAI_STREAMS, openapi_extra=_BODY
    )
    async def transcribe(request: Request) -> Response:
        """Have the model write down what is said, as OpenAI's endpoint, for models that take audio."""
        form = await read_form(request, strict=service.settings.strict_fields)
        if "audio" not in service.engine().model.modalities:
            message = "this model takes no audio; start the server with one that hears and its multimodal projector (--mmproj)"
            raise invalid_request(message, "file", Unsupported.code)
        audio = await asyncio.to_thread(_read, form.data)
        running = await _start(service, request, form, audio)
        warnings = [*form.warnings, *_model_warning(service, form)]
        if form.stream:
            return EventStream(running, TranscriptEvents(running, warnings), failure=openai_error_event)
        async with running:
            completion = await running.collect()
        return _response(form, audio, completion, warnings)

    return router


async def _start(service: Service, request: Request, form: TranscriptionForm, audio: Audio) -> RunningChat:
    base = service.sampling(CHAT_DEFAULTS)
    max_tokens = base.max_tokens if form.max_tokens is None else form.max_tokens
    params = dataclasses.replace(base, temperature=form.temperature, max_tokens=max_tokens)
    options = ChatOptions(kwargs=service.template_variables({}))
    return await start_chat(
        service,
        request,
        lambda: _turn(form, audio),
        options,
        params,
        service.options(request, form.model),
        streaming=form.stream,
        num_bytes=len(form.instruction),
    )


def _turn(form: TranscriptionForm, audio: Audio) -> Turn:
    content = [{"type": "text", "text": form.instruction}, audio]
    return next_turn([{"role": "user", "content": content}], read_part=known_attachment)


def _read(data: bytes) -> Audio:
    try:
        return Audio(data, name="file")
    except PacelineError as error:
        raise type(error)(f"file: {error}") from None


def _model_warning(service: Service, form: TranscriptionForm) -> tuple[str, ...]:
    if form.model is None or form.model in service.known_names:
        return ()
    return (f"model: the one model here is {service.names[0]!r}; it was used",)


class TranscriptEvents:
    """Encodes the chunks of a transcript as events: what is new of its text, then the whole."""

    def __init__(self, running: RunningChat, warnings: list[str]) -> None:
        self._prompt_ids, self._warnings = running.prompts[0], warnings
        self._text: list[str] = []

    def __call__(self, _prompt: int, chunk: ChatChunk) -> list[bytes]:
        """Return the JSON of the events of a chunk."""
        events: list[dict[str, Any]] = []
        for text in (delta.content for delta in chunk.deltas):
            if text:
                self._text.append(text)
                events.append({"type": "transcript.text.delta", "delta": text})
        if chunk.usage is not None:
            done = _transcript("".join(self._text), chunk.usage, self._prompt_ids, self._warnings)
            events.append({"type": "transcript.text.done"} | done)
        return [msgspec.json.encode(one) for one in events]


def _response(form: TranscriptionForm, audio: Audio, completion: ChatCompletion, warnings: list[str]) -> Response:
    text = completion.choices[0].message.content
    if form.response_format == "text":
        return PlainTextResponse(text + "\n")
    body = _transcript(text, completion.usage, completion.prompt_token_ids, warnings)
    if form.response_format == "verbose_json":
        body |= {"task": "transcribe", "language": form.language, "duration": audio.seconds}
    return Response(msgspec.json.encode(body), media_type="application/json")


def _transcript(text: str, usage: Usage, prompt_ids: tuple[int, ...], warnings: list[str]) -> dict[str, Any]:
    num_audio = sum(one < 0 for one in prompt_ids)
    return {
        "text": text,
        "usage": {
            "type": "tokens",
            "input_tokens": usage.prompt_tokens,
            "input_token_details": {"audio_tokens": num_audio, "text_tokens": usage.prompt_tokens - num_audio},
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    } | ({"warnings": warnings} if warnings else {})
