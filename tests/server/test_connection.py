"""A connection's patience with clients that do not read, or do not come back."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from paceline.server.connection import Connection
from paceline.server.serving import ServerConfig
from paceline.server.settings import ServerSettings


class Wire(asyncio.Transport):
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = asyncio.Event()
        self.sent, self.num_closes = b"", 0

    def abort(self) -> None:
        self.aborted.set()

    def is_closing(self) -> bool:
        return self.aborted.is_set()

    def close(self) -> None:
        self.num_closes += 1

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        self.sent += data

    def can_write_eof(self) -> bool:
        return False

    def resume_reading(self) -> None:
        pass


async def respond_nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise AssertionError("no request comes")


def connected(settings: ServerSettings, app: ASGIApp = respond_nothing) -> tuple[Connection, Wire]:
    config = ServerConfig(None, settings, None)  # type: ignore[arg-type]  # the app is set below
    rest: Any = {"config": config, "server_state": ServerState(), "app_state": {}}
    config.app = app  # type: ignore[assignment]
    config.load()
    connection, wire = Connection(settings, config.all_open, _loop=asyncio.get_running_loop(), **rest), Wire()
    connection.connection_made(wire)
    return connection, wire


def test_a_connection_stays_open_between_requests_for_as_long_as_the_settings_say() -> None:
    """To the fraction of a second."""

    async def main() -> None:
        connection, _ = connected(ServerSettings(keep_alive_s=0.25))
        assert connection.timeout_keep_alive == 0.25
        connection.connection_lost(None)

    asyncio.run(main())


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    """After as long as it may take to send."""

    async def main() -> None:
        connection, wire = connected(ServerSettings(body_timeout_s=0.01))
        connection.pause_writing()
        await wire.aborted.wait()
        connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_one_that_reads_again_has_all_the_time_anew() -> None:
    """No clock runs while it reads."""

    async def main() -> None:
        connection, wire = connected(ServerSettings(body_timeout_s=60))
        connection.pause_writing()
        first = connection._stall
        assert first is not None
        connection.resume_writing()
        assert first.cancelled()
        connection.pause_writing()
        assert connection._stall is not first
        connection.connection_lost(None)
        assert connection._stall is None
        assert not wire.aborted.is_set()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_connection_that_its_client_reset_is_waited_for_no_longer() -> None:
    """The wait for the next request holds all of the last request."""

    async def main() -> None:
        connection, _ = connected(ServerSettings(keep_alive_s=3600))
        connection.on_response_complete()
        waiting = connection.timeout_keep_alive_task
        assert waiting is not None
        connection.connection_lost(ConnectionResetError())
        assert waiting.cancelled()

    asyncio.run(main())


BEGUN = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"
HEAD = {"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"1")]}


def test_a_client_that_still_sends_a_refused_body_may_be_slow() -> None:
    """It has a few seconds for its next bytes each time, and in all no longer than for a body that is read."""

    async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send(HEAD)
        await send({"type": "http.response.body", "body": b"x"})

    async def main() -> None:
        connection, wire = connected(ServerSettings(body_timeout_s=60), refuse)
        connection.data_received(BEGUN)
        while connection._deadline is None:
            await asyncio.sleep(0)
        assert b"connection: close" in wire.sent and wire.num_closes == 0
        first, end_s = connection._deadline, connection.loop.time() + 60
        connection.data_received(b"}")
        assert first.cancelled() and connection._deadline is not None and not connection._deadline.cancelled()
        connection._linger_until_s -= 58
        before_s = connection.loop.time()
        connection.data_received(b"}")
        rearmed_s = connection.loop.time() - before_s  # the clock is read twice, and rounded: hence the millisecond
        assert connection._deadline.when() <= end_s - 58 + rearmed_s + 0.001
        connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_response_that_announced_the_end_of_the_connection_ends_it() -> None:
    """Also if the rest of the body arrives while the response is sent."""
    is_complete = asyncio.Event()

    async def respond(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send(HEAD)
        await is_complete.wait()
        await send({"type": "http.response.body", "body": b"x"})

    async def main() -> None:
        connection, wire = connected(ServerSettings(), respond)
        connection.data_received(BEGUN)
        while not wire.sent:
            await asyncio.sleep(0)
        assert b"connection: close" in wire.sent
        connection.data_received(b"x" * 8)
        is_complete.set()
        while not connection.cycle.response_complete:
            await asyncio.sleep(0)
        assert wire.num_closes > 0
        connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(main(), 60))
