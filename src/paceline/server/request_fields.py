"""Fields that requests of both APIs and the flags share: request options, names of samplers.

Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STREAM_OPTIONS = ("interval", "max_buffered_tokens", "slow_reader")


def merge_options(options: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the server's options with a request's own, which win; the smaller `timeout_s` of the two holds.

    Both are keywords of `RequestOptions`.
    """
    result = {**options, **mine}
    limits = [limit for limit in (options.get("timeout_s"), mine.get("timeout_s")) if limit is not None]
    if limits:
        result["timeout_s"] = min(limits)
    return result


def drop_stream_options(options: Mapping[str, Any], *, stream: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the keywords of `RequestOptions` that have an effect, and the names of those that need a stream."""
    unused = [] if stream else [name for name in _STREAM_OPTIONS if name in options]
    return {name: value for name, value in options.items() if name not in unused}, unused


SAMPLER_LETTERS = {
    "d": "dry",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "i": "infill",
    "e": "penalties",
    "a": "adaptive_p",
}
SAMPLER_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
