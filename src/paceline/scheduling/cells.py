"""How many KV cells are in use, counted exactly: a copied prefix lies under several sequence ids and counts once.

    seq id 0:  [segment of 100]──[segment of 20]
    seq id 1:  [the same 100  ]──[another of 5 ]          125 cells

Pure arithmetic on lengths; which tokens they are knows the prefix tree.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Segment:
    """A run of cells that belongs to the same sequence ids from its first to its last."""

    length: int
    num_holders: int = 1


class Cells:
    """The cells under each sequence id. `num_used`: in all."""

    def __init__(self) -> None:
        self._held: dict[int, list[Segment]] = {}
        self.num_used = 0

    def length(self, seq_id: int) -> int:
        """Tokens under a sequence id."""
        return sum(segment.length for segment in self._held.get(seq_id, ()))

    def extend(self, seq_id: int, num_tokens: int) -> None:
        """More tokens were computed, or loaded, at the end of a sequence."""
        segments = self._held.setdefault(seq_id, [])
        if segments and segments[-1].num_holders == 1:
            segments[-1].length += num_tokens
        else:
            segments.append(Segment(num_tokens))
        self.num_used += num_tokens

    def share(self, from_seq_id: int, to_seq_id: int, num_tokens: int) -> None:
        """An empty sequence takes over the first tokens of another."""
        shared: list[Segment] = []
        source, left = self._held[from_seq_id], num_tokens
        for index, segment in enumerate(source):
            if left < segment.length:
                source[index : index + 1] = [
                    Segment(left, segment.num_holders),
                    Segment(segment.length - left, segment.num_holders),
                ]
                self._replace_elsewhere(from_seq_id, segment, source[index : index + 2])
                segment = source[index]  # noqa: PLW2901 - the part that is shared
            segment.num_holders += 1
            shared.append(segment)
            left -= segment.length
            if left == 0:
                break
        self._held[to_seq_id] = shared

    def free(self, seq_id: int) -> None:
        """A sequence is empty again; what others have stays."""
        for segment in self._held.pop(seq_id, ()):
            segment.num_holders -= 1
            if not segment.num_holders:
                self.num_used -= segment.length

    def num_under(self, seq_ids: list[int]) -> int:
        """Cells that lie under any of these sequence ids."""
        return sum(segment.length for segment in {one for seq_id in seq_ids for one in self._held.get(seq_id, ())})

    def num_own(self, seq_id: int) -> int:
        """Tokens that nobody else has: what freeing it would give back."""
        return sum(segment.length for segment in self._held.get(seq_id, ()) if segment.num_holders == 1)

    def _replace_elsewhere(self, seq_id: int, segment: Segment, parts: list[Segment]) -> None:
        """Splits a segment for all others that have it too."""
        if segment.num_holders == 1:
            return
        for other, segments in self._held.items():
            if other != seq_id and segment in segments:
                at = next(index for index, one in enumerate(segments) if one is segment)
                segments[at : at + 1] = parts
