"""`paceline serve`: a model over HTTP, and its log.

The flags are llama-server's and do not fit a usual parser: see paceline.server.flags. Without one it starts sooner.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from paceline.cli import terminal
from paceline.cli.config_file import CONFIG_VARIABLE, MODEL_VARIABLE, default_path
from paceline.observability.tracing import TRACE_ID

if TYPE_CHECKING:
    from paceline.server.flags import Resolved
    from paceline.server.flags.display import Section
    from paceline.server.settings import ServerSettings

_WIDEST = 120  # columns of help: longer lines are hard to follow


def run_server(args: Sequence[str], other_names: Callable[[], Collection[str]]) -> int:
    """Serve a model over HTTP, or print what a flag asks for; return the exit code. Raises `InvalidParams` for wrong flags.

    Args:
        args: The command line.
        other_names: Returns the names on the top level of a config file that are for other commands.
    """
    from paceline.server.flags import DiskFiles, ModelPresets, SettingsSource, resolve
    from paceline.server.flags.display import config_sections, help_sections

    files = DiskFiles(terminal.note)
    environ = {
        name: value for name, value in os.environ.items() if value or name not in (CONFIG_VARIABLE, MODEL_VARIABLE)
    }
    resolve_again = partial(resolve, list(args), environ, files, default_config=default_path(), other_names=other_names)
    resolved = resolve_again()
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
            logging.captureWarnings(True)
            from paceline.server.startup import serve as run

            presets = ModelPresets(resolved, files) if resolved.is_router else None
            source = SettingsSource(
                _for_server(resolved),
                lambda: _for_server(resolve_again(downloads=False)),
                lambda found: ModelPresets(found, files),
                set_up_logging,
            )
            return run(source.started.settings, presets, source)
    return 0


def _for_server(resolved: Resolved) -> Resolved:
    """Return the settings with defaults of the server alone: of the disk cache, and of the folder of batches."""
    from paceline.server.listeners import state_folder

    settings = resolved.settings
    folder = settings.batch_folder or state_folder() / "batches" / str(settings.port)
    options = {"disk_cache": "auto", **settings.engine_options}
    settings = replace(settings, engine_options=options, batch_folder=folder if settings.batches else None)
    return replace(resolved, settings=settings)


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
        if trace_id := TRACE_ID.get():
            line["trace_id"] = trace_id
        line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return terminal.escaped(json.dumps(line, ensure_ascii=False))


class _PlainLines(terminal.LogLines):
    """Time in UTC, level, logger, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802 - logging's
        """Return the time in UTC, to the millisecond."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def set_up_logging(settings: ServerSettings) -> None:
    """Replace the handlers of the server's loggers, and close their log file. Raise `OSError` if the new one cannot be opened."""
    from paceline.server.operator_lines import STDERR, LogQueue, QueuedLines, describe_dropped, write_to
    from paceline.server.settings import ACCESS_LOGGER

    level = _LEVELS[settings.log_level]
    form = _JsonLines() if settings.log_json else _PlainLines()
    queue = STDERR
    if settings.log_file is not None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # blocking, a pipe's opening waits for a reader
        descriptor = os.open(settings.log_file, flags, 0o666)
        queue = LogQueue(partial(write_to, descriptor), partial(os.close, descriptor))
    former = {each.queue for each in logging.getLogger("paceline").handlers if isinstance(each, QueuedLines)}
    handler, access_handler, last_handler = QueuedLines(queue), QueuedLines(queue), QueuedLines(queue)
    handler.setFormatter(form)
    access_handler.setFormatter(terminal.LogLines("%(message)s"))
    last_handler.setFormatter(form)
    last_handler.setLevel(max(level, logging.WARNING))
    logging.lastResort = last_handler  # of other loggers, such as asyncio's
    queue.describe_dropped = lambda number: form.format(
        logging.LogRecord("paceline.server", logging.WARNING, "", 0, describe_dropped(number), None, None)
    )
    _direct("paceline", level, handler)
    _direct("uvicorn", level if level <= logging.DEBUG else max(level, logging.WARNING), handler)
    _direct(ACCESS_LOGGER, max(level, logging.INFO), access_handler)
    for each in former - {STDERR, queue}:
        each.close()


def _direct(name: str, level: int, handler: logging.Handler) -> None:
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
