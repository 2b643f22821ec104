"""llama.cpp as the engine's backend: one context for generation, one for each pooling in use.

`step`, `embed`, `copy`, `save`, `load`, `truncate`, `remove` and `detach_adapter` run on the engine's thread; the rest on any.
"""

from __future__ import annotations

import contextlib
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
from paceline.runtime.sampler import Logprobs
from paceline.runtime.step import FloatArray, IntArray, native_error
from paceline.scheduling.records import EmbeddingItem
from paceline.sequence import Row, RowOutput
from paceline.speculation.drafters.heads import DraftWish
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
                output = RowOutput((token_id,), [_record_of_one(found)])
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


def _record_of_one(logprobs: Logprobs) -> TokenLogprobs:
    top = logprobs.top
    return TokenLogprobs(logprobs.chosen.logprob, tuple(one.token_id for one in top), tuple(one.logprob for one in top))


def _has(words: TokenWords, token_id: int) -> bool:
    return bool(words[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))


_MASK_TIMEOUT_S = 10.0
_DRAFT_MASKS_S = 0.02  # for masks along drafts, during which no pass runs
_MASK_GRACE_S = 0.5  # after a pass that lasted as long as masks may take
# Architectures of which all files, or some, have M-RoPE: their contexts take rows that leave positions out.
_SKIP_POSITIONS = frozenset(
    {
        "bailingmoe3", "dflash", "glm4", "glm4moe", "hunyuan_vl", "paddleocr", "qwen2vl", "qwen35", "qwen35moe", "qwen3tts",
        "qwen3vl", "qwen3vlmoe", "qwen4exp",
    }
)  # fmt: skip


