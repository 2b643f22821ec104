"""How replicas are chosen. The others are given more than they have in practice: exact numbers of open requests, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from paceline.cluster import BLOCK_TOKENS, PromptBlocks, ReplicaReport, Router


@dataclass
class Cluster:
    """The view of a policy: the replicas, and the number of open requests at each."""

    names: list[str]
    num_open: dict[str, int] = field(default_factory=dict)

    def least_loaded(self, names: Sequence[str], random: Random) -> str:
        fewest = min(self.num_open[name] for name in names)
        return random.choice([name for name in names if self.num_open[name] == fewest])


class Policy(Protocol):
    """Chooses a replica for each request."""

    def choose(self, prompt: PromptBlocks, cluster: Cluster, now_s: float) -> str: ...

    def observe(self, name: str, report: ReplicaReport, now_s: float, age_s: float) -> bool: ...

    def remove(self, name: str) -> None: ...


class _Blind:
    """Uses no reports."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def observe(self, name: str, report: ReplicaReport, now_s: float, age_s: float) -> bool:
        return True

    def remove(self, name: str) -> None:
        pass


class ChooseRandom(_Blind):
    """Any."""

    def choose(self, prompt: PromptBlocks, cluster: Cluster, now_s: float) -> str:
        return self.random.choice(cluster.names)


class RoundRobin(_Blind):
    """The next one."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._next = 0

    def choose(self, prompt: PromptBlocks, cluster: Cluster, now_s: float) -> str:
        self._next += 1
        return cluster.names[self._next % len(cluster.names)]


class LeastLoaded(_Blind):
    """The replica with the fewest open requests."""

    def choose(self, prompt: PromptBlocks, cluster: Cluster, now_s: float) -> str:
        return cluster.least_loaded(cluster.names, self.random)


class PowerOfTwo(_Blind):
    """The replica with fewer open requests, of two random replicas."""

    def choose(self, prompt: PromptBlocks, cluster: Cluster, now_s: float) -> str:
        two = self.random.sample(cluster.names, min(2, len(cluster.names)))
        return cluster.least_loaded(two, self.random)


class PrefixAffinity(_Blind):
    """Sends a prompt to the replica that got most of it before, however busy it is; nothing is ever forgotten.

    max_imbalance: if given, only while the numbers of open requests differ by no more, like Ray Serve's prefix router by
    default. That router otherwise takes the better of two replicas, and if less than a tenth of a prompt is known, the
    replica with the fewest known prefixes.
    """

    def __init__(self, random: Random, max_imbalance: int | None = None) -> None:
        super().__init__(random)
        self._max_imbalance = max_imbalance
        self._balanced = PowerOfTwo(random)
        self._sent: dict[str, set[int]] = {}

    def remove(self, name: str) -> None:
        self._sent.pop(name, None)

    def choose(self, prompt: PromptBlocks, cluster: Cluster, now_s: float) -> str:
        name = self._choose(prompt, cluster, now_s)
        self._sent.setdefault(name, set()).update(prompt.hashes)
        return name

    def _choose(self, prompt: PromptBlocks, cluster: Cluster, now_s: float) -> str:
        counts = [cluster.num_open[name] for name in cluster.names]
        if self._max_imbalance is not None and max(counts) - min(counts) > self._max_imbalance:
            return self._balanced.choose(prompt, cluster, now_s)
        known = {name: self._num_known(prompt, name) for name in cluster.names}
        most = max(known.values())
        if most * BLOCK_TOKENS < 0.1 * prompt.num_tokens:
            if self._max_imbalance is None:
                return cluster.least_loaded(cluster.names, self.random)
            return min(cluster.names, key=lambda name: len(self._sent.get(name, ())))
        return cluster.least_loaded([name for name, num in known.items() if num == most], self.random)

    def _num_known(self, prompt: PromptBlocks, name: str) -> int:
        sent = self._sent.get(name, set())
        return next((place for place, value in enumerate(prompt.hashes) if value not in sent), len(prompt.hashes))


class Ours:
    """`paceline.cluster.Router`, with the reports that replicas send it; several routers that know nothing of each other."""

    def __init__(self, random: Random, num_routers: int = 1) -> None:
        self._routers = [Router(random) for _ in range(num_routers)]
        self._random = random

    def observe(self, name: str, report: ReplicaReport, now_s: float, age_s: float) -> bool:
        results = [router.observe(name, report, now_s, age_s=age_s) for router in self._routers]
        return all(results)

    def remove(self, name: str) -> None:
        for router in self._routers:
            router.remove(name)

    def choose(self, prompt: PromptBlocks, cluster: Cluster, now_s: float) -> str:
        router = self._random.choice(self._routers)
        best = router.rank(prompt, cluster.names, now_s)[0]
        router.note_routed(best, prompt, now_s)
        return best.replica_id


POLICIES: dict[str, Callable[[Random], Policy]] = {
    "random": ChooseRandom,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "prefix_only": PrefixAffinity,
    "serve_prefix": lambda random: PrefixAffinity(random, max_imbalance=10),
    "ours": Ours,
    "ours_4_routers": lambda random: Ours(random, num_routers=4),
}
