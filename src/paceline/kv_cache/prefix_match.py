"""The cached part of a prompt, and the places where running sequences stop so that others can start from their states. Pure.

A prefix is under a sequence id, in host memory, or about to be computed by another sequence. Memory that cannot be cut is of
use to another sequence only as it was at some place:

    prompt     <start>system ... <end><start>user ... <end><start>assistant
    places                       ^                    ^                             and regular places between

Places are branches of earlier prompts, starts that waiting sequences want, ends of messages, the end of the prompt, and regular
intervals. The end of a prompt is all but its last token, or the end of its last message if that is a few tokens before: the
next turn may have another header, without the thinking. Each other message end is at least twice as far as the message end
before it, so that a place follows instructions and tools, and a long conversation has few. A pass ends at a place, which costs
little beside saving the state. Saving takes at most 1/50 of the time to compute an interval, and 1/4 of the time to compute the
tokens before a branch or the end of a message, which other prompts share. The regular checkpoints of a prompt fill at most 1/8
of host memory.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from paceline.kv_cache.device_cells import CacheSequence, KVCacheLimits, PendingPrefix
from paceline.kv_cache.offload import (
    BLOCK_TOKENS,
    MIN_CACHED_TOKENS,
    CachedPrefix,
    ComputeCost,
    TransferCost,
    prompt_token_s,
)
from paceline.kv_cache.radix_tree import Node, Owner, PrefixSegment, SavedState, TreeMatch, host_segments, longest_owner

MIN_PENDING_TOKENS = 32
"""A sequence does not wait for another to compute fewer."""


class NotAdmitted(Enum):
    """Why a sequence cannot start in this tick."""

    PREFIX_PENDING = auto()  # another sequence is computing its prefix; those behind it may start
    READ_PENDING = auto()  # its prefix is being read from a disk; those behind it may start
    OFFLOAD_PENDING = auto()  # its cells, or its prefix, are on the way to host memory
    NO_CELLS = auto()


PREFIX_PENDING: Final = NotAdmitted.PREFIX_PENDING


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix from which a sequence starts: num_device tokens of `source`, then the segments; num_tokens in all.

    Attributes:
        node: The last matched node of the radix tree.
        state: The checkpoint at its end if memory has states; None if the source itself is at that place.
        num_read: Tokens at its end that were read from a disk for this sequence.
    """

    source: Owner | None
    num_device: int
    segments: tuple[PrefixSegment, ...]
    num_tokens: int
    node: Node | None
    state: SavedState | None = None
    num_read: int = 0

    def device_part(self) -> PrefixMatch:
        """Return the part on the device; nothing if a later state has to be loaded."""
        if self.state is not None:
            return NO_MATCH
        return (
            PrefixMatch(self.source, self.num_device, (), self.num_device, self.node) if self.num_device else NO_MATCH
        )

    @property
    def source_name(self) -> str:
        """`Usage.cached_from`: the source of most of the prefix."""
        if 2 * self.num_read > self.num_tokens:
            return "disk"
        if self.num_tokens - self.num_device > self.num_device:
            return "host"
        return "device" if isinstance(self.source, CachedPrefix) else "running"


NO_MATCH = PrefixMatch(None, 0, (), 0, None)


