"""Paths that nobody runs any more and that stay on the device for a while, under sequence ids of their own."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from paceline.scheduling.prefix_tree import Node
from paceline.scheduling.saving import Saving


@dataclass(slots=True, eq=False, kw_only=True)
class Kept(Saving):
    """A path under a sequence id. node: where it ends in the tree."""

    num_computed: int
    node: Node


class KeptPaths:
    """Least recently used first."""

    def __init__(self) -> None:
        self._paths: OrderedDict[Kept, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._paths)

    def add(self, kept: Kept) -> None:
        """The youngest."""
        self._paths[kept] = None

    def touch(self, kept: Kept) -> None:
        """It was used."""
        self._paths.move_to_end(kept)

    def remove(self, kept: Kept) -> None:
        """It is gone."""
        del self._paths[kept]

    def oldest(self) -> Kept | None:
        """The one that was used longest ago."""
        return next(iter(self._paths), None)

    def under(self, seq_id: int) -> list[Kept]:
        """The path under a sequence id, if one of these is."""
        return [kept for kept in self._paths if kept.seq_id == seq_id]

    @property
    def seq_ids(self) -> list[int]:
        """Of all of them."""
        return [kept.seq_id for kept in self._paths]