class LlamaBackend:
    """Computes rows on a context and texts on embedders.

    context: None for a model that cannot generate; its last sequence id is the backend's own, for saving and loading.
    adapters: by their keys. embedder_options: of the contexts for embeddings, made when first needed.
    drafting: contexts of draft models, which `abort` ends, too; others use and close them.
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
    def _compiler(self) -> ConstraintCompiler:
        """Made when first needed: reading a large vocabulary takes about a second."""
        return ConstraintCompiler(token_table(self._model.tokenizer))

    def make_samplers(self, params: SamplingParams, prompt: list[int]) -> tuple[Sampler | ConstrainedSampler, ...]:
        """Make one for each choice, all with the same seed. Compiles grammar and constraint, which may take long."""
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
        """Let it accept the tokens, or restore its state."""
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
        """Return the state of Mirostat and adaptive-p, whose draws depend on earlier ones."""
        assert isinstance(sampler, (Sampler, ConstrainedSampler))  # noqa: S101 - made above
        return sampler.state() if isinstance(sampler, Sampler) else sampler.sampler.state()

    def prepare_embedding(self, pooling: str | None, num_tokens: int) -> str:
        """Make the context for this pooling and texts of this size. Raises `Unsupported`, `NotEnoughMemory`."""
        with self._making:
            if pooling not in self._embedders:
                embedder = Embedder(self._model, pooling=pooling, **self._embedder_options)  # type: ignore[arg-type]
                self._embedders[pooling] = self._embedders.setdefault(embedder.pooling, embedder)
            self._embedders[pooling].reserve(num_tokens)
            return self._embedders[pooling].pooling

    def prepare_media_embedding(self, pooling: str | None, num_tokens: int, num_at_once: int) -> str:
        """See `Backend`; makes the context for it when it is first needed."""
        chosen = media_pooling(self._model, pooling)
        with self._making:
            if self._media_embedder is None:
                self._media_embedder = MediaEmbedder(self._model, **self._embedder_options)
            self._media_embedder.reserve(num_tokens, num_at_once)
        return chosen

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Share the positions before `end` of a sequence id, without computing any.

        A window gets cells of its own: llama.cpp never reuses those of two sequences, and has not reserved more.
        """
        context = self._generating
        context.copy(from_seq_id, to_seq_id, 0, end)
        if self._model.n_swa > 0 and context.has_state_apart:
            context.load_state(to_seq_id, context.save_state(to_seq_id, end), end)

    def copy_cells(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Share the cells before position `end`, without the state beside them."""
        self._generating.copy_cells(from_seq_id, to_seq_id, end)

    def save(self, seq_id: int, start: int, end: int) -> CellState:
        """Return the cells at positions [start, end) of a sequence id, in llama.cpp's own format."""
        return self._generating.save_cells(seq_id, start, end, scratch_seq_id=self._scratch)

    def load(self, seq_id: int, data: CellState, start: int, end: int) -> None:
        """Add positions [start, end) of what was saved."""
        self._generating.load_cells(seq_id, data, start, end, scratch_seq_id=self._scratch)

    def cut(self, data: CellState, start: int, end: int) -> CellState:
        """Return the cells at positions [start, end) of what was saved."""
        return self._generating.cut_cells(data, start, end, scratch_seq_id=self._scratch)

    def save_state(self, seq_id: int, end: int) -> CellState:
        """Return the state of a sequence id: what it holds beside cells, or all of it."""
        return self._generating.save_state(seq_id, end)

    def load_state(self, seq_id: int, data: CellState, end: int) -> None:
        """Give a sequence id a saved state."""
        self._generating.load_state(seq_id, data, end)

    def truncate(self, seq_id: int, end: int) -> None:
        """Remove the positions of a sequence id from `end` on."""
        self._generating.remove(seq_id, end)

    def remove(self, seq_id: int) -> None:
        """Empty a sequence id."""
        self._generating.remove(seq_id)

    def step(self, rows: Many[Row], lora: Lora) -> list[RowOutput]:
        """Run a pass and its draws, in one native call.

        Rows of media items are passes of their own. Raises `InvalidParams` for a row of text that does not go on where its
        sequence ends.
        """
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
        """Compute parts of media items, one after another, as each fills a pass; one that fails does so alone.

        Cells with places go on within their item at its position, which a rollback cannot cut at: hence the scratch sequence.
        """
        outputs: list[RowOutput] = []
        for row in rows:
            try:
                cells = slice(row.offset, row.offset + len(row.token_ids))
                embeddings, places = _embeddings(row)
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
        """Return drafts of the context's draft heads, none for a sequence that they could not follow.

        Behind an image of M-RoPE a token has another position than the cells before it would say: that where its sequence ends.
        """
        if self._may_skip_positions:
            wishes = [(seq_id, self.positions(seq_id), token_id, depth) for seq_id, _, token_id, depth in wishes]
        return self._generating.draft(wishes, min_probability=p_min)

    def _check_positions(self, rows: Many[Row]) -> None:
        """Raise `InvalidParams` where cells of a text are missing: the context takes what might follow an image there."""
        for row in rows:
            seq_id = _seq_id(row)
            if row.sequence.layout is TEXT_LAYOUT and row.position != (end := self.positions(seq_id)):
                raise InvalidParams(f"position must be {end}, where sequence {seq_id} goes on, not {row.position}")

    def _constrained_step(self, context: Context, rows: Many[Row]) -> list[RowOutput]:
        """Run a pass whose masks are filled meanwhile; those along drafts before it, since they say which of them to try.

        All share one deadline. Drafts whose masks take long are left out.
        """
        filler = self._mask_filler(context)
        samplers = [_constrained(row) for row in rows]
        masked = [
            (row, one)
            for row, one in zip(rows, samplers, strict=True)
            if one is not None and one.constraint is not None
        ]
        end_s = time.perf_counter() + _MASK_TIMEOUT_S
        jobs = filler.begin([(one.fills_along(row.drafts), 1 + row.num_drafts) for row, one in masked])
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
        for row, computed, end, one in zip(rows, found, ends, samplers, strict=True):
            output, job = computed, of_rows.get(id(row))
            if one is not None and one.processors is not None and output.error is None:
                mask = None if job is None else filler.slots.words(job.slots[0])
                scored, output = output.scored, one.draw(context.logits(end - 1), mask, row.num_logprobs)
                output.scored = scored
            if row.num_drafts and job is not None:
                output.waited_s = waited_s
            outputs.append(output if one is None else _settled(one, output, job))
        return outputs

    def _mask_filler(self, context: Context) -> MaskFiller:
        if self._masks is None:
            self._masks = MaskFiller(max(context.n_seq_max, context.n_outputs_max), len(self.vocabulary.pieces))
        return self._masks

    def embed(self, texts: list[list[int]], pooling: str | None) -> list[Any]:
        """Return vectors, float32 (dimension,); with pooling "none" float32 (tokens, dimension). Not normalised."""
        embedder = self._embedders[pooling]
        if embedder.pooling == "none":
            return list(embedder.embed_tokens(texts, normalize="none"))
        return list(embedder.embed(texts, normalize="none"))

    def embed_media(self, item: EmbeddingItem) -> npt.NDArray[np.float32]:
        """See `Backend`; float32 (dimension,), not normalised."""
        assert self._media_embedder is not None  # noqa: S101 - it was prepared
        found = item.request.embeddings
        return self._media_embedder.embed(
            [one if isinstance(one, list) else _media_part(found, one) for one in item.segments()]
        )

    def load_adapter(self, adapter: str, path: str) -> None:
        """See `Backend`."""
        self._adapters[adapter] = self._model.load_adapter(path)

    def adapter_fingerprint(self, adapter: str) -> bytes:
        """See `Backend`."""
        found = self._adapters.get(adapter)
        if found is None:
            raise AdapterNotFound(f"the adapter {name_of(adapter)!r} is not loaded")
        return found.fingerprint

    def detach_adapter(self, adapter: str) -> None:
        """See `Backend`."""
        if any(one == adapter for one, _ in self._lora):
            self._generating.set_adapters({})
            self._lora = ()

    def free_adapter(self, adapter: str) -> None:
        """See `Backend`."""
        found = self._adapters.pop(adapter, None)
        if found is not None:
            found.close()

    def positions(self, seq_id: int) -> int:
        """Return the position behind the last one that a sequence id holds."""
        held = self._generating.positions(seq_id)
        return 0 if held is None else held.last + 1

    def abort(self) -> None:
        """Abort running passes, which raise `Aborted`; those of a draft model, too."""
        for context in (self._context, *self._drafting):
            if context is not None:
                context.abort()
        self.abort_embedding()

    def abort_embedding(self) -> None:
        """Abort a running pass of an embedder, which raises `Aborted`."""
        for embedder in (*self._embedders.values(), self._media_embedder):
            if embedder is not None:
                embedder.abort()

    def close(self) -> None:
        """Free the contexts and adapters; the model belongs to its owner."""
        with self._making:
            embedders = (*self._embedders.values(), self._media_embedder)
            for one in (self._context, *embedders, *tuple(self._adapters.values())):
                if one is not None:
                    one.close()
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


def _embeddings(row: Row) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32] | None]:
    """Return the embeddings of the item that a row is a part of, and their places. Raises why there are none."""
    part = _media_part(row.sequence.request.embeddings, row.item)
    assert part.embeddings is not None  # noqa: S101 - as `_media_part` checks
    return part.embeddings, part.places


