"""The end of a client, noticed while its answer is made. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.requests import Request
from starlette.types import Receive

from paceline.server.problems import ClientGone


class HangUp:
    """Watches for the end of a client. Its body must have been read."""

    def __init__(self, request: Request) -> None:
        self.has_happened = False
        self._listeners: list[Callable[[], object]] = []
        self._task = asyncio.create_task(self._watch(request.receive))

    def check(self) -> None:
        """Raises `ClientGone` after it."""
        if self.has_happened:
            raise ClientGone

    def tell(self, listener: Callable[[], object]) -> None:
        """Calls it when the client goes; at once where it has gone."""
        if self.has_happened:
            listener()
        else:
            self._listeners.append(listener)

    def close(self) -> None:
        """Watches no more."""
        self._listeners.clear()
        self._task.cancel()

    async def _watch(
        self, receive: Receive
    ) -> None:  # not the request, which would keep its body for as long as we watch
        with suppress(asyncio.CancelledError):
            while (await receive())["type"] != "http.disconnect":
                pass
            self.has_happened = True
            for listener in self._listeners:
                listener()
