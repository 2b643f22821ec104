"""How kept paths leave the device: saved in pieces where there is time, at once where memory is full, the oldest first."""

from __future__ import annotations

from enum import Enum, auto

from paceline.scheduling.device import Device
from paceline.scheduling.kept import Kept, KeptPaths
from paceline.scheduling.limits import Limits
from paceline.scheduling.moving import PIECE
from paceline.scheduling.plan import Save
from paceline.scheduling.prefix_tree import WIDTH, Node, PrefixTree
from paceline.scheduling.reports import Reports


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
        num_missing = self._num_missing(kept)
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

    def tidy(self, idle_cells: int, running: list[int], most: int, now_s: float) -> None:
        """Moves paths to host memory, so many tokens a tick, while they fill more cells than that beside the running ids'."""
        if self._has_saved:
            return
        if self._leaving is None:
            oldest = self.kept.oldest()
            cells = self._device.cells
            if oldest is None or cells.num_used - cells.num_under(running) <= idle_cells:
                return
            self._leaving = oldest
        if not self._save_part(self._leaving, most):
            self.let_go(self._leaving, now_s)

    def evict(self, kept: Kept, now_s: float) -> None:
        """Saves what host memory has not of a path, and lets it go, all before the next pass."""
        for node in self._missing(kept):
            self._save(kept, node.start, node.end)
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

    def _missing(self, kept: Kept) -> list[Node]:
        """What of a path is not in host memory, where there is any."""
        return [node for node in kept.node.path() if node.blob is None] if self._limits.host_bytes else []

    def _num_missing(self, kept: Kept) -> int:
        return sum(node.end - node.start for node in self._missing(kept))

    def _save_part(self, kept: Kept, most: int) -> bool:
        """Saves what comes next of a path that host memory has not; answers whether there was something.

        A part that is missing although it was saved did not fit: what comes behind it is of no use.
        """
        missing = self._missing(kept)
        if not missing or missing[0].start < kept.num_tried:
            return False
        for node in missing:
            kept.num_tried = min(node.end, node.start + most)
            self._save(kept, node.start, kept.num_tried)
            most -= kept.num_tried - node.start
            if most <= 0:
                break
        return True

    def _save(self, kept: Kept, start: int, end: int) -> None:
        """In small pieces: each stays, and needs room for a moment when it is loaded, as a whole."""
        for at in range(start, end, PIECE):
            to = min(at + PIECE, end)
            tokens = kept.tokens[: to * WIDTH]
            self._device.operations.append(Save(kept.seq_id, at, to, kept.namespace, tokens, is_whole=False))
