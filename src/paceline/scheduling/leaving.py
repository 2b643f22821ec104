"""How kept paths leave the device: saved in pieces where there is time, at once where memory is full, the oldest first."""

from __future__ import annotations

import math
from enum import Enum, auto

from paceline.scheduling.device import Device
from paceline.scheduling.kept import Kept, KeptPaths
from paceline.scheduling.limits import Limits
from paceline.scheduling.prefix_tree import Node, PrefixTree
from paceline.scheduling.reports import Reports

_ALL = 2**31


class Way(Enum):
    """What came of making way."""

    MADE = auto()
    LATER = auto()  # a path is being saved, as much of it as fits this tick
    NONE = auto()  # nothing is kept


class Leaving:
    """The kept paths of one device, and the one of them that is on its way to host memory."""

    def __init__(self, limits: Limits, device: Device, tree: PrefixTree, reports: Reports) -> None:
        self._limits, self._device, self._tree, self._reports = limits, device, tree, reports
        self.kept = KeptPaths()
        self._leaving: Kept | None = None
        self._num_left = 0  # tokens that may still be saved in this tick, to make room
        self._has_saved = False  # a part of the leaving one, in this tick

    def begin_tick(self, most: int) -> None:
        """Another tick, in which so many tokens may be saved to make room for who waits."""
        self._num_left, self._has_saved = most, False

    def give_way(self, now_s: float) -> bool:
        """Memory is full: moves the path that was used longest ago off the device; answers whether there was one."""
        oldest = self.kept.oldest()
        if oldest is not None:
            self.evict(oldest, now_s)
        return oldest is not None

    def make_way(self, now_s: float) -> Way:
        """As `give_way`, for somebody who can wait: over several ticks, where saving takes longer than fits into one."""
        kept = self.kept.oldest()
        if kept is None:
            return Way.NONE
        num_missing = self.num_missing(kept)
        if num_missing <= self._num_left:
            self._num_left -= num_missing
            self.evict(kept, now_s)
            return Way.MADE
        if self._num_left > 0:
            self._leaving = kept
            if not self._save_part(kept, self._num_left):
                self.let_go(kept, now_s)
                return Way.MADE
            self._num_left, self._has_saved = 0, True
        return Way.LATER

    def tidy(self, idle_cells: int, running: list[int], most: int, num_ticks: float, now_s: float) -> None:
        """Moves paths to host memory, at most so many tokens a tick, while they fill more cells than that beside the running.

        running: the ids of those. num_ticks: until memory is full; whatever takes longer begins now.
        """
        if self._has_saved:
            return
        if self._leaving is None:
            oldest = self.kept.oldest()
            if oldest is None or not (
                self._fill_more_than(idle_cells, running) or self._lasts_longer(oldest, most, num_ticks)
            ):
                return
            self._leaving = oldest
        if not self._save_part(self._leaving, most):
            self.let_go(self._leaving, now_s)

    def _fill_more_than(self, num_cells: int, running: list[int]) -> bool:
        cells = self._device.cells
        return cells.num_used - cells.num_under(running) > num_cells

    def _lasts_longer(self, kept: Kept, most: int, num_ticks: float) -> bool:
        """Whether saving a path, so many tokens a tick, takes longer than so many ticks."""
        return not math.isinf(num_ticks) and self.num_missing(kept) > most * (num_ticks - 1)

    def evict(self, kept: Kept, now_s: float) -> None:
        """Saves what host memory has not of a path, and lets it go, all before the next pass."""
        kept.num_tried = 0
        self._save_part(kept, _ALL)
        self.let_go(kept, now_s)

    def let_go(self, kept: Kept, now_s: float) -> None:
        """A path is on the device no longer."""
        if self._leaving is kept:
            self._leaving = None
        self.kept.remove(kept)
        self._tree.let_go(kept, kept.node)
        num_own = self._device.cells.num_own(kept.seq_id)
        self._device.free(kept.seq_id)
        self._reports.watch.evicted(num_own, "device", now_s)

    def _missing(self, kept: Kept) -> list[tuple[int, int]]:
        """What of a path is not in host memory, where there is any."""
        return ranges_without_blob(kept.node, kept.num_computed) if self._limits.host_bytes else []

    def num_missing(self, kept: Kept) -> int:
        """Tokens of a path that host memory has not, where there is any."""
        return sum(end - start for start, end in self._missing(kept))

    def _save_part(self, kept: Kept, most: int) -> bool:
        """Saves what comes next of a path that host memory has not; answers whether there was something."""
        saves = kept.saves(self._missing(kept), most)
        self._device.operations += saves
        return bool(saves)


def ranges_without_blob(end: Node, num_tokens: int) -> list[tuple[int, int]]:
    """What of the first tokens of the path to this node is not in host memory."""
    return [
        (node.start, min(node.end, num_tokens)) for node in end.path() if node.blob is None and node.start < num_tokens
    ]
