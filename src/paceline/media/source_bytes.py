"""The sources of media: files, base64 and arrays."""

from __future__ import annotations

import base64
import binascii
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from paceline import validation
from paceline.errors import InvalidParams

if TYPE_CHECKING:
    import numpy as np


def is_array(source: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Return whether the source is a NumPy array, without loading NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(source, numpy.ndarray)


def file_bytes(name: str, path: Path, max_bytes: int) -> bytes:
    """Return the content of a file. name: "image" or "audio". Raises `InvalidParams`."""
    try:
        with validation.open_file(path, pipes=True) as file:
            check_bytes(name, os.fstat(file.fileno()).st_size, max_bytes)
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise InvalidParams(f"{name} cannot be read from {path}: {error.strerror or error}") from error
    check_bytes(name, len(data), max_bytes)
    return data


def decoded_base64(name: str, text: str) -> bytes:
    """Decode base64, which may be broken into lines. Raises `InvalidParams` if it is not valid."""
    try:
        return base64.b64decode(without_breaks(text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidParams(f"{name} is not valid base64: {error}") from None


def without_breaks(text: str) -> str:
    """Return base64 without line breaks, which MIME puts after 76 characters."""
    return text.replace("\r", "").replace("\n", "")


def kind_of(data: bytes, known: Sequence[tuple[int, bytes, str]]) -> str:
    """Return the kind of an unsupported file for a message. known: offset, signature and name of each kind."""
    if not data:
        return "an empty file"
    found = next((name for at, signature, name in known if data.startswith(signature, at)), None)
    return found or f"a file that begins with {data[:8]!r}"


def check_bytes(name: str, count: int, max_bytes: int) -> None:
    """Raise `InvalidParams` if a file is too large."""
    if count > max_bytes:
        raise InvalidParams(f"an {name} file may have {max_bytes} bytes, not {count}; make it smaller")
