"""From the body of a request to what the engine is asked: sampling, request options, and what has to be told in return.

Pure; any thread. Values are checked by `SamplingParams` and `RequestOptions`, whose errors name the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.server.openai.body_fields import (
    OPTION_EXTRAS,
    SAMPLING_EXTRAS,
    Body,
    GenerationBody,
    OpenAIChatBody,
    OpenAICompletionBody,
)
from paceline.server.openai.other_fields import judge, renamed
from paceline.server.options import merged

COMPLETION_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16}
CHAT_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": None}

_AS_THEY_ARE = ("temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty")
_READING = ("interval", "max_buffered_tokens", "slow_reader")  # how a stream is read
_MAX_BIAS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a body asks for. options: keywords of `RequestOptions`. warnings: what the client should know."""

    params: SamplingParams
    options: dict[str, Any]
    warnings: tuple[str, ...] = ()


def read_completion(body: OpenAICompletionBody, base: SamplingParams, options: Mapping[str, Any]) -> Asked:
    """base: what holds where the body says nothing. options: what follows from the request and not from its body.

    Prompts are the client's own, so that control tokens in their text are taken for what they spell, unless it says otherwise.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Unsupported(
            f"best_of must be n ({body.n or 1}) or left out, not {body.best_of}: all that is made is told"
        )
    changes: dict[str, Any] = {}
    if body.logprobs is not None:
        changes["logprobs"] = body.logprobs
        if body.echo:
            changes["prompt_logprobs"] = max(body.logprobs, _whole(body, "prompt_logprobs"))
    if body.echo:
        changes["echo"] = True
        if body.suffix:
            raise Unsupported("echo and suffix exclude each other: what comes between them is not the prompt's end")
    return _asked(body, base, {"parse_special": True, **options}, changes)


def read_chat(body: OpenAIChatBody, base: SamplingParams, options: Mapping[str, Any]) -> Asked:
    """As `read_completion`, for a conversation."""
    changes: dict[str, Any] = {}
    if body.max_completion_tokens is not None:
        if body.max_tokens is not None and body.max_tokens != body.max_completion_tokens:
            raise InvalidParams("max_tokens is the older name of max_completion_tokens: give one of them")
        changes["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise InvalidParams("top_logprobs has no meaning without logprobs: true")
    schema = _schema(body.response_format)
    if schema is not None:
        changes["json_schema"] = schema
    return _asked(body, base, options, changes)


def _asked(body: GenerationBody, base: SamplingParams, options: Mapping[str, Any], changes: dict[str, Any]) -> Asked:
    others = body.model_extra or {}
    warnings = judge(others, type(body))
    if body.stream_options is not None and not body.stream:
        raise InvalidParams("stream_options has no meaning without stream: true")
    also = renamed(others)
    params = base.replace(**{**_sampling(body), **_fitting(also, SAMPLING_EXTRAS, ("max_tokens",)), **changes})
    mine, unread = _options(body)
    if (body.stream_options is not None) and body.stream_options.include_obfuscation:
        warnings.append("stream_options.include_obfuscation: accepted, and without a meaning here")
    return Asked(params=params, options=merged(options, mine), warnings=(*warnings, *unread))


def _fitting(values: Mapping[str, Any], *names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if any(name in some for some in names)}


def _sampling(body: GenerationBody) -> dict[str, Any]:
    """Keywords of `SamplingParams`, of what the body says."""
    given = given_fields(body)
    changes = {name: given[name] for name in (*_AS_THEY_ARE, *SAMPLING_EXTRAS) if name in given}
    if body.max_tokens is not None:
        changes["max_tokens"] = body.max_tokens
    if body.seed is not None:
        changes["seed"] = body.seed if body.seed >= -1 else body.seed % 2**64
    if body.logit_bias is not None:
        changes["logit_bias"] = biases(body.logit_bias)
    return changes


def _options(body: GenerationBody) -> tuple[dict[str, Any], list[str]]:
    """Keywords of `RequestOptions`, and a warning for each that means nothing where the answer comes whole."""
    given = given_fields(body)
    options = {name: given[name] for name in OPTION_EXTRAS if name in given}
    unread = [] if body.stream else [name for name in _READING if name in options]
    RequestOptions(**options)  # says what is wrong with them
    return (
        {name: value for name, value in options.items() if name not in unread},
        [f"{name}: without a meaning where stream is not true" for name in unread],
    )


def given_fields(body: Body) -> dict[str, Any]:
    """What the body says, null left out."""
    return {name: value for name in body.model_fields_set if (value := getattr(body, name)) is not None}


def biases(given: Mapping[str, float]) -> dict[int, float]:
    """OpenAI's logit_bias, whose token ids are texts. Raises `InvalidParams`."""
    result = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidParams(f"logit_bias must have token ids as its keys, not {key[:80]!r}")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise InvalidParams(f"logit_bias[{key}] must be from -{_MAX_BIAS} to {_MAX_BIAS}, not {bias}")
        result[int(key)] = bias
    return result


def model_warning(body: Body, names: Sequence[str]) -> tuple[str, ...]:
    """A warning where the body names another model than the one that there is."""
    if body.model is None or body.model in names:
        return ()
    return (f"model: the one model here is {names[0]!r}; it answered",)


def _whole(body: GenerationBody, name: str) -> int:
    value = given_fields(body).get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name} must be an integer, not {value!r:.80}")
    return value


def _schema(response_format: Mapping[str, Any] | None) -> Any:
    """The JSON schema that a response_format asks for; None for text."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return response_format.get("schema") or {"type": "object"}
    if kind != "json_schema":
        raise InvalidParams(f'response_format.type must be "text", "json_object" or "json_schema", not {kind!r:.80}')
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if schema is None:
        raise InvalidParams("response_format.json_schema.schema must be a JSON schema")
    return schema
