"""The log of `paceline serve`: what is written, how, and where to. Called once, before the server starts."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from paceline.server.settings import ServerSettings

_OFF: Final = logging.CRITICAL + 1
_LEVELS: Final = {
    "off": _OFF,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}


class _JsonLines(logging.Formatter):
    """One object a line, with the fields that the access log's lines begin with."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
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
        """The time, to the millisecond."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def set_up(settings: ServerSettings) -> None:
    """Gives the loggers of the server their handlers, in place of those that they have. Raises `OSError` for the file."""
    from paceline.server.middleware.access_log import ACCESS_LOGGER  # its lines are JSON already

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
