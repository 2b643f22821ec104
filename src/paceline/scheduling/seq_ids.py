"""llama.cpp's sequence ids, handed out and taken back."""

from __future__ import annotations

import heapq


class SeqIds:
    """The ids 0 to num - 1; the lowest free one goes first, so that few ids are in use where few suffice."""

    def __init__(self, num: int) -> None:
        self._free = list(range(num))
        self._num = num

    @property
    def num_free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self) -> int:
        """One that nobody has."""
        return heapq.heappop(self._free)

    def give_back(self, seq_id: int) -> None:
        """Frees one that was taken."""
        heapq.heappush(self._free, seq_id)

    def check(self, taken: list[int]) -> None:
        """Asserts that these and the free ones are all, each once."""
        assert sorted([*self._free, *taken]) == list(range(self._num)), (self._free, taken)  # noqa: S101 - our own invariant
