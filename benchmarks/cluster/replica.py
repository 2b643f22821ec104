"""A replica: the scheduler, the KV cache and the executor of the engine, on a fake backend with a clock of its own."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline import SamplingParams
from paceline.cluster import BLOCK_TOKENS, DigestPublisher, DigestUpdate, LoadMeter, ReplicaReport
from paceline.engine.backend import Executor
from paceline.engine.core import Ask, Command, Engine, Submit
from paceline.engine.questions import digest, slots
from paceline.kv_cache import PrefixDigest
from paceline.observability.metrics import Instruments, Metrics
from paceline.request import RequestOptions
from paceline.scheduling.records import Answered, Delta, Event, SlotsSnapshot
from paceline.scheduling.scheduler import Scheduler
from paceline.scheduling.strategies import resolve_strategy
from paceline.sequence import Request
from paceline.testing.fake_backend import FakeBackend, FakeCost, ManualClock, limits_of

_QUESTION = -1  # the key of digests and slots: requests have keys from 0 on


@dataclass(frozen=True)
class Machine:
    """The properties of a replica: costs, cells, slots, and the largest size of a report."""

    cost: FakeCost = dataclasses.field(default_factory=lambda: FakeCost(base_s=0.02, token_s=0.001))
    num_cells: int = 16_384
    num_slots: int = 8
    host_bytes: int = 0
    max_report_bytes: int = 64 * 1024


class _Commands:
    def __init__(self) -> None:
        self.queue: deque[Command] = deque()

    def take(self) -> list[Command]:
        taken = list(self.queue)
        self.queue.clear()
        return taken


@dataclass
class Job:
    """A request and its outcome. num_moved: how often its replica left before its end."""

    key: int
    prompt: list[int]
    max_tokens: int
    submitted_s: float
    generated: list[int] = dataclasses.field(default_factory=list)
    first_s: float | None = None
    ended_s: float | None = None
    num_computed: int = 0
    num_moved: int = 0

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.submitted_s


class Replica:
    """Computes jobs tick by tick on its own clock.

    Attributes:
        clock: At the end of the last tick.
        busy_s: Seconds in ticks.
        jobs: Unfinished jobs, by key.
    """

    def __init__(self, name: str, machine: Machine, epoch: int = 1) -> None:
        self.name, self.clock, self.busy_s = name, ManualClock(), 0.0
        self.jobs: dict[int, Job] = {}
        num_seq_ids = machine.num_slots + 64
        self._backend = FakeBackend(
            clock=self.clock, num_seq_ids=num_seq_ids, num_cells=machine.num_cells, cost=machine.cost, eos_every=10**9
        )
        limits = dataclasses.replace(
            limits_of(self._backend, num_seq_ids),
            num_slots=machine.num_slots,
            n_batch=512,
            n_ubatch=512,
            chunk_size=512,
            itl_target_s=0.25,
            max_tick_s=1.0,
            host_bytes=machine.host_bytes,
        )
        self._metrics = Metrics(machine.num_slots)
        scheduler = Scheduler(limits, resolve_strategy("paced"), self.clock, Instruments((), own=self._metrics))
        self._commands = _Commands()
        self._engine = Engine(self._commands, scheduler, Executor(self._backend, self.clock))
        self._publisher = DigestPublisher(epoch, machine.max_report_bytes)
        self._meter = LoadMeter(machine.num_cells)

    def submit(self, job: Job) -> None:
        """Queue a job for the next tick; a moved job continues after its tokens so far."""
        params = SamplingParams(temperature=0, max_tokens=job.max_tokens - len(job.generated), ignore_eos=True)
        prompt = job.prompt + job.generated
        request = Request(
            key=job.key,
            prompt=prompt,
            params=params,
            options=RequestOptions(),
            samplers=self._backend.make_samplers(params, prompt),
            vocabulary=self._backend.vocabulary,
            submitted_s=self.clock.now(),
        )
        self.jobs[job.key] = job
        self._commands.queue.append(Submit(request))

    def ask_report(self) -> None:
        """Let the next tick make a report, at most one."""
        if not any(isinstance(command, Ask) for command in self._commands.queue):
            self._commands.queue += [
                slots.command(_QUESTION, ()),
                digest.command(_QUESTION, (self._publisher.max_prefixes, BLOCK_TOKENS)),
            ]

    def tick(self, now_s: float) -> tuple[list[Job], ReplicaReport | None]:
        """Run a tick that begins at that time; return the jobs that ended with it, and the report if one was asked for."""
        self.clock.advance(max(0.0, now_s - self.clock.now()))
        start_s = self.clock.now()
        events = self._engine.tick()
        self.busy_s += self.clock.now() - start_s
        ended = [job for event in events if (job := self._take(event)) is not None]
        answers = [event.result for event in events if isinstance(event, Answered)]
        return ended, self._report(answers) if answers else None

    def snapshot(self) -> DigestUpdate:
        """Return the whole digest of the last report."""
        return self._publisher.snapshot()

    def _report(self, answers: Sequence[object]) -> ReplicaReport:
        (views,) = [answer for answer in answers if isinstance(answer, SlotsSnapshot)]
        (prefixes,) = [answer for answer in answers if isinstance(answer, PrefixDigest)]
        load = self._meter.read(self._metrics.snapshot(), views)
        return ReplicaReport(state="ready", load=load, updates=(self._publisher.publish(prefixes),))

    def _take(self, event: Event) -> Job | None:
        """Add the tokens of an event to its job; return the job if the event ends it."""
        if not isinstance(event, Delta) or event.chunk is None:
            return None
        job, now_s = self.jobs[event.key], self.clock.now()
        if event.chunk.token_ids:
            job.generated += event.chunk.token_ids
            job.first_s = now_s if job.first_s is None else job.first_s
        if not event.is_last:
            return None
        usage = event.chunk.usage
        assert usage is not None
        assert event.chunk.error is None, event.chunk.error
        job.ended_s, job.num_computed = now_s, job.num_computed + usage.prompt_tokens - usage.cached_tokens
        del self.jobs[job.key]
        return job