def match_parts(match: TreeMatch, max_tokens: int, own: CacheSequence) -> PrefixMatch | NotAdmitted:
    """Return the longest cached prefix of a sequence, if any part of memory can be shared.

    Sets `own.waits_for` and returns `PREFIX_PENDING` if another sequence is about to compute enough more of it.
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
    """Return the longest cached prefix of a sequence, if memory has states and can be taken over only at certain places.

    The places are checkpoints and the current ends of running sequences. has_cells: whether cells lie beside the states. Sets
    `own.waits_for` and returns `PREFIX_PENDING` if another sequence will reach a later place.
    """
    length = own.layout.shareable(min(match.length, max_tokens))
    found = _match_running(match, length, own)
    checkpoint = _match_checkpoint(match, length, own, has_cells=has_cells)
    if checkpoint.num_tokens > found.num_tokens:
        found = checkpoint
    own.waits_for = _pending_state(match.nodes, length, found.num_tokens, own)
    return found if own.waits_for is None else PREFIX_PENDING


def _match_running(match: TreeMatch, length: int, own: CacheSequence) -> PrefixMatch:
    """Return the running sequence that has computed most of these tokens and no others."""
    for node in reversed(match.nodes):
        most = min(node.end, length)
        there = [
            owner
            for owner in node.owners
            if owner is not own
            and node.start < owner.num_computed_tokens <= most
            and own.layout.shareable(owner.num_computed_tokens) == owner.num_computed_tokens
        ]
        if there:
            source: CacheSequence = max(there, key=lambda owner: owner.num_computed_tokens)  # type: ignore[assignment]
            return PrefixMatch(source, source.num_computed_tokens, (), source.num_computed_tokens, node)
    return NO_MATCH


def _match_checkpoint(match: TreeMatch, length: int, own: CacheSequence, *, has_cells: bool) -> PrefixMatch:
    """Return the deepest checkpoint on the path that has its cells, too."""
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
    """Return the running sequence that can compute and stop at most of the first `length` tokens.

    None if it computes too few more than num_tokens; of a sibling, one more token is enough.
    """
    best: PendingPrefix | None = None
    most = num_tokens
    for node in nodes:
        for owner in node.owners:
            running: CacheSequence = owner  # type: ignore[assignment]  # memory with states has no other owners
            end = own.layout.shareable(min(node.end, length, running.num_prompt_tokens - 1))
            is_enough = end - num_tokens >= (1 if running.request is own.request else MIN_PENDING_TOKENS)
            if not is_enough or end <= max(most, running.num_computed_tokens) or running is own:
                continue
            if _is_worth_waiting_for(running, own, end):
                best, most = PendingPrefix(running, end), end
    return best


def _longest_source(match: TreeMatch, length: int, own: CacheSequence) -> tuple[Owner | None, int]:
    """As `longest_owner`, rounded down to a place where the sequence's layout can be cut."""
    source, num_device = longest_owner(match.nodes, length, own)
    num_device = own.layout.shareable(num_device)
    return (source, num_device) if num_device else (None, 0)


def _segments_of(match: TreeMatch, start: int, length: int, own: CacheSequence) -> tuple[PrefixSegment, ...]:
    """As `host_segments`, rounded down to a place where the sequence's layout can be cut."""
    segments = host_segments(match.nodes, start, length)
    end = own.layout.shareable(segments[-1].end) if segments else start
    return segments if not segments or end == segments[-1].end else host_segments(match.nodes, start, end)


def _pending_prefix(nodes: Iterable[Node], length: int, num_tokens: int, own: CacheSequence) -> PendingPrefix | None:
    """Return the running sequence that is about to have computed enough more of the first `length` tokens.

    Of a sibling, or of one that was waited for before, any more is enough, since many may wait for the same.
    """
    for node in nodes:
        for owner in node.owners:
            if owner is own or isinstance(owner, CachedPrefix):
                continue
            running: CacheSequence = owner  # type: ignore[assignment]  # the only other kind
            end = own.layout.shareable(min(node.end, length, running.num_prompt_tokens))
            if not _is_worth_waiting_for(running, own, end):
                continue
            is_close = own.waits_for is not None or running.request is own.request
            if end - num_tokens >= (1 if is_close else MIN_PENDING_TOKENS):
                return PendingPrefix(running, end)
    return None


def _is_worth_waiting_for(running: CacheSequence, own: CacheSequence, end: int) -> bool:
    """Return False for a sequence that may be slower than computing the first `end` tokens oneself."""
    scores = running.scored_from is not None and running.scored_from < end
    if running.request.is_paused or scores:
        return running.request is own.request and not running.request.is_paused
    return running.turn_key <= own.turn_key or running.request is own.request


MIN_SPACING_TOKENS = 64
"""Between two places; the one before a prompt's last token, and what `request` cannot round, may be closer to another."""

_REGULAR_COST = 0.02  # of the time to compute an interval, for saving a state
_BRANCH_COST = 0.25  # of the time to compute what leads to it
_UNKNOWN_INTERVAL = 8 * BLOCK_TOKENS  # before the first state, which may take a millisecond or fifty
_HEADER_TOKENS = 8  # of the message that is to be generated, with the end of the one before
_HOST_SHARE = 8  # a prompt's regular checkpoints fill at most 1/8 of host memory


