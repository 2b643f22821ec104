"""Fills masks on threads of its own, while a forward pass runs on the engine's."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.constraints.constraint import TokenWords
from paceline.runtime import MaskSlots

Fill = Callable[[TokenWords], bool]

_MAX_THREADS = 4
_ALL = np.uint32(0xFFFFFFFF)


@dataclass(slots=True, eq=False)
class MaskJob:
    """The masks of a row: one, or with drafts one behind each. num_filled: the slots in use, once it is done.

    fills: see `Constraint.fill_mask`; made one after the other, and may be fewer than slots. error: what the first raised; what
    a later one raised only ends the masks, since it comes again without the drafts. is_cut: set where no more masks are waited
    for, so that the one which is being filled is the last.
    """

    fills: Iterable[Fill]
    slots: range
    num_filled: int = 0
    is_cut: bool = False
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class MaskFiller:
    """Mask slots, and threads that fill them. One pass at a time, from one thread.

    Its threads are daemons and know nothing of this object, so that losing it ends them.
    """

    def __init__(self, num_slots: int, n_vocab: int) -> None:
        self.slots = MaskSlots(num_slots, n_vocab)
        self._todo: queue.SimpleQueue[MaskJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[MaskJob] = queue.SimpleQueue()
        self._num_threads = max(1, min(_MAX_THREADS, num_slots, os.cpu_count() or 1))
        for _ in range(self._num_threads):
            threading.Thread(
                target=_fill_masks, args=(self.slots, self._todo, self._done), name="paceline-masks", daemon=True
            ).start()

    def begin(self, rows: Sequence[tuple[Iterable[Fill], int]]) -> list[MaskJob]:
        """Begin to fill the masks of each row: its fills, and how many slots it may use. Slot numbers count from 0."""
        jobs, slot = [], 0
        for fills, num_slots in rows:
            job = MaskJob(fills, range(slot, slot + num_slots))
            slot += num_slots
            for one in job.slots:
                self.slots.clear(one)
            jobs.append(job)
            self._todo.put(job)
        return jobs

    def finish(self, jobs: Sequence[MaskJob], timeout_s: float) -> bool:
        """Wait until all of these are filled; return False if that takes longer: this object cannot be used after it."""
        end_s = time.monotonic() + timeout_s
        try:
            for _ in jobs:
                self._done.get(timeout=max(0.0, end_s - time.monotonic()))
        except queue.Empty:
            self._drop_waiting()
            return False
        return True

    def _drop_waiting(self) -> None:
        """Leave out what no thread has begun: the next object may fill masks of the same constraints."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._todo.get_nowait()

    def close(self) -> None:
        """End the threads, as soon as they have nothing to do."""
        for _ in range(self._num_threads):
            self._todo.put(None)

    def __del__(self) -> None:
        self.close()


def _fill_masks(slots: MaskSlots, todo: queue.SimpleQueue[MaskJob | None], done: queue.SimpleQueue[MaskJob]) -> None:
    while (job := todo.get()) is not None:
        try:
            for slot, fill in zip(job.slots, job.fills, strict=False):
                words = slots.words(slot)
                if not fill(words):
                    words.fill(_ALL)
                slots.ready(slot)
                job.num_filled += 1
                if job.is_cut:
                    break
        except BaseException as error:  # noqa: BLE001 - its row fails, and no other, also where it wants to exit
            if not job.num_filled:
                job.error = error
                slots.fail(job.slots[0], type(error).__name__)
        job.done.set()
        done.put(job)
