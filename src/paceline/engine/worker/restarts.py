"""When a worker that died is started again: exponential back-off, and the number of crashes after which none is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 60  # far beyond any cap; a float holds no arbitrary power of two


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """How long restarts wait, and how many of them there are.

    first_wait_s: before the first restart; each further one in a row waits twice as long, at most longest_wait_s.
    stable_s: a worker that was ready for so long ends the row. max_restarts: restarts in a row; one more crash ends the
    engine. None: no limit.
    """

    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    stable_s: float = 60.0
    max_restarts: int | None = None


class Restarts:
    """Counts the crashes of the workers of one engine. num_all: restarts since the beginning."""

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self.num_all = 0
        self._num_in_row = 0

    def crashed(self, now_s: float, ready_s: float | None) -> float | None:
        """Count a crash and return the time at which the next worker is to be started; None where max_restarts is used up.

        ready_s: when the worker that died was ready; None: it never was.
        """
        limits = self.limits
        self._num_in_row = self.num_in_row(now_s, ready_s) + 1
        if limits.max_restarts is not None and self._num_in_row > limits.max_restarts:
            return None
        self.num_all += 1
        doublings = min(self._num_in_row - 1, _MOST_DOUBLINGS)
        return now_s + min(limits.longest_wait_s, limits.first_wait_s * 2.0**doublings)

    def left(self, now_s: float, ready_s: float | None) -> None:
        """Note that a worker was ended when idle, which ends the row only where it was stable."""
        self._num_in_row = self.num_in_row(now_s, ready_s)

    def num_in_row(self, now_s: float, ready_s: float | None) -> int:
        """Return the number of crashes without a stable worker between them. ready_s: of the present worker, as above."""
        is_stable = ready_s is not None and now_s - ready_s >= self.limits.stable_s
        return 0 if is_stable else self._num_in_row
