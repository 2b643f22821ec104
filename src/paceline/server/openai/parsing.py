"""Map the bodies of OpenAI's requests to `SamplingParams` and `RequestOptions`.

Pure; any thread. Values are checked by `SamplingParams` and `RequestOptions`, whose errors name the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.server.constraint_fields import (
    CONSTRAINTS,
    compact_changes,
    enforceable,
    response_format_changes,
    structured_output_changes,
    without_other_constraints,
)
from paceline.server.openai.openai_bodies import (
    OPTION_EXTRAS,
    SAMPLING_EXTRAS,
    GenerationBody,
    OpenAIBody,
    OpenAIChatBody,
    OpenAICompletionBody,
    check_unknown_fields,
    rename_fields,
)
from paceline.server.request_fields import drop_stream_options, merge_options

COMPLETION_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16}
CHAT_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": None}

_SAME_NAMES = ("temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty")
_MAX_BIAS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """What a body asks for. options: keywords of `RequestOptions`. warnings: sentences for the client."""

    params: SamplingParams
    options: dict[str, Any]
    warnings: tuple[str, ...] = ()


def parse_completion(body: OpenAICompletionBody, base: SamplingParams, options: Mapping[str, Any]) -> ParsedRequest:
    """Parse the body of a completion. base: defaults; options: keywords of `RequestOptions` from outside the body.

    Control tokens in a prompt's text are parsed, since prompts are the client's own, unless the body says otherwise.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Unsupported(
            f"best_of must be n ({body.n or 1}) or left out, not {body.best_of}: every choice is returned"
        )
    changes: dict[str, Any] = {}
    if body.logprobs is not None:
        changes["logprobs"] = body.logprobs
        if body.echo:
            changes["prompt_logprobs"] = max(body.logprobs, _integer(body, "prompt_logprobs"))
    if body.echo:
        changes["echo"] = True
        if body.suffix:
            raise Unsupported("echo and suffix exclude each other: what comes between them is not the prompt's end")
    return parse_generation(body, base, {"parse_special": True, **options}, changes)


def parse_chat(body: OpenAIChatBody, base: SamplingParams, options: Mapping[str, Any]) -> ParsedRequest:
    """Parse the body of a chat completion; see `parse_completion`."""
    changes: dict[str, Any] = {}
    if body.max_completion_tokens is not None:
        if body.max_tokens is not None and body.max_tokens != body.max_completion_tokens:
            raise InvalidParams("max_tokens is the older name of max_completion_tokens: give one of them")
        changes["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise InvalidParams("top_logprobs has no meaning without logprobs: true")
    return parse_generation(body, base, options, changes)


def parse_generation(
    body: GenerationBody, base: SamplingParams, options: Mapping[str, Any], changes: Mapping[str, Any]
) -> ParsedRequest:
    """Parse what all bodies of generations share; see `parse_completion`. changes: keywords of `SamplingParams` that win."""
    others = body.model_extra or {}
    warnings = check_unknown_fields(others, type(body))
    if body.stream_options is not None and not body.stream:
        raise InvalidParams("stream_options has no meaning without stream: true")
    changed = {**_sampling_changes(body), **rename_fields(others), **_constraint_changes(body), **changes}
    params, relaxed = enforceable(_schema_field(body), base.replace(**without_other_constraints(base, changed)))
    mine, unread = _parse_options(body)
    if (body.stream_options is not None) and body.stream_options.include_obfuscation:
        warnings.append("stream_options.include_obfuscation: accepted, and without a meaning here")
    return ParsedRequest(params=params, options=merge_options(options, mine), warnings=(*warnings, *relaxed, *unread))


def _sampling_changes(body: GenerationBody) -> dict[str, Any]:
    """Return the keywords of `SamplingParams` that the body has."""
    given = given_fields(body)
    changes = {name: given[name] for name in (*_SAME_NAMES, *SAMPLING_EXTRAS) if name in given}
    if body.max_tokens is not None:
        changes["max_tokens"] = body.max_tokens
    if body.seed is not None:
        changes["seed"] = body.seed if body.seed >= -1 else body.seed % 2**64
    if body.logit_bias is not None:
        changes["logit_bias"] = parse_logit_bias(body.logit_bias)
    return changes


def _constraint_changes(body: GenerationBody) -> dict[str, Any]:
    """Return the constraint that a body spells as OpenAI or vLLM does. Raises `InvalidParams` for more than one."""
    wanted = response_format_changes(body.response_format)
    structured = structured_output_changes(given_fields(body))
    own = [name for name in CONSTRAINTS if getattr(body, name, None) is not None]
    if bool(wanted) + bool(structured) + bool(own) > 1:
        names = [
            *(["response_format"] if wanted else []),
            *(["structured_outputs"] if structured else []),
            *own,
        ]
        raise InvalidParams(f"{' and '.join(names)} exclude each other: set one of them")
    return wanted | structured | compact_changes(given_fields(body))


def _schema_field(body: GenerationBody) -> str:
    """Return the name of the field that has a body's JSON schema."""
    fields = ("response_format", "structured_outputs", "guided_json", "text")
    return next((name for name in fields if getattr(body, name, None) is not None), "json_schema")


def _parse_options(body: GenerationBody) -> tuple[dict[str, Any], list[str]]:
    """Return the keywords of `RequestOptions`, and a warning for each that needs a stream and has none."""
    given = given_fields(body)
    options = {name: given[name] for name in OPTION_EXTRAS if name in given}
    RequestOptions(**options)  # raises for wrong values
    options, unused = drop_stream_options(options, stream=bool(body.stream))
    return options, [f"{name}: without a meaning where stream is not true" for name in unused]


def given_fields(body: OpenAIBody) -> dict[str, Any]:
    """Return the fields that the body has, without null."""
    return {name: value for name in body.model_fields_set if (value := getattr(body, name)) is not None}


def parse_logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """Parse OpenAI's logit_bias, whose keys are token ids as text. Raises `InvalidParams`."""
    result = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidParams(f"logit_bias must have token ids as its keys, not {key[:80]!r}")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise InvalidParams(f"logit_bias[{key}] must be from -{_MAX_BIAS} to {_MAX_BIAS}, not {bias}")
        result[int(key)] = bias
    return result


def model_warning(body: OpenAIBody, names: Sequence[str]) -> tuple[str, ...]:
    """Return a warning if the body names another model than the one loaded."""
    if body.model is None or body.model in names:
        return ()
    return (f"model: the one model here is {names[0]!r}; it was used",)


def _integer(body: GenerationBody, name: str) -> int:
    value = given_fields(body).get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name} must be an integer, not {value!r:.80}")
    return value
