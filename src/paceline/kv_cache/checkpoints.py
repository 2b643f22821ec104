"""Where running sequences stop in their prompts, so that their states can be saved or taken over. Pure.

    prompt     <start>system ... <end><start>user ... <end><start>assistant
    places                       ^                    ^                             and every so many tokens between

A memory that cannot be cut is of use to others only as it was at some place. Places are where prompts have been seen to
branch, where waiting sequences want to start, where messages end, a prompt's end, and others at regular intervals. A prompt's
end is all but its last token, or the end of its last message where that is a few tokens before: the next turn may have
another header, without the thinking that this one asks for. Of other messages' ends each is at least twice as far as the one
before, so that there is one behind instructions and tools, and a long conversation has few. A pass ends at a place, which
costs little beside saving the state. Saving takes at most a fiftieth of the time to compute an interval, and a quarter of
that to compute what leads to a branch or to the end of a message, which others have; the regular checkpoints of one prompt
fill at most an eighth of host memory.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from paceline.kv_cache.interfaces import CacheSequence, ComputeCost, KVCacheLimits
from paceline.kv_cache.offload import BLOCK_TOKENS, MIN_CACHED_TOKENS, TransferCost, prompt_token_s
from paceline.kv_cache.radix_tree import Node

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
        last = next((one for one in ends if one > last - _HEADER_TOKENS), last)
        branches = [node.end for node in end.path() if len(node.children) > 1 and node.end < last]
        spacing = self._spacing(_BRANCH_COST)
        chosen = spaced(branches[::-1], [], start, spacing)
        chosen += spaced(doubling(ends, start, last), chosen, start, spacing)
        spacing = self._spacing(_REGULAR_COST)
        chosen += spaced(self._regular(start, last, spacing), [*chosen, last], start, spacing)
        self.places[sequence] = sorted({sequence.layout.cut(start, place) for place in (*chosen, last)})

    def request(self, sequence: CacheSequence, end: int) -> int:
        """Let a running sequence stop at `end`, which it has not reached, or soon before, and return where.

        Beside another place that is less than 64 tokens later, it is rounded down to a multiple of 64, so that many requests
        do not make as many passes; but for one that is less than that ahead of the sequence.
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
        """Return how many tokens there are to the next place; None without one."""
        places = self.places.get(sequence)
        return places[0] - sequence.num_computed_tokens if places else None

    def take_due(self) -> Iterable[CacheSequence]:
        """Return the sequences that are at a place, and forget the places that sequences have reached."""
        return list(self._due())

    def end(self, sequence: CacheSequence) -> None:
        """Forget a sequence that runs no longer."""
        self.places.pop(sequence, None)

    def _due(self) -> Iterator[CacheSequence]:
        for sequence, places in list(self.places.items()):
            place = 0
            while places and places[0] <= sequence.num_computed_tokens:
                place = places.pop(0)
            if not places:
                del self.places[sequence]
            if place and place == sequence.num_computed_tokens:
                yield sequence

    def _message_ends(self, sequence: CacheSequence, start: int, last: int) -> list[int]:
        """Return the places behind `start`, up to `last`, where a control token follows."""
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
        """Return places at multiples of an interval, a block doubled as often as needed, so that prompts have the same ones."""
        state_bytes = self._transfers.state_bytes
        in_host = last * state_bytes * _HOST_SHARE / self._limits.host_bytes if state_bytes else _UNKNOWN_INTERVAL
        interval = BLOCK_TOKENS << max(0, math.ceil(math.log2(max(spacing, in_host) / BLOCK_TOKENS)))
        return range((start // interval + 1) * interval, last, interval)


def doubling(places: Iterable[int], start: int, last: int) -> Iterator[int]:
    """Yield of ascending places before `last` those that are at least twice as far as the one before, from `start` on."""
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
