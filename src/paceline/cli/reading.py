"""Texts from the command line and from stdin, checked to be text."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.errors import InvalidParams

STDIN = "-"


def argument(name: str, text: str) -> str:
    """Return an argument as text. Raise `InvalidParams` if its bytes were not in the locale's encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParams(f"{name} is no valid text: character {error.start} of it is a stray byte") from None
    return text


def argument_or_stdin(name: str, text: str) -> str:
    """Return the argument, or for "-" all of stdin but the line break at its end."""
    return stdin_text() if text == STDIN else argument(name, text)


def arguments_or_lines(name: str, texts: list[str]) -> list[str]:
    """Return the arguments, each "-" replaced by the lines of stdin."""
    found: list[str] = []
    for text in texts:
        found += stdin_text().split("\n") if text == STDIN else [argument(name, text)]
    return found


def stdin_text() -> str:
    """Read all of stdin but the line break at its end. Raise `InvalidParams` if it is closed or not UTF-8."""
    if sys.stdin is None:
        raise InvalidParams('"-" reads stdin, which is closed')
    return _decoded("stdin", sys.stdin.buffer.read()).removesuffix("\n").removesuffix("\r")


def text_file(name: str, path: Path) -> str:
    """Read a file. Raise `InvalidParams` if it cannot be read or is not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidParams(f"{name}: cannot read {path}: {error.strerror or error}") from None
    return _decoded(f"{name} {path}", data)


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None
