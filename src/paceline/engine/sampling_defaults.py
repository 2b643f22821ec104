"""What a model's file says about how it wants to be sampled (GGUF keys general.sampling.*)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidParams
from paceline.params import SamplingParams

_FIELDS: dict[str, tuple[str, type]] = {
    "temp": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "penalty_last_n": ("penalty_last_n", int),
    "penalty_repeat": ("repeat_penalty", float),
    "mirostat": ("mirostat", int),
    "mirostat_tau": ("mirostat_tau", float),
    "mirostat_eta": ("mirostat_eta", float),
}
_log = logging.getLogger("paceline.engine")


def sampling_defaults(metadata: Mapping[str, str]) -> SamplingParams:
    """Return the usual defaults, with those of the model in their place; values that make no sense are left out and logged."""
    return SamplingParams(**told_by_model(metadata))


def told_by_model(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Of `SamplingParams` only what the file says; values that make no sense are left out and logged."""
    told: dict[str, Any] = {}
    for key, (field, kind) in _FIELDS.items():
        text = metadata.get(f"general.sampling.{key}")
        if text is None:
            continue
        try:
            told[field] = getattr(SamplingParams(**{field: kind(text)}), field)
        except (ValueError, InvalidParams) as error:
            _log.warning("the model's general.sampling.%s is ignored: %s", key, error)
    return told
