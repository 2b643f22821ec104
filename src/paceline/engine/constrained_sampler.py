"""A sampler of the native core with what its choice has to follow: a constraint, a GBNF grammar of its own, logits processors."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from paceline.constraints import Constraint, LogitsProcessors, ThinkingConstraint
from paceline.constraints.constraint import LogitRow, TokenWords
from paceline.engine.backend import as_paceline_error
from paceline.errors import NoTokenAllowed, SamplingError
from paceline.params import SamplingParams
from paceline.runtime import MaskSlots, Model, Sampler
from paceline.runtime.sampler import Logprobs
from paceline.sequence import RowOutput
from paceline.streaming.chunk import TokenLogprobs

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


_GREEDY = SamplingParams(temperature=0, samplers=())


class ConstrainedSampler:
    """Draws of one choice, and the constraint that they advance.

    `fill_mask` runs on a thread of its own while the pass runs, `fills_along` before it; the rest on the engine's thread. With
    processors the native step only computes the row, for which it needs a sampler to draw with, `row_sampler`; `draw` draws
    the token.
    """

    __slots__ = ("_filling", "constraint", "processors", "row_sampler", "sampler")

    def __init__(
        self,
        sampler: Sampler,
        constraint: Constraint | None,
        processors: LogitsProcessors | None = None,
        row_sampler: Sampler | None = None,
    ) -> None:
        self.sampler, self.constraint, self.processors = sampler, constraint, processors
        self.row_sampler = sampler if row_sampler is None else row_sampler
        self._filling = threading.Lock()
        self._note_thinking()

    def copy(self, choice: int) -> Self:
        """Return the same for another choice."""
        return type(self)(
            self.sampler.clone(choice=choice),
            None if self.constraint is None else self.constraint.copy(),
            None if self.processors is None else self.processors.copy(),
            None if self.processors is None else self.row_sampler.clone(),
        )

    def draw(self, logits: LogitRow, mask: TokenWords | None, num_logprobs: int | None) -> RowOutput:
        """Draw the next token from a processed row; the logits may be changed. Never raises.

        mask: what the constraint allows. num_logprobs: as in `Row`.
        """
        sampler, processors = self.sampler, self.processors
        assert processors is not None  # noqa: S101 - else the native step draws
        try:
            is_raw = num_logprobs is not None and sampler.params.logprobs_mode == "raw"
            raw = logits.copy() if is_raw else logits
            row = processors.process(logits)
            if num_logprobs is None:
                output = RowOutput((sampler.sample(row, mask),))
            else:
                token_id, logprobs = sampler.sample_with_logprobs(row, mask, k=num_logprobs)
                found = sampler.logprobs(raw, token_id, num_logprobs) if is_raw else logprobs
                output = RowOutput((token_id,), [_record(found)])
            sampler.accept(output.token_ids[0])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own processor may raise anything
            return RowOutput(error=as_paceline_error(error))
        return output

    def fill_mask(self, words: TokenWords) -> bool:
        """See `Constraint`. A forced token that the sampler itself would not draw is given up.

        Raises:
            SamplingError: An earlier call still runs, whose pass failed meanwhile.
        """
        if not self._filling.acquire(blocking=False):
            raise SamplingError("the constraint still fills the mask of a pass that failed")
        try:
            return self._fill_mask(words)
        finally:
            self._filling.release()

    def _fill_mask(self, words: TokenWords) -> bool:
        constraint = self.constraint
        assert constraint is not None  # noqa: S101 - else there is no mask to fill
        while isinstance(constraint, ThinkingConstraint) and (forced := constraint.forced_token) is not None:
            if _has(self.sampler.allowed_mask(), forced):
                break
            constraint.refuse_forced()
        return constraint.fill_mask(words)

    def fills_along(self, drafts: Sequence[int]) -> Iterator[Fill]:
        """Yield what fills the mask behind the last known token, then behind each draft while it is allowed.

        Ends before a draft behind which the choice would be complete, or the next token forced: what follows is decided
        without drafts.
        """
        constraint = self.constraint
        assert constraint is not None  # noqa: S101 - else there is no mask to fill
        filled = _Filled(self.fill_mask)
        yield filled.fill
        ahead = constraint.copy() if drafts else constraint
        for draft in drafts:
            if self.sampler.is_eog(draft) or not filled.allows(draft):
                return
            ahead.accept(draft)
            if ahead.is_complete or (isinstance(ahead, ThinkingConstraint) and ahead.forced_token is not None):
                return
            filled = _Filled(ahead.fill_mask)
            yield filled.fill

    def accept(self, token_id: int) -> None:
        """Advance by a token of a choice that began elsewhere."""
        self.sampler.accept(token_id)
        self.follow(token_id)

    def follow(self, token_id: int) -> None:
        """Advance constraint and processors alone, by a token that the sampler has drawn."""
        if self.processors is not None:
            self.processors.accept(token_id)
        if self.constraint is not None and not self.sampler.is_eog(token_id):
            self.constraint.accept(token_id)
            self._note_thinking()

    def _note_thinking(self) -> None:
        """Let a lazy grammar sleep while the model thinks."""
        if isinstance(self.constraint, ThinkingConstraint) and self.sampler.params.grammar_lazy:
            self.sampler.set_grammar_asleep(self.constraint.is_thinking)

    def settle(self, output: RowOutput) -> RowOutput:
        """Return the outcome of a draw, with whether the text is complete. Never raises: tokens before an error are kept.

        The core draws along drafts beyond the end of a grammar, where only an end of generation is left, or nothing: what is
        drawn there counts as little as without drafts, where nothing is.
        """
        num_followed = 0
        try:
            if output.token_ids and self._has_grammar_ended():
                if isinstance(output.error, SamplingError):
                    output.error = None
                if len(output.token_ids) > 1 and self.sampler.is_eog(output.token_ids[-1]):
                    output.token_ids, output.logprobs = output.token_ids[:-1], output.logprobs[:-1]
            for token_id in output.token_ids:
                self.follow(token_id)
                num_followed += 1
            if isinstance(output.error, NoTokenAllowed) and self._may_end():
                output.error, output.is_complete = None, True
            elif output.error is None and output.token_ids:
                output.is_complete = self._is_complete()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own constraint may raise anything
            output.error = as_paceline_error(error)
            output.token_ids, output.logprobs = output.token_ids[:num_followed], output.logprobs[:num_followed]
        return output

    def _may_end(self) -> bool:
        """Return whether the text is valid as it is: by the constraint, the grammar, or both."""
        by_constraint = None if self.constraint is None else self.constraint.may_end
        by_grammar = self.sampler.may_end if self.sampler.params.grammar is not None else None
        return {by_constraint, by_grammar} in ({True}, {True, None})

    def _is_complete(self) -> bool:
        if self.constraint is not None and self.constraint.is_complete:
            return True
        return self._has_grammar_ended()

    def _has_grammar_ended(self) -> bool:
        return self.sampler.params.grammar is not None and self.sampler.is_complete


class _Filled:
    """A mask that is filled, and what it says then."""

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self._words: TokenWords | None = None

    def fill(self, words: TokenWords) -> bool:
        """See `Constraint.fill_mask`."""
        is_written = self._fill(words)
        self._words = words if is_written else None
        return is_written

    def allows(self, token_id: int) -> bool:
        """Return whether a token may come."""
        return self._words is None or _has(self._words, token_id)


def greedy_row_sampler(model: Model) -> Sampler:
    """Return a sampler by which the native step computes a row; what it draws does not count."""
    return Sampler(_GREEDY, model, is_masked=True)


def _record(logprobs: Logprobs) -> TokenLogprobs:
    top = logprobs.top
    return TokenLogprobs(logprobs.chosen.logprob, tuple(one.token_id for one in top), tuple(one.logprob for one in top))


def _has(words: TokenWords, token_id: int) -> bool:
    return bool(words[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))