def _media_part(found: Any, item: MediaItem | None) -> MediaPart:
    """Return what an item was encoded to, of what a request has by the items' starts. Raises why there is none."""
    if isinstance(found, PacelineError):
        raise found
    part = None if item is None or found is None else found.get(item.start)
    if not isinstance(part, MediaPart) or part.embeddings is None:
        raise Unsupported("the embeddings of a media item are missing: llama.cpp computes items that were encoded")
    return part


def _plain_step(context: Context, rows: Many[Row]) -> list[RowOutput]:
    """Run a pass that draws next tokens and nothing else, as nearly all do."""
    running: Any = [row.sequence for row in rows]  # with a seq id and a sampler
    drawn = context.plain_step(
        [sequence.seq_id for sequence in running],
        [row.position for row in rows],
        [row.token_ids for row in rows],
        [one.sampler if row.draws else None for row, one in zip(rows, running, strict=True)],
    )
    return [
        RowOutput((one,)) if isinstance(one, int) else RowOutput() if one is None else RowOutput(error=one)
        for one in drawn
    ]


def token_table(tokenizer: Tokenizer) -> TokenTable:
    """Return the vocabulary as constraints read it."""
    return TokenTable(
        pieces=tokenizer.pieces(True),
        control_ids=frozenset(one for one in range(tokenizer.n_vocab) if tokenizer.is_control(one)),
        eog_ids=tokenizer.eog_ids,
        encode=partial(tokenizer.encode, add_special=False, parse_special=True),
    )


def _constrained(row: Row) -> ConstrainedSampler | None:
    """Return the sampler of a row that draws, if it is constrained."""
    sampler = row.sequence.sampler
    return sampler if row.draws and isinstance(sampler, ConstrainedSampler) else None


def _settled(sampler: ConstrainedSampler, output: RowOutput, job: MaskJob | None) -> RowOutput:
    if job is not None and job.error is not None:
        output.token_ids, output.logprobs, output.error = (), (), as_paceline_error(job.error)
        return output
    return sampler.settle(output)


def _masked_row(row: Row, job: MaskJob | None, end_s: float) -> tuple[Row, tuple[int, ...]]:
    """Return a row and the slots of its masks. Drafts whose masks are not filled by `end_s` are left out."""
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
    rows = zip(own.tolist(), ids[:, :num_top].tolist(), values[:, :num_top].tolist(), strict=True)
    return [_record(*row) for row in rows]


def _record(own: float, ids: list[int], values: list[float]) -> TokenLogprobs:
    count = ids.index(-1) if -1 in ids else len(ids)
    return TokenLogprobs(own, tuple(ids[:count]), tuple(values[:count]))
