"""The command line: `paceline demo`, `chat`, `generate`, `tokenize`, `embed`, `info`, `pull`, `list`, `serve` and others.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command that the process was started with, and end the process."""
    _open_closed_streams()
    try:
        from paceline.cli.app import build_app

        build_app(rich_help=sys.stdout.isatty())(prog_name="paceline")
    except KeyboardInterrupt:
        sys.exit(130)


def _open_closed_streams() -> None:
    """Replace a stdout or stderr that the process was started without, which Python shows as None, by the null device."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 (open until the process ends)
