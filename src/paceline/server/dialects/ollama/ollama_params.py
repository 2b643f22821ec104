"""Map the bodies of Ollama's requests to `SamplingParams` and `ChatOptions`. Pure; any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline import validation
from paceline.chat import ChatOptions
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.params import SamplingParams
from paceline.server.dialects.constraint_fields import enforceable
from paceline.server.dialects.ollama.ollama_bodies import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
)
from paceline.server.dialects.request_body import FieldRules, cap_warnings, check_fields, without_fractions
from paceline.server.dialects.request_fields import check_sampling_field, without_empty_texts

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

_WITHOUT_EFFECT = (
    "draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu",
    "num_gqa", "num_keep", "num_thread", "numa", "penalize_newline", "rope_frequency_base", "rope_frequency_scale", "tfs_z",
    "use_mlock", "use_mmap", "vocab_only",
)  # fmt: skip
_OPTIONS = FieldRules(without_effect=_WITHOUT_EFFECT)
_EMBEDDING_OPTIONS = FieldRules(without_effect=(*_FIELDS, *_WITHOUT_EFFECT))
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
    body: OllamaGenerationBody,
    base: SamplingParams,
    variables: TemplateVariables,
    reasoning_format: str,
    *,
    strict: bool = False,
) -> ParsedOllama:
    """Parse a body but for its messages. base: defaults; variables: as `Service.template_variables`.

    strict: refuse unknown fields and options. Raises `InvalidParams`, `InvalidType` and `Unsupported`, which name the field,
    and `ApiException` for unknown fields.
    """
    warnings = body.field_warnings(strict=strict)
    if isinstance(body, OllamaGenerateBody):
        _check_generate(body)
    changes = _parse_options(body.options, warnings, strict=strict)
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
        warnings=cap_warnings((*warnings, *relaxed)),
    )


def option_warnings(body: OllamaBody, *, strict: bool) -> list[str]:
    """Return warnings for what an embedding leaves out of account: all options, and unknown fields."""
    rules, options = _EMBEDDING_OPTIONS, _checked_options(body.options)
    return [*body.field_warnings(strict=strict), *check_fields(options, (), rules, strict=strict, place="options.")]


def _checked_options(options: object) -> Mapping[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise InvalidType(f"options must be an object, not {type(options).__name__}")
    return options or {}


def _check_generate(body: OllamaGenerateBody) -> None:
    if body.template:
        raise Unsupported("template is not supported: the chat template is the server's; leave it out, or set raw")
    if body.context:
        raise Unsupported("context is not supported; send the conversation as messages to /api/chat")
    if body.suffix and body.images:
        raise InvalidParams("suffix and images exclude each other: what is filled in is text alone")
    if body.suffix and body.system:
        raise InvalidParams("suffix and system exclude each other: what is filled in has no system message")


def _parse_options(given: object, warnings: list[str], *, strict: bool) -> dict[str, Any]:
    """Return keywords of `SamplingParams`. warnings: takes those of options without effect."""
    options = {name: without_fractions(value) for name, value in _checked_options(given).items()}
    warnings += check_fields(options, _FIELDS, _OPTIONS, strict=strict, place="options.")
    options["stop"] = without_empty_texts(options.get("stop"))
    changes: dict[str, Any] = {}
    for name, known in _FIELDS.items():
        value = options.get(name)
        if value is None:
            continue
        if name == "num_predict" and validation.integer("options.num_predict", value, -(2**31), 2**31 - 1) <= 0:
            value = None
        check_sampling_field(f"options.{name}", known, value)
        changes[known] = value
    return changes


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
