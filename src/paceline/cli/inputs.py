"""Inputs of commands: texts from arguments, stdin and files; sampling parameters from options and lines of a chat."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import validation
from paceline.cli import terminal
from paceline.errors import InvalidParams
from paceline.params import NAMES_ELSEWHERE, SamplingParams
from paceline.sampling_table import BY_NAME, LLAMA_NAMES, PARAMETERS

STDIN = "-"
_SILENCE_S = 2.0
_MAX_TEXT_BYTES = 256 << 20  # of a file with prompts, a schema or a grammar


def text_argument(name: str, text: str) -> str:
    """Return an argument as text. Raise `InvalidParams` if its bytes were not in the locale's encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParams(f"{name} is not valid text: character {error.start} is a stray byte") from None
    return text


def argument_or_stdin(name: str, text: str | None) -> str:
    """Return the argument; for "-", or without an argument if stdin is redirected, all of stdin but its last line break."""
    if text is None and not stdin_is_redirected():
        raise missing(name)
    return stdin_text() if text in (None, STDIN) else text_argument(name, text)


def arguments_or_lines(name: str, texts: list[str] | None) -> list[str]:
    """Return the arguments, each "-" replaced by the lines of stdin; without any, the lines of a redirected stdin."""
    if not texts and not stdin_is_redirected():
        raise missing(name)
    found: list[str] = []
    for text in texts or [STDIN]:
        found += stdin_text().split("\n") if text == STDIN else [text_argument(name, text)]
    return found


def given_text(name: str, words: list[str] | None, prompt: str | None, file: Path | None) -> str | None:
    """Return the argument or --prompt, the text of --file and the text of a redirected stdin, with a blank line between them.

    The words of the argument are joined by spaces. "-" as the argument or the file reads stdin there. Returns None if nothing
    is given and stdin has no text.
    """
    argument = " ".join(words) if words else None
    if argument is not None and prompt is not None:
        raise InvalidParams(f"{name} and --prompt exclude each other: give one of them")
    question = prompt if argument is None else argument
    parts = [] if question is None else [argument_or_stdin(name, question)]
    if file is not None:
        parts.append(stdin_text() if str(file) == STDIN else _without_line_end(text_file("--file", file)))
    is_read = question == STDIN or str(file) == STDIN
    if not is_read and stdin_is_redirected() and (not parts or _stdin_speaks()):
        piped = stdin_text()
        parts += [piped] if piped.strip() else []
    return "\n\n".join(filter(None, parts)) if parts else None


def missing(name: str) -> InvalidParams:
    """Return the error of a text that was neither given nor sent to stdin."""
    return InvalidParams(f"{name} is missing: give a text, or send one to stdin by a pipe; --help lists the options")


def stdin_is_redirected() -> bool:
    """Return whether stdin is a pipe, a file or a socket: not a terminal, not the null device, not closed."""
    mode = _stdin_mode()
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _stdin_mode() -> int:
    """Return the mode of stdin's file, 0 if it is closed; a stream without a descriptor counts as a regular file."""
    try:
        return 0 if sys.stdin is None else os.fstat(sys.stdin.fileno()).st_mode
    except io.UnsupportedOperation:
        return stat.S_IFREG
    except OSError:
        return 0


def _stdin_speaks() -> bool:
    """Return whether to read stdin beside an argument: not a socket that stays silent, as ssh and Node.js leave one open."""
    mode = _stdin_mode()
    if stat.S_ISREG(mode) or select.select([sys.stdin], [], [], _SILENCE_S)[0]:
        return True
    if stat.S_ISSOCK(mode):
        terminal.note(f"stdin is a socket that sent no text within {_SILENCE_S:g} s; it is left out")
        return False
    terminal.note("stdin is a pipe without text so far; it is read to its end. Add < /dev/null to leave it out.")
    return True


def stdin_text() -> str:
    """Read all of stdin but the line break at its end. Raise `InvalidParams` if it is closed or not UTF-8."""
    if sys.stdin is None:
        raise InvalidParams('"-" reads stdin, which is closed')
    return _without_line_end(_decoded("stdin", sys.stdin.buffer.read()))


def text_file(name: str, path: Path) -> str:
    """Read a file. Raise `InvalidParams` if it cannot be read or is not UTF-8."""
    try:
        data = validation.read_file(path, _MAX_TEXT_BYTES, pipes=True)
    except OSError as error:
        raise InvalidParams(f"{name}: cannot read {path}: {error.strerror or error}") from None
    return _decoded(f"{name} {path}", data)


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None


def usual_name(option: str) -> str:
    """Return the name of an option, without dashes, for llama.cpp's name of it; any other name as it is."""
    return LLAMA_NAMES.get(option, option)


def sampling_params(given: Mapping[str, Any], **changes: Any) -> SamplingParams:
    """Return the parameters that the options of `options.takes_options` set. Raises `InvalidParams`.

    Args:
        given: The options by the names of the fields; None and an empty list are not given.
        **changes: Fields that win over the options.
    """
    values = {name: value for name, value in given.items() if value is not None and value != []}
    for name in [name for name in values if name.endswith("_file")]:
        field, path = name.removesuffix("_file"), values.pop(name)
        option = f"--{name.replace('_', '-')}"
        if field in values:
            raise InvalidParams(f"--{field.replace('_', '-')} and {option} exclude each other: give one of them")
        values[field] = text_file(option, path)
    for name in [name for name in values if BY_NAME[name].is_repeated]:
        values[name] = tuple(text_argument(BY_NAME[name].option, text) for text in values[name])
    if values.get("dry_sequence_breakers") == ("none",):
        values["dry_sequence_breakers"] = ()
    if values.get("max_tokens") == -1:
        values["max_tokens"] = None
    if "samplers" in values or "logit_bias" in values:
        from paceline.server.flags import readers

        if "samplers" in values:
            values["samplers"] = readers.sampler_names("--samplers", values["samplers"])
        biases = [pair for text in values.get("logit_bias", ()) for pair in readers.bias("--logit-bias", text)]
        values["logit_bias"] = dict(biases)
    return SamplingParams(**values | changes)


def read_sampling(name: str, text: str, start: SamplingParams) -> tuple[str, Any]:
    """Return the field of `SamplingParams` that an option sets, and its value. Raises `InvalidParams`.

    Args:
        name: The option, with or without dashes before it, or the field.
        text: The value, as the command line has it; a switch takes true and false. "-" is the value in `start`.
        start: The parameters of the command line.
    """
    from paceline.server.flags import readers

    option = usual_name(name.lstrip("-").replace("_", "-")).replace("-", "_")
    known = [row.name for row in PARAMETERS if row.group] + [f"{row.name}_file" for row in PARAMETERS if row.file_flags]
    validation.reject_unknown([option], known, "docs/guide/sampling.md", NAMES_ELSEWHERE)
    row = BY_NAME[option.removesuffix("_file")]
    value: Any = text
    if text == "-":
        return row.name, getattr(start, row.name)
    if row.kind == "boolean":
        value = readers.switch(name, text)
    elif row.kind in ("integer", "number"):
        try:
            value = int(text) if row.kind == "integer" else float(text)
        except ValueError:
            wanted = "a whole number" if row.kind == "integer" else "a number"
            raise InvalidParams(f"{name} must be {wanted}, not {text[:80]!r}") from None
    elif row.is_repeated:
        value = [text]
    elif option != row.name:
        value = Path(text).expanduser()
    return row.name, getattr(sampling_params({option: value}), row.name)
