"""An engine on the fake backend that a test ticks by hand, and its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from paceline.clock import Clock
from paceline.engine.backend import Executor
from paceline.engine.core import Ask, Cancel, Command, EndSlow, Engine, SetInterval, SetPaused, Stop, Submit
from paceline.errors import DecodeError, PacelineError, SamplingError
from paceline.kv_cache import DiskStore, MediaItem, Remove, Truncate, pack_tokens
from paceline.observability.metrics import Instrument, Instruments, Metrics
from paceline.output import Vocabulary
from paceline.params import FIELDS, SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import Answered, Delta, Embedded, EmbeddingRequest, Event, Released, Started
from paceline.scheduling.scheduler import Scheduler
from paceline.scheduling.strategies import BatchStrategy, SchedulerView, TokenAllocation, resolve_strategy
from paceline.sequence import Limits, Request, Row, prefix_namespace
from paceline.speculation.drafter import Drafter
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs
from paceline.testing.fake_backend import BOS, EOS, FakeBackend, FakeSampler, FakeState, ManualClock


class Faults:
    """Failures in a world, set by a test."""

    def __init__(self) -> None:
        self.next_passes: deque[Exception] = deque()  # each ends one pass, whatever is in it
        self.poisonous: set[int] = set()  # requests that no pass survives
        self.undrawable: set[int] = set()  # requests whose next draw fails, once
        self.next_plans: deque[Exception] = deque()  # each is raised by the strategy, once

    def of_pass(self, number: int, rows: Many[Row]) -> Exception | None:
        if self.next_passes:
            return self.next_passes.popleft()
        poisonous = [row.sequence.request.key for row in rows if row.sequence.request.key in self.poisonous]
        return DecodeError(f"request {poisonous[0]} cannot be computed") if poisonous else None

    def of_row(self, row: Row) -> PacelineError | None:
        key = row.sequence.request.key
        if key not in self.undrawable:
            return None
        self.undrawable.discard(key)
        return SamplingError("every token is masked")


class FaultyStrategy:
    """Another strategy, but for the plans that fail."""

    def __init__(self, strategy: BatchStrategy, faults: Faults) -> None:
        self._strategy, self._faults = strategy, faults

    def plan(self, view: SchedulerView, budget: int) -> Many[TokenAllocation]:
        if self._faults.next_plans:
            raise self._faults.next_plans.popleft()
        return self._strategy.plan(view, budget)


class Scripted(FakeSampler):
    """Draws the tokens of a list in order, and then ends of generation."""

    def __init__(self, tokens: Many[int], end: int = 256) -> None:
        super().__init__(SamplingParams(), 0, 1)
        self._tokens = deque(tokens)
        self._end = end

    def draw(self, history: int) -> int:
        return self._tokens.popleft() if self._tokens else self._end


class Commands:
    """The commands of one test, in order."""

    def __init__(self) -> None:
        self.queue: deque[Command] = deque()

    def take(self) -> list[Command]:
        commands = list(self.queue)
        self.queue.clear()
        return commands


@dataclass
class Outcome:
    """All events of a request."""

    request: Request
    chunks: list[StreamChunk] = field(default_factory=list)
    terminal: StreamChunk | None = None
    is_started: bool = False
    is_released: bool = False

    def of_choice(self, choice: int = 0) -> list[StreamChunk]:
        return [chunk for chunk in self.chunks if chunk.choice == choice]

    def token_ids(self, choice: int = 0) -> list[int]:
        return [token for chunk in self.of_choice(choice) for token in chunk.token_ids]

    def logprobs(self, choice: int = 0) -> list[TokenLogprobs]:
        return [token for chunk in self.of_choice(choice) for token in chunk.logprobs]

    def last(self, choice: int = 0) -> StreamChunk:
        """The chunk with which a choice ended."""
        (chunk,) = [chunk for chunk in self.of_choice(choice) if chunk.finish_reason is not None]
        return chunk

    def drawn(self, choice: int = 0) -> list[int]:
        """All tokens that an ended choice generated, including its stop."""
        return [*self.token_ids(choice), *self.last(choice).stop_token_ids]

    def text(self, choice: int = 0) -> str:
        return "".join(chunk.text for chunk in self.of_choice(choice))

    def reason(self, choice: int = 0) -> FinishReason | None:
        reasons = [chunk.finish_reason for chunk in self.of_choice(choice) if chunk.finish_reason is not None]
        assert len(reasons) <= 1, reasons
        return reasons[0] if reasons else None


def make_request(
    backend: FakeBackend,
    clock: Clock,
    key: int,
    prompt: str | list[int],
    *,
    script: Many[int] | None = None,
    media: Many[MediaItem] = (),
    **options: Any,
) -> Request:
    """Return a request that is not submitted; greedy unless params say otherwise. script: the tokens to draw."""
    params = SamplingParams(**{"temperature": 0, **{k: v for k, v in options.items() if k in FIELDS}})
    rest = RequestOptions(**{k: v for k, v in options.items() if k not in FIELDS})
    ids = backend.encode(prompt) if isinstance(prompt, str) else list(prompt)
    return Request(
        key=key,
        prompt=ids,
        params=params,
        options=rest,
        samplers=backend.make_samplers(params, ids) if script is None else (Scripted(script),) * params.n,
        submitted_s=clock.now(),
        vocabulary=backend.vocabulary,
        lora=tuple(rest.lora),
        media=tuple(media),
        echo=bytes(token for token in ids if token < 256).decode("utf-8", "replace") if params.echo else "",
    )


def make_limits(backend: FakeBackend, **wanted: Any) -> Limits:
    """Return small limits, as the backend's memory allows."""
    kind, num_cells = backend.memory.kind, backend.memory.num_cells
    return Limits(
        **{
            "num_slots": 4,
            "n_batch": 64,
            "n_ubatch": 64,
            "chunk_size": 32,
            "max_positions": num_cells,
            "num_cells": None if kind == "recurrent" else num_cells,
            "num_seq_ids": backend.memory.num_seq_ids,
            "host_bytes": 16_000,
            "max_scored": 8,
            "can_share_part": kind == "attention",
            "has_state_apart": backend.memory.has_state_apart,
            "boundary_ids": frozenset({EOS, BOS}),
            "itl_target_s": 0.05,
            "max_tick_s": 0.2,
            "embed_tokens": 64,
            "embed_texts": 4,
            "max_drafted": 0 if kind == "compressed" else 12,
            "max_rollback": backend.memory.max_rollback,
            "n_vocab": BOS + 1,
            **wanted,
        }
    )


