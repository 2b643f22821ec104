"""From the fields of a completion's body to `SamplingParams` and `RequestOptions`. Takes time: not for the event loop.

What llama-server clamps is clamped and said in `warnings`; values that it documents as "off" are off without a word; what
would change the answer and cannot be done is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Tokenizer
from paceline.server.llama_server.biases import biases
from paceline.server.llama_server.bodies import CompletionBody, LoraScale
from paceline.server.llama_server.samplers import order

API_DEFAULTS: Mapping[str, Any] = {"max_tokens": None}
"""Where llama-server's defaults are not those of `SamplingParams`."""

RANDOM_SEED = 2**32 - 1
"""What llama-server calls a seed that is drawn; so does -1."""

_SAME = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p",
    "xtc_probability", "xtc_threshold", "repeat_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier",
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta",
    "adaptive_target", "adaptive_decay", "ignore_eos", "grammar_lazy",
)  # fmt: skip
# Beyond these a value means what the bound means, and llama-server says so.
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
_TOKEN_TRIGGER, _WORD_TRIGGER = 0, 1
_SAMPLING_EXTRAS = (
    "min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words", "grammar_root", "regex", "choice",
)  # fmt: skip
_OPTION_EXTRAS = (
    "priority", "queue_timeout_s", "ttft_timeout_s", "timeout_s", "truncate", "special", "cache_salt",
)  # fmt: skip
_STREAM_EXTRAS = ("interval", "max_buffered_tokens", "slow_reader")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a server has beside the request. base: sampling where the body says nothing; adapters: names, by id.

    spm_infill: whether the prompt of a gap has its suffix first.
    """

    base: SamplingParams
    tokenizer: Tokenizer
    adapters: Sequence[str] = ()
    spm_infill: bool = False


def sampling_params(body: CompletionBody, setting: Setting, warnings: list[str]) -> SamplingParams:
    """How to generate. Raises `InvalidParams`, and `Unsupported` for what would change the answer and cannot be done."""
    base = setting.base
    changes = _given(body, _SAME) | _given(body, _SAMPLING_EXTRAS)
    _bound(changes, warnings)
    if changes.get("dry_base", 1.0) < 1.0:
        warnings.append(f"dry_base must be at least 1; {changes.pop('dry_base')} was ignored")
    if body.repeat_last_n is not None:
        changes["penalty_last_n"] = body.repeat_last_n
    if body.seed is not None:
        changes["seed"] = _seed(body.seed)
    if body.samplers is not None:
        changes["samplers"] = order(body.samplers, warnings)
    if body.logit_bias is not None:
        changes["logit_bias"] = biases(setting.tokenizer, body.logit_bias, warnings)
    changes |= _breakers(body) | _stops(body) | _length(body, base) | _constraint(body, warnings) | _told(body)
    if body.min_keep is not None and body.min_keep > 1:
        raise Unsupported(
            f"min_keep must be 0 or 1, not {body.min_keep}: samplers here always keep one token, never more"
        )
    return base.replace(**changes)


def request_options(body: CompletionBody, warnings: list[str]) -> dict[str, Any]:
    """Keywords of `RequestOptions` that the body has. Raises `InvalidParams`."""
    read = _given(body, _STREAM_EXTRAS)
    if read and not body.stream:
        warnings += [f"{name} has no effect without stream and was ignored" for name in read]
        read = {}
    options = _given(body, _OPTION_EXTRAS) | read
    RequestOptions(**options)  # says what is wrong with them
    return options | ({} if body.cache_prompt is not False else {"cache_prompt": False})


def _given(body: CompletionBody, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(body, name) for name in names if getattr(body, name) is not None}


def lora_scales(entries: Sequence[LoraScale], adapters: Sequence[str], warnings: list[str]) -> dict[str, float]:
    """Scales by the adapters' names; those that are not mentioned do not apply."""
    scales: dict[str, float] = {}
    for entry in entries:
        if 0 <= entry.id < len(adapters):
            scales[adapters[entry.id]] = entry.scale
        else:
            warnings.append(f"lora: there is no adapter {entry.id}, and it was ignored")
    return scales


def _bound(changes: dict[str, Any], warnings: list[str]) -> None:
    for name, (low, high) in _OFF.items():
        if name in changes:
            changes[name] = _within(changes[name], low, high)
    for name, (low, high) in _CLAMPED.items():
        if name in changes and (value := _within(changes[name], low, high)) != changes[name]:
            warnings.append(f"{name}: {changes[name]} counts as {value}")
            changes[name] = value


def _within(value: Any, low: float | None, high: float | None) -> Any:
    if low is not None and value < low:
        return low
    return high if high is not None and value > high else value


def _seed(seed: int) -> int | None:
    """Negative numbers count as unsigned ones of 32 bits, as llama-server stores them."""
    if seed in (-1, RANDOM_SEED):
        return None
    return validation.integer("seed", seed, -(2**31), 2**64 - 1) % (2**32 if seed < 0 else 2**64)


def _breakers(body: CompletionBody) -> dict[str, Any]:
    if body.dry_sequence_breakers is None:
        return {}
    if not body.dry_sequence_breakers:
        raise InvalidParams("dry_sequence_breakers must be a list of at least one text")
    return {"dry_sequence_breakers": tuple(body.dry_sequence_breakers)}


def _stops(body: CompletionBody) -> dict[str, Any]:
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    stops = tuple(dict.fromkeys(one for one in given if one))
    return {"stop": stops} if stops else {}


def _length(body: CompletionBody, base: SamplingParams) -> dict[str, Any]:
    asked = next((n for n in (body.n_predict, body.max_completion_tokens, body.max_tokens) if n is not None), -1)
    num_choices = body.n_cmpl or body.n
    changes: dict[str, Any] = {} if num_choices is None else {"n": num_choices}
    return changes | {"max_tokens": base.max_tokens if asked == -1 else asked}


def _constraint(body: CompletionBody, warnings: list[str]) -> dict[str, Any]:
    """A grammar wins over a schema, as in llama-server; an empty one is none."""
    triggers = tuple(_trigger(index, one) for index, one in enumerate(body.grammar_triggers or ()))
    if body.grammar:
        if body.json_schema is not None:
            warnings.append("json_schema was ignored, since there is a grammar as well")
        return {"grammar": body.grammar, "grammar_triggers": triggers if body.grammar_lazy else ()}
    if body.json_schema is None:
        return {}
    if not isinstance(body.json_schema, (dict, bool)):
        raise InvalidType(f"json_schema must be an object or a bool, not {type(body.json_schema).__name__}")
    return {"json_schema": {"type": "object"} if body.json_schema == {} else body.json_schema}


def _trigger(index: int, trigger: dict[str, Any]) -> str | int:
    kind, value = trigger.get("type"), trigger.get("value")
    if kind == _TOKEN_TRIGGER:
        return validation.integer(f"grammar_triggers[{index}].token", trigger.get("token"), 0)
    if kind == _WORD_TRIGGER:
        return validation.text(f"grammar_triggers[{index}].value", value)
    raise Unsupported(
        f"grammar_triggers[{index}].type must be 0 (a token) or 1 (a word), not {kind!r}: no patterns here"
    )


def _told(body: CompletionBody) -> dict[str, Any]:
    num_probs = body.n_probs if body.n_probs is not None else body.logprobs
    if not num_probs:
        return {}
    return {"logprobs": num_probs, "logprobs_mode": "sampled" if body.post_sampling_probs else "raw"}
