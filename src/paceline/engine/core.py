"""The engine without its thread, and its commands: commands in, events out, one forward pass a tick.

It does no input or output: it never waits, has no clock and knows no reader. `Runner` gives it a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from paceline.engine.backend import Executor
from paceline.errors import PacelineError
from paceline.scheduling.records import EmbeddingRequest, Event
from paceline.scheduling.scheduler import Scheduler
from paceline.sequence import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a request for text or for embeddings."""

    request: Request | EmbeddingRequest


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """A command that is sent to a worker unchanged."""


class Cancel(_Record, frozen=True, tag="cancel"):
    """Cancel a request."""

    key: int


class SetPaused(_Record, frozen=True, tag="pause"):
    """Pause a request, or continue it."""

    key: int
    is_paused: bool


class SetInterval(_Record, frozen=True, tag="interval"):
    """Change how many tokens a chunk of a request needs."""

    key: int
    interval: int


class EndSlow(_Record, frozen=True, tag="slow"):
    """End a request with a slow reader."""

    key: int


class Stop(_Record, frozen=True, tag="stop"):
    """End every request."""


RequestCommand = Cancel | SetPaused | SetInterval | EndSlow
"""A command for one request that was submitted."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop pausing requests with slow readers, so that every request ends."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the engine's thread a question.

    Attributes:
        key: The key of the event `Answered`.
        begin: Called with the engine (`core.Engine`) before the next tick. It returns a function that is called after the tick
            for the result, or None if the engine emits the event by itself.
        due_s: On the engine's clock; the result is of the first tick that ends then or later, or has no work.
        may_change_cache: Whether it changes the KV cache, which ends a calibration. The result is taken before the tick: the
            change is made even if the tick fails.
    """

    key: int
    begin: Callable[[Any], Callable[[], Any] | None]
    due_s: float = 0.0
    may_change_cache: bool = False


Command = Ask | Submit | RequestCommand | Drain | Stop


class Commands(Protocol):
    """The source of commands: an `Inbox`, or a list in a test."""

    def take(self) -> Many[Command]:
        """Return the commands since the last call, in order."""


class TimedPasses(Protocol):
    """Passes that are timed before the first command: a `Calibration`."""

    def step(self) -> bool:
        """Time a pass; return False if none is left."""

    def end(self) -> None:
        """Learn from the timed passes."""


class Engine:
    """Scheduler and executor together. calibration: None if no passes are to be timed."""

    def __init__(
        self, commands: Commands, scheduler: Scheduler, executor: Executor, calibration: TimedPasses | None = None
    ) -> None:
        self._commands = commands
        self.scheduler = scheduler
        self.executor = executor
        self._calibration = calibration

    def tick(self) -> list[Event]:
        """Run one turn of the loop: commands, a plan, a pass, its events."""
        self._take_commands()
        plan = self.scheduler.plan()
        output = self.executor.run(plan)
        return self.scheduler.apply(plan, output)

    def note_cancelled(self, key: int) -> None:
        """End a running pass of embedding requests if all of them are cancelled, with this request. Any thread."""
        self.executor.note_cancelled(key)

    def calibrate(self) -> None:
        """Time a pass for the cost model; the first command that may change the cache ends the calibration for good."""
        if self._calibration is not None and not self._calibration.step():
            self.end_calibration()

    @property
    def is_calibrating(self) -> bool:
        """Whether passes are left to be timed."""
        return self._calibration is not None

    def fail_all(self, error: PacelineError, failures: list[Exception]) -> list[Event]:
        """End every request with an error, after a failure that no request caused. failures: see `Scheduler.fail_all`."""
        return self.scheduler.fail_all(error, failures)

    def reset(self) -> None:
        """Drop every request and empty the KV cache, which may be inconsistent; after `fail_all`."""
        self.scheduler.reset()

    def save_prefixes(self) -> None:
        """Save the prefixes that are on the device alone, so that a store gets them; after the last request."""
        self.scheduler.kv_cache.save_idle()
        while self.scheduler.kv_cache.is_saving_idle or self.scheduler.kv_cache.is_saving:
            self.tick()

    @property
    def is_idle(self) -> bool:
        """Whether the last tick had nothing to do; only a command or a deadline changes that."""
        return self.scheduler.is_idle

    def next_deadline_s(self) -> float:
        """Return when there is work even without a command; infinite if never."""
        return self.scheduler.next_deadline_s()

    def _take_commands(self) -> None:
        for command in self._commands.take():
            if self._calibration is not None and not (isinstance(command, Ask) and not command.may_change_cache):
                self.end_calibration()
            match command:
                case Submit(Request() as request):
                    self.scheduler.submit(request)
                case Submit(EmbeddingRequest() as request):
                    self.scheduler.submit_embedding(request)
                case Cancel(key):
                    self.scheduler.cancel(key)
                case SetPaused(key, is_paused):
                    self.scheduler.set_paused(key, is_paused=is_paused)
                case SetInterval(key, interval):
                    self.scheduler.set_interval(key, interval)
                case EndSlow(key):
                    self.scheduler.end_slow(key)
                case Ask():
                    answer = command.begin(self)
                    if answer is not None and command.may_change_cache:
                        self.scheduler.answer(command.key, answer())
                    elif answer is not None:
                        self.scheduler.ask(command.key, answer, command.due_s)
                case Drain():
                    self.scheduler.drain()
                case Stop():
                    self.scheduler.stop()

    def end_calibration(self) -> None:
        """Hand over the timed passes, and release the passes that are left, which hold the model."""
        calibration, self._calibration = self._calibration, None
        if calibration is not None:
            calibration.end()
