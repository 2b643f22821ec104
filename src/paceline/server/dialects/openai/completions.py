"""POST /v1/completions. On the event loop; prompts are tokenised in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from paceline import validation
from paceline.completion import Choice, Completion
from paceline.engine.prompts import Prompt, is_batch
from paceline.errors import InvalidParams, InvalidType
from paceline.server.api_errors import COMPLETE_FINISH_REASONS, OPENAI_FORM, naming_param, openai_error_event
from paceline.server.dialects.openai.openai_replies import (
    ChoiceBase,
    ChoiceStream,
    ResponseOptions,
    prompt_extras,
    response_options_of,
    wants_prompt_logprobs,
    whole_response,
)
from paceline.server.dialects.openai.openai_requests import COMPLETION_DEFAULTS, OpenAICompletionBody, parse_completion
from paceline.server.dialects.request_body import without_fractions
from paceline.server.dialects.request_fields import MarkedImages, segments_of
from paceline.server.dialects.token_reports import LogprobColumns, LogprobColumnsBuilder
from paceline.server.json_bodies import OPENAI_STREAMS
from paceline.server.routes import EVENTS, RouteFacts, Routes
from paceline.server.running_request import check_num_prompts, start_request
from paceline.server.service import Service
from paceline.server.sse import EventStream
from paceline.streaming import StreamChunk, TokenLogprobs


def routes() -> Routes:
    """Return the route."""
    router = Routes(RouteFacts(errors=OPENAI_FORM, model="required"), tags=["OpenAI"])

    @router.post("/v1/completions", early=EVENTS, summary="Complete a text", responses=OPENAI_STREAMS)
    async def complete(body: OpenAICompletionBody, request: Request) -> Response:
        """Complete a prompt or several, as OpenAI's endpoint; with `stream` as server-sent events."""
        service = Service.of(request.scope)
        base, engine = service.sampling(COMPLETION_DEFAULTS), service.engine()
        with naming_param(OpenAICompletionBody.model_fields):
            options, strict = service.options(request, body.model), service.settings.strict_fields
            parsed = await asyncio.to_thread(parse_completion, body, base, options, engine.tokenizer, strict=strict)
            images = MarkedImages(service.media_marker, await service.request_media())
            prompts = await asyncio.to_thread(list_prompts, body, engine.tokenizer, images)
            check_num_prompts(engine, options["tenant"], len(prompts), parsed.params.n)
            streaming = bool(body.stream)
            running_request = await start_request(
                service, request, prompts, parsed.params, parsed.options, streaming=streaming
            )
        response_options = response_options_of(
            service,
            body,
            parsed,
            running_request.prompts,
            id=f"cmpl-{running_request.request_id}",
            object="text_completion",
            wants_prompt_logprobs=wants_prompt_logprobs(body, parsed.params),
        )
        if streaming:
            return EventStream(running_request, CompletionStream(response_options), failure=openai_error_event)
        return await whole_response(running_request, response_options, completion_body)

    return router


def list_prompts(body: OpenAICompletionBody, tokenizer: Any, images: MarkedImages) -> list[Prompt]:
    """Return the prompts of a body; without one, the token that begins a text. Raises as `segments_of`, and `InvalidParams`."""
    prompt = without_fractions(body.prompt)
    if prompt is None:
        if tokenizer.bos is None:
            raise InvalidParams("prompt must be given: this model has no token for the beginning of a text")
        prompt = [tokenizer.bos]
    if not isinstance(prompt, (str, list, dict)):
        raise InvalidType(f"prompt must be a text, token ids or a list of these, not {prompt!r:.80}")
    if prompt == []:
        raise InvalidParams("prompt must not be an empty list")
    named: list[tuple[str, Any]] = [("prompt", prompt)]
    if isinstance(prompt, list) and is_batch(prompt):
        named = [(f"prompt[{index}]", one) for index, one in enumerate(prompt)]
    return [_prompt_of(name, without_fractions(one), images, has_suffix=bool(body.suffix)) for name, one in named]


