"""Run the application: sockets, signals, shutdown. On the main thread, which is the event loop's.

The first SIGTERM or SIGINT drains: new requests are rejected, running ones have `drain_s` to finish, then end with SHUTDOWN.
A second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import os
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import uvicorn
from fastapi import FastAPI

from paceline.server.api_errors import api_error_of
from paceline.server.application import build_app
from paceline.server.connection import Connection
from paceline.server.flags import ModelPresets
from paceline.server.in_flight import InFlight
from paceline.server.router.router_application import build_router_app
from paceline.server.settings import ServerSettings, is_socket_path

FAILED = 1
ENGINE_ENDED = 70
"""The exit code where the engine gave up by itself: EX_SOFTWARE of sysexits.h."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_THREADS = 64  # a few long prompts being tokenised would occupy all of asyncio's default
_FLUSH_S = 5.0  # for ended streams to send their last chunk


def serve(settings: ServerSettings, presets: ModelPresets | None = None) -> int:
    """Serve until a signal; return the exit code: 0, 1 where it cannot start, 70 where the engine gave up.

    presets: the models of a router; None where there is one model. Raises `InvalidParams` for invalid engine options or
    presets, before any socket is opened.
    """
    app = build_app(settings) if presets is None else build_router_app(settings, presets)
    try:
        config = uvicorn_config(app, settings)
        config.load()
    except (OSError, ssl.SSLError) as error:
        _print(f"cannot use the certificate {settings.ssl_certfile} with its key: {error.strerror or error}")
        return FAILED
    try:
        listeners = Listeners(settings)
    except CannotListen as error:
        _print(str(error))
        return FAILED
    with listeners, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(Serving(app, config, listeners).run())


def uvicorn_config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    protocol: Any = partial(Connection, settings)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=round(_FLUSH_S),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )


