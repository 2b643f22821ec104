"""When a worker is started again after a crash, when it hangs, and when an idle one is stopped. Pure: times come in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from paceline.engine.worker.black_box import LONG_WORK, Beat
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
    """How deaths, hangs and idle workers are treated: hang_timeout_s and sleep_idle_s, see `EngineConfig`.

    rpc_wait_s: for which requests wait for a lost RPC server.
    """

    on_engine_death: Literal["replay", "fail"] = "replay"
    restarts: RestartLimits = field(default_factory=RestartLimits)
    hang_timeout_s: float = math.inf
    sleep_idle_s: float | None = None
    rpc_wait_s: float = math.inf


LOOK_S: Final = 1.0
"""Seconds between two looks at the heartbeats of a worker."""

_EXCUSED_FROM_S: Final = 2.5  # of silence; then an excuse is looked for
_MOST_PATIENCE: Final = 64  # times longer that ticks may take after crashes in a row


class _Silence:
    """How long a value has stayed the same, in time that the observer saw pass."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._value: object = None

    def observe(self, value: object, passed_s: float) -> float:
        """Return the seconds for which the value is the same."""
        self.seconds = self.seconds + passed_s if value == self._value else 0.0
        self._value = value
        return self.seconds


class HangWatch:
    """Finds out from a worker's heartbeats whether the worker hangs. limit_s: `hang_timeout_s`.

    The listening thread and the engine's thread both give heartbeats. A stopped process gives none, nor does a thread that does
    not return from native code. Silence is counted look by look, and a look adds two seconds at most. If this process was
    suspended too, alone or with the machine, that time is not counted. Silence with an excuse is not counted either.

    Each crash in a row multiplies the time of a tick by four: perhaps the ticks were only slow.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._listening, self._beating, self._preparing = _Silence(), _Silence(), _Silence()
        self._patience = 1
        self._looked_s = self._next_s = math.inf

    def begin(self, now_s: float, num_crashes: int) -> None:
        """Watch a new worker. num_crashes: of the workers before it, in a row."""
        self._listening, self._beating, self._preparing = _Silence(), _Silence(), _Silence()
        self._patience = min(4**num_crashes, _MOST_PATIENCE)
        self._looked_s, self._next_s = now_s, now_s + LOOK_S

    def end(self) -> None:
        """Watch no worker."""
        self._next_s = math.inf

    def next_s(self) -> float:
        """Return when to look again; infinite without a worker."""
        return self._next_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat of the listening thread. Any thread."""
        return self._listening.seconds

    def allowed_s(self, beat: Beat) -> float:
        """Return how long the engine's thread may be silent after this heartbeat."""
        long_s = LONG_WORK * self._limit_s if beat.sign is None else self._limit_s
        return self._patience * max(long_s, beat.allowed_s)

    def look(
        self, now_s: float, beat: Beat | None, preparing: int | None, is_excused: Callable[[], bool], *, is_ready: bool
    ) -> str | None:
        """Return why the worker counts as hung; None if it does not.

        Args:
            now_s: The time.
            beat: The worker's heartbeats; None before the first one.
            preparing: The request that the worker prepares.
            is_excused: Whether the silence has an excuse; called only if the worker is silent.
            is_ready: Whether the worker has loaded the model.
        """
        passed_s = min(now_s - self._looked_s, 2 * LOOK_S)
        self._looked_s, self._next_s = now_s, now_s + LOOK_S
        longest_s = max(self._listening.seconds, self._beating.seconds if is_ready else 0.0) + passed_s
        if longest_s > _EXCUSED_FROM_S and is_excused():
            passed_s = 0.0
        silent_s = self._listening.observe(None if beat is None else beat.listened_s, passed_s)
        tick_s = self._beating.observe(None if beat is None else beat.beaten_s, passed_s)
        prepared_s = self._preparing.observe(preparing, passed_s)
        limit_s = self._limit_s if is_ready else LONG_WORK * self._limit_s
        if silent_s >= limit_s:
            return f"it gave no heartbeat for {silent_s:.0f} s"
        if is_ready and beat is not None and tick_s >= (allowed_s := self.allowed_s(beat)):
            return f"its engine has been in one tick for {tick_s:.0f} s, and {allowed_s:.0f} s were allowed"
        if preparing is not None and prepared_s >= LONG_WORK * self._limit_s:
            return f"it has prepared one request for {prepared_s:.0f} s"
        return None


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
