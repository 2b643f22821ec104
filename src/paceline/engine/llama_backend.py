"""llama.cpp as the engine's backend: one context for generation, and one for each pooling in use.

The engine's thread calls `step`, `embed`, `copy` to `load_state`, `truncate`, `remove` and `detach_adapter`; any thread calls
the rest.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.constraints import (
    Constraint,
    ConstraintCompiler,
    LogitsProcessors,
    ThinkingConstraint,
    TokenTable,
    has_constraint,
    logits_processors_of,
)
from paceline.constraints.constraint import LogitRow, TokenWords
from paceline.engine.adapters import name_of
from paceline.engine.backend import Lora, as_paceline_error
from paceline.errors import (
    Aborted,
    AdapterNotFound,
    InvalidParams,
    NoTokenAllowed,
    PacelineError,
    SamplingError,
    Unsupported,
)
from paceline.kv_cache import TEXT_LAYOUT, MediaItem
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.runtime import Adapter, CellState, Context, Embedder, MaskSlots, MediaPart, Model, Sampler, Tokenizer
from paceline.runtime.embedder import MediaEmbedder, media_pooling
from paceline.runtime.step import FloatArray, IntArray, StepRow, native_error
from paceline.scheduling.records import EmbeddingItem
from paceline.sequence import Row, RowOutput
from paceline.speculation.drafters.heads import DraftWish
from paceline.speculation.drafters.model_drafter import DraftRow, DraftToken
from paceline.streaming.chunk import TokenLogprobs

Fill = Callable[[TokenWords], bool]

_MAX_THREADS = 4
_ALL = np.uint32(0xFFFFFFFF)


@dataclass(slots=True, eq=False)
class MaskJob:
    """The masks of a row: the mask of the next token, and with drafts a mask after each draft.

    Attributes:
        fills: See `Constraint.fill_mask`; made one after another, possibly fewer than slots.
        slots: The mask slots that the row may use.
        num_filled: The slots in use, once the job is done.
        is_cut: Set when the pass waits for no more masks: the mask that is being filled is the last.
        error: The error of the first fill. An error of a later fill only ends the masks: it comes again without the drafts.
        done: Set when the job is done.
    """

    fills: Iterable[Fill]
    slots: range
    num_filled: int = 0
    is_cut: bool = False
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class MaskFiller:
    """Mask slots, and threads that fill them. One pass at a time, from one thread.

    Its threads are daemons and hold no reference to it, so that losing it ends them.
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
        """Begin to fill the masks of each row: its fills, and the number of slots it may use. Slots are numbered from 0."""
        jobs, slot = [], 0
        for fills, num_slots in rows:
            job = MaskJob(fills, range(slot, slot + num_slots))
            slot += num_slots
            for mask_slot in job.slots:
                self.slots.clear(mask_slot)
            jobs.append(job)
            self._todo.put(job)
        return jobs

    def finish(self, jobs: Sequence[MaskJob], timeout_s: float) -> bool:
        """Wait until all jobs are done. Returns False after the timeout: this object cannot be used any more."""
        end_s = time.monotonic() + timeout_s
        try:
            for _ in jobs:
                self._done.get(timeout=max(0.0, end_s - time.monotonic()))
        except queue.Empty:
            with contextlib.suppress(
                queue.Empty
            ):  # jobs of this pass must not fill masks beside those of the next object
                while True:
                    self._todo.get_nowait()
            return False
        return True

    def close(self) -> None:
        """End the threads when they have no more work."""
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
    """The sampler of one choice, and the constraint that its tokens advance.

    `fill_mask` runs on a thread of its own while the pass runs, `fills_along` before the pass, and the rest on the engine's
    thread. With logits processors the native step only computes the row, for which it needs `row_sampler`; `draw` draws the
    token.
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
        """Return a copy for another choice."""
        return type(self)(
            self.sampler.clone(choice=choice),
            None if self.constraint is None else self.constraint.copy(),
            None if self.processors is None else self.processors.copy(),
            None if self.processors is None else self.row_sampler.clone(),
        )

    def draw(self, logits: LogitRow, mask: TokenWords | None, num_logprobs: int | None) -> RowOutput:
        """Draw the next token from a row with logits processors, which may change the logits. Never raises.

        mask: the tokens that the constraint allows. num_logprobs: as in `Row`.
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
                ids, values = [top.token_id for top in found.top], [top.logprob for top in found.top]
                output = RowOutput((token_id,), [TokenLogprobs(found.chosen.logprob, tuple(ids), tuple(values))])
            sampler.accept(output.token_ids[0])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own processor may raise anything
            return RowOutput(error=as_paceline_error(error))
        return output

    def fill_mask(self, words: TokenWords) -> bool:
        """Fill a mask as `Constraint.fill_mask` does. A forced token that the sampler would not draw is given up.

        Raises:
            SamplingError: An earlier call of a failed pass is still running.
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
        """Yield the fill of the mask after the last known token, then after each draft as long as drafts are allowed.

        It ends before a draft that completes the choice or precedes a forced token: these are decided without drafts.
        """
        constraint = self.constraint
        assert constraint is not None  # noqa: S101 - else there is no mask to fill
        masks: list[TokenWords | None] = []  # that were filled; None: every token is allowed

        def recorded(fill: Fill, words: TokenWords) -> bool:
            is_written = fill(words)
            masks.append(words if is_written else None)
            return is_written

        yield partial(recorded, self.fill_mask)
        ahead = constraint.copy() if drafts else constraint
        for draft in drafts:
            mask = masks[-1]
            if self.sampler.is_eog(draft) or (mask is not None and not _has(mask, draft)):
                return
            ahead.accept(draft)
            if ahead.is_complete or (isinstance(ahead, ThinkingConstraint) and ahead.forced_token is not None):
                return
            yield partial(recorded, ahead.fill_mask)

    def accept(self, token_id: int) -> None:
        """Advance by a token of a choice that began in another engine."""
        self.sampler.accept(token_id)
        self.follow(token_id)

    def follow(self, token_id: int) -> None:
        """Advance constraint and processors by a token that the sampler has drawn."""
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
        """Return the outcome of a draw, with `is_complete` set. Never raises; tokens before an error are kept.

        Along drafts the core continues after the end of a grammar and then draws an end of generation, or nothing. These draws
        do not count, as there are none without drafts.
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
            constraint = self.constraint
            if isinstance(output.error, NoTokenAllowed):
                by_constraint = None if constraint is None else constraint.may_end
                by_grammar = self.sampler.may_end if self.sampler.params.grammar is not None else None
                if {by_constraint, by_grammar} in ({True}, {True, None}):
                    output.error, output.is_complete = None, True
            elif output.error is None and output.token_ids:
                output.is_complete = (constraint is not None and constraint.is_complete) or self._has_grammar_ended()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own constraint may raise anything
            output.error = as_paceline_error(error)
            output.token_ids, output.logprobs = output.token_ids[:num_followed], output.logprobs[:num_followed]
        return output

    def _has_grammar_ended(self) -> bool:
        return self.sampler.params.grammar is not None and self.sampler.is_complete


