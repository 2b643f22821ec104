"""Map the fields of a completion's body to `SamplingParams` and `RequestOptions`. Not for the event loop: tokenises.

Values that llama-server clamps are clamped with a warning; values that it documents as "off" turn a sampler off;
what would change the output and is not supported is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.params import SamplingParams
from paceline.request import MAX_DRAFT, RequestOptions
from paceline.runtime import Tokenizer
from paceline.server.dialects.constraint_fields import enforceable, without_other_constraints
from paceline.server.dialects.llama_server.llama_bodies import CompletionBody, LoraScale
from paceline.server.dialects.request_body import without_fractions
from paceline.server.dialects.request_fields import (
    BANNED_BIAS,
    MarkedImages,
    drop_stream_options,
    parse_logit_bias,
    parse_samplers,
    without_empty_texts,
)

API_DEFAULTS: Mapping[str, Any] = {"max_tokens": None}
"""Where llama-server's defaults are not those of `SamplingParams`."""

RANDOM_SEED = 2**32 - 1
"""What llama-server calls a seed that is drawn; so does -1."""

SAME_NAMES = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p",
    "xtc_probability", "xtc_threshold", "repeat_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier",
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta",
    "adaptive_target", "adaptive_decay", "ignore_eos",
)  # fmt: skip
"""Fields that have the same name and meaning in `SamplingParams`."""

