"""What can be asked of the engine. Frozen records, so that they can cross a border between processes."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.prefix_tree import Namespace, Saved
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
class Drain:
    """Waits for no reader any more, so that every request gets to its end."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends every request."""


@dataclass(frozen=True, slots=True)
class Export:
    """Asks for what memory has of a path; tokens as the prefix tree keeps them."""

    key: int
    namespace: Namespace
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Import:
    """Gives memory the saved ranges of a path, (start, end, saved cells) each."""

    key: int
    namespace: Namespace
    tokens: bytes
    ranges: tuple[tuple[int, int, Saved], ...]


@dataclass(frozen=True, slots=True)
class Inspect:
    """Asks what each slot does."""

    key: int


Question = Export | Import | Inspect
"""A command that is answered, by an event of the same key."""

Command = Question | Submit | Cancel | SetPaused | EndSlow | Drain | Stop
