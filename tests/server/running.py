"""A whole server in a thread of the tests' process, on a free port of the loopback. No sleeps: events and bounded waits."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import httpx
import uvloop
from fastapi import APIRouter, FastAPI

from paceline.server.application import build_app
from paceline.server.listeners import tls_context
from paceline.server.service import Service
from paceline.server.serving import ServerConfig, UvicornServer
from paceline.server.settings import ServerSettings

LONG_S = 60.0  # no wait of a test that passes takes so long


class RunningServer:
    """Serves from construction to `close`; a context manager. url: of its root; service: the app's, on the server's loop.

    llm: see `build_app`. engine: once it is loaded, the engine; any thread may use it.
    """

    def __init__(
        self,
        settings: ServerSettings,
        llm: Any = None,
        *,
        wait: bool = True,
        routes: Sequence[Callable[[Service], APIRouter]] = (),
        build: Callable[[ServerSettings, Any], FastAPI] = build_app,
    ) -> None:
        """wait: until the model is loaded. routes: more than the app has. build: makes the app of settings and llm."""
        self.settings, self._more, self._build = settings, routes, build
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._is_up = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(llm,), name="test-server", daemon=True)
        self._thread.start()
        assert self._is_up.wait(LONG_S)
        if self._failure is not None:
            raise self._failure
        if wait:
            self.do(self.service.loaded.wait())
            assert self.service.is_loaded, self.service.failure

    @property
    def service(self) -> Service:
        """The app's; to be used on the server's loop, see `do`."""
        found: Service = self.app.state.service
        return found

    @property
    def connections(self) -> Collection[Any]:
        """The open connections."""
        return self._server.server_state.connections

    @property
    def engine(self) -> Any:
        """The engine; the model must be loaded."""
        return self.service.engine()

    def client(self, **options: Any) -> httpx.Client:
        """A client of this server; close it, or use it as a context manager."""
        return httpx.Client(base_url=self.url, timeout=LONG_S, **options)

    def async_client(self, **options: Any) -> httpx.AsyncClient:
        """Return an asynchronous client, like `client`."""
        return httpx.AsyncClient(base_url=self.url, timeout=LONG_S, **options)

    def raw(self, method: str, path: str, body: Any, **headers: str) -> socket.socket:
        """Send a request and return its connection, with an unread response."""
        data = b"" if body is None else json.dumps(body).encode()
        sent = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data)), **headers}
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=LONG_S)
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        return connection

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the server's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LONG_S)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the server's loop."""

        async def called() -> Any:
            return function()

        return self.do(called())

    def until(self, is_so: Callable[[], bool]) -> None:
        """Let the server's loop turn until it is so."""

        async def turned() -> None:
            while not is_so():
                await asyncio.sleep(0.001)

        self.do(turned())

    def close(self) -> None:
        """End it as a signal does, at once."""
        if self._thread.is_alive() and self._failure is None:
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()

    def _run(self, llm: Any) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(llm))
        except BaseException as error:
            self._failure = error
        finally:
            self._socket.close()
            self._is_up.set()

    async def _serve(self, llm: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self.app: FastAPI = self._build(self.settings, llm)
        for routes in self._more:
            self.app.include_router(routes(self.service))
        self._server = UvicornServer(ServerConfig(self.app, self.settings, tls_context(self.settings)))
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        await self._server.is_up.wait()
        self._is_up.set()
        await serving

    def _stop(self) -> None:
        self._server.should_exit = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
