"""What it takes to move tokens between device and host memory, learnt from the moves. Pure arithmetic.

Loading is cheap: it moves every cell once, where each token that is generated behind them reads them all. Saving takes some ten
times as long, since the memory that it goes to is new.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.scheduling.plan import Load, Operation, PlanOutput, Save
from paceline.scheduling.saving import PIECE

_LARGE_PIECE = 16 * PIECE  # in a tick in which nobody waits for a token
_LEAST = 32  # tokens; fewer are not worth an operation
_TIDY_SHARE = 0.1  # of the time between two tokens, for what is in nobody's way
_ROOM_SHARE = 0.5  # of it, for what is in the way of somebody who waits
_GAIN = 0.3


class Rate:
    """Seconds a token, of one kind of move; a running mean."""

    def __init__(self) -> None:
        self._token_s: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        if not num_tokens:
            return
        found = seconds / num_tokens
        self._token_s = found if self._token_s is None else self._token_s + _GAIN * (found - self._token_s)

    def seconds(self, num_tokens: int) -> float:
        """What so many are going to take; 0 where none was ever moved."""
        return num_tokens * (self._token_s or 0.0)

    def tokens_within(self, seconds: float) -> int:
        """How many can be moved in this time; a piece, where none was ever moved."""
        if self._token_s is None:
            return PIECE
        return max(_LEAST, int(seconds / self._token_s)) if self._token_s > 0 else 2**31


class Moving:
    """The two rates of one engine, and what follows for a tick."""

    def __init__(self, itl_target_s: float) -> None:
        self._itl_target_s = itl_target_s
        self._saving, self._loading = Rate(), Rate()

    def observe(self, operations: Iterable[Operation], output: PlanOutput) -> None:
        """What was moved in a tick, and what that took."""
        self._saving.observe(sum(save.end - save.start for save, _ in output.saved), output.saving_s)
        self._loading.observe(_num_loaded(operations), output.loading_s)

    def seconds(self, operations: Iterable[Operation]) -> float:
        """What these are going to take."""
        saves = sum(one.end - one.start for one in operations if isinstance(one, Save))
        return self._saving.seconds(saves) + self._loading.seconds(_num_loaded(operations))

    def seconds_to_and_fro(self, num_tokens: int) -> float:
        """What it takes to save so many tokens, and to load them again."""
        return self._saving.seconds(num_tokens) + self._loading.seconds(num_tokens)

    def tokens_to_tidy(self, *, is_generating: bool) -> int:
        """Most tokens of idle paths that may be saved in this tick."""
        if not is_generating:
            return _LARGE_PIECE
        return min(PIECE, self._saving.tokens_within(_TIDY_SHARE * self._itl_target_s))

    def tokens_for_room(self, *, is_generating: bool) -> int:
        """Most tokens that may be saved in this tick to make room for somebody who waits."""
        return self._saving.tokens_within(_ROOM_SHARE * self._itl_target_s) if is_generating else 2**31


def _num_loaded(operations: Iterable[Operation]) -> int:
    return sum(one.end - one.start for one in operations if isinstance(one, Load))
