"""Notice that a client disconnects while its response is made. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.requests import Request
from starlette.types import Receive

from paceline.server.api_errors import ClientDisconnected


class DisconnectWatcher:
    """Watches one request for the disconnection of its client. Its body must have been read."""

    def __init__(self, request: Request) -> None:
        self.is_disconnected = False
        self._listeners: list[Callable[[], object]] = []
        self._task = asyncio.create_task(self._watch(request.receive))

    def raise_if_disconnected(self) -> None:
        """Raise `ClientDisconnected` if the client has disconnected."""
        if self.is_disconnected:
            raise ClientDisconnected

    def on_disconnect(self, listener: Callable[[], object]) -> None:
        """Call `listener` when the client disconnects, at once if it already has."""
        if self.is_disconnected:
            listener()
        else:
            self._listeners.append(listener)

    def close(self) -> None:
        """Stop watching."""
        self._listeners.clear()
        self._task.cancel()

    async def _watch(
        self, receive: Receive
    ) -> None:  # not the request, which would keep its body for as long as we watch
        with suppress(asyncio.CancelledError):
            while (await receive())["type"] != "http.disconnect":
                pass
            self.is_disconnected = True
            for listener in self._listeners:
                listener()
