"""Which replica gives a request its first token soonest. `LoadMeter` reads a replica, `Router` ranks replicas by their reports.

    expected time to first token = wait for the replica + prompt tokens left to compute + one tick

The wait is the longer of two times: until the prompt tokens before this request are computed, and until a slot is free. Both come
from the replica's last report, minus the time since, plus the requests that this router has sent there since. The digests say
which prefixes are cached; prefixes of requests that this router sent count as cached, too. All of it may be wrong: then a request
waits longer than necessary.

Replicas are compared by this time plus half of the computing time: later requests wait for the computation as well, and a
choice that minimises each request's own time computes more in total.

Pure: the time is an argument, and ties are broken by a given source of random numbers. One thread at a time may call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Final, Literal, get_args

import msgspec

from paceline import validation
from paceline.cluster.prefix_digest import BLOCK_TOKENS, DigestUpdate, PrefixIndex, PromptBlocks
from paceline.observability import metric_table as table
from paceline.observability.metric_table import MetricsSnapshot
from paceline.scheduling.records import SlotsSnapshot

_TIE: Final = 0.01  # times that differ by this share are equal
_FOR_OTHERS: Final = 0.5  # weight of the computing time, for the requests that wait for it
_MAX_EXPECTED: Final = 1 << 14  # expected hashes of a replica: 64 bits each, a million tokens
_SLOW_TOKEN_S: Final = 0.005  # taken for a replica if no replica has measured a time; a slow machine's
_SLOW_TICK_S: Final = 0.05
_FORGET: Final = 0.5  # weight of the earlier readings of a meter, at each reading


ReplicaState = Literal["ready", "draining", "unhealthy"]


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a replica, and the costs of its ticks. A cost of 0 was not measured yet.

    Attributes:
        num_slots: Sequences that run at once, at least 1.
        num_running: Sequences that have a slot.
        num_waiting: Requests that have no slot yet.
        waiting_tokens: Accepted prompt tokens that are not computed yet.
        free_cells: KV cells that no running sequence holds. Cells of cached prefixes are free, since these are evicted. None if
            the model's memory is not made of cells.
        prefill_token_s: Recent seconds per prompt token, including the work computed beside it.
        tick_s: Recent seconds per tick.
        slot_s: Recent seconds that a request holds its slot.
    """

    num_slots: int = 1
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    free_cells: int | None = None
    prefill_token_s: float = 0.0
    tick_s: float = 0.0
    slot_s: float = 0.0


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica at one moment. A router may get every report, some of them, or one twice.

    Attributes:
        state: "ready", "draining" or "unhealthy"; only a ready replica gets new requests.
        load: Its load.
        updates: The latest updates of its prefix digest, in order. A router applies the updates that it has not applied yet.
        made_at: When it was made, in Unix seconds; 0 if that is not known.
    """

    state: ReplicaState
    load: ReplicaLoad
    updates: tuple[DigestUpdate, ...] = ()
    made_at: float = 0.0

    def check(self) -> None:
        """Raise `InvalidParams`, naming the field, for a value that no replica reports."""
        validation.choice("state", self.state, get_args(ReplicaState))
        load = self.load
        validation.integer("num_slots", load.num_slots, 1)
        for name in ("num_running", "num_waiting", "waiting_tokens"):
            validation.integer(name, getattr(load, name), 0)
        if load.free_cells is not None:
            validation.integer("free_cells", load.free_cells, 0)
        for name in ("prefill_token_s", "tick_s", "slot_s"):
            validation.number(name, getattr(load, name), 0)


class LoadMeter:
    """Reads an engine's load. Costs are averages over the last few readings, so read at equal intervals, such as half a second.

    Args:
        num_cells: The engine's KV cells; None if its memory is not made of cells.
    """

    def __init__(self, num_cells: int | None) -> None:
        self._num_cells = None if num_cells is None else validation.integer("num_cells", num_cells, 0)
        self._token_s, self._tick_s, self._slot_s, self._prompt_tokens = _Ratio(), _Ratio(), _Ratio(), _Ratio()

    def read(self, metrics: MetricsSnapshot, slots: SlotsSnapshot) -> ReplicaLoad:
        """Return the load at this moment. A waiting request counts as the mean of the earlier prompts."""
        ticks = metrics.histogram(table.TICK_S.name, "generate")
        requests, queues = metrics.histogram(table.REQUEST_S.name), metrics.histogram(table.QUEUE_S.name)
        prefill_s, prefill_tokens = metrics.number(table.PREFILL_S.name), metrics.number(table.PREFILL.name)
        mean_prompt = self._prompt_tokens.update(prefill_tokens, queues.count)
        running = [slot for slot in slots if slot.is_processing]
        left = sum(max(0, slot.num_prompt_tokens - slot.num_computed_tokens) for slot in running)
        used = sum(slot.num_computed_tokens - slot.num_cached for slot in running)
        return ReplicaLoad(
            num_slots=max(1, len(slots)),
            num_running=len(running),
            num_waiting=slots.num_waiting,
            waiting_tokens=left + round(slots.num_waiting * mean_prompt),
            free_cells=None if self._num_cells is None else max(0, self._num_cells - used),
            prefill_token_s=self._token_s.update(prefill_s, prefill_tokens),
            tick_s=self._tick_s.update(ticks.sum, ticks.count),
            # The difference may fall: a wait counts when it ends, a request when it ends, which is later.
            slot_s=self._slot_s.update(max(0.0, requests.sum - queues.sum), requests.count),
        )


class _Ratio:
    """A quotient of the growth of two counters, in which recent growth weighs more; 0 until they grow."""

    def __init__(self) -> None:
        self._last_above, self._last_below = 0.0, 0.0
        self._above, self._below = 0.0, 0.0

    def update(self, above: float, below: float) -> float:
        """Take the counters' present values and return the quotient. If `above` fell, its highest value counts."""
        above = max(above, self._last_above)
        if below > self._last_below:
            self._above = self._above * _FORGET + above - self._last_above
            self._below = self._below * _FORGET + below - self._last_below
            self._last_above, self._last_below = above, below
        return self._above / self._below if self._below else 0.0


