"""`paceline serve`: a model over HTTP, and its log.

The flags are llama-server's and do not fit a usual parser: see paceline.server.flags.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperCommand

from paceline.cli import terminal

if TYPE_CHECKING:
    from paceline.server.flags.display import Section
    from paceline.server.settings import ServerSettings

_WIDEST = 120  # columns of help: longer lines are hard to follow


class RawCommand(TyperCommand):
    """A command that receives its arguments unparsed, --help included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave all arguments to the command."""
        ctx.args = list(args)
        return list(args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage line of errors; the command writes its own help."""
        formatter.write_usage(ctx.command_path, "[FLAG [VALUE]]...")


def serve(ctx: typer.Context) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI and of llama-server. Takes llama-server's flags."""
    from paceline.server.flags import DiskFiles, ModelPresets, resolve
    from paceline.server.flags.display import config_sections, help_sections

    files = DiskFiles(terminal.note)
    resolved = resolve(ctx.args, os.environ, files)
    match resolved.prints:
        case "help":
            _write(help_sections(min(shutil.get_terminal_size().columns, _WIDEST)))
        case "version":
            from paceline import __version__

            terminal.write(f"paceline {__version__}\n")
        case "config":
            _write(config_sections(resolved))
        case None:
            for note in resolved.notes:
                terminal.note(f"Note: {note}")
            set_up_logging(resolved.settings)
            from paceline.server.serving import serve as run

            presets = ModelPresets(resolved, files) if resolved.is_router else None
            raise typer.Exit(run(resolved.settings, presets))


def _write(sections: Iterable[Section]) -> None:
    for index, section in enumerate(sections):
        terminal.write("\n" * (index > 0) + section.title + "\n", style="bold")
        terminal.write("".join(f"{line}\n" for line in section.lines))


_OFF: Final = logging.CRITICAL + 1
_LEVELS: Final = {
    "off": _OFF,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}


class _JsonLines(logging.Formatter):
    """One JSON object a line, with the fields that the access log's lines begin with."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line of JSON."""
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _PlainLines(logging.Formatter):
    """Time in UTC, level, logger, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802 - logging's
        """Return the time in UTC, to the millisecond."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def set_up_logging(settings: ServerSettings) -> None:
    """Replace the handlers of the server's loggers. Raise `OSError` if the log file cannot be opened."""
    from paceline.server.middleware.recording import ACCESS_LOGGER  # its lines are JSON already

    level = _LEVELS[settings.log_level]
    form = _JsonLines() if settings.log_json else _PlainLines()
    _direct("paceline", level, settings, form)
    _direct("uvicorn", level if level <= logging.DEBUG else max(level, logging.WARNING), settings, form)
    _direct(ACCESS_LOGGER, max(level, logging.INFO), settings, logging.Formatter("%(message)s"))


def _direct(name: str, level: int, settings: ServerSettings, form: logging.Formatter) -> None:
    handler: logging.Handler
    if settings.log_file is None:
        handler = logging.StreamHandler()
    else:
        handler = logging.FileHandler(settings.log_file, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(form)
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
