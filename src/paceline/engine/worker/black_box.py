"""What the worker was doing when it died: the requests of the pass that ran, the one being prepared, and the one being encoded.

And whether it was at a question that no request is part of, such as how many cells a picture takes, or the loading of an adapter.
A page of memory that both processes map: writing it costs no system call, and it survives any kind of death.
The engine's thread writes the pass, the preparing and the encoding thread their requests; the front reads when the worker is
dead. The listening thread writes its signs of life, which the front reads at any time.

    0      8          16        24
    ready  is_in_pass  num_keys  keys ...        8 bytes each, native order; the last two are times, see `beat`, before them
                                                 the request being encoded, and before that the number of open questions
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from paceline.clock import Clock
from paceline.engine.backend import Backend
from paceline.engine.executor import Executor
from paceline.engine.spare_workers import BOX_BYTES, box_file
from paceline.observability.heartbeat import Sign
from paceline.scheduling.plan import EmbeddingPlan, Plan, PlanOutput

_KEYS_AT = 24
_BEAT_AT = BOX_BYTES - 16
_ENCODING_AT = _BEAT_AT - 8
_QUESTIONS_AT = _ENCODING_AT - 8
_MAX_KEYS = (_QUESTIONS_AT - _KEYS_AT) // 8


@dataclass(frozen=True, slots=True)
class LastSeen:
    """What a black box holds.

    in_pass: keys of the pass that ran; None where none did. preparing, encoding: a key, or None. is_asked: whether it was at a
    question.
    """

    in_pass: frozenset[int] | None = None
    preparing: int | None = None
    encoding: int | None = None
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """When the worker's listening thread last turned, and the sign of the engine's loop at that time; None before it runs."""

    listened_s: float
    sign: Sign | None


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
        """Note which request is being prepared; None: none is. Preparing thread. Keys begin at 1."""
        struct.pack_into("=Q", self._memory, 0, key or 0)

    def encode(self, key: int | None) -> None:
        """Note of which request images are being encoded; None: of none. Encoding thread."""
        struct.pack_into("=Q", self._memory, _ENCODING_AT, key or 0)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Note that a thread is at a question that is no request's. Any of the worker's threads."""
        self._note_questions(1)
        try:
            yield
        finally:
            self._note_questions(-1)

    def _note_questions(self, change: int) -> None:
        with self._asking:
            self._num_questions += change
            struct.pack_into("=Q", self._memory, _QUESTIONS_AT, self._num_questions)

    def beat(self, listened_s: float, sign: Sign | None) -> None:
        """Note that the worker is alive. Listening thread. Times are of the system-wide clock, and more than 0."""
        since_s = 0.0 if sign is None or sign.state == "ended" else sign.since_s
        # One store each, so that no reader sees half of a number: native order, aligned. The sign is the state of the loop.
        struct.pack_into("@d", self._memory, _BEAT_AT + 8, -since_s if sign and sign.state == "idle" else since_s)
        struct.pack_into("@d", self._memory, _BEAT_AT, listened_s)

    def read_beat(self) -> Beat | None:
        """Return the last sign of life; None if there was none, or the box is closed. Any thread."""
        with self._closing:
            if self._memory.closed:
                return None
            listened_s, since_s = struct.unpack_from("@2d", self._memory, _BEAT_AT)
        if listened_s == 0:
            return None
        return Beat(listened_s, Sign("idle" if since_s < 0 else "ticking", abs(since_s)) if since_s else None)

    def read(self) -> LastSeen:
        """Return what was written last."""
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


class TracingExecutor(Executor):
    """Write into a black box which requests a pass is for, before it begins. Engine's thread."""

    def __init__(self, backend: Backend, clock: Clock, box: BlackBox) -> None:
        super().__init__(backend, clock)
        self._box = box

    def run(self, plan: Plan) -> PlanOutput:
        """Run a plan as `Executor.run` does."""
        if plan.is_empty:
            return super().run(plan)
        self._box.begin_pass(_keys(plan))
        try:
            return super().run(plan)
        finally:
            self._box.end_pass()


def _keys(plan: Plan) -> set[int]:
    if isinstance(plan, EmbeddingPlan):
        return {item.request.key for item in plan.items}
    return {row.sequence.request.key for row in plan.rows}