class CheckpointPlaces:
    """Places ahead of running sequences.

    places: of each sequence in order; most sequences that decode have none. Read-only.
    """

    def __init__(self, limits: KVCacheLimits, transfers: TransferCost, cost: ComputeCost) -> None:
        self._limits, self._transfers, self._cost = limits, transfers, cost
        self.places: dict[CacheSequence, list[int]] = {}

    def begin(self, sequence: CacheSequence, end: Node) -> None:
        """Choose the places of a sequence that begins to run. end: of its prompt in the radix tree."""
        start, last = sequence.num_computed_tokens, sequence.num_prompt_tokens - 1
        if not (self._limits.host_bytes and sequence.writes_cache) or last <= max(start, MIN_CACHED_TOKENS):
            return
        ends = self._message_ends(sequence, start, last)
        last = next((place for place in ends if place > last - _HEADER_TOKENS), last)
        branches = [node.end for node in end.path() if len(node.children) > 1 and node.end < last]
        spacing = self._spacing(_BRANCH_COST)
        chosen = spaced(branches[::-1], [], start, spacing)
        chosen += spaced(doubling(ends, start, last), chosen, start, spacing)
        spacing = self._spacing(_REGULAR_COST)
        chosen += spaced(self._regular(start, last, spacing), [*chosen, last], start, spacing)
        self.places[sequence] = sorted({sequence.layout.cut(start, place) for place in (*chosen, last)})

    def request(self, sequence: CacheSequence, end: int) -> int:
        """Let a running sequence stop at `end`, which it has not reached, or soon before, and return the place.

        If another place follows within 64 tokens, `end` is rounded down to a multiple of 64, so that many requests do not
        cause as many passes; it is not rounded if the sequence has already passed the rounded place.
        """
        places = self.places.setdefault(sequence, [])
        index = bisect_left(places, end)
        if index < len(places) and places[index] == end:
            return end
        if index and places[index - 1] > max(sequence.num_computed_tokens, end - MIN_SPACING_TOKENS):
            return places[index - 1]
        if index < len(places) and places[index] < min(
            end + MIN_SPACING_TOKENS, sequence.num_prompt_tokens - _HEADER_TOKENS
        ):
            rounded = sequence.layout.shareable(end - end % MIN_SPACING_TOKENS)
            end = rounded if rounded > sequence.num_computed_tokens else end
        if end not in places:
            insort(places, end)
        return end

    def tokens_left(self, sequence: CacheSequence) -> int | None:
        """Return the number of tokens to the next place; None if there is none."""
        places = self.places.get(sequence)
        return places[0] - sequence.num_computed_tokens if places else None

    def take_due(self) -> list[CacheSequence]:
        """Return the sequences that are at a place, and forget the places that sequences have reached."""
        due = []
        for sequence, places in list(self.places.items()):
            place = 0
            while places and places[0] <= sequence.num_computed_tokens:
                place = places.pop(0)
            if not places:
                del self.places[sequence]
            if place and place == sequence.num_computed_tokens:
                due.append(sequence)
        return due

    def end(self, sequence: CacheSequence) -> None:
        """Forget a sequence that runs no longer."""
        self.places.pop(sequence, None)

    def _message_ends(self, sequence: CacheSequence, start: int, last: int) -> list[int]:
        """Return the places after `start`, up to `last`, that a control token follows."""
        boundary_ids = self._limits.boundary_ids
        if not boundary_ids:
            return []
        ids = array("i", sequence.token_bytes(last + 1))
        return [place for place in range(start + 1, last + 1) if ids[place] in boundary_ids]

    def _spacing(self, cost: float) -> int:
        """Return the least number of tokens between places: saving a state costs this share of computing them."""
        token_s = prompt_token_s(self._cost)
        if token_s <= 0:
            return MIN_SPACING_TOKENS
        return max(MIN_SPACING_TOKENS, math.ceil(self._transfers.state_seconds(1) / (cost * token_s)))

    def _regular(self, start: int, last: int, spacing: int) -> range:
        """Return multiples of an interval, a doubled block, so that different prompts have equal places."""
        state_bytes = self._transfers.state_bytes
        in_host = last * state_bytes * _HOST_SHARE / self._limits.host_bytes if state_bytes else _UNKNOWN_INTERVAL
        interval = BLOCK_TOKENS << max(0, math.ceil(math.log2(max(spacing, in_host) / BLOCK_TOKENS)))
        return range((start // interval + 1) * interval, last, interval)


def doubling(places: Iterable[int], start: int, last: int) -> Iterator[int]:
    """Yield ascending places before `last`, each at least twice as far as the place before it, the first as `start`."""
    least = max(2 * start, MIN_SPACING_TOKENS)
    for place in places:
        if least <= place < last:
            yield place
            least = 2 * place


def spaced(places: Iterable[int], others: Iterable[int], start: int, spacing: int) -> list[int]:
    """Return the first of these places that are far enough from `start`, from others and from each other."""
    chosen: list[int] = []
    for place in places:
        if place >= start + spacing and all(abs(place - other) >= spacing for other in (*others, *chosen)):
            chosen.append(place)
    return chosen
