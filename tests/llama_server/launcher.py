"""Runs `paceline serve` with the flags that llama-server's tests give.

Repositories on the web become stand-ins, and behaviour that llama-server has by default and paceline on request is requested.
Everything else is passed on unchanged. `python -m tests.llama_server.launcher SOCKET` has servers forked, see `fork_server`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.llama_server.fork_server import serve

MODELS = "PACELINE_STAND_INS"
"""The variable with the path of a JSON file: each stand-in's path by `repository/file`."""

_WITHOUT_EFFECT = {"--offline"}  # nothing is ever downloaded
_FAKE_TIMING = "LLAMA_SERVER_DEBUG_FAKE_TIMING"  # llama-server's: requests that its router hands on take longer
_DELAY_S = 2.0


def serve_arguments(arguments: Sequence[str], models: Mapping[str, str]) -> list[str]:
    """Return the arguments of `paceline serve` for llama-server's arguments. models: paths of the stand-ins."""
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
    is_router = "--model" not in kept
    if is_router and "--no-models-autoload" not in kept:
        kept.append("--models-autoload")
    return [*kept, "--prefill-assistant", *(["--offline"] if is_router else [])]


def run(arguments: list[str]) -> None:
    """Serve, and end the process."""
    from paceline.cli import main

    models = json.loads(Path(os.environ[MODELS]).read_text())
    if os.environ.get(_FAKE_TIMING):
        _delay_routed_requests()
    sys.argv = ["paceline", "serve", *serve_arguments(arguments, models)]
    main()


def _delay_routed_requests() -> None:
    """Delay requests that a router hands on, as llama-server does if its tests ask for it."""
    from paceline.server.router.model_dispatch import ModelDispatch

    entered = ModelDispatch._entered

    async def enter_slowly(self: Any, *arguments: Any) -> Any:
        served = await entered(self, *arguments)
        await asyncio.sleep(_DELAY_S)
        return served

    ModelDispatch._entered = enter_slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    import paceline.cli.app
    import paceline.server.serving  # noqa: F401 - imported once for all servers

    serve(sys.argv[1], run)
