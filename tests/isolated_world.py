"""Front and workers in one thread: every message is encoded and decoded, and a worker dies between two ticks, or in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.engine_world import check_memory

from paceline.engine.backend import Executor
from paceline.engine.core import Cancel, EndSlow, Engine, SetInterval, SetPaused
from paceline.engine.inbox import Inbox
from paceline.engine.worker import messages
from paceline.engine.worker.black_box import BlackBox
from paceline.engine.worker.messages import FrameReader, framed
from paceline.engine.worker.replay_log import ReplayLog
from paceline.engine.worker.supervisor import RestartLimits, Restarts
from paceline.engine.worker.worker_requests import RequestPreparer, SocketSink
from paceline.engine.worker.worker_telemetry import RequestsWatch
from paceline.kv_cache import MediaItem
from paceline.observability.metrics import Instruments, Metrics
from paceline.params import FIELDS, SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import Delta, Embedded, EmbeddingRequest, Event, Released, RequestEvent, Started
from paceline.scheduling.scheduler import Scheduler
from paceline.scheduling.strategies import resolve_strategy
from paceline.sequence import Request
from paceline.streaming import FinishReason, StreamChunk
from paceline.testing.fake_backend import FakeBackend, ManualClock, limits_of


class WireLink:
    """Keeps the sent bytes, as they would come out of a socket."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self.writes: list[list[messages.Up]] = []

    @property
    def received(self) -> list[messages.Up]:
        return [item for write in self.writes for item in write]

    def send(self, *sent: bytes) -> None:
        self.writes.append([messages.decode_up(frame) for frame in self._reader.feed(b"".join(map(framed, sent)))])


class WorkerLife:
    """One worker's engine, ticked by hand."""

    def __init__(self, clock: ManualClock, backend_options: dict[str, Any]) -> None:
        self.backend = FakeBackend(clock=clock, **backend_options)
        self.link = WireLink()
        self.inbox = Inbox(2**62)
        limits = limits_of(self.backend, backend_options.get("num_seq_ids", 8))
        self.scheduler = Scheduler(limits, resolve_strategy("paced"), clock, Instruments())
        self.scheduler.reports_held_back = True
        self.sink = SocketSink(self.link, self.inbox, self.backend, lambda: None)  # type: ignore[arg-type]
        self.box = BlackBox.create()
        self.preparer = RequestPreparer(self.inbox, self.sink, self.backend, self.box)
        self.engine = Engine(self.inbox, self.scheduler, Executor(self.backend, clock))

    def hear(self, message: messages.EngineRequest) -> None:
        decoded = messages.decode_down(messages.encode(message))
        assert isinstance(decoded, messages.EngineRequest)
        self.preparer.expect(message.key)
        self.preparer.prepare(decoded)

    def tick(self) -> list[RequestEvent]:
        self.sink.deliver(self.engine.tick())
        self.check()
        parts = [
            event
            for message in self.link.received
            if isinstance(message, messages.Happened)
            for event in message.events
        ]
        self.link.writes.clear()
        return parts

    def check(self) -> None:
        self.scheduler.check()
        check_memory(self.scheduler, self.backend)

    def check_done(self) -> None:
        """No request runs or waits, and memory holds nothing but cached prefixes."""
        self.check()
        cache = self.scheduler.kv_cache
        assert not self.scheduler._requests
        assert self.scheduler.num_waiting == 0
        assert self.scheduler._slots.num_free == self.scheduler._limits.num_slots
        assert not cache._cells.operations
        assert cache._cells.seq_ids.num_free + len(cache._offloader) == self.scheduler._limits.num_seq_ids

    def close(self) -> None:
        self.box.close()


