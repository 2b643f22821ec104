"""Runs the application: the socket, the signals, the end. On the main thread, which is the event loop's.

The first SIGTERM or SIGINT drains: new work is refused, what runs may end within `drain_s`, then it ends with SHUTDOWN. A
second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from paceline.server.app import build_app
from paceline.server.connection import Connection
from paceline.server.problems import problem_of
from paceline.server.service import Service
from paceline.server.settings import ServerSettings

FAILED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BACKLOG = 1024
_THREADS = 64  # asyncio's own few would all be taken by some long prompts that are tokenised, and nobody else served
_LAST_WORDS_S = 5.0  # for streams that were ended to tell their clients


def serve(settings: ServerSettings) -> int:
    """Serves until it is told to end; answers the process's exit code: 0, or 1 where it cannot begin.

    Raises `InvalidParams` for engine options that make no sense, before anything is opened.
    """
    app = build_app(settings)
    try:
        config = uvicorn_config(app, settings)
        config.load()
        listener = bound_socket(settings)
    except (OSError, ssl.SSLError) as error:  # a port that is taken, a certificate that cannot be read
        _say(f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}")
        return FAILED
    with listener, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(Serving(app, config, listener).run())


def uvicorn_config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    """How uvicorn runs the application."""
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
        timeout_graceful_shutdown=round(_LAST_WORDS_S),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )


def bound_socket(settings: ServerSettings) -> socket.socket:
    """Listens on host and port; a name that has several addresses is its first one, IPv4 before IPv6. Raises `OSError`."""
    found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    is_any = settings.host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_any)


class UvicornServer(uvicorn.Server):
    """Leaves signals alone, and tells when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        self.is_up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does not."""
        yield


class Serving:
    """One run of a server, from its socket to its end."""

    def __init__(self, app: FastAPI, config: uvicorn.Config, listener: socket.socket) -> None:
        self._service: Service = app.state.service
        self._settings = self._service.settings
        self._server = UvicornServer(config)
        self._listener = listener
        self._is_told_to_end = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Until a signal, or until loading fails; answers the exit code."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, "paceline-server"))
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take_signal, number)
        running = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        running.add_done_callback(lambda _: self.end())  # should it ever end by itself
        telling = asyncio.create_task(self._tell())
        await self._is_told_to_end.wait()
        telling.cancel()
        await self._drain()
        self._server.should_exit = True
        await running
        return self._code

    def end(self) -> None:
        """As the first signal does."""
        self._is_told_to_end.set()

    def _take_signal(self, number: int) -> None:
        if not self._is_told_to_end.is_set():
            _say("ending: no new requests are taken; a second signal ends at once")
            self.end()
            return
        _say("ended at once")
        os._exit(128 + number)  # a worker process notices that it is alone

    async def _tell(self) -> None:
        """Says when it listens and when the model is there; without a model there is no server."""
        began = time.monotonic()
        await self._server.is_up.wait()
        _say(f"listening on {url_of(self._listener, self._settings)}")
        if not self._settings.api_keys and not _is_loopback(self._listener):
            _say("warning: everybody who reaches this address may use the server; set an API key, or bind 127.0.0.1")
            if self._settings.checks_hosts and not self._settings.allowed_hosts:
                _say("clients that ask for this machine by a name need --allowed-hosts NAME; IP addresses are fine")
        await self._service.loaded.wait()
        if self._service.failure is None:
            _freeze_garbage()
            slots = self._service.engine().config.num_slots
            _say(f"{self._service.names[0]} is ready after {time.monotonic() - began:.1f} s ({slots} slots)")
            return
        _say(f"cannot load the model: {problem_of(self._service.failure).message}")
        self._code = FAILED
        self.end()

    async def _drain(self) -> None:
        """Lets what runs end in time; what does not ends with SHUTDOWN, and has a moment to say so."""
        self._service.drain()
        quiet = self._service.traffic.quiet
        if self._service.is_loaded:
            with suppress(TimeoutError):
                await asyncio.wait_for(quiet(), self._settings.drain_s)
        await self._service.aclose()
        with suppress(TimeoutError):
            await asyncio.wait_for(quiet(), _LAST_WORDS_S)


def _freeze_garbage() -> None:
    """What is there by now stays; looking it through for garbage again and again would hold the loop for 50 ms each time."""
    gc.collect()
    gc.freeze()


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """Where a client on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if settings.ssl_certfile else 'http'}://{shown}:{port}{settings.root_path}"


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def _say(text: str) -> None:
    with suppress(OSError):  # who read this may have gone, and the server serves and ends without them
        print(f"paceline: {text}", file=sys.stderr, flush=True)  # noqa: T201 - for the people who started it
