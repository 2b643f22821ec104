"""Heartbeats: the state that a loop notes at each turn, and whether its engine is alive.

A loop's own thread writes its `Pulse`; any thread reads it without involving the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from paceline.clock import Clock
from paceline.streaming.chunk import fields_of

LONGEST_TICK_S: Final = 300.0
"""A longer tick counts as hung. Generation ticks are bounded by `max_tick_ms`, but a text is embedded in one pass, which can
take minutes for a long text and a large model on a slow machine."""

LONGEST_SILENCE_S: Final = 60.0
"""A worker whose listening thread gives no sign for longer hangs, or its process was stopped."""

CRASH_LOOP: Final = 3
"""The state is "crash_loop" after this many crashes in a row while no worker is ready. Blame alone takes two crashes for one
request."""


class Sign(NamedTuple):
    """The state of a loop and the time of its last turn, on its clock."""

    state: Literal["idle", "ticking", "ended"]
    since_s: float


class Pulse:
    """The last sign of one loop. Its own thread calls tick, rest, beat and end.

    Attributes:
        beat_s: Seconds for which the loop may wait before it calls `beat`; None: it need not.
    """

    beat_s: float | None = None

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._sign = Sign("idle", clock.now())

    def tick(self) -> None:
        """Note the beginning of a turn."""
        self._sign = Sign("ticking", self.clock.now())

    def rest(self) -> None:
        """Note that the loop waits for work."""
        self._sign = Sign("idle", self.clock.now())

    def beat(self) -> None:
        """Note that the loop still waits for work."""

    def announce(self) -> None:
        """Note that the rest of the turn may take long."""

    def end(self) -> None:
        """Note that the loop has ended."""
        self._sign = Sign("ended", self.clock.now())

    @property
    def sign(self) -> Sign:
        """Return the last sign, on any thread."""
        return self._sign


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Whether an engine is alive, and its state.

    Attributes:
        is_alive: it is idle, sleeping, in a tick for at most `LONGEST_TICK_S`, or a worker process is being started. A worker
            may take longer for a tick that its cost model expects to be long.
        state: "idle" while it waits for work, "ticking", "starting" while no worker process is ready, "hung" while a worker
            whose heartbeats stopped for `hang_timeout_s` is replaced, "crash_loop" while no worker is ready after
            `CRASH_LOOP` or more crashes in a row, "sleeping" while there is no worker because the engine was idle for
            `sleep_idle_s`, "ended" after close or a failure.
        state_s: seconds since the loop last turned: how long it has been idle, or in this tick.
        worker_pid: with isolation="process", the worker's process id, None without one.
        num_restarts: restarts of the worker so far.
        num_crashes: crashes of workers in a row, 0 again after one has run for a minute.
        silent_s: seconds since the worker's last sign, which it gives every second, also during a tick; state and state_s are
            as old as that. Beyond `LONGEST_SILENCE_S`, or `hang_timeout_s` if that is longer, the engine is not alive. Time
            in which this process did not run either is not counted.
        restart_in_s: seconds of back-off until the next worker is started, None if none is due.
        num_hangs: workers that were killed because their heartbeats stopped; each is followed by a restart.
    """

    is_alive: bool
    state: Literal["idle", "ticking", "starting", "hung", "crash_loop", "sleeping", "ended"]
    state_s: float
    worker_pid: int | None = None
    num_restarts: int = 0
    silent_s: float = 0.0
    num_crashes: int = 0
    restart_in_s: float | None = None
    num_hangs: int = 0

    @property
    def is_idle(self) -> bool:
        """Return whether the engine waits for work."""
        return self.state == "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHistory:
    """The history of an engine's worker processes; see `Heartbeat`."""

    worker_pid: int | None = None
    num_restarts: int = 0
    num_crashes: int = 0
    num_hangs: int = 0


_NO_WORKERS: Final = WorkerHistory()


def heartbeat_of(
    sign: Sign,
    now_s: float,
    past: WorkerHistory = _NO_WORKERS,
    *,
    silent_s: float = 0.0,
    longest_tick_s: float = LONGEST_TICK_S,
    longest_silence_s: float = LONGEST_SILENCE_S,
) -> Heartbeat:
    """Return the heartbeat of a loop that gave this sign."""
    state_s = max(0.0, now_s - sign.since_s)  # the loop's thread may have noted it after now_s
    turns = sign.state == "idle" or (sign.state == "ticking" and state_s <= longest_tick_s)
    return Heartbeat(
        is_alive=turns and silent_s <= longest_silence_s,
        state=sign.state,
        state_s=state_s,
        silent_s=silent_s,
        **fields_of(past),
    )


def starting(
    since_s: float, past: WorkerHistory, restart_in_s: float | None = None, *, is_hung: bool = False
) -> Heartbeat:
    """Return the heartbeat of an engine without a ready worker since since_s seconds; loading may take any time.

    is_hung: whether the last worker hung.
    """
    return Heartbeat(
        is_alive=True,
        state="crash_loop" if past.num_crashes >= CRASH_LOOP else "hung" if is_hung else "starting",
        state_s=since_s,
        restart_in_s=restart_in_s,
        **fields_of(past),
    )


def sleeping(since_s: float, past: WorkerHistory) -> Heartbeat:
    """Return the heartbeat of an engine whose worker was stopped since_s seconds ago because it was idle."""
    return Heartbeat(
        is_alive=True,
        state="sleeping",
        state_s=since_s,
        **fields_of(past),
    )
