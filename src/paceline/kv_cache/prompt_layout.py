"""Cells and positions of a prompt that is more than text. Pure.

    cells        0 1 2 | 3 4 5 6 7 8 | 9 10          an image of 6 cells that spans 3 positions (M-RoPE)
    positions    0 1 2 | 3 3 3 3 3 3 | 6  7

A token has one cell and one position. A media item has a cell for each embedding of its encoder, and spans the positions that the
model defines, at most one for each cell. The cache counts cells; llama.cpp addresses memory by positions, which are derived
here. An item is never cut in the cache: memory has no position between its cells.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from paceline.errors import InvalidParams

MIN_SHARED_CELLS = 4
"""An item of fewer cells has too short a key to be found in the cache by: 31 bits a cell."""

_KEY_BITS = 31
_MAX_ITEM_CELLS = 1 << 20


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """A part of a prompt that is computed from embeddings.

    Attributes:
        start: Its first cell.
        content_hash: Hash of its source, by which it is found in the cache.
        is_causal: Whether each of its cells attends only to earlier cells, so that it may be computed in parts; otherwise all of
            it takes one pass.
    """

    start: int
    num_cells: int
    num_positions: int
    content_hash: bytes
    is_causal: bool = True

    @property
    def end(self) -> int:
        """The cell after its last cell."""
        return self.start + self.num_cells

    def key_tokens(self) -> list[int]:
        """Return negative numbers that replace token ids in its cells; items that differ only in `start` have equal numbers."""
        identity = (self.num_cells, self.num_positions, self.is_causal, self.content_hash)
        digest = hashlib.blake2b(repr(identity).encode(), digest_size=16).digest()
        number = int.from_bytes(digest)
        words = [~(number >> _KEY_BITS * index & 2**_KEY_BITS - 1) for index in range(MIN_SHARED_CELLS)]
        return [words[index % MIN_SHARED_CELLS] for index in range(self.num_cells)]


class PromptLayout:
    """The media items of a prompt, in order, and the positions of its cells. Only tokens follow the last item."""

    __slots__ = ("_ends", "_num_shareable", "_shifts", "_starts", "items")

    def __init__(self, items: Sequence[MediaItem] = ()) -> None:
        self.items = tuple(items)
        self._starts = [item.start for item in self.items]
        self._shifts = [0]  # from cells to positions, behind as many items
        for item in self.items:
            self._shifts.append(self._shifts[-1] + item.num_positions - item.num_cells)
        self._ends = [item.end + shift for item, shift in zip(self.items, self._shifts[1:], strict=True)]  # positions
        short = (item.start for item in self.items if item.num_cells < MIN_SHARED_CELLS)
        self._num_shareable = next(short, None)

    def position(self, cell: int) -> int:
        """Return the position of a cell; of an item's cell, the position at which the item begins."""
        if not self.items:
            return cell
        index = bisect_right(self._starts, cell)
        if index and cell < self.items[index - 1].end:
            index -= 1
            cell = self._starts[index]
        return cell + self._shifts[index]

    def cell(self, position: int) -> int:
        """Return the cell at a position: the cell of a token, the first cell of an item, or the cell after the last."""
        index = bisect_right(self._ends, position)
        return position - self._shifts[index]

    def shareable(self, num_cells: int) -> int:
        """Return the number of the first cells that can be shared: whole items, up to the first item with a short key."""
        if not self.items:
            return num_cells
        if self._num_shareable is not None:
            num_cells = min(num_cells, self._num_shareable)
        item = self.item_at(num_cells)
        return num_cells if item is None else item.start

    def cut(self, start: int, end: int) -> int:
        """Return the last place up to `end` at which a range from `start` can be cut; at least the end of an item there."""
        at = self.shareable(end)
        if at > start:
            return at
        item = self.item_at(start)
        return end if item is None else item.end

    def item_at(self, cell: int) -> MediaItem | None:
        """Return the item that a cell belongs to; None for a token's."""
        index = bisect_right(self._starts, cell) - 1
        return self.items[index] if index >= 0 and cell < self.items[index].end else None

    def tokens_left(self, cell: int) -> int | None:
        """Return the number of tokens from a cell up to the next item; None if no item follows."""
        index = bisect_right(self._starts, cell)
        return self._starts[index] - cell if index < len(self._starts) else None

    def keyed(self, prompt: Sequence[int]) -> list[int]:
        """Return the prompt with the items' keys in their cells. Raises `InvalidParams` if the items do not fit into it."""
        self._check(len(prompt))
        filled = list(prompt)
        for item in self.items:
            filled[item.start : item.end] = item.key_tokens()
        return filled

    def _check(self, num_cells: int) -> None:
        for item in self.items:
            if not 1 <= item.num_positions <= item.num_cells <= _MAX_ITEM_CELLS or item.start < 0:
                raise InvalidParams(
                    f"a media item needs 1 to {_MAX_ITEM_CELLS} cells and 1 to as many positions, "
                    f"not {item.num_cells} and {item.num_positions} from cell {item.start} on"
                )
        if any(item.end > other.start for item, other in pairwise(self.items)):
            raise InvalidParams("media items must be in order and must not overlap")
        if self.items and self.items[-1].end >= num_cells:
            raise InvalidParams(
                f"a prompt must end with a token: its last media item ends at cell {self.items[-1].end} of {num_cells}"
            )


TEXT_LAYOUT = PromptLayout()
"""Of every prompt without media: positions are cells."""
