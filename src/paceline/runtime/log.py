"""llama.cpp's log as `logging.getLogger("paceline.llama")`.

Lines arrive on the thread whose native call just returned, in the order they were logged. llama.cpp calls its chatter
about a model's load "info"; it is passed on as DEBUG, so that an application that logs at INFO stays readable.
"""

from __future__ import annotations

import logging

from paceline import _native

logger = logging.getLogger("paceline.llama")

_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}


def _deliver(level: int, line: str) -> None:
    logger.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


def install() -> None:
    """Takes llama.cpp's log over; called once when `paceline.runtime` is imported."""
    # Python writes warnings to stderr where nobody has set logging up; a library stays silent then.
    logger.addHandler(logging.NullHandler())
    _native.set_log_sink(_deliver)
