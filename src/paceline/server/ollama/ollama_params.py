"""Map the bodies of Ollama's requests to `SamplingParams` and `ChatOptions`. Pure; any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline import validation
from paceline.chat import ChatOptions
from paceline.errors import InvalidParams, InvalidType, PacelineError, Unsupported
from paceline.params import SamplingParams
from paceline.server.constraint_fields import enforceable
from paceline.server.ollama.ollama_bodies import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    given,
    unknown_warnings,
)

OLLAMA_DEFAULTS: Mapping[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "repeat_penalty": 1.1,
    "penalty_last_n": 64,
    "max_tokens": None,
}

_FIELDS: Mapping[str, str] = {
    "num_predict": "max_tokens",
    "repeat_last_n": "penalty_last_n",
    **{
        name: name
        for name in (
            "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty",
            "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "seed", "stop",
        )
    },
}  # fmt: skip
"""Options by the names that `SamplingParams` has for them."""
_EFFORTS = ("low", "medium", "high", "max")

TemplateVariables = Callable[[Mapping[str, Any], str | None], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedOllama:
    """What a body asks for. num_top: most likely tokens reported with each; None: no log-probabilities."""

    params: SamplingParams
    chat: ChatOptions
    num_top: int | None = None
    warnings: tuple[str, ...] = ()


def parse_ollama(
    body: OllamaGenerationBody, base: SamplingParams, variables: TemplateVariables, reasoning_format: str
) -> ParsedOllama:
    """Parse a body but for its messages. base: defaults; variables: as `Service.template_variables`.

    Raises `InvalidParams`, `InvalidType` and `Unsupported`, which name the field.
    """
    if isinstance(body, OllamaGenerateBody):
        _check_generate(body)
    changes, ignored = _parse_options(body.options)
    schema = _schema(body.format)
    if schema is not None:
        changes["json_schema"] = schema
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    if num_top is not None:
        changes["logprobs"] = num_top
    thinking, effort = _thinking(body.think)
    params, relaxed = enforceable("format", base.replace(**changes))
    return ParsedOllama(
        params=params,
        chat=ChatOptions(
            tools=body.tools if isinstance(body, OllamaChatBody) else None,
            reasoning_format=reasoning_format,
            kwargs=variables(thinking, effort),
        ),
        num_top=num_top,
        warnings=(*unknown_warnings(given(body.model_extra)), *ignored, *relaxed),
    )


def option_warnings(body: OllamaBody) -> list[str]:
    """Return warnings for what an embedding leaves out of account: all options, and unknown fields."""
    if body.options is not None and not isinstance(body.options, Mapping):
        raise InvalidType(f"options must be an object, not {type(body.options).__name__}")
    return [*unknown_warnings(given(body.model_extra)), *unknown_warnings(given(body.options), "options.")]


def _check_generate(body: OllamaGenerateBody) -> None:
    if body.template:
        raise Unsupported("template is not supported: the chat template is the server's; leave it out, or set raw")
    if body.context:
        raise Unsupported("context is not supported; send the conversation as messages to /api/chat")
    if body.suffix and body.images:
        raise InvalidParams("suffix and images exclude each other: what is filled in is text alone")
    if body.suffix and body.system:
        raise InvalidParams("suffix and system exclude each other: what is filled in has no system message")


def _parse_options(options: object) -> tuple[dict[str, Any], list[str]]:
    """Return keywords of `SamplingParams`, and warnings for options that have no meaning here."""
    if options is None:
        return {}, []
    if not isinstance(options, Mapping):
        raise InvalidType(f"options must be an object, not {type(options).__name__}")
    found = given(options)
    changes = {_FIELDS[name]: value for name, value in found.items() if name in _FIELDS}
    limit = found.get("num_predict")
    if limit is not None and validation.integer("options.num_predict", limit, -(2**31), 2**31 - 1) <= 0:
        changes["max_tokens"] = None
    for name in found:  # one at a time, so that an error is of that option
        if name in _FIELDS:
            _check_option(name, changes[_FIELDS[name]])
    return changes, unknown_warnings([name for name in found if name not in _FIELDS], "options.")


def _check_option(name: str, value: Any) -> None:
    try:
        SamplingParams(**{_FIELDS[name]: value})
    except PacelineError as error:
        message = f"options.{name}{str(error).removeprefix(_FIELDS[name])}"
        raise (InvalidType if isinstance(error, InvalidType) else InvalidParams)(message) from None


def _schema(wanted: object) -> Any:
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        return {"type": "object"}
    if not isinstance(wanted, Mapping):
        raise InvalidParams(f'format must be "json" or a JSON schema, an object, not {wanted!r:.80}')
    return wanted


def _thinking(think: object) -> tuple[dict[str, Any], str | None]:
    """Return variables of the template and the reasoning effort."""
    if think is None or think == "":
        return {}, None
    if isinstance(think, bool):
        return {"enable_thinking": think}, None
    return {"enable_thinking": True}, validation.choice("think", think, _EFFORTS)
