"""Decode request bodies that a client compressed with gzip, deflate or zstd. Pure; for threads."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from paceline.server.api_errors import ApiError, ApiException

ENCODINGS: Final = ("gzip", "deflate", "zstd")
"""The encodings that are decoded, as the Accept-Encoding header lists them."""

PART_BYTES: Final = 1 << 18
"""Most bytes of a decoded part."""

_SLICE_BYTES: Final = 1 << 16  # fed at once: decompressors copy input that they have not used yet
_MAX_MEMBERS: Final = 1000  # gzip members or zstd frames of a body, since each costs a new decompressor
_MAX_WINDOW_LOG: Final = 23  # 8 MiB, the largest window that RFC 9659 allows for zstd over HTTP
_ZLIB_FORMAT, _RAW_DEFLATE, _GZIP_FORMAT = 15, -15, 31  # zlib's wbits


def content_encoding(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the encoding that a body has to be decoded from, or None if the body is not encoded.

    Raises `ApiException` with status 415 for an unknown encoding, and for several encodings on top of each other.
    """
    values = b",".join(value for name, value in headers if name == b"content-encoding").decode("latin-1")
    encodings = [name for name in (part.strip().lower() for part in values.split(",")) if name not in ("", "identity")]
    if not encodings:
        return None
    encoding = "gzip" if encodings[0] == "x-gzip" else encodings[0]
    if len(encodings) == 1 and encoding in ENCODINGS:
        return encoding
    message = (
        f"content-encoding is {values[:80]!r}; send one of {', '.join(ENCODINGS)}, or the body without an encoding"
    )
    refused = ApiException(ApiError(415, "invalid_request_error", "unsupported_content_encoding", message))
    refused.headers = {"accept-encoding": ", ".join(ENCODINGS)}
    raise refused


def decoded_parts(encoding: str, body: bytes) -> Iterator[bytes]:
    """Yield the decoded content of a body in parts of at most `PART_BYTES`.

    Memory beside the parts is bounded by the decompressor's window. Raises `ApiException` with status 400 for a body that is
    damaged, incomplete, or followed by other data.
    """
    if encoding == "zstd":
        yield from _parts(encoding, body, *_zstd_decompressors())
    else:
        wbits = _GZIP_FORMAT if encoding == "gzip" else _deflate_format(body)
        yield from _parts(encoding, body, lambda: _ZlibDecompressor(wbits), zlib.error)


class _Decompressor(Protocol):
    """The interface of the standard library's decompressors that bound their output."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _ZlibDecompressor:
    """A `_Decompressor` for gzip and deflate."""

    def __init__(self, wbits: int) -> None:
        self._zlib = zlib.decompressobj(wbits)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


def _zstd_decompressors() -> tuple[Callable[[], _Decompressor], type[Exception]]:
    """Return a factory of decompressors and the type of their errors. Imports late, since few clients send zstd."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
    return lambda: zstd.ZstdDecompressor(options=options), zstd.ZstdError


def _deflate_format(body: bytes) -> int:
    """Return zlib's wbits for a deflate body. HTTP's deflate is zlib's format, but some clients send raw deflate data."""
    is_zlib = len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    return _ZLIB_FORMAT if is_zlib else _RAW_DEFLATE


def _parts(
    encoding: str, body: bytes, make_decompressor: Callable[[], _Decompressor], error_type: type[Exception]
) -> Iterator[bytes]:
    """Yield the content of all gzip members or zstd frames; deflate has one."""
    position, max_members = 0, 1 if encoding == "deflate" else _MAX_MEMBERS
    for _ in range(max_members):
        decompressor = make_decompressor()
        while not decompressor.eof:
            data = body[position : position + _SLICE_BYTES] if decompressor.needs_input else b""
            position += len(data)
            try:
                part = decompressor.decompress(data, PART_BYTES)
            except error_type as error:
                raise _broken(encoding, str(error)) from None
            if part:
                yield part
            elif position == len(body) and not data and decompressor.needs_input and not decompressor.eof:
                raise _broken(encoding, "it ends too early")
        position -= len(decompressor.unused_data)
        if position == len(body):
            return
    raise _broken(encoding, f"other data follow after {max_members} parts" if max_members > 1 else "other data follow")


def _broken(encoding: str, reason: str) -> ApiException:
    message = f"the body is not valid {encoding}, the encoding that its content-encoding header names: {reason}"
    return ApiException(ApiError(400, "invalid_request_error", "invalid_content_encoding", message))
