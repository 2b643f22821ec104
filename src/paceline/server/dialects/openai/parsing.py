"""Map the bodies of OpenAI's requests to `SamplingParams` and `RequestOptions`, which check the values.

Their errors name the field. Texts in logit_bias are tokenised: not for the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from paceline import validation
from paceline.errors import InvalidParams, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Tokenizer
from paceline.server.dialects.constraint_fields import (
    CONSTRAINTS,
    NO_CONSTRAINT,
    compact_changes,
    enforceable,
    response_format_changes,
    structured_output_changes,
    without_other_constraints,
)
from paceline.server.dialects.openai.openai_bodies import (
    OPTION_EXTRAS,
    SAMPLING_EXTRAS,
    GenerationBody,
    OpenAIBody,
    OpenAIChatBody,
    OpenAICompletionBody,
)
from paceline.server.dialects.request_body import cap_warnings, without_fractions
from paceline.server.dialects.request_fields import (
    check_sampling_field,
    drop_stream_options,
    merge_options,
    parse_logit_bias,
    parse_samplers,
    without_empty_texts,
)

COMPLETION_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16}
CHAT_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": None}

_SAME_NAMES = ("temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty")
_LIMITS: Final = ("max_output_tokens", "max_completion_tokens", "max_tokens", "n_predict")
"""Names of the most tokens, the newest first."""

_RENAMED: Final = {"repeat_last_n": "penalty_last_n", "repetition_penalty": "repeat_penalty", "typ_p": "typical_p"}
"""Other servers' names of sampling parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A parsed body, without its prompt. options: keywords of `RequestOptions`. warnings: sentences for the client."""

    params: SamplingParams
    options: dict[str, Any]
    warnings: tuple[str, ...] = ()


def parse_completion(
    body: OpenAICompletionBody,
    base: SamplingParams,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    strict: bool = False,
) -> ParsedRequest:
    """Parse the body of a completion. Control tokens in a prompt's text are parsed unless the body says otherwise.

    Args:
        body: The body.
        base: Defaults of the sampling parameters.
        options: Keywords of `RequestOptions` from outside the body.
        tokenizer: Encodes the texts in logit_bias.
        strict: Whether unknown fields are refused.

    Raises:
        InvalidParams: A value is malformed; the message begins with the field.
        Unsupported: A value is known, and not supported.
        ApiException: A field is not supported, or unknown if strict.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Unsupported(
            f"best_of must be n ({body.n or 1}) or left out, not {body.best_of}: every choice is returned"
        )
    changes: dict[str, Any] = {}
    if body.logprobs is not None:
        changes["logprobs"] = body.logprobs
        if body.echo:
            asked = given_fields(body).get("prompt_logprobs", 0)
            changes["prompt_logprobs"] = max(body.logprobs, validation.integer("prompt_logprobs", asked))
    if body.echo:
        changes["echo"] = True
        if body.suffix:
            raise Unsupported("echo and suffix exclude each other: what comes between them is not the prompt's end")
    options = {"parse_special": True, **options, "suffix": body.suffix or None}
    return parse_generation(body, base, options, changes, tokenizer, strict=strict)


def parse_chat(
    body: OpenAIChatBody,
    base: SamplingParams,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    strict: bool = False,
) -> ParsedRequest:
    """Parse the body of a chat completion; see `parse_completion`."""
    changes: dict[str, Any] = {}
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidParams("top_logprobs has no meaning without logprobs: true")
    return parse_generation(body, base, options, changes, tokenizer, strict=strict)


def parse_generation(  # noqa: PLR0913 - the parts of a request have many sources
    body: GenerationBody,
    base: SamplingParams,
    options: Mapping[str, Any],
    changes: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    strict: bool = False,
    warnings: Sequence[str] = (),
) -> ParsedRequest:
    """Parse the fields that all bodies of generations share; see `parse_completion`.

    changes: keywords of `SamplingParams` that replace the body's. warnings: the first warnings of the request.
    """
    warnings = [*warnings, *body.field_warnings(strict=strict)]
    if body.stream_options is not None and not body.stream:
        warnings.append("stream_options has no effect if stream is not true and was ignored")
    changed = {
        **_sampling_changes(body, tokenizer, warnings),
        **_length_changes(body, warnings),
        **_constraint_changes(body, warnings, strict=strict),
        **changes,
    }
    params, relaxed = enforceable(_schema_field(body), base.replace(**without_other_constraints(base, changed)))
    warnings += relaxed
    mine = _parse_options(body, warnings)
    return ParsedRequest(params=params, options=merge_options(options, mine), warnings=cap_warnings(warnings))


def _sampling_changes(body: GenerationBody, tokenizer: Tokenizer, warnings: list[str]) -> dict[str, Any]:
    """Return the keywords of `SamplingParams` that the body has, but for its length."""
    given = given_fields(body)
    changes = {name: without_fractions(given[name]) for name in (*_SAME_NAMES, *SAMPLING_EXTRAS) if name in given}
    stop = without_empty_texts(changes.pop("stop", None))
    if stop is not None:
        changes["stop"] = stop
    if changes.get("samplers") and isinstance(changes["samplers"], (list, str)):
        samplers = parse_samplers(changes.pop("samplers"), warnings)
        changes |= {"samplers": samplers} if samplers else {}  # without a known name the defaults stay
    if isinstance(changes.get("dry_sequence_breakers"), str):
        changes["dry_sequence_breakers"] = _list_of(changes["dry_sequence_breakers"])
    if body.seed is not None:
        changes["seed"] = body.seed if body.seed >= -1 else body.seed % 2**64
    if body.logit_bias is not None:
        changes["logit_bias"] = parse_logit_bias(tokenizer, body.logit_bias)
    for name, known in _RENAMED.items():
        value = without_fractions((body.model_extra or {}).get(name))
        if value is None:
            continue
        check_sampling_field(name, known, value)
        if changes.setdefault(known, value) != value:
            warnings.append(f"{name} was ignored, since there is {known} as well")
    return changes


def _list_of(text: str) -> Any:
    """Return the list that a text has as JSON, which is text-generation-webui's shape; any other text as it is."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, list) else text


