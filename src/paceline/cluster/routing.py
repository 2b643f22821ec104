"""Which replica gives a request its first token soonest.

    expected time to first token = what waits there + what is left to compute of the prompt + a tick

What waits is the longer of two: the prompt tokens before it, and the time until a slot is free. Both are what the last
report said, less the time since, and what this router has sent there since. Cached is what the digests say, and what is being
computed of requests that this router sent. All of it may be wrong: then a request waits longer than it had to.

Replicas are compared by this time and half of what is left to compute once more: the requests behind wait for that as well,
and choices that look at their own request alone compute more for all.

Pure: times are handed in, and ties are broken by a given source of random numbers. One thread at a time may call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Final

import msgspec

from paceline import validation
from paceline.cluster.block_hashes import BLOCK_TOKENS, PromptBlocks
from paceline.cluster.prefix_index import PrefixIndex
from paceline.cluster.replica_report import ReplicaLoad, ReplicaReport, check_report

_TIE: Final = 0.01  # relative difference of two times that means nothing
_FOR_OTHERS: Final = 0.5  # weight of the time that is computed, for the requests behind
_MAX_EXPECTED: Final = 1 << 14  # hashes of a replica: 64 bits each, a million tokens
_SLOW_TOKEN_S: Final = 0.005  # a slow machine's, where no replica has measured any
_SLOW_TICK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class RankedReplica:
    """A replica that may take a request.

    Attributes:
        replica_id: Its name.
        num_cached: Tokens of the prompt that it is thought to have, whole blocks of them, never all of the prompt.
        wait_s: Expected seconds until it begins with the prompt.
        ttft_s: Expected seconds to the first token, wait_s included.
        fits: Whether its free cells are thought to hold the rest of the prompt.
    """

    replica_id: str
    num_cached: int
    wait_s: float
    ttft_s: float
    fits: bool

    @property
    def cost_s(self) -> float:
        """What replicas are compared by: ttft_s, and half of what it computes for the requests behind it."""
        return self.ttft_s + _FOR_OTHERS * (self.ttft_s - self.wait_s)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request that was sent after the last report: when, how many tokens there are to compute, and the seconds."""

    at_s: float
    num_tokens: int
    prefill_s: float


class _Replica:
    """What a router knows of one replica: its last report, and what was sent there since."""

    def __init__(self) -> None:
        self.state = "ready"
        self.load: ReplicaLoad | None = None
        self.read_s = 0.0
        self.sent: list[_Sent] = []

    def observe(self, report: ReplicaReport, read_s: float) -> None:
        self.state, self.load, self.read_s = report.state, report.load, read_s
        self.sent = [one for one in self.sent if one.at_s > read_s]

    def known_load(self, usual: ReplicaLoad) -> ReplicaLoad:
        """Return its load, with the usual costs for those that it has not measured."""
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
        """Return the expected time until a request that is sent now gets its slot and the prompts before it are computed."""
        busy_until_s = self.read_s + load.waiting_tokens * load.prefill_token_s
        for one in self.sent:
            busy_until_s = max(busy_until_s, one.at_s) + one.prefill_s
        num_ahead = load.num_running + load.num_waiting + len(self.sent) - load.num_slots + 1
        slot_at_s = self.read_s + max(0, num_ahead) * load.slot_s / load.num_slots
        return max(0.0, busy_until_s - now_s, slot_at_s - now_s)

    def free_cells(self, load: ReplicaLoad) -> float:
        if load.free_cells is None:
            return float("inf")
        return load.free_cells - load.waiting_tokens - sum(one.num_tokens for one in self.sent)


class Router:
    """Ranks replicas for requests by what they report.

    Args:
        random: Breaks ties; the same numbers, reports and requests give the same choices.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._replicas: dict[str, _Replica] = {}
        self._index = PrefixIndex(_MAX_EXPECTED)

    def observe(self, replica_id: str, report: ReplicaReport, now_s: float, *, age_s: float = 0.0) -> bool:
        """Take in a report.

        Args:
            replica_id: The replica that it is from.
            report: The report.
            now_s: The time, on the router's clock.
            age_s: How long ago it was made, as far as is known. What was sent to the replica within that time is added to it.

        Returns:
            False if a digest update before this one was missed. What was known of the cached prefixes stays until
            `DigestPublisher.snapshot` comes; the rest of the report counts.

        Raises:
            InvalidParams: No replica reports this; nothing is changed.
        """
        check_report(report)
        read_s = validation.number("now_s", now_s) - validation.number("age_s", age_s, 0)
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.load is not None and read_s < replica.read_s:
            return True  # it was overtaken by a later one
        is_current = report.digest is None or self._index.apply(replica_id, report.digest)
        self._replica(replica_id).observe(report, read_s)
        self._index.settle(replica_id, read_s)
        return is_current

    def remove(self, replica_id: str) -> None:
        """Forget a replica that is gone; one that was never seen is no error."""
        self._replicas.pop(replica_id, None)
        self._index.remove(replica_id)

    def rank(self, prompt: PromptBlocks, candidates: Iterable[str], now_s: float) -> list[RankedReplica]:
        """Return the replicas that may take a request, the best first.

        Args:
            prompt: The request's, by `hash_prompt`.
            candidates: The replicas that are there. One that has not reported yet is taken for idle and empty, and as
                fast as the others.
            now_s: The time, on the router's clock.

        Returns:
            All candidates that are not draining or unhealthy: those whose cells hold the prompt before others, by their
            cost_s; those that are within a hundredth of the best, in random order. Empty: no replica takes requests.
        """
        names = [name for name in dict.fromkeys(candidates) if self._state(name) == "ready"]
        matched = self._index.matched_blocks(prompt.hashes, names)
        usual = self._usual_load()
        ranked = [self._expected(name, prompt, matched.get(name, 0), usual, now_s) for name in names]
        ranked.sort(key=lambda one: (not one.fits, one.cost_s))
        if len(ranked) < 2:
            return ranked
        best, limit_s = ranked[0], ranked[0].cost_s * (1 + _TIE)
        num_tied = sum(one.fits == best.fits and one.cost_s <= limit_s for one in ranked)
        tied = ranked[:num_tied]
        self._random.shuffle(tied)
        return tied + ranked[num_tied:]

    def note_routed(self, ranked: RankedReplica, prompt: PromptBlocks, now_s: float) -> None:
        """Count a request that was sent to a replica, until a report has it; one of those that `rank` returned for it."""
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
        """Return what is taken for the load of a replica without a report: idle, with the costs of the others."""
        loads = [one.load for one in self._replicas.values() if one.load is not None]
        return ReplicaLoad(
            num_slots=max((one.num_slots for one in loads), default=1),
            num_running=0,
            num_waiting=0,
            waiting_tokens=0,
            free_cells=None,
            prefill_token_s=_usual((one.prefill_token_s for one in loads), _SLOW_TOKEN_S),
            tick_s=_usual((one.tick_s for one in loads), _SLOW_TICK_S),
            slot_s=_usual((one.slot_s for one in loads), 0.0),
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


def _usual(measured: Iterable[float], slow: float) -> float:
    """Return the median of what was measured, 0 aside."""
    return median([one for one in measured if one] or [slow])
