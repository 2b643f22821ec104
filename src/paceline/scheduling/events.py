"""What came of a tick, in order: deltas, endings, results of questions. Events name requests by key and know no channel."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.errors import PacelineError
from paceline.kv_cache import PrefixDigest
from paceline.scheduling.activity import EngineActivity
from paceline.scheduling.telemetry import SlotsSnapshot
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


class Exported(msgspec.Struct):
    """Saved ranges of a prefix, one behind the other from its first token on; may be empty."""

    key: int
    ranges: list[Any]


class Imported(msgspec.Struct):
    """What host memory has of a prefix after an import; empty where its capacity has no room for any."""

    key: int
    ranges: list[Any]


class Inspected(msgspec.Struct):
    """What each slot does, which prefixes are cached, or what the engine does, after the tick."""

    key: int
    snapshot: SlotsSnapshot | PrefixDigest | EngineActivity


class AdapterDetached(msgspec.Struct):
    """No pass uses an adapter any more, and nothing that was computed with it is cached."""

    key: int


Event = AdapterDetached | Exported | Imported | Inspected | Started | Delta | HeldBack | Ended | Released | Embedded
