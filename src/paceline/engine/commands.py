"""Commands to an engine, as frozen records.

Those about a request that was submitted, and `Stop`, go to a worker as they are; `Submit` and the questions have messages of
their own there, since what they hold does not leave its process.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from paceline.kv_cache import TEXT_LAYOUT, Namespace, PromptLayout, SavedState
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.sequence import Request


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
class Export:
    """Ask for what the KV cache has of a prefix; tokens as `pack_tokens` returns them, media items by their keys."""

    key: int
    namespace: Namespace
    tokens: bytes
    layout: PromptLayout = TEXT_LAYOUT


@dataclass(frozen=True, slots=True)
class Import:
    """Give the host cache the saved ranges of a prefix, (start, end, saved cells) each."""

    key: int
    namespace: Namespace
    tokens: bytes
    ranges: tuple[tuple[int, int, SavedState], ...]


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask what each slot does."""

    key: int


@dataclass(frozen=True, slots=True)
class Digest:
    """Ask for hashes of the cached prefixes, of whole blocks where block_tokens is given."""

    key: int
    max_prefixes: int
    block_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Observe:
    """Ask what the engine does: ticks and marks behind a number, and at most max_nodes of the radix tree; None: no tree.

    due_s: on the engine's clock; the reply comes after the first tick that ends then or later, or finds nothing to do.
    """

    key: int
    after: int
    max_nodes: int | None
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DetachAdapter:
    """Stop applying an adapter of which no request is open, and drop what was computed with it."""

    key: int
    adapter: str


Question = Export | Import | Inspect | Digest | Observe | DetachAdapter
"""A command whose result is an event of the same key."""

Command = Question | Submit | RequestCommand | Drain | Stop
