"""The questions that callers ask an engine beside requests: one function for each, found by its name.

A new question is a function here. `EngineClient.ask` takes it, wherever the engine runs: in this process it is called there; a
worker or a replica gets its name and arguments as a `Call`, and sends its result back as a `Reply`. Types of arguments and
result are those of the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, TypeVarTuple, get_args

import msgspec

from paceline.clock import MonotonicClock
from paceline.engine.backend import Backend
from paceline.engine.core import Ask, Engine
from paceline.engine.media_encoder import MediaEncoder
from paceline.engine.prompts import KeyedPrompt, refuse_media
from paceline.engine.saved_prefixes import PrefixNamespace, SavedPrefixes
from paceline.errors import EngineError, PacelineError
from paceline.kv_cache import PrefixDigest
from paceline.media import MediaExtent
from paceline.runtime import MediaPart
from paceline.scheduling.records import EngineActivity, SlotsSnapshot
from paceline.scheduling.telemetry import slots_snapshot
from paceline.sequence import Limits

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

REPLY_S: Final = 10.0
"""Seconds for the reply to a question about state, which comes after the current tick."""

MEASURE_REPLY_S: Final = 60.0
"""Seconds for the reply to how many cells an image or audio takes."""

FILE_REPLY_S: Final = 600.0
"""Seconds for saving, loading or erasing a prefix and for loading or freeing an adapter."""


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A question to another process. args: as msgpack. delay_s: from the moment when the other process receives it."""

    number: int
    name: str
    args: bytes
    delay_s: float = 0.0


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The result of a `Call` as msgpack, or the error; neither if the engine ended before it had an answer."""

    number: int
    result: bytes | None = None
    error: PacelineError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources of functions that run outside of ticks.

    Attributes:
        backend: Of the engine.
        ask: Passes a command to the engine's thread; the result resolves the future.
        next_key: Returns a new key for a command.
        prefixes: The saved prefixes.
        encoder: Of images and audio, if there is a projector.
        projectors: Projector files beside the model.
        report: Sends the metrics to the front.
    """

    backend: Backend
    ask: Callable[[Ask], Future[Any]]
    next_key: Callable[[], int]
    prefixes: SavedPrefixes
    encoder: MediaEncoder | None = None
    projectors: Sequence[Path] = ()
    report: Callable[[], object] = lambda: None


Place = Literal["tick", "thread", "listener", "replica"]
AfterDeath = Literal["give up", "ask once more", "ask until done"]
Idle = Callable[[Limits, int], R]
"""Returns the answer while there is no worker, of the engine's limits and its number of open requests."""