# llama-server documents values beyond these as "off", as the bound is.
_OFF = {
    "temperature": (0.0, None),
    "top_k": (0, None),
    "top_n_sigma": (-1.0, None),
    "adaptive_target": (-1.0, None),
    "typical_p": (None, 1.0),
}
_CLAMPED = {
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "mirostat": (0, 2),
    "adaptive_target": (None, 1.0),
}
_TOKEN_TRIGGER, _WORD_TRIGGER, _PATTERN_TRIGGER, _FULL_PATTERN_TRIGGER = 0, 1, 2, 3
_SAMPLING_EXTRAS = (
    "min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words", "grammar_root", "regex", "choice",
    "lark", "disable_any_whitespace",
)  # fmt: skip
_OPTION_EXTRAS = (
    "priority", "queue_timeout_s", "ttft_timeout_s", "timeout_s", "truncate", "special", "cache_salt", "interval",
    "max_buffered_tokens", "slow_reader", "speculation", "max_draft",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseContext:
    """What parsing needs beside the body. base: sampling defaults; adapters: names by id.

    images: how prompts have them. spm_infill: put the suffix first in an infill prompt. spec_types: kinds of drafts, as
    llama-server names them. strict: refuse unknown fields.
    """

    base: SamplingParams
    tokenizer: Tokenizer
    images: MarkedImages
    adapters: Sequence[str] = ()
    spm_infill: bool = False
    spec_types: str = "none"
    strict: bool = False


def parse_params(body: CompletionBody, context: ParseContext, warnings: list[str]) -> SamplingParams:
    """Return how to sample. Raises `InvalidParams`, and `Unsupported` for what would change the output."""
    base = context.base
    changes = _given(body, (*SAME_NAMES, "grammar_lazy"))
    changes |= {name: without_fractions(value) for name, value in _given(body, _SAMPLING_EXTRAS).items()}
    _apply_bounds(changes, warnings)
    if changes.get("dry_base", 1.0) < 1.0:
        warnings.append(f"dry_base must be at least 1; {changes.pop('dry_base')} was ignored")
    if body.repeat_last_n is not None:
        changes["penalty_last_n"] = body.repeat_last_n
    if body.seed is not None:
        changes["seed"] = _parse_seed(body.seed)
    if body.samplers is not None:
        changes["samplers"] = parse_samplers(body.samplers, warnings)
    if body.logit_bias is not None:
        changes["logit_bias"] = parse_logit_bias(context.tokenizer, body.logit_bias, warnings)
    changes |= (
        _dry_breakers(body) | _stops(body) | _length(body, base) | _constraint(body, warnings) | _logprob_fields(body)
    )
    if body.min_keep is not None and body.min_keep > 1:
        raise Unsupported(
            f"min_keep must be 0 or 1, not {body.min_keep}: samplers here always keep one token, never more"
        )
    params, relaxed = enforceable("json_schema", base.replace(**without_other_constraints(base, changes)))
    warnings += relaxed
    return params


def parse_options(body: CompletionBody, warnings: list[str]) -> dict[str, Any]:
    """Return the keywords of `RequestOptions` that the body has. Raises `InvalidParams`."""
    options, unused = drop_stream_options(_given(body, _OPTION_EXTRAS), stream=bool(body.stream))
    warnings += [f"{name} has no effect without stream and was ignored" for name in unused]
    options |= _most_drafts(body, warnings)
    RequestOptions(**options)  # raises for wrong values
    return options | ({} if body.cache_prompt is not False else {"cache_prompt": False})


def _most_drafts(body: CompletionBody, warnings: list[str]) -> dict[str, Any]:
    """Return max_draft of llama-server's name for it, which it reads no more; more than there can be count as the most."""
    asked = body.speculative_n_max
    if asked is None:
        return {}
    if body.max_draft is not None:
        warnings.append("speculative.n_max was ignored, since there is max_draft as well")
        return {}
    if asked > MAX_DRAFT:
        warnings.append(f"speculative.n_max: {asked} counts as {MAX_DRAFT}")
    return {"max_draft": min(asked, MAX_DRAFT)}


def _given(body: CompletionBody, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(body, name) for name in names if getattr(body, name) is not None}


def parse_lora_scales(entries: Sequence[LoraScale], adapters: Sequence[str], warnings: list[str]) -> dict[str, float]:
    """Return scales by the adapters' names; adapters without an entry are not applied."""
    scales: dict[str, float] = {}
    for entry in entries:
        if 0 <= entry.id < len(adapters):
            scales[adapters[entry.id]] = entry.scale
        else:
            warnings.append(f"lora: there is no adapter {entry.id}, and it was ignored")
    return scales


def _apply_bounds(changes: dict[str, Any], warnings: list[str]) -> None:
    for name, (low, high) in _OFF.items():
        if name in changes:
            changes[name] = _clamp(changes[name], low, high)
    for name, (low, high) in _CLAMPED.items():
        if name in changes and (value := _clamp(changes[name], low, high)) != changes[name]:
            warnings.append(f"{name}: {changes[name]} counts as {value}")
            changes[name] = value


def _clamp(value: Any, low: float | None, high: float | None) -> Any:
    if low is not None and value < low:
        return low
    return high if high is not None and value > high else value


def _parse_seed(seed: int) -> int | None:
    """Return the seed; negative numbers count as unsigned ones of 32 bits, as llama-server stores them."""
    if seed in (-1, RANDOM_SEED):
        return None
    return validation.integer("seed", seed, -(2**31), 2**64 - 1) % (2**32 if seed < 0 else 2**64)


def _dry_breakers(body: CompletionBody) -> dict[str, Any]:
    if body.dry_sequence_breakers is None:
        return {}
    if not body.dry_sequence_breakers:
        raise InvalidParams("dry_sequence_breakers must be a list of at least one text")
    return {"dry_sequence_breakers": tuple(body.dry_sequence_breakers)}


def _stops(body: CompletionBody) -> dict[str, Any]:
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    stops = without_empty_texts(given)
    return {"stop": tuple(dict.fromkeys(stops))} if stops else {}


def _length(body: CompletionBody, base: SamplingParams) -> dict[str, Any]:
    asked = next((n for n in (body.n_predict, body.max_completion_tokens, body.max_tokens) if n is not None), -1)
    num_choices = body.n_cmpl or body.n
    changes: dict[str, Any] = {} if num_choices is None else {"n": num_choices}
    return changes | {"max_tokens": base.max_tokens if asked == -1 else asked}


def _constraint(body: CompletionBody, warnings: list[str]) -> dict[str, Any]:
    """Return the grammar or the schema. A grammar wins, as in llama-server; an empty one is none."""
    triggers = tuple(_parse_trigger(index, one) for index, one in enumerate(body.grammar_triggers or ()))
    if body.grammar:
        if body.json_schema is not None:
            warnings.append("json_schema was ignored, since there is a grammar as well")
        return {"grammar": body.grammar, "grammar_triggers": triggers if body.grammar_lazy else ()}
    if body.json_schema is None:
        return {}
    if not isinstance(body.json_schema, (dict, bool)):
        raise InvalidType(f"json_schema must be an object or a bool, not {type(body.json_schema).__name__}")
    return {"json_schema": {"type": "object"} if body.json_schema == {} else body.json_schema}


def _parse_trigger(index: int, trigger: dict[str, Any]) -> str | int | dict[str, Any]:
    kind, value = trigger.get("type"), trigger.get("value")
    if kind == _TOKEN_TRIGGER:
        return validation.integer(f"grammar_triggers[{index}].token", without_fractions(trigger.get("token")), 0)
    if kind == _WORD_TRIGGER:
        return validation.text(f"grammar_triggers[{index}].value", value)
    if kind in (_PATTERN_TRIGGER, _FULL_PATTERN_TRIGGER):
        pattern = validation.text(f"grammar_triggers[{index}].value", value)
        return {"pattern": pattern, "is_full": kind == _FULL_PATTERN_TRIGGER}
    raise InvalidParams(
        f"grammar_triggers[{index}].type must be 0 (a token), 1 (a word), 2 (a pattern) or 3 (a pattern of the whole text), "
        f"not {kind!r}"
    )


def _logprob_fields(body: CompletionBody) -> dict[str, Any]:
    num_probs = body.n_probs if body.n_probs is not None else body.logprobs
    if not num_probs:
        return {}
    return {"logprobs": num_probs, "logprobs_mode": "sampled" if body.post_sampling_probs else "raw"}


def logit_bias_body(found: Iterable[tuple[int, float]]) -> list[dict[str, Any]]:
    """Return biases as `generation_settings` reports them; a banned token's is null."""
    return [{"bias": None if bias <= BANNED_BIAS else bias, "token": token} for token, bias in found]
