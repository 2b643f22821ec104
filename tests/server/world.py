"""A server over a fake engine, and clients of it: httpx, and raw sockets that misbehave."""

from __future__ import annotations

import socket
from typing import Any

import httpx
from tests.running_engine import fail_the_next_tick
from tests.server import probe
from tests.server.running import RunningServer
from tests.server.stand_in import StandInEngine, StandInLLM

from paceline.server.settings import ServerSettings


class World:
    """A server over a stand-in, and its client."""

    def __init__(self, settings: dict[str, Any] | None = None, **engine: Any) -> None:
        self.engine = StandInEngine(**engine)
        self.server = RunningServer(ServerSettings(**(settings or {})), StandInLLM(self.engine), routes=(probe.routes,))
        self.client = self.server.client()

    def post(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/probe", json=body)

    def raw(self, request_id: str = "some", **body: Any) -> socket.socket:
        """Return a request with an unread response."""
        return self.server.raw("POST", "/v1/probe", body, **{"x-request-id": request_id})

    def fail_the_next_tick(self) -> None:
        fail_the_next_tick(self.engine._thread._engine.scheduler)

    def close(self) -> None:
        self.engine.backend.gate.set()
        self.client.close()
        self.server.close()

    def socket(self) -> socket.socket:
        """A connection on which nothing was sent."""
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