class UvicornServer(uvicorn.Server):
    """uvicorn's server without signal handlers; `is_up` is set when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and set `is_up`."""
        await super().startup(sockets)
        self.is_up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Serving`."""
        yield


class Served(Protocol):
    """What is served: the `Service` of one model, or the router of several. loaded: set when it is ready, or has failed."""

    settings: ServerSettings
    in_flight: InFlight
    loaded: asyncio.Event

    @property
    def failure(self) -> BaseException | None:
        """Why it cannot serve; None where it can."""

    @property
    def is_loaded(self) -> bool:
        """Whether requests can run."""

    def ready_line(self, seconds: float) -> str:
        """Return what to print when it is ready, after so many seconds."""

    async def ended(self) -> BaseException | None:
        """Wait for its end; return the reason if it gave up by itself."""

    def drain(self) -> None:
        """Reject new requests from now on."""

    async def aclose(self) -> None:
        """End running requests, and free what they use."""


class Serving:
    """One run of a server, from its sockets to its shutdown."""

    def __init__(self, app: FastAPI, config: uvicorn.Config, listeners: Listeners) -> None:
        self._service: Served = app.state.service
        self._settings = self._service.settings
        self._server = UvicornServer(config)
        self._listeners = listeners
        self._stop_requested = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Serve until a signal, a failure to load, or the engine gives up; return the exit code."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, "paceline-server"))
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        running = asyncio.create_task(self._server.serve(sockets=self._listeners.sockets))
        running.add_done_callback(lambda _: self.end())  # if uvicorn ends by itself
        watching = asyncio.create_task(self._watch())
        await self._stop_requested.wait()
        watching.cancel()
        await self._drain()
        self._server.should_exit = True
        await running
        return self._code

    def end(self) -> None:
        """Start the shutdown, as the first signal does."""
        self._stop_requested.set()

    def _on_signal(self, number: int) -> None:
        if not self._stop_requested.is_set():
            _print("ending: no new requests are accepted; a second signal ends at once")
            self.end()
            return
        _print("ended at once")
        os._exit(128 + number)  # a worker process notices that its parent is gone

    async def _watch(self) -> None:
        """Shut down where the model cannot be loaded or the engine gives up, for the service manager to act on."""
        await self._announce()
        if self._service.failure is None:
            reason = await self._service.ended()
            if reason is not None:
                _print(f"ending: {reason}")
                self._code = ENGINE_ENDED
                self.end()

    async def _announce(self) -> None:
        """Print when it listens and when the model is loaded; shut down where it cannot be."""
        began = time.monotonic()
        await self._server.is_up.wait()
        urls = [url_of(one, self._settings) for one in self._listeners.sockets]
        _print(f"listening on {' and '.join(urls)}")
        if not self._settings.api_keys and not self._listeners.are_private:
            _print(
                "warning: every client that reaches this address may use the server; set an API key, or bind 127.0.0.1"
            )
            if self._settings.checks_hosts and not self._settings.allowed_hosts:
                _print("clients that ask for this machine by a name need --allowed-hosts NAME; IP addresses are fine")
        await self._service.loaded.wait()
        if self._service.failure is None:
            _freeze_garbage()
            _print(self._service.ready_line(time.monotonic() - began))
            return
        _print(f"cannot load the model: {api_error_of(self._service.failure).message}")
        self._code = FAILED
        self.end()

    async def _drain(self) -> None:
        """Wait `drain_s` for running requests; then end them with SHUTDOWN, and wait for their last chunks."""
        self._service.drain()
        wait_idle = self._service.in_flight.wait_idle
        if self._service.is_loaded:
            with suppress(TimeoutError):
                await asyncio.wait_for(wait_idle(), self._settings.drain_s)
        await self._service.aclose()
        with suppress(TimeoutError):
            await asyncio.wait_for(wait_idle(), _FLUSH_S)


def _freeze_garbage() -> None:
    """Exclude all present objects from garbage collection: each full collection would block the loop for 50 ms."""
    gc.collect()
    gc.freeze()


def _print(text: str) -> None:
    with suppress(OSError):  # stderr may be closed
        print(f"paceline: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the command's own output


_BACKLOG = 1024
_PROBE_S = 1.0  # timeout of the connection that looks for a running server


class CannotListen(OSError):
    """A socket cannot be opened; the message names address and reason."""


class Listeners:
    """Open sockets, in the order of `settings.hosts`; a context manager that closes them and removes Unix sockets' files."""

    def __init__(self, settings: ServerSettings) -> None:
        """Open all sockets. Raises `CannotListen`, with no socket left open."""
        self._closing = ExitStack()
        self.sockets: list[socket.socket] = []
        is_alone = sum(not is_socket_path(host) for host in settings.hosts) == 1
        try:
            for host in settings.hosts:
                self.sockets.append(self._closing.enter_context(_listener(host, settings.port, is_alone=is_alone)))
                if is_socket_path(host):
                    self._closing.callback(_remove, Path(host), Path(host).stat().st_ino)
        except BaseException:
            self._closing.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    @property
    def are_private(self) -> bool:
        """Return whether only this machine can reach them."""
        return all(map(_is_private, self.sockets))


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """Return the URL for a client on this machine."""
    if listener.family == socket.AF_UNIX:
        return f"unix://{listener.getsockname()}{settings.root_path}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if settings.ssl_certfile else 'http'}://{shown}:{port}{settings.root_path}"


def _listener(host: str, port: int, *, is_alone: bool) -> socket.socket:
    try:
        return _unix_socket(Path(host)) if is_socket_path(host) else _tcp_socket(host, port, is_alone=is_alone)
    except OSError as error:
        where = host if is_socket_path(host) else f"{host} port {port}"
        raise CannotListen(f"cannot listen on {where}: {error.strerror or error}") from None


def _tcp_socket(host: str, port: int, *, is_alone: bool) -> socket.socket:
    """Listen on a name's first address, IPv4 before IPv6. :: accepts IPv4 as well where it is the only host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    is_any = host == "::" and is_alone and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_any)


def _unix_socket(path: Path) -> socket.socket:
    """Listen on a path. Replaces the file of a server that has crashed, and no other file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_stale_socket(path):
            path.unlink()
        listener.bind(os.fspath(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.strerror is None:  # the path is too long
            raise OSError(f"{error}; give a shorter path") from None
        raise
    return listener


def _is_stale_socket(path: Path) -> bool:
    """Return whether there is a socket file without a listener."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                return True
    return False


def _remove(path: Path, inode: int) -> None:
    """Remove a Unix socket's file, unless another server has replaced it."""
    with suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _is_private(listener: socket.socket) -> bool:
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
