"""Fills masks on threads of its own, while a forward pass runs on the engine's."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.constraints.constraint import TokenWords
from paceline.runtime import MaskSlots

Fill = Callable[[TokenWords], bool]

_MAX_THREADS = 4
_ALL = np.uint32(0xFFFFFFFF)


@dataclass(slots=True, eq=False)
class MaskJob:
    """One mask of a pass. fill: see `Constraint.fill_mask`; error: what it raised."""

    fill: Fill
    slot: int
    error: BaseException | None = None


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

    def begin(self, fills: Sequence[Fill]) -> list[MaskJob]:
        """Begin to fill a slot for each of these; slot numbers count from 0."""
        jobs = [MaskJob(fill, slot) for slot, fill in enumerate(fills)]
        for job in jobs:
            self.slots.clear(job.slot)
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
            words = slots.words(job.slot)
            if not job.fill(words):
                words.fill(_ALL)
            slots.ready(job.slot)
        except BaseException as error:  # noqa: BLE001 - its row fails, and no other, also where it wants to exit
            job.error = error
            slots.fail(job.slot, type(error).__name__)
        done.put(job)
