"""Request options of the server and of a request, put together. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(options: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """The server's options with a request's own, which win, but that no request outlives the server's limit.

    Both are keywords of `RequestOptions`.
    """
    result = {**options, **mine}
    limits = [limit for limit in (options.get("timeout_s"), mine.get("timeout_s")) if limit is not None]
    if limits:
        result["timeout_s"] = min(limits)
    return result