class Question(Generic[R, *Ts]):
    """A question and the function that answers it.

    Attributes:
        name: Of the function, and in messages.
        answer: The function. In place "tick" it is called with the engine before a tick, on the engine's thread, and returns a
            function that is called after the tick; elsewhere it is called with `Resources`.
        place: Where a worker calls it: "tick"; "thread": on a thread of its own; "listener": on the thread that reads the
            socket. A "replica" of a cluster calls it with its `WorkerEngine`.
        idle: Returns the answer while there is no worker; None: the question waits for the next worker.
        patience_s: Seconds for the reply.
        after_death: For a worker that died before it replied: whether the next one is asked.
    """

    def __init__(
        self,
        answer: Callable[..., Any],
        place: Place,
        idle: Idle[R] | None,
        patience_s: float,
        after_death: AfterDeath,
    ) -> None:
        self.name, self.answer, self.place = answer.__name__, answer, place
        self.idle, self.patience_s, self.after_death = idle, patience_s, after_death
        signature = inspect.signature(answer, eval_str=True)
        _, *args = [parameter.annotation for parameter in signature.parameters.values()]
        result = signature.return_annotation
        self._args = msgspec.msgpack.Decoder(tuple[tuple(args)])  # type: ignore[misc]  # made of the annotations
        self._result = msgspec.msgpack.Decoder(get_args(result)[1] if place == "tick" else result)
        QUESTIONS[self.name] = self

    def call(self, number: int, args: tuple[*Ts], delay_s: float = 0.0) -> Call:
        """Return the message with this question."""
        return Call(number, self.name, msgspec.msgpack.encode(args), delay_s)

    def args(self, call: Call) -> tuple[*Ts]:
        """Return the arguments of a message. Raises `EngineError` for invalid bytes."""
        return self._decoded(self._args, call.args)  # type: ignore[no-any-return]

    def reply(self, number: int, result: R) -> Reply:
        """Return the message with the result."""
        return Reply(number, msgspec.msgpack.encode(result))

    def result(self, reply: Reply) -> R:
        """Return the result of a message that has one. Raises `EngineError` for invalid bytes."""
        return self._decoded(self._result, reply.result or b"")  # type: ignore[no-any-return]

    def _decoded(self, decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EngineError(f"arguments or result of the question {self.name!r} cannot be read: {error}") from None

    def command(self, key: int, args: tuple[*Ts], due_s: float = 0.0) -> Ask:
        """Return the command for the engine's thread; for a question in place "tick"."""
        return Ask(key, lambda engine: self.answer(engine, *args), due_s)


QUESTIONS: Final[dict[str, Question[Any, *tuple[Any, ...]]]] = {}
"""All questions by name."""


def find_question(call: Call) -> Question[Any, *tuple[Any, ...]]:
    """Return the question of a message. Raises `EngineError` for a name that this version does not have."""
    found = QUESTIONS.get(call.name)
    if found is None:
        raise EngineError(f"there is no question {call.name!r}; the questions are {', '.join(sorted(QUESTIONS))}")
    return found


def after_tick(
    idle: Idle[R],
) -> Callable[[Callable[[Engine, *Ts], Callable[[], R]]], Question[R, *Ts]]:
    """Make a question about the engine's state of a function. idle: see `Question`."""
    return lambda answer: Question(answer, "tick", idle, REPLY_S, "give up")


def beside_ticks(
    patience_s: float, after_death: AfterDeath
) -> Callable[[Callable[[Resources, *Ts], R]], Question[R, *Ts]]:
    """Make a question of a function that reads files or waits for the engine's thread."""
    return lambda answer: Question(answer, "thread", None, patience_s, after_death)


# ---- the engine's state


def _idle_slots(limits: Limits, num_open: int) -> SlotsSnapshot:
    return slots_snapshot((), num_slots=limits.num_slots, num_waiting=num_open)


def _idle_activity(limits: Limits, num_open: int) -> EngineActivity:
    now_s = MonotonicClock().now()
    return EngineActivity(started_s=0.0, now_s=now_s, last_number=0, slots=_idle_slots(limits, num_open))


@after_tick(_idle_slots)
def slots(engine: Engine) -> Callable[[], SlotsSnapshot]:
    """Return the activity of each slot."""
    return engine.scheduler.slots


@after_tick(lambda *_: PrefixDigest())
def digest(engine: Engine, max_prefixes: int, block_tokens: int | None) -> Callable[[], PrefixDigest]:
    """Return hashes of the cached prefixes, of whole blocks if block_tokens is given."""
    return lambda: engine.scheduler.kv_cache.digest(max_prefixes, block_tokens)


@after_tick(_idle_activity)
def activity(engine: Engine, after: int, max_nodes: int | None) -> Callable[[], EngineActivity]:
    """Return the ticks and marks after a number, and at most max_nodes of the radix tree; None: no tree."""
    return engine.scheduler.observe(after, max_nodes)


# ---- metrics


def _at_once(answer: Callable[[Resources], None]) -> Question[None]:
    return Question(answer, "listener", lambda *_: None, REPLY_S, "give up")


@_at_once
def report(resources: Resources) -> None:
    """Have the worker send its metrics to the front."""
    resources.report()


# ---- files


@beside_ticks(FILE_REPLY_S, "give up")
def save_prefix(resources: Resources, name: str, prompt: KeyedPrompt, namespace: PrefixNamespace) -> int:
    """Write a cached prefix to a file and return its number of tokens."""
    return resources.prefixes.save(name, prompt, namespace)


@beside_ticks(FILE_REPLY_S, "ask once more")
def load_prefix(resources: Resources, name: str, namespace: PrefixNamespace) -> list[int]:
    """Load a saved prefix into host memory and return its token ids."""
    return resources.prefixes.load(name, namespace)


@beside_ticks(FILE_REPLY_S, "give up")
def erase_prefix(resources: Resources, name: str) -> None:
    """Delete a saved prefix."""
    resources.prefixes.erase(name)


@beside_ticks(FILE_REPLY_S, "ask once more")
def load_adapter(resources: Resources, key: str, path: str) -> None:
    """Load a LoRA adapter under a new key."""
    resources.backend.load_adapter(key, path)


def detach(adapter: str, engine: Engine) -> Callable[[], None]:
    """Stop applying an adapter, and drop its prefixes from the cache."""
    engine.executor.detach_adapter(adapter)
    engine.scheduler.forget_adapter(adapter)
    return lambda: None


@beside_ticks(FILE_REPLY_S, "ask until done")
def free_adapter(resources: Resources, key: str) -> None:
    """Free a LoRA adapter that no open request uses, and its prefixes."""
    resources.ask(Ask(resources.next_key(), partial(detach, key), may_change_cache=True)).result()
    resources.backend.free_adapter(key)


_MAX_EXTENTS: Final = 1024  # of images and audio with remembered parts


MediaSizes = tuple[tuple[int, ...], int, int, bool]
"""Fields of a `MediaPart`: tokens, num_cells, num_positions, is_causal."""


@beside_ticks(MEASURE_REPLY_S, "ask once more")
def measure_media(resources: Resources, extent: MediaExtent) -> tuple[MediaSizes, ...]:
    """Return the parts of an image or audio of an extent in a prompt."""
    if resources.encoder is None:
        refuse_media(extent, resources.projectors)
    parts = resources.encoder.measure(extent)
    return tuple((part.tokens, part.num_cells, part.num_positions, part.is_causal) for part in parts)


def measuring(
    ask: Callable[[tuple[MediaExtent]], Future[tuple[MediaSizes, ...]]],
) -> Callable[[MediaExtent], tuple[MediaPart, ...]]:
    """Return a function that measures images and audio elsewhere: `measure_media` is asked once for each extent."""
    known: dict[MediaExtent, tuple[MediaPart, ...]] = {}

    def measure(extent: MediaExtent) -> tuple[MediaPart, ...]:
        parts = known.get(extent)
        if parts is None:
            parts = tuple(MediaPart(*sizes, None, None) for sizes in ask((extent,)).result())
            if len(known) >= _MAX_EXTENTS:
                known.clear()
            known[extent] = parts
        return parts

    return measure
