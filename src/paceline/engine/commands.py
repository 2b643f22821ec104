"""Commands to an engine, as frozen records.

Commands for one submitted request, and `Stop`, go to a worker as they are. `Submit` and `Ask` stay in their process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.scheduling.records import EmbeddingRequest
from paceline.sequence import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a request for text or for embeddings."""

    request: Request | EmbeddingRequest


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """A command that goes to a worker as it is."""


class Cancel(_Record, frozen=True, tag="cancel"):
    """Cancel a request."""

    key: int


class SetPaused(_Record, frozen=True, tag="pause"):
    """Pause a request, or continue it."""

    key: int
    is_paused: bool


class SetInterval(_Record, frozen=True, tag="interval"):
    """Change how many tokens a chunk of a request needs."""

    key: int
    interval: int


class EndSlow(_Record, frozen=True, tag="slow"):
    """End a request whose reader is too slow."""

    key: int


class Stop(_Record, frozen=True, tag="stop"):
    """End every request."""


RequestCommand = Cancel | SetPaused | SetInterval | EndSlow
"""A command for one request that was submitted."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait for slow readers no longer, so that every request ends."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask something of the engine's thread.

    Attributes:
        key: Of the event `Answered`.
        begin: Called with the engine (`core.Engine`) before the next tick. It returns a function, which is called after the tick
            for the result, or None if the engine will emit the event by itself.
        due_s: On the engine's clock; the result is of the first tick that ends then or later, or finds nothing to do.
        may_change_cache: Whether it changes the KV cache, which ends a calibration.
    """

    key: int
    begin: Callable[[Any], Callable[[], Any] | None]
    due_s: float = 0.0
    may_change_cache: bool = False


Command = Ask | Submit | RequestCommand | Drain | Stop
