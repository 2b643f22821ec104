"""What responses of web servers say: statuses, Retry-After, ranges, ETags. Pure; httpx is not loaded for it."""

from __future__ import annotations

import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

from paceline.errors import AccessDenied, HubUnavailable, ModelNotFound
from paceline.hub.references import without_secrets

if TYPE_CHECKING:
    import httpx

PASSING: Final = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed."""

_MAX_DIGITS: Final = 18


def refused(response: httpx.Response, name: str, url: str) -> Exception:
    """Return the error for a status that is none of success. name: of the file."""
    status, host = response.status_code, response.url.host
    if status in (401, 403):
        return AccessDenied(
            f"{host} refuses {name} (HTTP {status}); it needs a token that may read it: set HF_TOKEN or pass hf_token"
        )
    if status in (404, 410):
        return ModelNotFound(f"there is no file at {without_secrets(url)} (HTTP {status})")
    return HubUnavailable(f"{host} did not send {name}: HTTP {status}")


def retry_after_s(text: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for; None without one."""
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


def content_range(text: str) -> tuple[int | None, int | None]:
    """Return first byte and total of a Content-Range header."""
    unit, _, rest = text.partition(" ")
    span, _, total = rest.partition("/")
    first = span.partition("-")[0]
    begin = whole_number(first)
    if unit != "bytes" or begin is None:
        return None, None
    return begin, whole_number(total)


def whole_number(text: str) -> int | None:
    """Return a length as headers write it, in ASCII digits; None for anything else, and from 10**18 on."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


def is_weak(tag: str) -> bool:
    """Return whether an ETag is weak: If-Range does not take it."""
    return tag.startswith("W/")


def are_same_version(tag: str, other: str) -> bool:
    """Compare two ETags weakly: servers that compress, and proxies, mark the tag of the same file as weak."""
    return tag.removeprefix("W/") == other.removeprefix("W/")
