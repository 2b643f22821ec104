"""Several drafters, asked one after the other: the first that proposes for a sequence wins the tick. Pure."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from paceline.errors import DrafterError
from paceline.kv_cache import KVCache
from paceline.scheduling.plan import Row, RowOutput
from paceline.scheduling.sequence import Sequence
from paceline.scheduling.speculation import Speculation


class DraftChain:
    """The speculation of each drafter, in the order in which they are asked; to the scheduler like one.

    Each has its own view of how its drafts fare and what they cost, so that one which is right nine times of ten does not make
    another look good, and its own state of each sequence, which it brings up to date when it is asked.
    """

    def __init__(self, links: SequenceOf[Speculation]) -> None:
        self._links = tuple(links)

    def add_drafts(self, rows: list[Row], kv_cache: KVCache) -> list[tuple[Sequence, DrafterError]]:
        """See `Speculation`. Rows that have drafts, or whose drafter failed, are not given to those that follow."""
        failed: list[tuple[Sequence, DrafterError]] = []
        num_expected = 0.0
        for link in self._links:
            found = link.add_drafts(rows, kv_cache, num_expected)
            if found:
                failed += found
                ended = {sequence for sequence, _ in found}
                rows = [row for row in rows if row.sequence not in ended]
                if not rows:
                    break
            num_expected += link.num_expected
        return failed

    def note(self, row: Row, output: RowOutput) -> None:
        """See `Speculation`; what came of a row's drafts is for the one that proposed them."""
        next(link for link in self._links if link.has_proposed(row.sequence)).note(row, output)

    def forget_gone(self) -> None:
        """See `Speculation`."""
        for link in self._links:
            link.forget_gone()

    def reset(self) -> None:
        """See `Speculation`."""
        for link in self._links:
            link.reset()
