"""Commands for several machines: `paceline rpc-serve` lends devices, `paceline cluster serve` serves models on Ray Serve."""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from paceline import validation
from paceline.cli import terminal
from paceline.cli.endings import INTERRUPTED
from paceline.cli.inputs import text_argument
from paceline.cli.options import VerboseOption, running, show_log
from paceline.errors import Unsupported

if TYPE_CHECKING:
    from paceline.runtime import Device


DEFAULT_PORT: Final = 50052  # of llama.cpp's rpc-server
_LOG_S: Final = 0.2
_DANGER: Final = (
    "WARNING: any program that reaches {address}:{port} can read and change the memory of this process and use it up: there is "
    "no authentication and no encryption. Let only a network of yours reach it."
)


# Options are laid out by hand, a few lines each.
# fmt: off
Host = Annotated[str, running("--host", "-H", metavar="HOST", help="IPv4 address or name to bind to.")]
Port = Annotated[int, running("--port", "-p", metavar="PORT", min=1, max=65535, help="Port.")]
LentDevices = Annotated[list[str] | None, running(
    "--device", "-d", metavar="NAME,...", help="Devices to lend; see `paceline info`.",
    show_default="all GPUs; without one the CPU",
)]
Threads = Annotated[int | None, running(
    "--threads", "-t", metavar="N", min=1, max=512, help="CPU threads.", show_default="physical cores",
)]
Cache = Annotated[bool, running("--cache", "-c", help="Keep tensors in files, so that a model is sent once.")]
# fmt: on


def rpc_serve(
    *,
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    device: LentDevices = None,
    threads: Threads = None,
    cache: Cache = False,
    verbose: VerboseOption = False,
) -> None:
    """Lend this machine's devices to engines elsewhere (`--rpc HOST:PORT`), one at a time, until it is stopped.

    There is no authentication: it binds to this machine alone unless --host says otherwise.
    """
    from paceline.runtime import rpc

    rpc.check_is_built()
    names = [name for given in device or () for name in text_argument("--device", given).split(",")]
    lent = rpc.lent_devices(names)
    address = rpc.listening_address(text_argument("--host", host), port)
    folder = rpc.cache_folder() if cache else None
    for path in [] if folder is None else rpc.checked_cache(folder):
        terminal.note(f"Removed a damaged tensor of the cache: {path}")
    show_log(logging.DEBUG if verbose else logging.WARNING)
    announce(address, port, lent, folder)
    _serve(address, port, lent, threads, folder)


def announce(address: str, port: int, lent: list[Device], folder: Path | None) -> None:
    """Note the lent devices and the address, and warn if other machines reach it."""
    if not ipaddress.ip_address(address).is_loopback:
        terminal.note(_DANGER.format(address=address, port=port))
    names = ", ".join(f"{device.name} ({device.free_bytes / 2**30:,.1f} GiB free)" for device in lent)
    kept = "" if folder is None else f"; tensors are kept in {folder}"
    terminal.note(f"Lending {names} on {address}:{port}, without authentication{kept}. Ctrl-C ends it.")


def _serve(address: str, port: int, lent: list[Device], threads: int | None, folder: Path | None) -> None:
    """Serve on a thread, as the call never returns; this one keeps the log flowing and takes signals."""
    from paceline.runtime import rpc

    failed: Future[None] = Future()

    def work() -> None:
        try:
            rpc.serve(address, port, lent, n_threads=threads, cache=folder)
        except BaseException as error:  # noqa: BLE001 (raised again by the main thread)
            failed.set_exception(error)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    threading.Thread(target=work, name="paceline-rpc-server", daemon=True).start()
    while not failed.done():
        with suppress(TimeoutError):
            failed.exception(_LOG_S)
        rpc.take_log()
    failed.result()


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """End the process with its connections: the engines that used them notice."""
    sys.stderr.flush()
    os._exit(INTERRUPTED if number == signal.SIGINT else 0)


cluster_commands = typer.Typer(help="Serve models from several replicas, on Ray Serve.", no_args_is_help=True)


@cluster_commands.callback()
def _group() -> None:
    """Keep `serve` a command of a group, of which it is the only one."""


@cluster_commands.command()
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
        for model in found.models:
            replicas = f"{model.replicas.min} to {model.replicas.max} replicas"
            terminal.write(f"{model.name}: {model.entry.model or 'the demo model'}, {replicas}\n")
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
        names = [model.name for model in found.models]
        terminal.note(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} served on {url}")

    data = validation.read_file(config, validation.MAX_CONFIG_BYTES)
    deploy.serve_until(stop, config, data, found, note_ready)
