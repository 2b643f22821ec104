"""Which request killed the worker: suspects run one at a time, and the one that crashes again is at fault. Pure.

    held ──take──> handed ──ended──> gone          held: with the front; handed: with the worker
      ^               │
      └─────died──────┘

After a crash the requests of the pass that ran are suspects. One of them is on probation: it runs beside those that are
not suspected, until it has brought tokens twice, and so is beyond the place of the crash, or has ended. While suspects are left,
requests that had not started wait, new ones too: one of those may be the cause of the next crash, and an innocent one would be
taken for it.

Where the worker ended because an RPC server was lost, the server may have been stopped by hand, and restarted again: the one on
probation is spared once.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Collection, Iterable

PROBATION_TICKS = 2

# By which a process ends itself. Others come from outside (the kernel's out-of-memory killer, an operator) and blame no request.
FATAL_SIGNALS = frozenset(
    (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
)


class Blame:
    """Decides which requests the worker may have now, and which of them is at fault when it dies."""

    def __init__(self) -> None:
        self._suspects: deque[int] = deque()
        self._free: deque[int] = deque()  # may be handed over whatever happens
        self._waiting: deque[int] = deque()  # may be handed over when no request is suspected
        self._handed: dict[int, None] = {}
        self._on_probation: int | None = None
        self._num_good = 0
        self._spared: set[int] = set()

    def add(self, key: int) -> None:
        """Add a new request."""
        self._waiting.append(key)

    def take(self) -> list[int]:
        """Return the requests to be handed to the worker now, in order."""
        taken = []
        if self._on_probation is None and self._suspects:
            self._on_probation, self._num_good = self._suspects.popleft(), 0
            taken.append(self._on_probation)
        taken += self._free
        self._free.clear()
        if self._on_probation is None:
            taken += self._waiting
            self._waiting.clear()
        self._handed.update(dict.fromkeys(taken))
        return taken

    def brought(self, key: int) -> None:
        """Note that a request has brought tokens."""
        if key == self._on_probation:
            self._num_good += 1
            if self._num_good >= PROBATION_TICKS:
                self._spared.discard(key)
                self.clear(key)

    def clear(self, key: int) -> None:
        """Suspect a request no longer, or, if it is paused, not for now."""
        if key == self._on_probation:
            self._on_probation = None

    def ended(self, key: int) -> None:
        """Forget a request that has ended."""
        self.clear(key)
        self._spared.discard(key)
        self._handed.pop(key, None)
        for queue in (self._suspects, self._free, self._waiting):
            if key in queue:
                queue.remove(key)

    def died(
        self, *, is_crash: bool, seen: Collection[int] | None, started: Collection[int], lost_server: bool = False
    ) -> int | None:
        """Hold all that the dead worker had, and return the request that is at fault, if one is known.

        is_crash: it ended itself. seen: what it was at, None where that is not known. started: requests that ever ran.
        lost_server: it ended itself for want of an RPC server.
        """
        handed, on_probation = list(self._handed), self._on_probation
        self._handed.clear()
        self._on_probation = None
        if not is_crash:
            self._hold(handed, [] if on_probation is None else [on_probation], started)
            return None
        if on_probation is not None and seen is not None and on_probation in seen:
            if lost_server and on_probation not in self._spared:
                self._spared.add(on_probation)
                self._hold(handed, [on_probation], started)
                return None
            handed.remove(on_probation)
            self._hold(handed, [], started)
            return on_probation
        accused = [key for key in handed if (key in started if seen is None else key in seen)]
        if on_probation is not None and on_probation not in accused:
            accused.insert(0, on_probation)
        self._hold(handed, accused or handed, started)
        return None

    def _hold(self, handed: Iterable[int], accused: Collection[int], started: Collection[int]) -> None:
        self._suspects.extendleft(reversed([key for key in handed if key in accused]))
        others = [key for key in handed if key not in accused]
        self._free.extend(key for key in others if key in started)
        self._waiting.extendleft(reversed([key for key in others if key not in started]))

    @property
    def held(self) -> tuple[int, ...]:
        """Requests that are with the front."""
        return (*self._suspects, *self._free, *self._waiting)

    @property
    def handed(self) -> tuple[int, ...]:
        """Requests that are with the worker."""
        return tuple(self._handed)

    def is_handed(self, key: int) -> bool:
        """Whether a request is with the worker."""
        return key in self._handed
