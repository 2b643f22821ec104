"""Compressed bodies are decoded in small parts, and anything else than one known encoding is refused."""

from __future__ import annotations

import gzip
import os
import sys
import tracemalloc
import zlib
from collections.abc import Callable

import pytest

from paceline.server.api_errors import ApiException
from paceline.server.middleware.request_limits import PART_BYTES, content_encoding, decoded_parts

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Compress = Callable[[bytes], bytes]


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


FORMATS: list[tuple[str, Compress]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstd.compress),
]
each_format = pytest.mark.parametrize(("encoding", "compress"), FORMATS, ids=["gzip", "zlib", "raw deflate", "zstd"])


@each_format
@pytest.mark.parametrize("num_bytes", [0, 1, 1000, PART_BYTES, 3 * PART_BYTES + 17])
def test_a_body_is_decoded_to_what_was_compressed(encoding: str, compress: Compress, num_bytes: int) -> None:
    """In parts that are never empty nor larger than the bound, whether it compresses well or not."""
    for content in (os.urandom(num_bytes), b"x" * num_bytes):
        parts = list(decoded_parts(encoding, compress(content)))
        assert b"".join(parts) == content
        assert all(0 < len(part) <= PART_BYTES for part in parts)


@pytest.mark.parametrize("num_bytes", [65_400, 65_430, 65_460])
def test_a_full_part_at_the_end_of_a_slice_is_followed_by_the_rest(num_bytes: int) -> None:
    """The decompressor may hold input then from which it cannot decode another byte."""
    compressor = zstd.ZstdCompressor()
    start = os.urandom(num_bytes)
    rest = b"".join(b"%d " % number for number in range(1000))
    body = b"".join(
        compressor.compress(content, compressor.FLUSH_BLOCK) for content in (start, bytes(PART_BYTES - num_bytes), rest)
    )
    body += compressor.flush()
    assert b"".join(decoded_parts("zstd", body)) == start + bytes(PART_BYTES - num_bytes) + rest


@each_format
def test_a_bomb_costs_a_part_at_a_time(encoding: str, compress: Compress) -> None:
    """Reading one part of a gigabyte of zeros takes no more memory than a few parts and the decompressor's window."""
    bomb = compress(bytes(256 << 20))
    tracemalloc.start()
    try:
        assert next(decoded_parts(encoding, bomb)) == bytes(PART_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 4 * PART_BYTES
    finally:
        tracemalloc.stop()


@each_format
@pytest.mark.parametrize("damage", ["cut", "not compressed", "followed by text"])
def test_a_damaged_body_is_a_400_that_names_the_encoding(encoding: str, compress: Compress, damage: str) -> None:
    """Whether it ends early, was never compressed, or has other data after it."""
    whole = compress(b'{"prompt": "a fox"}' * 100)
    body = {"cut": whole[:-3], "not compressed": b'{"prompt": "a fox"}', "followed by text": whole + b"{}"}[damage]
    with pytest.raises(ApiException) as raised:
        list(decoded_parts(encoding, body))
    error = raised.value.api_error
    assert (error.status, error.code) == (400, "invalid_content_encoding")
    assert f"the body is not valid {encoding}" in error.message


@pytest.mark.parametrize(("encoding", "compress"), [FORMATS[0], FORMATS[3]], ids=["gzip", "zstd"])
def test_members_of_one_body_are_joined_up_to_a_thousand(encoding: str, compress: Compress) -> None:
    """Both formats allow several of them in a row; each costs a decompressor."""
    assert b"".join(decoded_parts(encoding, compress(b"ab") * 1000)) == b"ab" * 1000
    with pytest.raises(ApiException, match="after 1000 parts"):
        list(decoded_parts(encoding, compress(b"ab") * 1001))


def test_a_zstd_window_above_eight_mebibytes_is_refused() -> None:
    """It would be allocated whole for a body of a few bytes."""
    options = {zstd.CompressionParameter.window_log: 24}
    compressor = zstd.ZstdCompressor(options=options)
    body = compressor.compress(os.urandom(100)) + compressor.flush()
    with pytest.raises(ApiException, match="too much memory"):
        list(decoded_parts("zstd", body))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([b"identity"], None),
        ([b""], None),
        ([b"gzip"], "gzip"),
        ([b" GZip "], "gzip"),
        ([b"x-gzip"], "gzip"),
        ([b"identity, zstd"], "zstd"),
        ([b"deflate"], "deflate"),
    ],
)
def test_the_header_names_the_encoding(values: list[bytes], expected: str | None) -> None:
    """In any case of letters; identity is none."""
    assert content_encoding([(b"content-encoding", value) for value in values]) == expected


@pytest.mark.parametrize("values", [[b"br"], [b"x-zstd"], [b"gzip, gzip"], [b"gzip", b"zstd"], [b"\xff" * 500]])
def test_other_encodings_and_several_at_once_are_a_415_that_lists_the_known_names(values: list[bytes]) -> None:
    """A body that is compressed twice can be a thousand times a thousand times larger."""
    with pytest.raises(ApiException) as raised:
        content_encoding([(b"content-encoding", value) for value in values])
    assert raised.value.api_error.status == 415
    assert raised.value.api_error.code == "unsupported_content_encoding"
    assert raised.value.headers == {"accept-encoding": "gzip, deflate, zstd"}
    assert len(raised.value.api_error.message) < 300
