"""Ranges of a path on their way from a sequence id to host memory, as many of them a tick as there is time for. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from paceline.scheduling.plan import Save
from paceline.scheduling.prefix_tree import WIDTH, Namespace

PIECE = 512
"""Tokens that are saved in one go: a piece stays, and needs room for a moment when it is loaded, as a whole."""


@dataclass(slots=True, eq=False, kw_only=True)
class Saving:
    """A path that is saved. tokens: of it, as bytes; num_tried: up to where it was saved once, from its beginning."""

    seq_id: int
    namespace: Namespace
    tokens: bytes
    num_tried: int = 0

    def saves(self, missing: Iterable[tuple[int, int]], most: int) -> list[Save]:
        """What comes next of the ranges that host memory has not, at most so many tokens.

        None where that is nothing, or was saved once and is missing all the same: it did not fit, and what comes behind it is
        of no use.
        """
        saves: list[Save] = []
        for start, end in missing:
            if most <= 0 or (not saves and start < self.num_tried):
                break
            self.num_tried = min(end, start + most)
            most -= self.num_tried - start
            saves += self._in_pieces(start, self.num_tried)
        return saves

    def _in_pieces(self, start: int, end: int) -> list[Save]:
        bounds = [*range(start, end, PIECE), end]
        return [self._save(one, other) for one, other in pairwise(bounds)]

    def _save(self, start: int, end: int) -> Save:
        return Save(self.seq_id, start, end, self.namespace, self.tokens[: end * WIDTH], is_whole=False)
