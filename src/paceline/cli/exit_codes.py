"""How commands end: an exit code, and one line on stderr for an error."""

from __future__ import annotations

from typing import Final

from paceline.cli import terminal
from paceline.errors import InvalidParams, PacelineError

FAILED: Final = 1
WRONG_USAGE: Final = 2
INTERRUPTED: Final = 130
READER_GONE: Final = 141


def error_text(error: BaseException) -> str:
    """Return an error as one line: of an `OSError` the file and the reason, without its number."""
    if isinstance(error, PacelineError) or not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def report(error: BaseException) -> int | None:
    """Report what a command raised, and return its exit code; None for an error that keeps its traceback."""
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED
        case PacelineError():
            terminal.report(str(error))
            return WRONG_USAGE if isinstance(error, InvalidParams) else FAILED
        case BrokenPipeError():
            terminal.abandon_output()
            return READER_GONE
        case OSError():
            terminal.abandon_output()
            place = f"{error.filename}" if error.filename else "cannot write to stdout"
            terminal.report(f"{place}: {error.strerror or error}")
            return FAILED
    return None
