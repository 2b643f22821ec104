"""The state of a worker when it died: the requests of its pass, and the requests that it prepared and encoded.

It also tells whether the worker answered a question that belongs to no request: the cells of a picture, or loading an adapter.
The state is in a page of memory that both processes map. Writing costs no system call, and the page is readable after every kind
of death. The engine's thread, the preparing thread and the encoding thread write their requests, and the front reads these when
the worker is dead. The listening thread and the engine's thread write heartbeats, which the front reads at any time.

    0      8          16        24
    ready  is_in_pass  num_keys  keys ...        8 bytes each, native order; the last four are a `Beat`, before them
                                                 the request being encoded, and before that the number of open questions
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Final

from paceline.clock import Clock
from paceline.config import EngineConfig
from paceline.engine.backend import Backend, Executor
from paceline.engine.spare_workers import BOX_BYTES, box_file
from paceline.observability.heartbeat import Pulse, Sign
from paceline.scheduling.records import EmbeddingPlan, Plan, PlanOutput
from paceline.scheduling.strategies import TickCost

_KEYS_AT = 24
_BEAT_AT = BOX_BYTES - 32
_ENCODING_AT = _BEAT_AT - 8
_QUESTIONS_AT = _ENCODING_AT - 8
_MAX_KEYS = (_QUESTIONS_AT - _KEYS_AT) // 8


@dataclass(frozen=True, slots=True)
class LastSeen:
    """The content of a black box.

    Attributes:
        in_pass: Keys of the running pass; None without a pass.
        preparing: Key of the request that was being prepared; None without a request.
        encoding: Key of the request with images that were being encoded; None without a request.
        is_asked: Whether a question was being answered.
    """

    in_pass: frozenset[int] | None = None
    preparing: int | None = None
    encoding: int | None = None
    is_asked: bool = False


BEAT_S: Final = 1.0
"""Seconds between two heartbeats of a thread that waits."""

LONG_WORK: Final = 10
"""Multiple of `hang_timeout_s` for work of unknown length: loading a model, timing its passes, moving saved states."""

_PASS_FACTOR: Final = 20  # times the expected duration of a pass; a machine that is only slow takes less


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeats of a worker. Times are of the system-wide clock.

    Attributes:
        listened_s: When the listening thread last turned.
        sign: The sign of the engine's loop; None before it runs and after its end.
        beaten_s: When the engine's thread gave its last heartbeat.
        allowed_s: Seconds until its next heartbeat that do not count as a hang; 0: no more than `hang_timeout_s`.
    """

    listened_s: float
    sign: Sign | None = None
    beaten_s: float = 0.0
    allowed_s: float = 0.0


class BlackBox:
    """One page under a file that has no name. The front makes it, the worker gets its file descriptor."""

    def __init__(self, file: IO[bytes] | int) -> None:
        self._file = None if isinstance(file, int) else file
        self._closing = threading.Lock()
        self._asking, self._num_questions = threading.Lock(), 0
        self._memory = mmap.mmap(file if isinstance(file, int) else file.fileno(), BOX_BYTES)

    @classmethod
    def create(cls) -> BlackBox:
        """Return a new, empty box."""
        return cls(box_file())

    def fileno(self) -> int:
        """Return the descriptor that the worker inherits."""
        assert self._file is not None  # noqa: S101 - the front's end
        return self._file.fileno()

    def begin_pass(self, keys: Iterable[int]) -> None:
        """Note that a pass over these requests begins. Engine's thread."""
        wanted = tuple(keys)[:_MAX_KEYS]
        struct.pack_into(f"={len(wanted)}Q", self._memory, _KEYS_AT, *wanted)
        struct.pack_into("=2Q", self._memory, 8, 1, len(wanted))

    def end_pass(self) -> None:
        """Note that the pass is over."""
        struct.pack_into("=2Q", self._memory, 8, 0, 0)

    def prepare(self, key: int | None) -> None:
        """Note the request that is being prepared; None: no request. Preparing thread. Keys begin at 1."""
        struct.pack_into("=Q", self._memory, 0, key or 0)

    def encode(self, key: int | None) -> None:
        """Note the request with images that are being encoded; None: no request. Encoding thread."""
        struct.pack_into("=Q", self._memory, _ENCODING_AT, key or 0)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Note that a thread computes the result of a question. Any of the worker's threads."""
        self._note_questions(1)
        try:
            yield
        finally:
            self._note_questions(-1)

    def _note_questions(self, change: int) -> None:
        with self._asking:
            self._num_questions += change
            struct.pack_into("=Q", self._memory, _QUESTIONS_AT, self._num_questions)

    # Times are more than 0. One store each, so that no reader sees half of a number: native order, aligned.

    def listen(self, now_s: float) -> None:
        """Note that the listening thread turns."""
        struct.pack_into("@d", self._memory, _BEAT_AT, now_s)

    def beat(self, now_s: float, sign: Sign, allowed_s: float = 0.0) -> None:
        """Note a heartbeat of the engine's thread; see `Beat`."""
        since_s = 0.0 if sign.state == "ended" else -sign.since_s if sign.state == "idle" else sign.since_s
        struct.pack_into("@d", self._memory, _BEAT_AT + 8, since_s)
        struct.pack_into("@d", self._memory, _BEAT_AT + 16, now_s)
        # Last: with the old heartbeat and the new allowance, the end of a long pass would look like a hang.
        struct.pack_into("@d", self._memory, _BEAT_AT + 24, allowed_s)

    def allow(self, seconds: float) -> None:
        """Set how long the engine's thread may take until its next heartbeat."""
        struct.pack_into("@d", self._memory, _BEAT_AT + 24, seconds)

    def read_beat(self) -> Beat | None:
        """Return the last heartbeats; None if there was none, or the box is closed. Any thread."""
        with self._closing:
            if self._memory.closed:
                return None
            listened_s, since_s, beaten_s, allowed_s = struct.unpack_from("@4d", self._memory, _BEAT_AT)
        if listened_s == 0:
            return None
        sign = Sign("idle" if since_s < 0 else "ticking", abs(since_s)) if since_s else None
        return Beat(listened_s, sign, beaten_s, allowed_s)

    def read_preparing(self) -> int | None:
        """Return the request that is being prepared; None if there is none, or the box is closed. Any thread."""
        with self._closing:
            return None if self._memory.closed else struct.unpack_from("=Q", self._memory, 0)[0] or None

    def read(self) -> LastSeen:
        """Return the present content."""
        preparing, is_in_pass, count = struct.unpack_from("=3Q", self._memory, 0)
        keys = struct.unpack_from(f"={min(count, _MAX_KEYS)}Q", self._memory, _KEYS_AT)
        num_questions, encoding = struct.unpack_from("=2Q", self._memory, _QUESTIONS_AT)
        in_pass = frozenset(keys) if is_in_pass else None
        return LastSeen(in_pass, preparing or None, encoding or None, is_asked=num_questions > 0)

    def forget(self) -> None:
        """As `close`, in a forked child, where a thread that does not exist there may hold the lock."""
        self._closing = threading.Lock()
        self.close()

    def close(self) -> None:
        """Unmap the memory and close the file; idempotent."""
        with self._closing:
            self._memory.close()
        if self._file is not None:
            self._file.close()