def make_scheduler(
    limits: Limits,
    strategy: BatchStrategy,
    clock: Clock,
    instruments: tuple[Instrument, ...],
    drafter: Drafter | None = None,
    store: DiskStore | None = None,
) -> Scheduler:
    """As an engine has it."""
    return Scheduler(limits, strategy, clock, Instruments(instruments), drafter, store)


def check_memory(scheduler: Scheduler, backend: FakeBackend) -> None:
    """Memory holds exactly the running and kept sequences, and cells about to be removed."""
    held, cache = backend.memory._sequences, scheduler.kv_cache
    there = {sequence.seq_id for sequence in scheduler.running} | set(cache._offloader.seq_ids)
    leaving = {operation.seq_id for operation in cache._cells.operations if isinstance(operation, Remove)}
    cut = {
        operation.seq_id: operation.num_tokens
        for operation in cache._cells.operations
        if isinstance(operation, Truncate)
    }
    assert there.isdisjoint(leaving)
    assert {seq_id for seq_id, item in enumerate(held) if item.hashes} <= there | leaving
    for sequence in scheduler.running:
        assert sequence.seq_id is not None
        assert len(held[sequence.seq_id].hashes) == sequence.num_computed_tokens
    for kept in cache._offloader.prefixes:
        num_held = cut.get(kept.seq_id, len(held[kept.seq_id].hashes))
        assert kept.layout.shareable(num_held) == kept.num_computed_tokens
    if scheduler._limits.num_cells is not None:
        cells = {cell for seq_id in there for cell in held[seq_id].cells[: cut.get(seq_id)]}
        assert len(cells) == cache.num_cells


