"""Catching up with sequences that lag behind in a drafter's own memory: with which, and how much in a tick. Pure.

What it takes is an investment. It pays where drafts pay by what is left to generate, and else only as a trial, as far as the
budget of trials has it. How much goes into one tick follows from the inter-token target.
"""

from __future__ import annotations

from collections import deque

from paceline.scheduling.drafter_calls import DrafterCalls

_PAYBACK = 0.2  # of what the rest of a sequence takes, that drafts are taken to save at least where they pay
_MOST_LEFT = 512  # tokens that a sequence is taken to go on for
_FIRST_CHUNK = 32  # tokens of a tick, while nothing is known
_LEAST_CHUNK, _MOST_CHUNK = 16, 1024  # the least also where no time is left
_NUM_TELLING = 16  # tokens from which on a time says what one of them takes
_NUM_KEPT = 5  # times, of which the median counts


class CatchUp:
    """What catching up takes, and whether it is worth it. token_s: seconds of a token; 0 while nothing is known."""

    def __init__(self, calls: DrafterCalls, itl_target_s: float) -> None:
        self._calls, self._itl_target_s = calls, itl_target_s
        self.token_s = 0.0
        self._seen: deque[float] = deque(maxlen=_NUM_KEPT)

    def pays(self, lag: float, num_left: int, tick_s: float, num_decode: int) -> bool:
        """Return whether drafts, where they pay, win back what catching up with a sequence takes.

        lag: tokens that it misses. num_left: most tokens that it still generates. tick_s: of a tick without drafts, in which
        so many sequences decode; 0 while that is not known.
        """
        if not tick_s:
            return True
        return self.cost_s(lag) <= _PAYBACK * min(num_left, _MOST_LEFT) * tick_s / num_decode

    def cost_s(self, lag: float) -> float:
        """Return what it takes to catch up with a sequence that misses so many tokens; 0 while nothing is known."""
        return lag * self.token_s if lag else 0.0

    def limit(self, tick_s: float) -> int:
        """Have the drafter compute no more than a tick has time for that takes so long without it; return how much that is.

        Raises `DrafterError` where the drafter fails.
        """
        left_s = self._itl_target_s - tick_s
        num_tokens = int(left_s / self.token_s) if self.token_s else _FIRST_CHUNK
        return self._calls.limit_catch_up(max(_LEAST_CHUNK, min(num_tokens, _MOST_CHUNK)))

    def observe(self, seconds: float) -> bool:
        """Learn from the last proposal, which took so long beside its steps; return whether catching up was a part of it."""
        num_tokens = self._calls.num_caught_up
        if num_tokens < _NUM_TELLING:
            return False
        self._seen.append(max(0.0, seconds) / num_tokens)
        self.token_s = sorted(self._seen)[(len(self._seen) - 1) // 2]
        return True