def _prompt_of(name: str, prompt: Any, images: MarkedImages, *, has_suffix: bool) -> Prompt:
    """Return a prompt; of one in llama-server's shape the text, or the segments with its images."""
    if not isinstance(prompt, dict):
        if not isinstance(prompt, (str, list)):
            raise InvalidType(f"{name} must be a text or token ids, not {prompt!r:.80}")
        return prompt
    if "prompt_string" not in prompt:
        raise InvalidParams(f"{name}.prompt_string is missing; multimodal_data may stand beside it")
    if not prompt.get("multimodal_data"):
        return validation.text(f"{name}.prompt_string", prompt["prompt_string"])
    if has_suffix:
        raise InvalidParams(f"{name}: suffix and multimodal_data exclude each other: what is filled in is text alone")
    return segments_of(name, prompt, images)


class CompletionChoice(ChoiceBase, kw_only=True):
    """One choice. Indices count over all prompts, those of the first prompt first."""

    text: str
    logprobs: LogprobColumns | None
    finish_reason: str | None


def completion_body(options: ResponseOptions, completions: Sequence[Completion]) -> bytes:
    """Encode a response that is not streamed; completions in the order of the prompts."""
    choices = (
        _completion_choice(options, number, one, choice)
        for number, one in enumerate(completions)
        for choice in one.choices
    )
    return options.whole(choices, [one.usage for one in completions])


def _completion_choice(
    options: ResponseOptions, prompt: int, completion: Completion, choice: Choice
) -> CompletionChoice:
    scores = completion.prompt_logprobs or ()
    return CompletionChoice(
        index=prompt * options.n + choice.index,
        text=choice.text,
        logprobs=_columns(options, prompt, scores, choice),
        finish_reason=choice.finish_reason,
        stop_reason=UNSET if choice.stop is None else choice.stop,
        token_ids=choice.token_ids if options.token_ids else UNSET,
        **prompt_extras(options, prompt, scores),
    )


def _columns(
    options: ResponseOptions, prompt: int, scores: Sequence[TokenLogprobs], choice: Choice
) -> LogprobColumns | None:
    if options.num_top is None or choice.logprobs is None:
        return None
    writer = LogprobColumnsBuilder(options.text_pieces, options.token_pieces, options.num_top)
    columns = echo_columns(options, prompt, scores, writer)
    return _join(columns, writer.write(choice.token_ids, choice.logprobs))


def echo_columns(
    options: ResponseOptions, prompt: int, scores: Sequence[TokenLogprobs], writer: LogprobColumnsBuilder
) -> LogprobColumns:
    """Return the columns of an echoed prompt; empty ones without echo."""
    if not options.echoes:
        return LogprobColumns()
    columns = writer.write(options.prompts[prompt], (None, *scores))
    writer.end_prompt()
    return columns


def _join(first: LogprobColumns, second: LogprobColumns) -> LogprobColumns:
    return LogprobColumns(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


class CompletionStream(ChoiceStream[StreamChunk]):
    """The events of a completion; tokens without text are an event only if ids or log-probabilities are reported."""

    def __init__(self, options: ResponseOptions) -> None:
        super().__init__(options)
        self._writers: dict[int, LogprobColumnsBuilder] = {}

    def _choices(self, prompt: int, chunk: StreamChunk) -> Sequence[CompletionChoice]:
        if not (chunk.text or chunk.finish_reason in COMPLETE_FINISH_REASONS or self._reports_tokens(chunk)):
            return ()
        return (self._choice(prompt, chunk),)

    def _choice(self, prompt: int, chunk: StreamChunk) -> CompletionChoice:
        options, index = self._options, prompt * self._options.n + chunk.choice
        is_first = index not in self._writers
        if is_first:
            self._writers[index] = LogprobColumnsBuilder(
                options.text_pieces, options.token_pieces, options.num_top or 0
            )
        scores: Sequence[TokenLogprobs] = self._scores[prompt].values
        extras: dict[str, Any] = prompt_extras(options, prompt, scores) if is_first else {}
        logprobs = None
        if options.num_top is not None:
            writer = self._writers[index]
            before = echo_columns(options, prompt, scores, writer) if is_first else LogprobColumns()
            logprobs = _join(before, writer.write(chunk.token_ids, chunk.logprobs))
        return CompletionChoice(
            index=index,
            text=chunk.text,
            logprobs=logprobs,
            finish_reason=chunk.finish_reason if chunk.finish_reason in COMPLETE_FINISH_REASONS else None,
            stop_reason=UNSET if chunk.stop is None else chunk.stop,
            token_ids=chunk.token_ids if options.token_ids else UNSET,
            **extras,
        )