class World:
    """Engine, clock and backend. By default each tick is followed by a check of everything."""

    def __init__(
        self,
        *,
        strategy: str | BatchStrategy = "paced",
        instruments: tuple[Instrument, ...] = (),
        limits: dict[str, Any] | None = None,
        vocabulary: Vocabulary | None = None,
        drafter: Drafter | None = None,
        store: DiskStore | None = None,
        **backend: Any,
    ) -> None:
        self._make: dict[str, Any] = {"strategy": strategy, "limits": limits, "vocabulary": vocabulary, **backend}
        self.clock = ManualClock()
        self.faults = Faults()
        self.metrics = Metrics()
        backend.setdefault("fail", self.faults.of_pass)
        backend.setdefault("fail_row", self.faults.of_row)
        wanted = dict(limits or {})
        num_slots = wanted.get("num_slots", 4)
        is_shared = backend.get("kind", "attention") == "attention"
        backend.setdefault("num_seq_ids", num_slots + 3 if is_shared else num_slots)
        self.backend = FakeBackend(clock=self.clock, **backend)
        self.vocabulary = self.backend.vocabulary = vocabulary or self.backend.vocabulary
        self.limits = make_limits(self.backend, **wanted)
        self.commands = Commands()
        self.scheduler = make_scheduler(
            self.limits,
            FaultyStrategy(resolve_strategy(strategy), self.faults),
            self.clock,
            (self.metrics, *instruments),
            drafter,
            store,
        )
        self.executor = Executor(self.backend, self.clock)
        self.engine = Engine(self.commands, self.scheduler, self.executor)
        self.outcomes: dict[int, Outcome] = {}
        self.embedding_requests: dict[int, EmbeddingRequest] = {}
        self.embedded: dict[int, Embedded] = {}
        self.exported: dict[int, list[FakeState] | None] = {}  # None until the event comes
        self.imported: dict[int, list[FakeState] | None] = {}
        self._next_key = 0
        self.num_ticks = 0

    # ---- what callers do

    def request(self, prompt: str | list[int], **options: Any) -> Request:
        """A request that is not submitted."""
        self._next_key += 1
        return make_request(self.backend, self.clock, self._next_key, prompt, **options)

    def fresh(self, request: Request, key: int) -> Request:
        """Another identical request, without recorded events."""
        samplers = self.backend.make_samplers(request.params, request.prompt)
        return Request(
            key=key,
            prompt=request.prompt,
            params=request.params,
            options=request.options,
            samplers=samplers,
            submitted_s=self.clock.now(),
            vocabulary=self.backend.vocabulary,
            media=request.media,
        )

    def submit(self, prompt: str | list[int], **options: Any) -> Outcome:
        request = self.request(prompt, **options)
        outcome = self.outcomes[request.key] = Outcome(request)
        self.commands.queue.append(Submit(request))
        return outcome

    def alone(self, prompt: str | list[int], **options: Any) -> Outcome:
        """The outcome of the same request in a world of its own, of the same make."""
        world = World(**self._make)
        outcome = world.submit(prompt, **options)
        world.run()
        return outcome

    def submit_embedding(self, texts: list[str], *, pooling: str | None = None, **options: Any) -> int:
        self._next_key += 1
        request = EmbeddingRequest(
            key=self._next_key,
            texts=[self.backend.encode(text) for text in texts],
            pooling=pooling,
            options=RequestOptions(**options),
            submitted_s=self.clock.now(),
        )
        self.embedding_requests[request.key] = request
        self.commands.queue.append(Submit(request))
        return request.key

    def export(self, token_ids: list[int], **options: Any) -> int:
        """Export the cached part of a prefix; return the key of the result."""
        self._next_key += 1
        self.exported[self._next_key] = None
        namespace = prefix_namespace(RequestOptions(**options))
        key, tokens = self._next_key, pack_tokens(token_ids)
        self.commands.queue.append(
            Ask(key, lambda engine: engine.scheduler.export(key, namespace, tokens), may_change_cache=True)
        )
        return self._next_key

    def bring_in(self, token_ids: list[int], states: list[FakeState], **options: Any) -> int:
        """Import saved ranges of a prefix; return the key of the result."""
        self._next_key += 1
        self.imported[self._next_key] = None
        namespace = prefix_namespace(RequestOptions(**options))
        ranges = tuple((state.start, state.start + len(state.hashes), state) for state in states)
        tokens = pack_tokens(token_ids)

        def bring_in(engine: Engine) -> Any:
            found = engine.scheduler.import_ranges(namespace, tokens, ranges)
            return lambda: found

        self.commands.queue.append(Ask(self._next_key, bring_in, may_change_cache=True))
        return self._next_key

    def cancel_embedding(self, key: int) -> None:
        self.embedding_requests[key].cancelled = True
        self.commands.queue.append(Cancel(key))

    def cancel(self, outcome: Outcome) -> None:
        outcome.request.cancelled = True
        self.commands.queue.append(Cancel(outcome.request.key))

    def pause(self, outcome: Outcome, *, is_paused: bool = True) -> None:
        self.commands.queue.append(SetPaused(outcome.request.key, is_paused))

    def set_interval(self, outcome: Outcome, interval: int) -> None:
        self.commands.queue.append(SetInterval(outcome.request.key, interval))

    def end_slow(self, outcome: Outcome) -> None:
        self.commands.queue.append(EndSlow(outcome.request.key))

    def stop(self) -> None:
        self.commands.queue.append(Stop())

    # ---- the loop

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.num_ticks += 1
            self.take(self.engine.tick())
            self.check()

    def run(self, max_ticks: int = 5000) -> None:
        """Tick until nothing is left to do."""
        for _ in range(max_ticks):
            self.tick()
            if self.engine.is_idle and not self.commands.queue:
                return
        raise AssertionError(f"not done after {max_ticks} ticks: {self.open_keys()}")

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Delta) and event.chunk is None:
                continue
            if isinstance(event, Embedded):
                assert event.key not in self.embedded, "an embedding request ended twice"
                self.embedded[event.key] = event
            elif isinstance(event, Answered):
                results = self.exported if event.key in self.exported else self.imported
                assert results[event.key] is None, "a query got two results"
                results[event.key] = event.result
            elif event.key in self.outcomes:
                self._note(self.outcomes[event.key], event)

    def _note(self, outcome: Outcome, event: Event) -> None:
        if isinstance(event, Started):
            assert not outcome.is_started
            outcome.is_started = True
            return
        if isinstance(event, Released):
            assert outcome.terminal is not None, "released before its terminal chunk"
            assert not outcome.is_released
            outcome.is_released = True
            return
        assert isinstance(event, Delta)
        assert event.chunk is not None
        assert outcome.terminal is None, "a chunk after the terminal one"
        expected = len(outcome.token_ids(event.chunk.choice))
        assert event.chunk.index == expected, (event.chunk.index, expected)
        event.chunk.text.encode()
        outcome.chunks.append(event.chunk)
        if event.is_last:
            assert event.chunk.finish_reason is not None
            assert event.chunk.usage is not None
            outcome.terminal = event.chunk

    def check(self) -> None:
        """Check the invariants between ticks: places, positions, cells, endings, counts."""
        self.scheduler.check()
        self.metrics.check()
        for sequence in self.scheduler.running:
            assert sequence.seq_id is not None
            position = sequence.layout.position(sequence.num_computed_tokens)
            assert self.backend.positions(sequence.seq_id) == position
        self._check_memory()
        open_keys = {key for key, outcome in self.outcomes.items() if outcome.terminal is None}
        waiting_to_begin = {command.request.key for command in self.commands.queue if isinstance(command, Submit)}
        known = set(self.scheduler._requests) | {request.key for request in self.scheduler._embedding._queue.requests}
        open_keys |= self.embedding_requests.keys() - self.embedded.keys()
        assert open_keys - waiting_to_begin == known

    def check_done(self) -> None:
        """Check that nothing is left of any request, and that each has ended."""
        self.check()
        assert self.engine.is_idle
        assert not self.scheduler.running
        assert not self.scheduler._requests
        assert self.scheduler.num_waiting == 0
        cache = self.scheduler.kv_cache
        kept = set(cache._offloader.seq_ids)
        assert all(
            (self.backend.positions(seq_id) > 0) == (seq_id in kept) for seq_id in range(self.limits.num_seq_ids)
        )
        assert self.scheduler._slots.num_free == self.limits.num_slots
        assert not cache._cells.operations
        assert {owner for node in cache._tree.nodes() for owner in node.owners} == set(cache._offloader.prefixes)
        assert not self.scheduler._events
        for outcome in self.outcomes.values():
            assert outcome.terminal is not None
            assert outcome.is_released
            for choice in range(outcome.request.params.n):
                assert outcome.reason(choice) is not None
        assert self.embedded.keys() == self.embedding_requests.keys()
        assert None not in [*self.exported.values(), *self.imported.values()]
        snapshot = self.metrics.snapshot()
        assert snapshot.submitted == len(self.outcomes) + len(self.embedded)
        assert snapshot.queued == snapshot.resident == 0

    def _check_memory(self) -> None:
        check_memory(self.scheduler, self.backend)

    def open_keys(self) -> list[int]:
        return [key for key, outcome in self.outcomes.items() if outcome.terminal is None]
