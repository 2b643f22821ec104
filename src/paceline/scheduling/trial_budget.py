"""What drafts may cost that are not known to pay: three thousandths of the time, put aside as it passes. Pure arithmetic.

Trials of sequences without drafts, and passes of sizes that were never seen, show whether drafts pay. What they lose against
passes without drafts is spent when it is known. While more was spent than put aside, there are none.
"""

from __future__ import annotations

_SHARE = 0.003  # of the time
_FIRST_TICKS, _FIRST_SAVED_S = 8, 0.03  # what is there at the beginning: so many ticks, but no more
_USUALLY_SAVED_S, _MOST_SAVED_S = 0.1, 60.0


class TrialBudget:
    """Seconds put aside, less those lost.

    saved_s: negative where a trial took longer than was known; no more than a tenth of a second, or what the dearest trial takes
    that waits for it, so that much time without trials does not allow many of them at once.
    """

    def __init__(self) -> None:
        self.saved_s, self._most_s = 0.0, _USUALLY_SAVED_S
        self._is_new = True

    def pass_time(self, tick_s: float, num_ticks: int = 1) -> None:
        """Put a share of the time that so many ticks take aside. The first one brings what there is at the beginning."""
        if self._is_new and tick_s:
            self.saved_s += min(_FIRST_TICKS * tick_s, _FIRST_SAVED_S)
            self._is_new = False
        seconds = tick_s * num_ticks
        self.saved_s = min(max(self.saved_s, self._most_s), self.saved_s + _SHARE * seconds)

    def affords(self, expected_s: float) -> bool:
        """Return whether there is enough for a trial that is expected to lose so much; if not, it is saved for."""
        if expected_s <= self.saved_s:
            return True
        self._most_s = max(self._most_s, min(expected_s, _MOST_SAVED_S))
        return False

    def spend(self, lost_s: float) -> None:
        """Take out what a trial loses; where it wins, nothing."""
        self.saved_s -= max(0.0, lost_s)
        self._most_s = _USUALLY_SAVED_S
