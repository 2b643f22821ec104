"""What can be asked of the engine. Frozen records, so that they can cross a border between processes."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.sequence import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """A request to be generated or embedded."""

    request: Request | EmbeddingRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request."""

    key: int


@dataclass(frozen=True, slots=True)
class SetPaused:
    """Lets a request sit out ticks, or go on."""

    key: int
    is_paused: bool


@dataclass(frozen=True, slots=True)
class EndSlow:
    """Ends a request whose reader is too slow."""

    key: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends every request."""


Command = Submit | Cancel | SetPaused | EndSlow | Stop
