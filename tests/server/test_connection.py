"""A connection's patience with clients that do not read, or do not come back."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.server import ServerState

from paceline.server.connection import Connection
from paceline.server.serving import ServerConfig
from paceline.server.settings import ServerSettings


class Wire(asyncio.Transport):
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = asyncio.Event()

    def abort(self) -> None:
        self.aborted.set()

    def is_closing(self) -> bool:
        return self.aborted.is_set()

    def close(self) -> None:
        pass


def connected(settings: ServerSettings) -> tuple[Connection, Wire]:
    config = ServerConfig(None, settings, None)  # type: ignore[arg-type]  # no request comes
    rest: Any = {"config": config, "server_state": ServerState(), "app_state": {}}
    config.app = lambda _: None  # type: ignore[assignment]
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
    """What waits for the next request holds all of the last one."""

    async def main() -> None:
        connection, _ = connected(ServerSettings(keep_alive_s=3600))
        connection.on_response_complete()
        waiting = connection.timeout_keep_alive_task
        assert waiting is not None
        connection.connection_lost(ConnectionResetError())
        assert waiting.cancelled()

    asyncio.run(main())
