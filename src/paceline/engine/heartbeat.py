"""Signs of life: what a loop says of itself at each turn, and what follows for whoever asks whether the engine lives.

A loop's own thread writes its `Pulse`; any thread reads, without asking the loop anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from paceline.scheduling.clock import Clock

LONGEST_TICK_S: Final = 300.0
"""A tick that takes longer is taken for one that never ends. Generating ticks are cut to `max_tick_ms`; but a text to be
embedded is one pass however long it is, and on a slow machine with a large model that takes minutes."""

LONGEST_SILENCE_S: Final = 60.0
"""A thread that only listens and passes on, and says nothing for longer, hangs, or its process was stopped."""


class Sign(NamedTuple):
    """What a loop does, and since when on its clock; it turns each time that this changes."""

    state: Literal["idle", "ticking", "ended"]
    since_s: float


class Pulse:
    """The last sign of one loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sign = Sign("idle", clock.now())

    def tick(self) -> None:
        """A turn begins. Loop's thread."""
        self._sign = Sign("ticking", self._clock.now())

    def rest(self) -> None:
        """There is nothing to do until somebody wants something. Loop's thread."""
        self._sign = Sign("idle", self._clock.now())

    def end(self) -> None:
        """There is no turn any more. Loop's thread."""
        self._sign = Sign("ended", self._clock.now())

    @property
    def sign(self) -> Sign:
        """The last one. Any thread."""
        return self._sign


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Whether an engine lives, and what it is at.

    is_alive: it is idle, or turns, or is in a tick for no longer than `LONGEST_TICK_S`, or a process is on its way that takes
    over. state: "idle" while it waits for work, "ticking", "starting" while there is no worker process or it loads,
    "ended" where nothing goes on any more. state_s: since the loop last turned, so how long it has been idle, or in this tick.

    Of an engine with a process of its own: worker_pid, None while there is none; num_restarts so far; silent_s: since the
    worker last gave a sign, which it does every second, also in the middle of a tick. What is said of its loop is as
    old as that. Beyond `LONGEST_SILENCE_S` it is not alive.
    """

    is_alive: bool
    state: Literal["idle", "ticking", "starting", "ended"]
    state_s: float
    worker_pid: int | None = None
    num_restarts: int = 0
    silent_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it waits for work."""
        return self.state == "idle"


def heartbeat_of(
    sign: Sign,
    now_s: float,
    *,
    worker_pid: int | None = None,
    num_restarts: int = 0,
    silent_s: float = 0.0,
) -> Heartbeat:
    """What follows from a loop's sign."""
    state_s = max(0.0, now_s - sign.since_s)  # another thread's sign may be newer than our time
    turns = sign.state == "idle" or (sign.state == "ticking" and state_s <= LONGEST_TICK_S)
    return Heartbeat(
        is_alive=turns and silent_s <= LONGEST_SILENCE_S,
        state=sign.state,
        state_s=state_s,
        worker_pid=worker_pid,
        num_restarts=num_restarts,
        silent_s=silent_s,
    )


def starting(since_s: float, *, worker_pid: int | None = None, num_restarts: int = 0) -> Heartbeat:
    """There is no worker, or it loads, for so many seconds; however long that takes, it is no hang of ours."""
    return Heartbeat(is_alive=True, state="starting", state_s=since_s, worker_pid=worker_pid, num_restarts=num_restarts)
