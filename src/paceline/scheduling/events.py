"""What a tick tells the outside: deltas and endings, in order. Whoever delivers them knows the channels; nobody here does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError
from paceline.streaming.chunk import StreamChunk


@dataclass(slots=True)
class Started:
    """The request left the queue: one of its sequences got a slot, or its first text a place in a pass."""

    key: int


@dataclass(slots=True)
class Delta:
    """A chunk of a request that goes on."""

    key: int
    chunk: StreamChunk


@dataclass(slots=True)
class HeldBack:
    """A choice drew tokens, and nothing of them can be shown yet: they may belong to a stop."""

    key: int
    choice: int


@dataclass(slots=True)
class Ended:
    """The terminal chunk of a request; nothing but `Released` follows."""

    key: int
    chunk: StreamChunk


@dataclass(slots=True)
class Released:
    """The request's slots are free and its memory is reclaimable."""

    key: int


@dataclass(slots=True)
class Embedded:
    """An embedding request has ended: a vector for each of its texts, or why there are none."""

    key: int
    vectors: list[Any]
    error: PacelineError | None


Event = Started | Delta | HeldBack | Ended | Released | Embedded
