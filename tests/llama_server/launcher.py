"""Runs `paceline serve` with the flags that llama-server's tests give.

Repositories on the web become stand-ins, and what llama-server does by default and paceline does on request is requested.
Everything else is passed on as it is. `python -m tests.llama_server.launcher SOCKET` has servers forked, see `fork_server`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.llama_server.fork_server import serve

MODELS = "PACELINE_STAND_INS"
"""The variable with the path of a JSON file: each stand-in's path by `repository/file`."""

_WITHOUT_EFFECT = {"--offline"}  # nothing is ever downloaded


def serve_arguments(arguments: Sequence[str], models: Mapping[str, str]) -> list[str]:
    """Return the arguments of `paceline serve` for those of llama-server. models: paths of the stand-ins."""
    kept: list[str] = []
    origin = {"--hf-repo": "", "--hf-file": ""}
    rest = iter(arguments)
    for argument in rest:
        if argument in origin:
            origin[argument] = next(rest)
        elif argument not in _WITHOUT_EFFECT:
            kept.append(argument)
    if origin["--hf-repo"]:
        kept += ["--model", models["/".join(origin.values())]]
    if "--cors-origins" not in kept:
        kept += ["--cors-origins", "*", "--cors-credentials"]
    if "--metrics" not in kept:
        kept.append("--no-metrics")
    return [*kept, "--prefill-assistant"]


def run(arguments: list[str]) -> None:
    """Serve, and end the process."""
    from paceline.cli import main

    models = json.loads(Path(os.environ[MODELS]).read_text())
    sys.argv = ["paceline", "serve", *serve_arguments(arguments, models)]
    main()


if __name__ == "__main__":
    import paceline.cli.app
    import paceline.server.serving  # noqa: F401 - imported once for all servers

    serve(sys.argv[1], run)
