"""Where the beginning of a sequence comes from: a running sequence, a kept path, host memory, or nowhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from paceline.scheduling.kept import Kept
from paceline.scheduling.prefix_tree import Blob, Match, Node
from paceline.scheduling.sequence import Promise, Sequence

LEAST_HOST_TOKENS = 16
"""Fewer are computed sooner than fetched."""
LEAST_WAIT_TOKENS = 32
"""For fewer nobody waits until another request has computed them."""


class Wait(Enum):
    """What a sequence does that will get its beginning from another."""

    WAIT = "somebody is computing it"


WAIT: Final = Wait.WAIT


class Part(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a blob's range that are wanted."""

    blob: Blob
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The first num_device tokens come from `source`, then the parts; num_tokens in all. node: the last that was matched."""

    source: Sequence | Kept | None
    num_device: int
    parts: tuple[Part, ...]
    num_tokens: int
    node: Node | None

    def without_parts(self) -> Placement:
        """What the device alone has of it."""
        return Placement(self.source, self.num_device, (), self.num_device, self.node) if self.num_device else NOTHING

    @property
    def source_name(self) -> str:
        """As `Usage.cached_from` names it: where most of it was."""
        if self.num_tokens - self.num_device > self.num_device:
            return "host"
        return "running" if isinstance(self.source, Sequence) else "device"


NOTHING = Placement(None, 0, (), 0, None)


def place(match: Match, most: int, own: Sequence) -> Placement | Wait:
    """The best that a match offers for the first `most` tokens of a sequence, where any part of a memory can be shared."""
    length = min(match.length, most)
    source, num_device = best_holder(match.nodes, length, own)
    parts = parts_of(match.nodes, num_device, length)
    num_tokens = parts[-1].end if parts else num_device
    if num_tokens - num_device < LEAST_HOST_TOKENS:
        parts, num_tokens = (), num_device
    own.waits_for = _promise(match.nodes, length, num_tokens, own)
    if own.waits_for is not None:
        return WAIT
    if num_tokens == 0:
        return NOTHING
    return Placement(source, num_device, parts, num_tokens, match.nodes[-1])


def place_whole(match: Match, most: int) -> Placement:
    """The same where memory is only copied or saved as a whole: the deepest snapshot on the way."""
    for node in reversed(match.nodes):
        if node.blob is not None and node.is_snapshot and node.end <= min(match.length, most):
            return Placement(None, 0, (Part(node.blob, 0, node.end),), node.end, node)
    return NOTHING


def best_holder(nodes: Iterable[Node], length: int, own: Sequence | None = None) -> tuple[Sequence | Kept | None, int]:
    """Who has most of the first `length` tokens, and how many; not `own`."""
    best: Sequence | Kept | None = None
    most = 0
    for node in reversed(tuple(nodes)):
        reach = min(node.end, length)
        if reach <= most:
            break
        for holder in node.holders:
            if holder is not own and holder.seq_id is not None and min(holder.num_computed, reach) > most:
                assert isinstance(holder, (Sequence, Kept))  # noqa: S101 - nothing else holds
                best, most = holder, min(holder.num_computed, reach)
    return best, most


def _keeps_promises(holder: Sequence, own: Sequence) -> bool:
    """Whether it pays to wait for a running sequence: not for one that may be slower than computing it oneself."""
    if holder.request.is_paused or holder.is_scoring:
        return holder.request is own.request and not holder.request.is_paused
    return holder.turn_key <= own.turn_key or holder.request is own.request


def _promise(nodes: Iterable[Node], length: int, num_tokens: int, own: Sequence) -> Promise | None:
    """Who of those that run is going to have computed enough more of the first `length` tokens.

    A sibling, or whoever was waited for already: any more, since many may wait for the same.
    """
    for node in nodes:
        for holder in node.holders:
            if holder is own or not isinstance(holder, Sequence) or not _keeps_promises(holder, own):
                continue
            least = 1 if own.waits_for is not None or holder.request is own.request else LEAST_WAIT_TOKENS
            end = min(node.end, length, holder.num_prompt)
            if end - num_tokens >= least:
                return Promise(holder, end)
    return None


def parts_of(nodes: Iterable[Node], start: int, length: int) -> tuple[Part, ...]:
    """What host memory has from `start` on without a gap; nodes of one blob give one part."""
    parts: list[Part] = []
    at = start
    for node in nodes:
        if node.end <= at:
            continue
        if node.blob is None or node.is_snapshot or at >= length:
            break
        end = min(node.end, length)
        if parts and parts[-1].blob is node.blob:
            parts[-1] = Part(node.blob, parts[-1].start, end)
        else:
            parts.append(Part(node.blob, at, end))
        at = end
    return tuple(parts)
