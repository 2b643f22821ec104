"""The command line: `paceline demo`, `chat`, `generate`, `tokenize`, `embed`, `info`, `pull`, `list`, `serve` and others.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Run the command that the process was started with, and end the process."""
    _open_closed_streams()
    try:
        if sys.argv[1:2] == ["serve"] and "_PACELINE_COMPLETE" not in os.environ:
            _serve(sys.argv[2:])
        from paceline.cli.app import build_app, complete_in_bash

        if os.environ.get("_PACELINE_COMPLETE") == "complete_bash":
            complete_in_bash()
        build_app(rich_help=sys.stdout.isatty())(prog_name="paceline")
    except KeyboardInterrupt:
        sys.exit(130)


def _serve(args: list[str]) -> NoReturn:
    """Run the server without Typer and the other commands: their import takes as long as all other work before a load."""
    # Until the server handles the signal. Process 1, as in a container, would ignore it without a handler.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    # NumPy's BLAS computes nothing here, and its threads spin for 50 ms after the import, on processors that the load needs.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if _loads_in_a_worker(args):
        from paceline.engine.spare_workers import SPARE_WORKERS

        SPARE_WORKERS.launch()  # it imports beside what follows, which ends it where it is of no use
    from paceline.cli.endings import report
    from paceline.cli.serve import run_server

    def names_of_other_commands() -> set[str]:
        from paceline.cli.app import names_beside_serve  # late: a server of flags alone needs none of it

        return names_beside_serve()

    try:
        code: int | None = run_server(args, names_of_other_commands)
    except Exception as error:
        code = report(error)
        if code is None:
            raise
    sys.exit(code)


def _loads_in_a_worker(args: list[str]) -> bool:
    """Return whether a model's file is named and nothing speaks against a worker: a guess, before the flags are known."""
    names = {argument.partition("=")[0].replace("_", "-") for argument in args}
    speaks_against = {"--isolation", "-h", "--help", "--usage", "--version", "--print-config"}
    return bool(names & {"-m", "--model"}) and not names & speaks_against and "PACELINE_ISOLATION" not in os.environ


def _open_closed_streams() -> None:
    """Replace a stdout or stderr that the process was started without, which Python shows as None, by the null device."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 (open until the process ends)
