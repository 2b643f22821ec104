"""`paceline cluster serve`: models on Ray Serve, by a file."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import validation
from paceline.cli import terminal
from paceline.errors import Unsupported

commands = typer.Typer(help="Serve models from several replicas, on Ray Serve.", no_args_is_help=True)


@commands.callback()
def _group() -> None:
    """Keep `serve` a command of a group, of which it is the only one."""


@commands.command()
def serve(
    config: Annotated[
        Path, typer.Argument(help="A TOML file with [cluster], [server] and [models.NAME].", metavar="FILE")
    ],
    check: Annotated[bool, typer.Option("--check", help="Check the file, and start nothing.")] = False,
) -> None:
    """Serve the models of a file over HTTP: the routes and keys of `paceline serve`, over replicas that Ray keeps running."""
    from paceline.ray_serve.cluster_config import read_cluster_config

    found = read_cluster_config(config)
    for note in found.notes:
        terminal.note(f"Note: {note}")
    if check:
        terminal.write("".join(f"{_line(one)}\n" for one in found.models))
        return
    try:
        from paceline.ray_serve import deploy
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"paceline cluster needs Ray Serve, which is not installed: pip install 'paceline[ray]' ({error})"
        ) from None
    stop = threading.Event()

    def note_ready() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # now: Ray has set handlers of its own
            signal.signal(number, lambda *_: stop.set())
        options = found.options
        url = f"http://{options.host}:{options.port}{options.route_prefix}"
        terminal.note(f"{_names(found.models)} served on {url}")

    data = validation.read_file(config, validation.MAX_CONFIG_BYTES)
    deploy.serve_until(stop, config, data, found, note_ready)


def _names(models: Any) -> str:
    names = [one.name for one in models]
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names)} are"


def _line(model: Any) -> str:
    replicas = model.replicas
    return f"{model.name}: {model.source.model or 'the demo model'}, {replicas.min} to {replicas.max} replicas"
