"""Bytes of media from where a caller has them: files, base64, arrays that are no bytes yet."""

from __future__ import annotations

import base64
import binascii
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from paceline import validation
from paceline.errors import InvalidParams

if TYPE_CHECKING:
    import numpy as np


def is_array(source: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Return whether it is of NumPy, which need not be loaded to say that it is not."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(source, numpy.ndarray)


def file_bytes(name: str, path: Path, max_bytes: int) -> bytes:
    """Return what a file has. name: "image" or "audio". Raises `InvalidParams`."""
    try:
        with validation.open_file(path, pipes=True) as file:
            check_bytes(name, os.fstat(file.fileno()).st_size, max_bytes)
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise InvalidParams(f"{name} cannot be read from {path}: {error.strerror or error}") from error
    check_bytes(name, len(data), max_bytes)
    return data


def decoded_base64(name: str, text: str) -> bytes:
    """Return the bytes that base64 stands for, also where it is broken into lines. Raises `InvalidParams` for what is none."""
    try:
        return base64.b64decode(without_breaks(text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidParams(f"{name} is not valid base64: {error}") from None


def without_breaks(text: str) -> str:
    """Return base64 without its breaks of lines, which MIME puts after 76 characters."""
    return text.replace("\r", "").replace("\n", "")


def check_bytes(name: str, count: int, max_bytes: int) -> None:
    """Raise `InvalidParams` for a file that is too large."""
    if count > max_bytes:
        raise InvalidParams(f"an {name} file may have {max_bytes} bytes, not {count}; make it smaller")
