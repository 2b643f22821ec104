"""Requests to web servers within bounds of time, and what their responses say: statuses, Retry-After, ranges, ETags.

A server may be hostile: status and headers have a deadline, a body must arrive at a minimum rate, and nothing is decompressed.
Blocking; any thread. Loads httpx when something is requested.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, Self

from paceline.errors import AccessDenied, HubUnavailable, ModelNotFound
from paceline.hub.references import without_secrets

if TYPE_CHECKING:
    import httpx

PASSING: Final = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed."""

TIMEOUT_S: Final = 20.0
"""Longest wait for a connection, and for the next bytes."""
HEAD_S: Final = 60.0
"""Longest wait for status and headers, with all redirects."""
RATE_WINDOW_S: Final = 60.0
"""Period in which a body must arrive with at least `MIN_BYTES_S`."""
MIN_BYTES_S: Final = 1024
SMALL_BODY_S: Final = 120.0
"""Longest wait for a whole listing, after its headers."""
MAX_REDIRECTS: Final = 10

_MAX_DIGITS: Final = 18
_NEW_CONNECTION: Final = ("connection.connect_tcp.complete", "connection.start_tls.complete")


def new_client() -> httpx.Client:
    """Return a client whose requests have a connection each, as `open_response` expects."""
    import httpx

    return httpx.Client(
        timeout=TIMEOUT_S, headers={"user-agent": "paceline"}, limits=httpx.Limits(max_keepalive_connections=0)
    )


@contextmanager
def open_response(
    client: httpx.Client, url: str, headers: Mapping[str, str], *, method: str = "GET"
) -> Iterator[httpx.Response]:
    """Yield the response to a request, with its body unread. Redirects are followed; their bodies are not read.

    Raises `httpx.HTTPError`, which is a `ReadTimeout` if status and headers take more than `HEAD_S`.
    """
    import httpx

    with _Deadline(HEAD_S) as deadline:
        request = client.build_request(
            method,
            url,
            headers={**headers, "accept-encoding": "identity"},
            extensions={"trace": deadline.traced},
        )
        try:
            response = client.send(request, stream=True, follow_redirects=False)
            for _ in range(MAX_REDIRECTS):
                if response.next_request is None:
                    break
                response.close()
                response = client.send(response.next_request, stream=True, follow_redirects=False)
        except httpx.TransportError:
            if deadline.is_over:
                raise httpx.ReadTimeout(f"no complete headers within {HEAD_S:g} s") from None
            raise
    try:
        if response.next_request is not None:
            raise httpx.TooManyRedirects(f"more than {MAX_REDIRECTS} redirects", request=request)
        yield response
    finally:
        response.close()


class _Deadline:
    """Shuts down the connections of a request if its block takes too long: httpx limits only each wait for bytes."""

    def __init__(self, seconds: float) -> None:
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self.is_over = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def traced(self, event: str, info: Mapping[str, Any]) -> None:
        """Note the socket of a new connection. httpcore calls this for each of its steps."""
        if event in _NEW_CONNECTION and (found := info["return_value"].get_extra_info("socket")) is not None:
            self._sockets.append(found)
            if self.is_over:
                self._end()

    def _end(self) -> None:
        self.is_over = True
        for each in self._sockets:
            with suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)  # not an SSLSocket's own, which also drops its TLS state


def body_pieces(response: httpx.Response) -> Iterator[bytes]:
    """Yield the bytes of a body as they arrive.

    Raises `httpx.HTTPError`: `DecodingError` for a compressed body, `ReadTimeout` for one slower than `MIN_BYTES_S`.
    """
    import httpx

    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise httpx.DecodingError(f"{response.url.host} sends it compressed ({encoding[:20]!r}), unasked")
    began_s, count = time.monotonic(), 0
    for piece in response.iter_raw():
        count += len(piece)
        seconds = time.monotonic() - began_s
        if seconds >= RATE_WINDOW_S:
            if count < MIN_BYTES_S * seconds:
                raise httpx.ReadTimeout(f"less than {MIN_BYTES_S} bytes/s for {seconds:.0f} s")
            began_s, count = time.monotonic(), 0
        yield piece


def small_body(response: httpx.Response, max_bytes: int) -> bytes:
    """Return a whole body of at most `max_bytes` that comes within `SMALL_BODY_S`. Raises `httpx.HTTPError`."""
    import httpx

    body, began_s = bytearray(), time.monotonic()
    for piece in body_pieces(response):
        body += piece
        if time.monotonic() - began_s > SMALL_BODY_S:
            raise httpx.ReadTimeout(f"the response is not complete after {SMALL_BODY_S:g} s")
        if len(body) > max_bytes:
            raise httpx.DecodingError(f"the response has more than {max_bytes >> 20} MiB")
    return bytes(body)


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
