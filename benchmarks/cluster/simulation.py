"""Many replicas, in turn in simulated time: arrivals, ticks, reports that are late or lost, replicas that leave."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from benchmarks.cluster.policies import Cluster, Policy
from benchmarks.cluster.replica import Job, Machine, Replica
from benchmarks.cluster.traces import Dialogue
from paceline.cluster import ReplicaReport, hash_prompt
from paceline.request import RequestOptions


@dataclass(frozen=True)
class Setting:
    """The simulation's settings besides the trace.

    report_s: seconds between the reports of a replica. delay_s: seconds until a report arrives. lost_share: share of reports
    that never arrive. leaves: the times at which replicas leave, with all of their state.
    """

    num_replicas: int
    machine: Machine = field(default_factory=Machine)
    report_s: float = 0.5
    delay_s: float = 0.1
    lost_share: float = 0.0
    leaves: tuple[tuple[float, int], ...] = ()
    seed: int = 1


@dataclass
class Outcome:
    """The results of a trace. update_bytes: bytes of digests in each sent report."""

    jobs: list[Job] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    update_bytes: list[int] = field(default_factory=list)
    num_resyncs: int = 0

    @property
    def num_prompt(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def num_computed(self) -> int:
        return sum(job.num_computed for job in self.jobs)

    @property
    def hit_rate(self) -> float:
        return 1 - self.num_computed / self.num_prompt

    def ttft_s(self, quantile: float) -> float:
        times = sorted(job.ttft_s for job in self.jobs)
        return times[min(len(times) - 1, int(quantile * len(times)))]

    @property
    def imbalance(self) -> float:
        """The busy time of the busiest replica, relative to the mean."""
        return max(self.busy_s) / (sum(self.busy_s) / len(self.busy_s))


class Simulation:
    """Events in the order of their times, at equal times in the order of creation."""

    def __init__(self, trace: list[Dialogue], policy: Policy, setting: Setting) -> None:
        self._policy, self._setting = policy, setting
        self._random = Random(setting.seed)
        self._replicas = {f"r{place}": Replica(f"r{place}", setting.machine) for place in range(setting.num_replicas)}
        self._cluster = Cluster(list(self._replicas), dict.fromkeys(self._replicas, 0))
        self._ticking: set[str] = set()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order, self._keys = count(), count()
        self._going_on: dict[int, tuple[Dialogue, int]] = {}
        self._num_left = sum(len(record.turns) for record in trace)
        self._missed: set[str] = set()
        self.outcome = Outcome()
        for dialogue in trace:
            self._at(dialogue.start_s, lambda now_s, one=dialogue: self._arrive(now_s, one, 0, list(one.head)))  # type: ignore[misc]
        for place, name in enumerate(self._replicas):
            first_s = setting.report_s * place / setting.num_replicas
            self._at(first_s, lambda now_s, name=name: self._ask_report(now_s, name))  # type: ignore[misc]
        for at_s, place in setting.leaves:
            self._at(at_s, lambda now_s, name=f"r{place}": self._leave(now_s, name))  # type: ignore[misc]

    def run(self) -> Outcome:
        """Run until every request has ended."""
        while self._num_left:
            now_s, _, do = heapq.heappop(self._events)
            do(now_s)
        self.outcome.busy_s = [replica.busy_s for replica in self._replicas.values()]
        return self.outcome

    def _at(self, when_s: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), do))

    def _arrive(self, now_s: float, dialogue: Dialogue, turn: int, history: list[int]) -> None:
        said = dialogue.turns[turn]
        job = Job(next(self._keys), history + list(said.added), said.num_generated, now_s)
        self._going_on[job.key] = (dialogue, turn)
        self._route(now_s, job)

    def _route(self, now_s: float, job: Job) -> None:
        prompt = hash_prompt(job.prompt + job.generated, RequestOptions())
        name = self._policy.choose(prompt, self._cluster, now_s)
        self._cluster.num_open[name] += 1
        self._replicas[name].submit(job)
        self._wake(now_s, name)

    def _wake(self, now_s: float, name: str) -> None:
        if name not in self._ticking:
            self._ticking.add(name)
            self._at(now_s, lambda now_s: self._tick(now_s, name))

    def _tick(self, now_s: float, name: str) -> None:
        self._ticking.discard(name)
        if name not in self._cluster.names:
            return
        replica = self._replicas[name]
        ended, report = replica.tick(now_s)
        end_s = replica.clock.now()
        for job in ended:
            self._at(end_s, lambda now_s, job=job: self._end(now_s, name, job))  # type: ignore[misc]
        if report is not None:
            self._send(end_s, name, report)
        if replica.jobs:
            self._wake(end_s, name)

    def _end(self, now_s: float, name: str, job: Job) -> None:
        self._num_left -= 1
        self._cluster.num_open[name] -= 1
        self.outcome.jobs.append(job)
        dialogue, turn = self._going_on.pop(job.key)
        if turn + 1 < len(dialogue.turns):
            history, next_s = job.prompt + job.generated, now_s + dialogue.turns[turn].think_s
            self._at(next_s, lambda now_s: self._arrive(now_s, dialogue, turn + 1, history))

    def _ask_report(self, now_s: float, name: str) -> None:
        if name in self._cluster.names:
            self._replicas[name].ask_report()
            self._wake(now_s, name)
            self._at(now_s + self._setting.report_s, lambda now_s: self._ask_report(now_s, name))

    def _send(self, now_s: float, name: str, report: ReplicaReport) -> None:
        if name in self._missed:
            self._missed.discard(name)
            self.outcome.num_resyncs += 1
            report = ReplicaReport(state=report.state, load=report.load, updates=(self._replicas[name].snapshot(),))
        self.outcome.update_bytes.append(sum(len(update.added) + len(update.removed) for update in report.updates))
        if self._random.random() >= self._setting.lost_share:
            self._at(now_s + self._setting.delay_s, lambda now_s: self._deliver(now_s, name, report))

    def _deliver(self, now_s: float, name: str, report: ReplicaReport) -> None:
        if name not in self._cluster.names:
            return
        if not self._policy.observe(name, report, now_s, self._setting.delay_s):
            self._missed.add(name)

    def _leave(self, now_s: float, name: str) -> None:
        self._cluster.names.remove(name)
        self._policy.remove(name)
        replica = self._replicas[name]
        jobs = list(replica.jobs.values())
        replica.jobs.clear()
        for job in jobs:
            job.num_moved += 1
            self._route(now_s, job)