@dataclass(frozen=True, slots=True)
class RankedReplica:
    """A replica that may take a request.

    Attributes:
        replica_id: Its name.
        num_cached: Tokens of the prompt that it probably has cached: whole blocks, and never the whole prompt.
        wait_s: Expected seconds until it begins with the prompt.
        ttft_s: Expected seconds to the first token, wait_s included.
        fits: Whether its free cells probably hold the rest of the prompt.
    """

    replica_id: str
    num_cached: int
    wait_s: float
    ttft_s: float
    fits: bool

    @property
    def cost_s(self) -> float:
        """The number that replicas are compared by: ttft_s plus half of the computing time."""
        return self.ttft_s + _FOR_OTHERS * (self.ttft_s - self.wait_s)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request that was sent to a replica after its last report."""

    at_s: float
    num_tokens: int  # to compute
    prefill_s: float


class _Replica:
    """The last report of a replica, and the requests that were sent there since."""

    def __init__(self) -> None:
        self.state = "ready"
        self.load: ReplicaLoad | None = None
        self.read_s = 0.0
        self.sent: list[_Sent] = []

    def known_load(self, usual: ReplicaLoad) -> ReplicaLoad:
        """Return its load, with the usual costs in place of costs that it has not measured."""
        load = self.load
        if load is None:
            return usual
        if load.prefill_token_s and load.tick_s and load.slot_s:
            return load
        return msgspec.structs.replace(
            load,
            prefill_token_s=load.prefill_token_s or usual.prefill_token_s,
            tick_s=load.tick_s or usual.tick_s,
            slot_s=load.slot_s or usual.slot_s,
        )

    def wait_s(self, load: ReplicaLoad, now_s: float) -> float:
        """Return the expected seconds until a request sent now has a slot and the prompts before it are computed."""
        busy_until_s = self.read_s + load.waiting_tokens * load.prefill_token_s
        for sent in self.sent:
            busy_until_s = max(busy_until_s, sent.at_s) + sent.prefill_s
        num_ahead = load.num_running + load.num_waiting + len(self.sent) - load.num_slots + 1
        slot_at_s = self.read_s + max(0, num_ahead) * load.slot_s / load.num_slots
        return max(0.0, busy_until_s - now_s, slot_at_s - now_s)

    def free_cells(self, load: ReplicaLoad) -> float:
        if load.free_cells is None:
            return float("inf")
        return load.free_cells - load.waiting_tokens - sum(sent.num_tokens for sent in self.sent)


class Router:
    """Ranks replicas for requests by their reports.

    Args:
        random: Breaks ties; the same numbers, reports and requests give the same choices.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._replicas: dict[str, _Replica] = {}
        self._index = PrefixIndex(_MAX_EXPECTED)

    def observe(self, replica_id: str, report: ReplicaReport, now_s: float, *, age_s: float = 0.0) -> bool:
        """Take a report.

        Args:
            replica_id: The replica that sent it.
            report: The report.
            now_s: The time, on the router's clock.
            age_s: How long ago it was made, as far as is known. Requests sent to the replica within that time are added to it.

        Returns:
            False if an earlier digest update was missed. The old digest stays until a report has `DigestPublisher.snapshot`;
            the rest of this report counts.

        Raises:
            InvalidParams: No replica reports this. Updates of the report before the wrong update are kept, nothing else.
        """
        report.check()
        read_s = validation.number("now_s", now_s) - validation.number("age_s", age_s, 0)
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.load is not None and read_s < replica.read_s:
            return True  # a later report came first
        is_current = True
        for update in report.updates:
            is_current = self._index.apply(replica_id, update)
        replica = self._replica(replica_id)
        replica.state, replica.load, replica.read_s = report.state, report.load, read_s
        replica.sent = [sent for sent in replica.sent if sent.at_s > read_s]
        self._index.settle(replica_id, read_s)
        return is_current

    def remove(self, replica_id: str) -> None:
        """Forget a replica that is gone; an unknown one is no error."""
        self._replicas.pop(replica_id, None)
        self._index.remove(replica_id)

    def rank(self, prompt: PromptBlocks, candidates: Iterable[str], now_s: float) -> list[RankedReplica]:
        """Return the replicas that may take a request, best first.

        Args:
            prompt: The request's prompt, from `hash_prompt`.
            candidates: The replicas to choose from. A replica without a report counts as idle, empty, and as fast as the others.
            now_s: The time, on the router's clock.

        Returns:
            All candidates that are not draining or unhealthy: first those with enough cells for the prompt, each group by cost_s.
            Replicas within a hundredth of the best are in random order. Empty if no replica takes requests.
        """
        names = [name for name in dict.fromkeys(candidates) if self._state(name) == "ready"]
        matched = self._index.matched_blocks(prompt.hashes, names)
        usual = self._usual_load()
        ranked = [self._expected(name, prompt, matched.get(name, 0), usual, now_s) for name in names]
        ranked.sort(key=lambda replica: (not replica.fits, replica.cost_s))
        if len(ranked) < 2:
            return ranked
        best, limit_s = ranked[0], ranked[0].cost_s * (1 + _TIE)
        num_tied = sum(replica.fits == best.fits and replica.cost_s <= limit_s for replica in ranked)
        tied = ranked[:num_tied]
        self._random.shuffle(tied)
        return tied + ranked[num_tied:]

    def note_routed(self, ranked: RankedReplica, prompt: PromptBlocks, now_s: float) -> None:
        """Count a request that was sent to a replica until a report covers it. ranked: an item of the result of `rank`."""
        replica = self._replica(ranked.replica_id)
        num_tokens = prompt.num_tokens - ranked.num_cached
        prefill_s = num_tokens * replica.known_load(self._usual_load()).prefill_token_s
        replica.sent.append(_Sent(now_s, num_tokens, prefill_s))
        self._index.expect(ranked.replica_id, prompt.hashes, now_s + ranked.ttft_s)

    def _replica(self, replica_id: str) -> _Replica:
        return self._replicas.setdefault(replica_id, _Replica())

    def _state(self, replica_id: str) -> str:
        replica = self._replicas.get(replica_id)
        return "ready" if replica is None else replica.state

    def _usual_load(self) -> ReplicaLoad:
        """Return the load assumed of a replica without a report: idle, with the median costs of the others."""
        loads = [replica.load for replica in self._replicas.values() if replica.load is not None]
        return ReplicaLoad(
            num_slots=max((load.num_slots for load in loads), default=1),
            prefill_token_s=_median((load.prefill_token_s for load in loads), _SLOW_TOKEN_S),
            tick_s=_median((load.tick_s for load in loads), _SLOW_TICK_S),
            slot_s=_median((load.slot_s for load in loads), 0.0),
        )

    def _expected(
        self, name: str, prompt: PromptBlocks, num_blocks: int, usual: ReplicaLoad, now_s: float
    ) -> RankedReplica:
        replica = self._replicas.get(name) or _Replica()
        load = replica.known_load(usual)
        num_cached = min(num_blocks * BLOCK_TOKENS, prompt.num_tokens - 1)
        num_left = prompt.num_tokens - num_cached
        wait_s = replica.wait_s(load, now_s)
        return RankedReplica(
            replica_id=name,
            num_cached=num_cached,
            wait_s=wait_s,
            ttft_s=wait_s + num_left * load.prefill_token_s + load.tick_s,
            fits=num_left <= replica.free_cells(load),
        )


def _median(measured: Iterable[float], default: float) -> float:
    """Return the median of the measured times without zeros, or the default if there are none."""
    return median([seconds for seconds in measured if seconds] or [default])