def _length_changes(body: GenerationBody, warnings: list[str]) -> dict[str, Any]:
    """Return max_tokens by the newest of its names; None stands for -1: until the context is full."""
    given = {**(body.model_extra or {}), **given_fields(body)}
    known = {*type(body).model_fields, *body.rules.renamed}
    limits = [
        (name, validation.integer(name, without_fractions(given[name]), -1, 2**31 - 1))
        for name in _LIMITS
        if name in known and given.get(name) is not None
    ]
    if not limits:
        return {}
    newest, most = limits[0]
    warnings += [f"{name} was ignored, since there is {newest} as well" for name, limit in limits if limit != most]
    return {"max_tokens": None if most == -1 else most}


def _constraint_changes(body: GenerationBody, warnings: list[str], *, strict: bool) -> dict[str, Any]:
    """Return the constraint that a body spells as OpenAI or vLLM does. Raises `InvalidParams` for more than one."""
    wanted = response_format_changes(body.response_format, warnings, strict=strict)
    structured = structured_output_changes(given_fields(body), warnings, strict=strict)
    own = [name for name in CONSTRAINTS if getattr(body, name, None) not in NO_CONSTRAINT]
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
    fields = ("json_schema", "response_format", "structured_outputs", "guided_json", "text")
    return next((name for name in fields if getattr(body, name, None) not in NO_CONSTRAINT), "json_schema")


def _parse_options(body: GenerationBody, warnings: list[str]) -> dict[str, Any]:
    """Return the keywords of `RequestOptions`. An option of streams has a warning if the response is not streamed."""
    given = given_fields(body)
    options = {name: given[name] for name in OPTION_EXTRAS if name in given}
    RequestOptions(**options)  # raises for wrong values
    options, unused = drop_stream_options(options, stream=bool(body.stream))
    warnings += [f"{name} has no effect if stream is not true and was ignored" for name in unused]
    return options


def given_fields(body: OpenAIBody) -> dict[str, Any]:
    """Return the fields that the body has, without null."""
    return {name: value for name in body.model_fields_set if (value := getattr(body, name)) is not None}


def model_warning(body: OpenAIBody, names: Sequence[str]) -> tuple[str, ...]:
    """Return a warning if the body names a model other than the loaded model."""
    if body.model is None or body.model in names:
        return ()
    return (f"model: the one model here is {names[0]!r}; it was used",)
