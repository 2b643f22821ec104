"""When a worker is started again after a crash, and when an idle one is stopped. Pure: times come in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from paceline.errors import RpcServerUnavailable

LEAVE_S: Final = 10.0  # for a worker to leave by itself, before it is killed
_MAX_DOUBLINGS = 60  # far beyond any cap, and within the range of a float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Back-off and maximum number of restarts.

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
        """Count a crash and return when to start the next worker; None if max_restarts is exceeded.

        ready_s: when the worker that died was ready; None: it never was.
        """
        limits = self.limits
        self._num_in_row = self.num_in_row(now_s, ready_s) + 1
        if limits.max_restarts is not None and self._num_in_row > limits.max_restarts:
            return None
        self.num_all += 1
        doublings = min(self._num_in_row - 1, _MAX_DOUBLINGS)
        return now_s + min(limits.longest_wait_s, limits.first_wait_s * 2.0**doublings)

    def left(self, now_s: float, ready_s: float | None) -> None:
        """Note that an idle worker was stopped, which ends the row only if it was stable."""
        self._num_in_row = self.num_in_row(now_s, ready_s)

    def num_in_row(self, now_s: float, ready_s: float | None) -> int:
        """Return the number of crashes without a stable worker between them. ready_s: of the present worker, as above."""
        is_stable = ready_s is not None and now_s - ready_s >= self.limits.stable_s
        return 0 if is_stable else self._num_in_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to do about a death, and about an idle worker: sleep_idle_s, see `EngineConfig`.

    rpc_wait_s: for which requests wait for a lost RPC server.
    """

    on_engine_death: Literal["replay", "fail"] = "replay"
    restarts: RestartLimits = field(default_factory=RestartLimits)
    sleep_idle_s: float | None = None
    rpc_wait_s: float = math.inf


class ServersAway:
    """How long the RPC servers of an engine have been away. wait_s: for which requests wait for them.

    Without a server no worker gets ready, so this counts from the first worker that was refused or lost one. To be asked while
    there is no worker: one that loads has its servers, for as long as that takes.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._since_s: float | None = None
        self._error: RpcServerUnavailable | None = None
        self.error: RpcServerUnavailable | None = None  # for every request, from the end of the wait until `back`

    def lost(self, now_s: float, error: RpcServerUnavailable) -> None:
        """Note that a worker has ended for want of a server."""
        self._error = error
        if self._since_s is None:
            self._since_s = now_s
        if self.error is not None:
            self.error = error

    def back(self) -> None:
        """Note that a worker is ready, or has ended for another reason: it had its servers, as far as is known."""
        self._since_s = self._error = self.error = None

    def next_s(self) -> float:
        """Return when requests have waited long enough; infinite while none does, or once they have."""
        return math.inf if self._since_s is None or self.error is not None else self._since_s + self._wait_s

    def give_up(self, now_s: float) -> RpcServerUnavailable | None:
        """Return the error with which requests end now, once."""
        if now_s < self.next_s():
            return None
        self.error = self._error
        return self.error


class Sleep:
    """Whether the worker is stopped because nothing has needed it. idle_s: for how long; None: it is never stopped."""

    def __init__(self, idle_s: float | None) -> None:
        self._idle_s = math.inf if idle_s is None else idle_s
        self._used_s = math.inf  # nothing is idle before it has been used
        self._leave_by_s = math.inf
        self.is_asleep = False

    def used(self, now_s: float) -> None:
        """Note that the worker became ready, or that something needs it."""
        self._used_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Whether an idle worker is to be stopped."""
        return not self.is_asleep and now_s >= self._used_s + self._idle_s

    def is_late(self, now_s: float) -> bool:
        """Whether a worker that was told to leave takes too long."""
        return now_s >= self._leave_by_s

    def next_s(self) -> float:
        """Return when `is_due` or `is_late` becomes true, if nothing happens before."""
        return self._leave_by_s if self.is_asleep else self._used_s + self._idle_s

    def begin(self, now_s: float) -> None:
        """Note that the worker was told to leave."""
        self.is_asleep, self._leave_by_s = True, now_s + LEAVE_S

    def left(self) -> None:
        """Note that the worker is gone or was killed."""
        self._leave_by_s = math.inf

    def end(self) -> None:
        """Note that another worker is started."""
        self.is_asleep, self._used_s, self._leave_by_s = False, math.inf, math.inf
