"""What of a prompt is cached: under which sequence id, in host memory, or about to be computed by another sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import msgspec

from paceline.kv_cache.interfaces import CacheSequence, PendingPrefix
from paceline.kv_cache.offload import MIN_CACHED_TOKENS, CachedPrefix
from paceline.kv_cache.radix_tree import HostBlock, Node, TreeMatch

MIN_PENDING_TOKENS = 32
"""A sequence does not wait for another to compute fewer."""


class NotAdmitted(Enum):
    """Why a sequence cannot start in this tick."""

    PREFIX_PENDING = auto()  # another sequence is computing its prefix; those behind it may start
    OFFLOAD_PENDING = auto()  # its cells, or its prefix, are on the way to host memory
    NO_CELLS = auto()


PREFIX_PENDING: Final = NotAdmitted.PREFIX_PENDING


class PrefixSegment(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a host block, to be loaded."""

    block: HostBlock
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix that a sequence starts from: num_device tokens of `source`, then the segments; num_tokens in all.

    node: the last one that was matched in the radix tree.
    """

    source: CacheSequence | CachedPrefix | None
    num_device: int
    segments: tuple[PrefixSegment, ...]
    num_tokens: int
    node: Node | None

    def device_part(self) -> PrefixMatch:
        """Return the part that is on the device."""
        return (
            PrefixMatch(self.source, self.num_device, (), self.num_device, self.node) if self.num_device else NO_MATCH
        )

    @property
    def source_name(self) -> str:
        """`Usage.cached_from`: where most of the prefix was."""
        if self.num_tokens - self.num_device > self.num_device:
            return "host"
        return "device" if isinstance(self.source, CachedPrefix) else "running"


NO_MATCH = PrefixMatch(None, 0, (), 0, None)


def match_parts(match: TreeMatch, max_tokens: int, own: CacheSequence) -> PrefixMatch | NotAdmitted:
    """Return the longest cached prefix of a sequence, where any part of a memory can be shared.

    Sets `own.waits_for` and returns `PREFIX_PENDING` where another sequence is about to compute enough more of it.
    """
    length = min(match.length, max_tokens)
    source, num_device = longest_owner(match.nodes, length, own)
    segments = host_segments(match.nodes, num_device, length)
    num_tokens = segments[-1].end if segments else num_device
    if num_tokens - num_device < MIN_CACHED_TOKENS:
        segments, num_tokens = (), num_device
    own.waits_for = _pending_prefix(match.nodes, length, num_tokens, own)
    if own.waits_for is not None:
        return PREFIX_PENDING
    if num_tokens == 0:
        return NO_MATCH
    return PrefixMatch(source, num_device, segments, num_tokens, match.nodes[-1])


def match_checkpoint(match: TreeMatch, max_tokens: int) -> PrefixMatch:
    """Return the deepest checkpoint on the path, where memory is only saved whole."""
    for node in reversed(match.nodes):
        if node.block is not None and node.is_checkpoint and node.end <= min(match.length, max_tokens):
            return PrefixMatch(None, 0, (PrefixSegment(node.block, 0, node.end),), node.end, node)
    return NO_MATCH


def match_sibling(sequence: CacheSequence) -> PrefixMatch | NotAdmitted:
    """Return the prompt but its last token of another choice of the request, where memory is only copied whole."""
    wanted = sequence.num_prompt_tokens - 1
    if wanted == 0 or len(sequence.request.sequences) == 1:
        return NO_MATCH
    siblings = [one for one in sequence.request.sequences if one is not sequence and one.is_running]
    for sibling in siblings:
        if sibling.num_computed_tokens == wanted:
            return PrefixMatch(sibling, wanted, (), wanted, None)
    return PREFIX_PENDING if any(sibling.num_computed_tokens < wanted for sibling in siblings) else NO_MATCH


def longest_owner(
    nodes: Iterable[Node], length: int, own: CacheSequence | None = None
) -> tuple[CacheSequence | CachedPrefix | None, int]:
    """Return the owner, other than `own`, that has most of the first `length` tokens computed, and how many."""
    best: CacheSequence | CachedPrefix | None = None
    most = 0
    for node in reversed(tuple(nodes)):
        reach = min(node.end, length)
        if reach <= most:
            break
        for owner in node.owners:
            if owner is not own and owner.seq_id is not None and min(owner.num_computed_tokens, reach) > most:
                best, most = owner, min(owner.num_computed_tokens, reach)  # type: ignore[assignment]  # the only two kinds
    return best, most


def host_segments(nodes: Iterable[Node], start: int, length: int) -> tuple[PrefixSegment, ...]:
    """Return what host memory has from `start` on without a gap; nodes of one block give one segment."""
    segments: list[PrefixSegment] = []
    at = start
    for node in nodes:
        if node.end <= at:
            continue
        if node.block is None or node.is_checkpoint or at >= length:
            break
        end = min(node.end, length)
        if segments and segments[-1].block is node.block:
            segments[-1] = PrefixSegment(node.block, segments[-1].start, end)
        else:
            segments.append(PrefixSegment(node.block, at, end))
        at = end
    return tuple(segments)


def _pending_prefix(nodes: Iterable[Node], length: int, num_tokens: int, own: CacheSequence) -> PendingPrefix | None:
    """Return the running sequence that is about to have computed enough more of the first `length` tokens.

    Of a sibling, or of one that was waited for before, any more is enough, since many may wait for the same.
    """
    for node in nodes:
        for owner in node.owners:
            if owner is own or isinstance(owner, CachedPrefix):
                continue
            running: CacheSequence = owner  # type: ignore[assignment]  # the only other kind
            if not _is_worth_waiting_for(running, own):
                continue
            is_close = own.waits_for is not None or running.request is own.request
            end = min(node.end, length, running.num_prompt_tokens)
            if end - num_tokens >= (1 if is_close else MIN_PENDING_TOKENS):
                return PendingPrefix(running, end)
    return None


def _is_worth_waiting_for(running: CacheSequence, own: CacheSequence) -> bool:
    """Return False for a sequence that may be slower than computing the prefix oneself."""
    if running.request.is_paused or running.is_scoring:
        return running.request is own.request and not running.request.is_paused
    return running.turn_key <= own.turn_key or running.request is own.request
