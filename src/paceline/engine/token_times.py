"""When tokens came: the time to a request's first token, and the intervals between those of a sequence.

Fed with what an instrument is told, in order, by one thread. Holds what lives and forgets what has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.scheduling.instrument import RequestRecord, TickRecord


@dataclass(slots=True, eq=False)
class Live:
    """A request. last_s: by choice, when its last token came, where an interval runs since then."""

    record: RequestRecord
    has_started: bool = False
    has_token: bool = False
    last_s: dict[int, float] = field(default_factory=dict)

    def start(self) -> bool:
        """It got a slot. Answers whether this was the first time."""
        is_first, self.has_started = not self.has_started, True
        return is_first


@dataclass(slots=True)
class TickTimes:
    """What one tick ended: times to a first token, and intervals with how often each occurred. Seconds."""

    ttft_s: list[float]
    intervals_s: dict[float, int]


class TokenTimes:
    """The requests that live, by key, and when they had their tokens.

    A request may end before the tick is told that brought its last token, so that what had a slot is kept until then; where
    no ticks are told, as in a front whose worker counts them, nothing is.
    """

    def __init__(self, *, has_ticks: bool = True) -> None:
        self._has_ticks = has_ticks
        self._live: dict[int, Live] = {}
        self._ending: dict[int, Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Live]:
        return iter(self._live.values())

    def add(self, record: RequestRecord) -> bool:
        """A request begins its life. Answers False, and changes nothing, where the key is taken."""
        if record.key in self._live:
            return False
        self._live[record.key] = Live(record)
        return True

    def find(self, key: int) -> Live | None:
        """The request, while it lives."""
        return self._live.get(key)

    def pop(self, key: int) -> Live | None:
        """The request, which ends with this."""
        live = self._live.pop(key, None)
        if live is not None and live.has_started and self._has_ticks:
            self._ending[key] = live
        return live

    def pause(self, key: int) -> None:
        """Its reader keeps it waiting: no interval runs until the next token."""
        live = self._live.get(key)
        if live is not None:
            live.last_s.clear()

    def tick(self, record: TickRecord) -> TickTimes:
        """What the tokens of a tick ended; they all came when it did. k tokens at once end k intervals of equal length."""
        now_s = record.start_s + record.elapsed_s
        found = TickTimes([], {})
        intervals_s = found.intervals_s
        for row in record.rows:
            if not row.num_new:
                continue
            live = self._live.get(row.key) or self._ending.get(row.key)
            if live is None:
                continue
            last_s = live.last_s.get(row.choice)
            live.last_s[row.choice] = now_s
            if last_s is not None:
                interval_s = (now_s - last_s) / row.num_new
                intervals_s[interval_s] = intervals_s.get(interval_s, 0) + row.num_new
            if row.first and not live.has_token:
                live.has_token = True
                found.ttft_s.append(now_s - live.record.submitted_s)
        self._ending.clear()
        return found
