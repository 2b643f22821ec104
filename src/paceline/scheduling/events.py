"""What came of a tick, in order: deltas, endings, results of questions. Events name requests by key and know no channel."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.errors import PacelineError
from paceline.streaming.chunk import StreamChunk


class Started(msgspec.Struct):
    """The request left the queue: one of its sequences got a slot, or its first text a place in a pass."""

    key: int


class Delta(msgspec.Struct):
    """A chunk of a request that has not ended."""

    key: int
    chunk: StreamChunk


class HeldBack(msgspec.Struct):
    """A choice drew tokens of which no chunk was made: they may belong to a stop, or are fewer than its interval."""

    key: int
    choice: int


class Ended(msgspec.Struct):
    """The terminal chunk of a request; nothing but `Released` follows."""

    key: int
    chunk: StreamChunk


class Released(msgspec.Struct):
    """The request's slots are free and its memory is reclaimable."""

    key: int


class Embedded(msgspec.Struct):
    """An embedding request has ended: a vector for each of its texts, or why there are none."""

    key: int
    vectors: list[Any]
    error: PacelineError | None


class Answered(msgspec.Struct):
    """The result of a command with this key that asked the engine for something."""

    key: int
    result: Any


Event = Answered | Started | Delta | HeldBack | Ended | Released | Embedded
