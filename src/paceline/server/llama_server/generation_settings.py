"""llama-server's `generation_settings`: in responses, in /props and in /slots. Pure; any thread."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.params import SamplingParams
from paceline.server.llama_server.sampling_fields import BANNED_BIAS, RANDOM_SEED, logit_bias_body

_SAME_NAMES = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "adaptive_target",
    "adaptive_decay", "ignore_eos",
)  # fmt: skip


def brief_settings(
    params: SamplingParams, *, stream: bool = False, others: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings without lists and grammars, for /props and /slots. others: those outside of sampling."""
    num_predict = -1 if params.max_tokens is None else params.max_tokens
    given = others or {}
    return {
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        **{name: getattr(params, name) for name in _SAME_NAMES},
        "repeat_last_n": params.penalty_last_n,
        "max_tokens": num_predict,
        "n_predict": num_predict,
        "n_keep": 0,
        "n_discard": 0,
        "stream": stream,
        "n_probs": params.logprobs or 0,
        "min_keep": 0,
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": list(params.samplers),
        "speculative.types": "none",
        "timings_per_token": given.get("timings_per_token", False),
        "post_sampling_probs": params.logprobs is not None and params.logprobs_mode == "sampled",
        "backend_sampling": False,
        "lora": given.get("lora", []),
    }


def full_settings(
    params: SamplingParams, eog_ids: Iterable[int], *, stream: bool, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings for a response. A JSON schema is reported as given, not as its grammar."""
    never = [(token, BANNED_BIAS) for token in sorted(eog_ids)] if params.ignore_eos else []
    settings = brief_settings(params, stream=stream, others=others) | {
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "stop": list(params.stop),
        "logit_bias": logit_bias_body([*_bias_pairs(params), *never]),
        "grammar": params.grammar or "",
        "grammar_lazy": params.grammar_lazy,
        "grammar_triggers": [_trigger_body(one) for one in params.grammar_triggers],
        "preserved_tokens": [],
    }
    if isinstance(params.json_schema, str):
        settings["json_schema"] = json.loads(params.json_schema)
    return settings


def _bias_pairs(params: SamplingParams) -> Sequence[tuple[int, float]]:
    return tuple(params.logit_bias.items()) if isinstance(params.logit_bias, Mapping) else params.logit_bias


def _trigger_body(trigger: str | int) -> dict[str, Any]:
    if isinstance(trigger, int):
        return {"type": 0, "value": "", "token": trigger}
    return {"type": 1, "value": trigger}