def greedy_row_sampler(model: Model) -> Sampler:
    """Return a sampler with which the native step computes a row; its draw does not count."""
    return Sampler(_GREEDY, model, is_masked=True)


def _has(words: TokenWords, token_id: int) -> bool:
    return bool(words[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))


_MASK_TIMEOUT_S = 10.0
_DRAFT_MASKS_S = 0.02  # for masks along drafts, which are filled before the pass
_MASK_GRACE_S = 0.5  # for masks after a pass that used up the timeout
# Architectures with M-RoPE in some files: their contexts accept rows that skip positions.
_SKIP_POSITIONS = frozenset(
    {
        "bailingmoe3", "dflash", "glm4", "glm4moe", "hunyuan_vl", "paddleocr", "qwen2vl", "qwen35", "qwen35moe", "qwen3tts",
        "qwen3vl", "qwen3vlmoe", "qwen4exp",
    }
)  # fmt: skip


class LlamaBackend:
    """Computes rows on a context and texts on embedders. Its methods are documented by `Backend`.

    Args:
        model: The model.
        context: The context for generation; None for a model that cannot generate. Its last sequence id belongs to the backend.
        adapters: The adapters by their keys.
        embedder_options: Options of the contexts for embeddings, which are made when they are first needed.
        drafting: Contexts of draft models, which `abort` aborts too. Their owner closes them.
    """

    def __init__(
        self,
        model: Model,
        context: Context | None,
        adapters: Mapping[str, Adapter],
        embedder_options: Mapping[str, Any],
        drafting: Many[Context] = (),
    ) -> None:
        tokenizer = model.tokenizer
        self.vocabulary = Vocabulary(tokenizer.pieces(False), tokenizer.pieces(True), tokenizer.eog_ids)
        self._model, self._context, self._drafting = model, context, tuple(drafting)
        self._adapters = dict(adapters)
        self._lora: Lora = ()
        self._scratch = 0 if context is None else context.n_seq_max - 1
        self._embedder_options = dict(embedder_options)
        self._embedders: dict[str | None, Embedder] = {}
        self._media_embedder: MediaEmbedder | None = None
        self._making = threading.Lock()
        self._masks: MaskFiller | None = None
        self._may_skip_positions = model.metadata.get("general.architecture") in _SKIP_POSITIONS

    @cached_property
    def _compiler(self) -> ConstraintCompiler:  # reading a large vocabulary takes about a second
        return ConstraintCompiler(token_table(self._model.tokenizer))

    def make_samplers(self, params: SamplingParams, prompt: list[int]) -> tuple[Sampler | ConstrainedSampler, ...]:
        first = Sampler(params, self._model, is_masked=True)
        first.accept_prompt(prompt)
        constraint = self._compiler.compile(params) if has_constraint(params) else None
        processors = logits_processors_of(params)
        if constraint is None and processors is None and params.grammar is None:
            return (first, *(first.clone(choice=choice) for choice in range(1, params.n)))
        row_sampler = None if processors is None else greedy_row_sampler(self._model)
        leading = ConstrainedSampler(first, constraint, processors, row_sampler)
        return (leading, *(leading.copy(choice) for choice in range(1, params.n)))

    def resume_sampler(self, sampler: object, token_ids: Many[int], state: bytes | None) -> None:
        assert isinstance(sampler, (Sampler, ConstrainedSampler))  # noqa: S101 - made above
        if state is None:
            for token_id in token_ids:
                sampler.accept(token_id)
        elif isinstance(sampler, Sampler):
            sampler.restore(state)
        else:
            sampler.sampler.restore(state)
            for token_id in token_ids:
                sampler.follow(token_id)

    def sampler_state(self, sampler: object) -> bytes:
        assert isinstance(sampler, (Sampler, ConstrainedSampler))  # noqa: S101 - made above
        return sampler.state() if isinstance(sampler, Sampler) else sampler.sampler.state()

    def prepare_embedding(self, pooling: str | None, num_tokens: int) -> str:
        with self._making:
            if pooling not in self._embedders:
                embedder = Embedder(self._model, pooling=pooling, **self._embedder_options)  # type: ignore[arg-type]
                self._embedders[pooling] = self._embedders.setdefault(embedder.pooling, embedder)
            self._embedders[pooling].reserve(num_tokens)
            return self._embedders[pooling].pooling

    def prepare_media_embedding(self, pooling: str | None, num_tokens: int, num_at_once: int) -> str:
        chosen = media_pooling(self._model, pooling)
        with self._making:
            if self._media_embedder is None:
                self._media_embedder = MediaEmbedder(self._model, **self._embedder_options)
            self._media_embedder.reserve(num_tokens, num_at_once)
        return chosen

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        context = self._generating
        context.copy(from_seq_id, to_seq_id, 0, end)
        if self._model.n_swa > 0 and context.has_state_apart:  # llama.cpp does not reuse window cells of two sequences
            context.load_state(to_seq_id, context.save_state(to_seq_id, end), end)

    def copy_cells(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        self._generating.copy_cells(from_seq_id, to_seq_id, end)

    def save(self, seq_id: int, start: int, end: int) -> CellState:
        return self._generating.save_cells(seq_id, start, end, scratch_seq_id=self._scratch)

    def load(self, seq_id: int, data: CellState, start: int, end: int) -> None:
        self._generating.load_cells(seq_id, data, start, end, scratch_seq_id=self._scratch)

    def cut(self, data: CellState, start: int, end: int) -> CellState:
        return self._generating.cut_cells(data, start, end, scratch_seq_id=self._scratch)

    def save_state(self, seq_id: int, end: int) -> CellState:
        return self._generating.save_state(seq_id, end)

    def saved_cells(self, start: int, end: int, payload: npt.NDArray[np.uint8]) -> CellState:
        return CellState(start, end, payload)

    def load_state(self, seq_id: int, data: CellState, end: int) -> None:
        self._generating.load_state(seq_id, data, end)

    def truncate(self, seq_id: int, end: int) -> None:
        self._generating.remove(seq_id, end)

    def remove(self, seq_id: int) -> None:
        self._generating.remove(seq_id)

    def step(self, rows: Many[Row], lora: Lora) -> list[RowOutput]:
        context = self._generating
        if self._may_skip_positions:
            self._check_positions(rows)
        if lora != self._lora:
            context.set_adapters({self._adapters[name]: scale for name, scale in lora})
            self._lora = lora
        if rows[0].item is not None:
            return self._item_step(context, rows)
        if any([row.sequence.sampler.__class__ is ConstrainedSampler for row in rows]):  # noqa: C419 - the faster way
            return self._constrained_step(context, rows)
        if any([row.num_drafts or row.num_logprobs is not None or row.targets for row in rows]):  # noqa: C419 - the faster way
            return _step(context, rows)
        return _plain_step(context, rows)

    def _item_step(self, context: Context, rows: Many[Row]) -> list[RowOutput]:
        """Compute parts of media items, each in a pass of its own. A failed part fails its row only.

        The scratch sequence is needed because rows with places continue an item at the item's position, at which no rollback
        can cut.
        """
        outputs: list[RowOutput] = []
        for row in rows:
            try:
                cells = slice(row.offset, row.offset + len(row.token_ids))
                part = _media_part(row.sequence.request.embeddings, row.item)
                embeddings, places = part.embeddings, part.places
                assert embeddings is not None  # noqa: S101 - as `_media_part` checks
                context.decode_embeddings(
                    _seq_id(row),
                    row.position + (row.offset if places is None else 0),
                    embeddings[cells],
                    places=None if places is None else places[cells],
                    is_causal=row.item is not None and row.item.is_causal,
                    scratch_seq_id=self._scratch,
                )
                outputs.append(RowOutput())
            except Aborted as error:  # the others have to end as well
                return [*outputs, *(RowOutput(error=error, computed=False) for _ in rows[len(outputs) :])]
            except Exception as error:  # noqa: BLE001 - the rows before it are computed
                outputs.append(RowOutput(error=as_paceline_error(error), computed=False))
        return outputs

    def draft(self, wishes: Many[DraftWish], p_min: float) -> list[list[int]]:
        """Return the drafts of the context's draft heads; none for a sequence that the heads could not follow.

        After an image of M-RoPE the position of a token is not its number of cells, so it is read from the context.
        """
        if self._may_skip_positions:
            wishes = [(seq_id, self.positions(seq_id), token_id, depth) for seq_id, _, token_id, depth in wishes]
        return self._generating.draft(wishes, min_probability=p_min)

    def _check_positions(self, rows: Many[Row]) -> None:
        """Raise `InvalidParams` if a text skips positions: such a context accepts the gap that only an image may leave."""
        for row in rows:
            seq_id = _seq_id(row)
            if row.sequence.layout is TEXT_LAYOUT and row.position != (end := self.positions(seq_id)):
                raise InvalidParams(f"position must be {end}, where sequence {seq_id} goes on, not {row.position}")

    def _constrained_step(self, context: Context, rows: Many[Row]) -> list[RowOutput]:
        """Run a pass while its masks are filled. Masks along drafts are filled before it: they decide which drafts are in it.

        All masks share one deadline. Drafts with slow masks are left out.
        """
        if self._masks is None:
            self._masks = MaskFiller(max(context.n_seq_max, context.n_outputs_max), len(self.vocabulary.pieces))
        filler = self._masks
        drawing: list[Any] = [row.sequence.sampler if row.draws else None for row in rows]
        samplers = [sampler if isinstance(sampler, ConstrainedSampler) else None for sampler in drawing]
        masked = [
            (row, sampler)
            for row, sampler in zip(rows, samplers, strict=True)
            if sampler is not None and sampler.constraint is not None
        ]
        end_s = time.perf_counter() + _MASK_TIMEOUT_S
        jobs = filler.begin([(sampler.fills_along(row.drafts), 1 + row.num_drafts) for row, sampler in masked])
        of_rows = {id(row): job for (row, _), job in zip(masked, jobs, strict=True)}
        try:
            begin_s = time.perf_counter()
            masked_rows = [_masked_row(row, of_rows.get(id(row)), begin_s + _DRAFT_MASKS_S) for row in rows]
            waited_s = time.perf_counter() - begin_s
            step_rows, slots = [row for row, _ in masked_rows], [slots for _, slots in masked_rows]
            timeout_s = max(0.0, end_s - time.perf_counter())
            found = _step(context, step_rows, mask_slots=slots, masks=filler.slots, mask_timeout_s=timeout_s)
        finally:
            if not filler.finish(jobs, max(_MASK_GRACE_S, end_s - time.perf_counter())):
                self._masks = None  # a thread is still writing to it
        ends = accumulate(len(row.token_ids) for row in step_rows)
        outputs = []
        for row, computed, end, sampler in zip(rows, found, ends, samplers, strict=True):
            output, job = computed, of_rows.get(id(row))
            if sampler is not None and sampler.processors is not None and output.error is None:
                mask = None if job is None else filler.slots.words(job.slots[0])
                scored, output = output.scored, sampler.draw(context.logits(end - 1), mask, row.num_logprobs)
                output.scored = scored
            if row.num_drafts and job is not None:
                output.waited_s = waited_s
            if job is not None and job.error is not None:
                output.token_ids, output.logprobs, output.error = (), (), as_paceline_error(job.error)
            elif sampler is not None:
                output = sampler.settle(output)
            outputs.append(output)
        return outputs

    def embed(self, texts: list[list[int]], pooling: str | None) -> list[Any]:
        embedder = self._embedders[pooling]
        if embedder.pooling == "none":
            return list(embedder.embed_tokens(texts, normalize="none"))
        return list(embedder.embed(texts, normalize="none"))

    def embed_media(self, item: EmbeddingItem) -> npt.NDArray[np.float32]:
        assert self._media_embedder is not None  # noqa: S101 - it was prepared
        found = item.request.embeddings
        return self._media_embedder.embed(
            [segment if isinstance(segment, list) else _media_part(found, segment) for segment in item.segments()]
        )

    def load_adapter(self, adapter: str, path: str) -> None:
        self._adapters[adapter] = self._model.load_adapter(path)

    def adapter_fingerprint(self, adapter: str) -> bytes:
        found = self._adapters.get(adapter)
        if found is None:
            raise AdapterNotFound(f"the adapter {name_of(adapter)!r} is not loaded")
        return found.fingerprint

    def detach_adapter(self, adapter: str) -> None:
        if any(key == adapter for key, _ in self._lora):
            self._generating.set_adapters({})
            self._lora = ()

    def free_adapter(self, adapter: str) -> None:
        found = self._adapters.pop(adapter, None)
        if found is not None:
            found.close()

    def positions(self, seq_id: int) -> int:
        held = self._generating.positions(seq_id)
        return 0 if held is None else held.last + 1

    def abort(self) -> None:
        for context in (self._context, *self._drafting):
            if context is not None:
                context.abort()
        self.abort_embedding()

    def abort_embedding(self) -> None:
        for embedder in (*self._embedders.values(), self._media_embedder):
            if embedder is not None:
                embedder.abort()

    def close(self) -> None:
        with self._making:
            embedders = (*self._embedders.values(), self._media_embedder)
            for owned in (self._context, *embedders, *tuple(self._adapters.values())):
                if owned is not None:
                    owned.close()
        self._masks = None
        self.__dict__.pop("_compiler", None)  # its vocabulary takes as much memory as the tokenizer's

    @property
    def _generating(self) -> Context:
        if self._context is None:
            raise Unsupported("this model cannot generate")
        return self._context


def _seq_id(row: Row) -> int:
    assert row.sequence.seq_id is not None  # noqa: S101 - rows are running sequences'
    return row.sequence.seq_id


def _media_part(parts: Any, item: MediaItem | None) -> MediaPart:
    """Return the encoded part of a media item. Raises the error of its encoding, and `Unsupported` if it was not encoded."""
    if isinstance(parts, PacelineError):
        raise parts
    part = None if item is None or parts is None else parts.get(item.start)
    if not isinstance(part, MediaPart) or part.embeddings is None:
        raise Unsupported("the embeddings of a media item are missing: llama.cpp computes items that were encoded")
    return part


def _plain_step(context: Context, rows: Many[Row]) -> list[RowOutput]:
    """Run a pass that only draws next tokens, as nearly all passes do."""
    running: Any = [row.sequence for row in rows]  # with a seq id and a sampler
    drawn = context.plain_step(
        [sequence.seq_id for sequence in running],
        [row.position for row in rows],
        [row.token_ids for row in rows],
        [sequence.sampler if row.draws else None for row, sequence in zip(rows, running, strict=True)],
    )
    return [
        RowOutput((token,)) if isinstance(token, int) else RowOutput() if token is None else RowOutput(error=token)
        for token in drawn
    ]


def token_table(tokenizer: Tokenizer) -> TokenTable:
    """Return the vocabulary in the form that constraints read."""
    return TokenTable(
        pieces=tokenizer.pieces(True),
        control_ids=frozenset(filter(tokenizer.is_control, range(tokenizer.n_vocab))),
        eog_ids=tokenizer.eog_ids,
        encode=partial(tokenizer.encode, add_special=False, parse_special=True),
    )


def _masked_row(row: Row, job: MaskJob | None, end_s: float) -> tuple[Row, tuple[int, ...]]:
    """Return a row with its mask slots, and with the drafts that its constraint allows and that have masks by end_s."""
    if job is None:
        return row, ()
    if not row.num_drafts:
        return row, tuple(job.slots)
    job.is_cut = not job.done.wait(max(0.0, end_s - time.perf_counter()))
    num_slots = max(1, job.num_filled)
    num_left_out = len(job.slots) - num_slots
    cut = msgspec.structs.replace(
        row, token_ids=row.token_ids[: len(row.token_ids) - num_left_out], num_drafts=row.num_drafts - num_left_out
    )
    return cut, tuple(job.slots[:num_slots])


def _step(
    context: Context, rows: Many[Row], mask_slots: Many[tuple[int, ...]] | None = None, **masks: Any
) -> list[RowOutput]:
    """Run a pass over rows of any kind. masks: options of `Context.step`."""
    running: Any = [row.sequence for row in rows]  # with a seq id and a sampler
    arrays = context.step_columns(
        seq_ids=[sequence.seq_id for sequence in running],
        positions=[row.position for row in rows],
        token_ids=[row.token_ids for row in rows],
        num_drafts=[row.num_drafts for row in rows],
        samplers=[_row_samplers(row) for row in rows],
        targets=[row.targets for row in rows],
        num_logprobs=[row.num_logprobs for row in rows],
        mask_slots=[()] * len(rows) if mask_slots is None else mask_slots,
        **masks,
    )
    failed = {sampler: native_error(kind, message) for sampler, kind, message in arrays.errors}
    counts, token_ids = arrays.num_drawn.tolist(), arrays.token_ids.tolist()
    outputs, sampler, num_drawn, num_scored = [], 0, 0, 0
    for row in rows:
        output = RowOutput()
        if row.targets:
            part = slice(num_scored, num_scored + len(row.targets))
            output.scored = _records(
                arrays.scored_own[part], arrays.scored_ids[part], arrays.scored_values[part], row.num_logprobs or 0
            )
            num_scored = part.stop
        if row.draws:
            part = slice(num_drawn, num_drawn + counts[sampler])
            output.token_ids, output.error = tuple(token_ids[part]), failed.get(sampler)
            if row.num_logprobs is not None:
                output.logprobs = _records(
                    arrays.drawn_own[part], arrays.drawn_ids[part], arrays.drawn_values[part], row.num_logprobs
                )
            if row.num_drafts:
                output.num_verified, output.num_accepted = row.num_drafts, row.num_right(output.token_ids)
                output.is_taken_back = sampler in arrays.taken_back
            num_drawn, sampler = part.stop, sampler + 1
        outputs.append(output)
    return outputs


def _row_samplers(row: Row) -> tuple[Sampler, ...]:
    sampler: Any = row.sequence.sampler
    return (sampler.row_sampler if isinstance(sampler, ConstrainedSampler) else sampler,) if row.draws else ()


def _records(own: FloatArray, ids: IntArray, values: FloatArray, num_top: int) -> list[TokenLogprobs]:
    records = []
    for own_logprob, top, logprobs in zip(
        own.tolist(), ids[:, :num_top].tolist(), values[:, :num_top].tolist(), strict=True
    ):
        count = top.index(-1) if -1 in top else len(top)
        records.append(TokenLogprobs(own_logprob, tuple(top[:count]), tuple(logprobs[:count])))
    return records


class LlamaDraftBackend:
    """Draws the likeliest tokens. wants_probabilities: whether to compute their probabilities over the whole vocabulary."""

    def __init__(self, model: Model, context: Context, *, wants_probabilities: bool) -> None:
        self._context, self._wants_probabilities = context, wants_probabilities
        self._greedy = Sampler(SamplingParams(temperature=0), model)
        self._samplers: list[Sampler] = []  # one a row of a pass

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        self._context.copy(from_seq_id, to_seq_id, 0, end)

    def truncate(self, seq_id: int, end: int) -> None:
        self._context.remove(seq_id, end)

    def remove(self, seq_id: int) -> None:
        self._context.remove(seq_id)

    def step(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        while len(self._samplers) < len(rows):
            self._samplers.append(self._greedy.clone())
        if self._wants_probabilities:
            return self._with_probabilities(rows)
        drawn = self._context.plain_step(
            [row.seq_id for row in rows],
            [row.position for row in rows],
            [row.token_ids for row in rows],
            [sampler if row.draws else None for row, sampler in zip(rows, self._samplers, strict=False)],
        )
        return [None if token is None else DraftToken(_token(token), 1.0) for token in drawn]

    def _with_probabilities(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        found = self._context.step(
            [
                StepRow(
                    seq_id=row.seq_id,
                    position=row.position,
                    token_ids=row.token_ids,
                    samplers=(sampler,) if row.draws else (),
                    num_logprobs=0,
                )
                for row, sampler in zip(rows, self._samplers, strict=False)
            ]
        )
        tokens: list[DraftToken | None] = []
        for result in found.rows:
            if not result.draws:
                tokens.append(None)
                continue
            (draws,) = result.draws
            assert draws.logprobs is not None or draws.error is not None  # noqa: S101 - they were asked for
            token_id = _token(draws.error or draws.token_ids[0])
            tokens.append(DraftToken(token_id, math.exp(float(draws.logprobs.own[0])) if draws.logprobs else 0.0))
        return tokens


def _token(drawn: int | Exception) -> int:
    if isinstance(drawn, Exception):
        raise drawn
    return drawn