class WorkerPulse(Pulse):
    """The pulse of a worker's engine, whose heartbeats go into a black box. Engine's thread.

    hang_timeout_s: see `EngineConfig`.
    """

    beat_s = BEAT_S

    def __init__(self, clock: Clock, box: BlackBox, hang_timeout_s: float) -> None:
        super().__init__(clock)
        self._box, self._long_s = box, LONG_WORK * hang_timeout_s
        self.beat()

    def tick(self) -> None:
        """See `Pulse`."""
        super().tick()
        self._box.beat(self.sign.since_s, self.sign)

    def rest(self) -> None:
        """See `Pulse`."""
        super().rest()
        self._box.beat(self.sign.since_s, self.sign)

    def beat(self) -> None:
        """See `Pulse`."""
        self._box.beat(self.clock.now(), self.sign)

    def announce(self) -> None:
        """See `Pulse`."""
        self._box.allow(self._long_s)

    def end(self) -> None:
        """See `Pulse`."""
        super().end()
        self._box.beat(self.sign.since_s, self.sign)


class PassAllowance:
    """How long a pass may take until it counts as a hang."""

    def __init__(self, config: EngineConfig, cost: TickCost) -> None:
        self._limit_s, self._cost = config.hang_timeout_s, cost
        # A lost RPC server is noticed after the silence of a reply, and that of the connection after it.
        self._silence_s = 2 * config.rpc_timeout_s if config.rpc else 0.0

    def seconds(self, plan: Plan) -> float:
        """Return the seconds of a plan's cache operations and its pass. A text to embed is estimated as a prompt."""
        if isinstance(plan, EmbeddingPlan):
            num_tokens = num_cells = sum(len(item.token_ids) for item in plan.items)
            num_outputs = 1
        else:
            num_tokens, num_cells = sum([len(row.token_ids) for row in plan.rows]), plan.num_cells
            num_outputs = sum([row.num_outputs for row in plan.rows])
        pass_s = _PASS_FACTOR * self._cost.seconds(num_tokens, num_cells, num_outputs) if num_tokens else 0.0
        return (LONG_WORK * self._limit_s if plan.operations else 0.0) + self._silence_s + max(self._limit_s, pass_s)


class TracingExecutor(Executor):
    """Writes the requests of a pass and the time that it may take into a black box before the pass. Engine's thread."""

    def __init__(self, backend: Backend, clock: Clock, box: BlackBox, allowance: PassAllowance) -> None:
        super().__init__(backend, clock)
        self._box, self._allowance = box, allowance

    def run(self, plan: Plan) -> PlanOutput:
        """Run a plan as `Executor.run` does."""
        if plan.is_empty:
            return super().run(plan)
        self._box.begin_pass(_keys(plan))
        self._box.allow(self._allowance.seconds(plan))
        try:
            return super().run(plan)
        finally:
            self._box.end_pass()


def _keys(plan: Plan) -> set[int]:
    if isinstance(plan, EmbeddingPlan):
        return {item.request.key for item in plan.items}
    return {row.sequence.request.key for row in plan.rows}
