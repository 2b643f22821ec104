"""An engine on the fake backend that a test ticks by hand, and what came out of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.commands import Cancel, Command, EndSlow, SetPaused, Stop, Submit
from paceline.engine.core import Engine
from paceline.engine.executor import Executor
from paceline.engine.instruments import Instruments
from paceline.params import FIELDS, SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.events import Delta, Embedded, Ended, Event, HeldBack, Released, Started
from paceline.scheduling.instrument import Instrument
from paceline.scheduling.limits import Limits
from paceline.scheduling.scheduler import Scheduler
from paceline.scheduling.sequence import Request
from paceline.scheduling.strategies import resolve_strategy
from paceline.scheduling.view import BatchStrategy
from paceline.streaming import FinishReason, StreamChunk
from paceline.testing.fake_backend import FakeBackend
from paceline.testing.manual_clock import ManualClock


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
    """All that a request was told."""

    request: Request
    chunks: list[StreamChunk] = field(default_factory=list)
    terminal: StreamChunk | None = None
    is_started: bool = False
    is_released: bool = False

    def of_choice(self, choice: int = 0) -> list[StreamChunk]:
        return [chunk for chunk in self.chunks if chunk.choice == choice]

    def token_ids(self, choice: int = 0) -> list[int]:
        return [token for chunk in self.of_choice(choice) for token in chunk.token_ids]

    def text(self, choice: int = 0) -> str:
        return "".join(chunk.text for chunk in self.of_choice(choice))

    def reason(self, choice: int = 0) -> FinishReason | None:
        reasons = [chunk.finish_reason for chunk in self.of_choice(choice) if chunk.finish_reason is not None]
        assert len(reasons) <= 1, reasons
        return reasons[0] if reasons else None


class World:
    """Engine, clock and backend. Unless told otherwise, each tick is followed by a check of everything."""

    def __init__(
        self,
        *,
        strategy: str | BatchStrategy = "paced",
        instruments: tuple[Instrument, ...] = (),
        limits: dict[str, Any] | None = None,
        **backend: Any,
    ) -> None:
        self.clock = ManualClock()
        wanted = dict(limits or {})
        num_slots = wanted.get("num_slots", 4)
        backend.setdefault("num_seq_ids", num_slots)
        self.backend = FakeBackend(clock=self.clock, **backend)
        kind = self.backend.memory.kind
        self.limits = Limits(
            **{
                "num_slots": num_slots,
                "n_batch": 64,
                "n_ubatch": 64,
                "chunk_size": 32,
                "max_positions": self.backend.memory.num_cells,
                "num_cells": None if kind == "recurrent" else self.backend.memory.num_cells,
                "max_scored": 8,
                "can_share_part": kind == "attention",
                "itl_target_s": 0.05,
                "max_tick_s": 0.2,
                "embed_tokens": 64,
                "embed_texts": 4,
                **wanted,
            }
        )
        self.commands = Commands()
        self.scheduler = Scheduler(self.limits, resolve_strategy(strategy), self.clock, Instruments(instruments))
        self.engine = Engine(self.commands, self.scheduler, Executor(self.backend, self.clock))
        self.outcomes: dict[int, Outcome] = {}
        self.embedded: dict[int, Embedded] = {}
        self.num_ticks = 0

    # ---- what callers do

    def submit(self, prompt: str | list[int], **options: Any) -> Outcome:
        params = SamplingParams(**{"temperature": 0, **{k: v for k, v in options.items() if k in FIELDS}})
        rest = RequestOptions(**{k: v for k, v in options.items() if k not in FIELDS})
        ids = self.backend.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request = Request(
            key=len(self.outcomes) + len(self.embedded) + 1,
            prompt=ids,
            params=params,
            options=rest,
            samplers=self.backend.make_samplers(params, ids),
            submitted_s=self.clock.now(),
            vocabulary=self.backend.vocabulary,
            lora=tuple(rest.lora),
            echo=bytes(token for token in ids if token < 256).decode("utf-8", "replace") if params.echo else "",
        )
        outcome = self.outcomes[request.key] = Outcome(request)
        self.commands.queue.append(Submit(request))
        return outcome

    def submit_embedding(self, texts: list[str], *, pooling: str | None = None, **options: Any) -> int:
        key = 1_000_000 + len(self.embedded) + len(self.outcomes)
        request = EmbeddingRequest(
            key=key,
            texts=[self.backend.encode(text) for text in texts],
            pooling=pooling,
            options=RequestOptions(**options),
            submitted_s=self.clock.now(),
        )
        self.commands.queue.append(Submit(request))
        return key

    def cancel(self, outcome: Outcome) -> None:
        outcome.request.cancelled = True
        self.commands.queue.append(Cancel(outcome.request.key))

    def pause(self, outcome: Outcome, *, is_paused: bool = True) -> None:
        self.commands.queue.append(SetPaused(outcome.request.key, is_paused))

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
        """Ticks until nothing is left to do."""
        for _ in range(max_ticks):
            self.tick()
            if self.engine.is_idle and not self.commands.queue:
                return
        raise AssertionError(f"not done after {max_ticks} ticks: {self.open_keys()}")

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, HeldBack):
                continue
            if isinstance(event, Embedded):
                assert event.key not in self.embedded, "an embedding request ended twice"
                self.embedded[event.key] = event
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
        assert isinstance(event, (Delta, Ended))
        assert outcome.terminal is None, "a chunk after the terminal one"
        expected = len(outcome.token_ids(event.chunk.choice))
        assert event.chunk.index == expected, (event.chunk.index, expected)
        event.chunk.text.encode()
        outcome.chunks.append(event.chunk)
        if isinstance(event, Ended):
            assert event.chunk.finish_reason is not None
            assert event.chunk.usage is not None
            outcome.terminal = event.chunk

    def check(self) -> None:
        self.scheduler.check()
        for sequence in self.scheduler.running:
            assert sequence.seq_id is not None
            assert self.backend.positions(sequence.seq_id) == sequence.num_computed

    def open_keys(self) -> list[int]:
        return [key for key, outcome in self.outcomes.items() if outcome.terminal is None]
