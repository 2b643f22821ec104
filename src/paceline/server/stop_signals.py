"""SIGTERM and SIGINT of a server. The first one asks it to end, a second one ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Final

from paceline.hub.references import visible
from paceline.server.log_queue import STDERR

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """What the event loop does with them, from `install` on. requested: set by the first one, or by `request`."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()

    def install(self) -> None:
        """Handle the signals on the running loop, which is the main thread's."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def request(self) -> None:
        """Ask the server to end, as the first signal does."""
        self.requested.set()

    def _on_signal(self, number: int) -> None:
        if not self.requested.is_set():
            say("ending: no new requests are accepted; a second signal ends at once")
            self.request()
            return
        say("ended at once")
        STDERR.flush()
        os._exit(128 + number)  # a worker process notices that its parent is gone


def say(text: str) -> None:
    """Write a line of the server's own to stderr. Never waits. Characters of a stranger's name that do not print become "?"."""
    STDERR.put(f"paceline: {visible(text)}")