@dataclass
class ReaderOutcome:
    """All that the reader of a request received."""

    request: Request
    chunks: list[StreamChunk] = field(default_factory=list)
    terminal: StreamChunk | None = None
    num_started: int = 0
    is_released: bool = False

    def summary(self) -> list[tuple[Any, ...]]:
        """Per choice everything that must not depend on deaths."""
        return [self._choice([chunk for chunk in self.chunks if chunk.choice == choice]) for choice in range(self.n)]

    @property
    def n(self) -> int:
        return self.request.params.n

    @staticmethod
    def _choice(chunks: list[StreamChunk]) -> tuple[Any, ...]:
        index = 0
        for chunk in chunks:
            assert chunk.index == index
            index += len(chunk.token_ids)
        last = chunks[-1]
        return (
            tuple(token for chunk in chunks for token in chunk.token_ids),
            "".join(chunk.text for chunk in chunks),
            tuple(token for chunk in chunks for token in chunk.logprobs),
            tuple(token for chunk in chunks for token in chunk.prompt_logprobs),
            [chunk.finish_reason for chunk in chunks if chunk.finish_reason],
            last.stop,
            last.stop_token_ids,
        )


class IsolatedWorld:
    """A replay_log and workers in a row."""

    def __init__(self, **backend_options: Any) -> None:
        self.clock = ManualClock()
        self._options = {"num_seq_ids": 8, **backend_options}
        self.replay_log = ReplayLog()
        self.outcomes: dict[int, ReaderOutcome] = {}
        self.embedded: dict[int, Embedded] = {}
        self.requests: dict[int, Request | EmbeddingRequest] = {}
        self.metrics = Metrics()
        self._watch = RequestsWatch(self.metrics, self.clock)
        self.worker = WorkerLife(self.clock, self._options)
        self.is_served = True  # whether there is a worker; where there is none, `worker` is the dead one
        self.restarts = Restarts(RestartLimits())
        self._ready_s = self.clock.now()
        self.start_at_s: float | None = None  # where there is no worker: when its back-off is over

    def submit(self, prompt: list[int], *, media: tuple[MediaItem, ...] = (), **options: Any) -> ReaderOutcome:
        params = SamplingParams(**{"temperature": 0, **{k: v for k, v in options.items() if k in FIELDS}})
        rest = RequestOptions(**{k: v for k, v in options.items() if k not in FIELDS})
        request = Request(
            key=len(self.requests) + 1,
            prompt=prompt,
            params=params,
            options=rest,
            samplers=(),
            submitted_s=self.clock.now(),
            lora=rest.lora,
            media=media,
            vocabulary=self.worker.backend.vocabulary,
            echo=bytes(token for token in prompt if token < 256).decode("utf-8", "replace") if params.echo else "",
        )
        outcome = self.outcomes[request.key] = ReaderOutcome(request)
        self._accept(request)
        return outcome

    def submit_embedding(self, texts: list[list[int]], **options: Any) -> int:
        request = EmbeddingRequest(
            key=len(self.requests) + 1,
            texts=texts,
            pooling=None,
            options=RequestOptions(**options),
            submitted_s=self.clock.now(),
        )
        self._accept(request)
        return request.key

    def _accept(self, request: Request | EmbeddingRequest) -> None:
        self.requests[request.key] = request
        self.replay_log.add(request)
        self._watch.queued(request)
        if self.is_served:
            self.worker.hear(self.replay_log.message(request.key))

    def die(self) -> None:
        """The worker is gone between two ticks; unsent bytes are lost. The next worker goes on with everything."""
        self.reap()
        self.start()

    def reap(self, *, loses_a_tick: bool = False) -> int:
        """The worker is gone, with the results of its last tick if it loses them, and there is no other yet.

        Returns the number of crashes in a row before this crash.
        """
        if loses_a_tick:
            self.worker.engine.tick()  # time passes
        num_crashes = self.num_crashes
        self.worker.close()
        for key in tuple(self.replay_log.unreleased):
            self.take(self.replay_log.release(key))
        self.is_served = False
        self.start_at_s = self.restarts.crashed(self.clock.now(), self._ready_s)
        return num_crashes

    @property
    def num_crashes(self) -> int:
        """In a row, as the front counts them now."""
        return self.restarts.num_in_row(self.clock.now(), self._ready_s if self.is_served else None)

    def wait_for_back_off(self) -> None:
        """Wait until the next worker may be started; requests due until then end."""
        assert self.start_at_s is not None
        self.clock.advance(max(0.0, self.start_at_s - self.clock.now()))
        self._end_due()

    def fail_to_start(self) -> None:
        """Another worker dies before it is ready."""
        self.wait_for_back_off()
        self.start_at_s = self.restarts.crashed(self.clock.now(), None)

    def start(self) -> None:
        """Another worker goes on with the open requests."""
        self.wait_for_back_off()
        self.worker, self.is_served = WorkerLife(self.clock, self._options), True
        self._ready_s, self.start_at_s = self.clock.now(), None
        for key in self.replay_log:
            self.worker.hear(self.replay_log.message(key))
            request = self.replay_log.find(key)
            if isinstance(request, Request) and request.is_paused:
                self.worker.inbox.put(SetPaused(key, True))

    def pause(self, key: int, *, is_paused: bool) -> None:
        request = self.replay_log.find(key)
        if isinstance(request, Request) and request.is_paused != is_paused:
            request.is_paused = is_paused
            if self.is_served:
                self.worker.inbox.put(SetPaused(key, is_paused))

    def set_interval(self, key: int, interval: int) -> None:
        request = self.replay_log.find(key)
        if isinstance(request, Request):
            request.set_interval(interval)
            if self.is_served and request.params.prompt_logprobs is None:
                self.worker.inbox.put(SetInterval(key, interval))

    def cancel(self, key: int) -> None:
        request = self.replay_log.find(key)
        if request is not None:
            request.cancelled = True
            if self.is_served:
                self.worker.inbox.put(Cancel(key))

    def end_slow(self, key: int) -> None:
        request = self.replay_log.find(key)
        if isinstance(request, Request):
            request.is_slow = True
            if self.is_served:
                self.worker.inbox.put(EndSlow(key))

    def tick(self) -> None:
        """Tick. Without a worker, the front ends due requests."""
        if not self.is_served:
            self._end_due()
            return
        for part in self.worker.tick():
            self.take(self.replay_log.note(part))

    def _end_due(self) -> None:
        for key, reason in self.replay_log.due(tuple(self.replay_log), self.clock.now()).items():
            self.take(self.replay_log.end(key, reason, self.clock.now()))

    def run(self, before_tick: Callable[[int], None] = lambda _: None, max_ticks: int = 3000) -> None:
        """Tick until nothing is open; before_tick is called with the number of each."""
        for number in range(max_ticks):
            if not len(self.replay_log) and not self.replay_log.unreleased:
                self.worker.close()
                return
            before_tick(number)
            self.tick()
        raise AssertionError(f"not done after {max_ticks} ticks: {list(self.replay_log)}")

    def end_without_worker(self, key: int, reason: FinishReason) -> None:
        """The front ends a request that the worker was told to cancel, and has not ended."""
        self.cancel(key)
        self.take(self.replay_log.end(key, reason, self.clock.now(), keeps_slots=self.is_served))

    def end(self, outcome: ReaderOutcome, reason: FinishReason) -> None:
        """The front ends a request by itself."""
        self.take(self.replay_log.end(outcome.request.key, reason, self.clock.now()))

    def take(self, events: list[Event]) -> None:
        for event in events:
            self._watch.saw(event, self.requests[event.key])
            if isinstance(event, Embedded):
                assert event.key not in self.embedded
                self.embedded[event.key] = event
            if event.key not in self.outcomes:
                continue
            outcome = self.outcomes[event.key]
            match event:
                case Started():
                    outcome.num_started += 1
                case Delta(_, StreamChunk() as chunk, is_last):
                    assert outcome.terminal is None
                    outcome.chunks.append(chunk)
                    outcome.terminal = chunk if is_last else None
                case Released():
                    assert outcome.terminal is not None
                    assert not outcome.is_released
                    outcome.is_released = True
