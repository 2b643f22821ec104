"""What of a prompt is cached: under which sequence id, in host memory, or about to be computed by another sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import msgspec

from paceline.kv_cache.interfaces import CacheSequence, PendingPrefix
from paceline.kv_cache.offload import MIN_CACHED_TOKENS, CachedPrefix
from paceline.kv_cache.radix_tree import HostBlock, Node, SavedState, TreeMatch

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

    node: the last one that was matched in the radix tree. state: the checkpoint at its end, where memory is not cells alone;
    None where the source is there itself.
    """

    source: CacheSequence | CachedPrefix | None
    num_device: int
    segments: tuple[PrefixSegment, ...]
    num_tokens: int
    node: Node | None
    state: SavedState | None = None

    def device_part(self) -> PrefixMatch:
        """Return the part that is on the device; nothing where a state behind it has to be loaded."""
        if self.state is not None:
            return NO_MATCH
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
    length = own.layout.shareable(min(match.length, max_tokens))
    source, num_device = _longest_source(match, length, own)
    segments = _segments_of(match, num_device, length, own)
    num_tokens = segments[-1].end if segments else num_device
    if num_tokens - num_device < MIN_CACHED_TOKENS:
        segments, num_tokens = (), num_device
    own.waits_for = _pending_prefix(match.nodes, length, num_tokens, own)
    if own.waits_for is not None:
        return PREFIX_PENDING
    if num_tokens == 0:
        return NO_MATCH
    return PrefixMatch(source, num_device, segments, num_tokens, match.nodes[-1])


def match_state(match: TreeMatch, max_tokens: int, own: CacheSequence, *, has_cells: bool) -> PrefixMatch | NotAdmitted:
    """Return the longest cached prefix of a sequence, where memory is more than cells and can be taken over at places alone.

    Those are the checkpoints and where running sequences are now. has_cells: whether cells lie beside the states. Sets
    `own.waits_for` and returns `PREFIX_PENDING` where another sequence will come by a later place.
    """
    length = own.layout.shareable(min(match.length, max_tokens))
    found = _match_running(match, length, own)
    checkpoint = _match_checkpoint(match, length, own, has_cells=has_cells)
    if checkpoint.num_tokens > found.num_tokens:
        found = checkpoint
    own.waits_for = _pending_state(match.nodes, length, found.num_tokens, own)
    return found if own.waits_for is None else PREFIX_PENDING


def _match_running(match: TreeMatch, length: int, own: CacheSequence) -> PrefixMatch:
    """Return all that the running sequence has which has computed most of these tokens and none behind them."""
    for node in reversed(match.nodes):
        most = min(node.end, length)
        there = [
            one
            for one in node.owners
            if one is not own
            and node.start < one.num_computed_tokens <= most
            and own.layout.shareable(one.num_computed_tokens) == one.num_computed_tokens
        ]
        if there:
            source: CacheSequence = max(there, key=lambda one: one.num_computed_tokens)  # type: ignore[assignment]
            return PrefixMatch(source, source.num_computed_tokens, (), source.num_computed_tokens, node)
    return NO_MATCH


def _match_checkpoint(match: TreeMatch, length: int, own: CacheSequence, *, has_cells: bool) -> PrefixMatch:
    """Return the deepest checkpoint on the path whose cells are there."""
    for node in reversed(match.nodes):
        if node.state is None or node.end > length:
            continue
        if not has_cells:
            return PrefixMatch(None, 0, (), node.end, node, node.state)
        source, num_device = _longest_source(match, node.end, own)
        segments = _segments_of(match, num_device, node.end, own)
        if (segments[-1].end if segments else num_device) == node.end:
            return PrefixMatch(source, num_device, segments, node.end, node, node.state)
    return NO_MATCH


def _pending_state(nodes: Iterable[Node], length: int, num_tokens: int, own: CacheSequence) -> PendingPrefix | None:
    """Return the running sequence that can compute most of the first `length` tokens, all but its prompt's last, and stop there.

    None where that is not enough more than num_tokens; of a sibling any more is enough.
    """
    best: PendingPrefix | None = None
    most = num_tokens
    for node in nodes:
        for owner in node.owners:
            running: CacheSequence = owner  # type: ignore[assignment]  # there are no others where memory has states
            end = own.layout.shareable(min(node.end, length, running.num_prompt_tokens - 1))
            is_enough = end - num_tokens >= (1 if running.request is own.request else MIN_PENDING_TOKENS)
            if not is_enough or end <= max(most, running.num_computed_tokens) or running is own:
                continue
            if _is_worth_waiting_for(running, own):
                best, most = PendingPrefix(running, end), end
    return best


def _longest_source(
    match: TreeMatch, length: int, own: CacheSequence
) -> tuple[CacheSequence | CachedPrefix | None, int]:
    """As `longest_owner`, up to where the sequence's layout can be cut."""
    source, num_device = longest_owner(match.nodes, length, own)
    num_device = own.layout.shareable(num_device)
    return (source, num_device) if num_device else (None, 0)


def _segments_of(match: TreeMatch, start: int, length: int, own: CacheSequence) -> tuple[PrefixSegment, ...]:
    """As `host_segments`, up to where the sequence's layout can be cut."""
    segments = host_segments(match.nodes, start, length)
    end = own.layout.shareable(segments[-1].end) if segments else start
    return segments if not segments or end == segments[-1].end else host_segments(match.nodes, start, end)


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
        if node.block is None or at >= length:
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
            end = own.layout.shareable(min(node.end, length, running.num_prompt_tokens))
            if end - num_tokens >= (1 if is_close else MIN_PENDING_TOKENS):
                return PendingPrefix(running, end)
    return None


def _is_worth_waiting_for(running: CacheSequence, own: CacheSequence) -> bool:
    """Return False for a sequence that may be slower than computing the prefix oneself."""
    if running.request.is_paused or running.is_scoring:
        return running.request is own.request and not running.request.is_paused
    return running.turn_key <= own.turn_key or running.request is own.request
