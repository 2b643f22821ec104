"""The interface of a backend (llama.cpp, or a fake), and the executor that runs plans on one.

The engine's thread calls `copy` to `detach_adapter`, and the executor; any thread may call the rest.

Memory is addressed by positions, which are cells where a prompt is text; a range of positions has all cells of the media items in
it.

Errors: an exception belongs to all rows or texts of that call, and nothing of it may have been kept. An error of one
row alone goes into its `RowOutput`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence as Many
from typing import Any, Protocol

from paceline.clock import Clock
from paceline.errors import Aborted, EngineError, PacelineError
from paceline.kv_cache import (
    Copy,
    Cut,
    Load,
    LoadState,
    Operation,
    Remove,
    Save,
    SavedState,
    SaveState,
    TransferOutput,
    Truncate,
)
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.scheduling.records import EmbeddingItem, EmbeddingPlan, EmbeddingRequest, Plan, PlanOutput
from paceline.sequence import Row, RowOutput

Lora = tuple[tuple[str, float], ...]


class Backend(Protocol):
    """Computes rows and texts."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens' bytes and the ends of generation."""

    def make_samplers(self, params: SamplingParams, prompt: list[int]) -> tuple[object, ...]:
        """Return a sampler with the prompt for each of `params.n` choices. May take long; raises `RequestError`s."""

    def resume_sampler(self, sampler: object, token_ids: Many[int], state: bytes | None) -> None:
        """Bring a new sampler to the state of another one, which drew these tokens and has this `sampler_state`."""

    def sampler_state(self, sampler: object) -> bytes:
        """Return a sampler's state; needed only if its draws depend on more than seed and tokens."""

    def prepare_embedding(self, pooling: str | None, num_tokens: int) -> str:
        """Prepare for texts of up to num_tokens tokens, and return the pooling. May take long.

        Raises `RequestError`s and `NotEnoughMemory`.
        """

    def prepare_media_embedding(self, pooling: str | None, num_tokens: int, num_at_once: int) -> str:
        """Prepare for prompts with media of up to num_tokens tokens and cells, and return the pooling. May take long.

        num_at_once: cells of the largest item that one pass has to compute. Raises `Unsupported` for another pooling than that
        of the last token, and as `prepare_embedding`.
        """

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Copy the positions before `end` of one sequence id to another, which is empty."""

    def copy_cells(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Copy the cells of these positions alone, where a state lies beside them; `load_state` makes the copy usable."""

    def save(self, seq_id: int, start: int, end: int) -> SavedState:
        """Return the cells at positions [start, end) of a sequence id, for host memory."""

    def load(self, seq_id: int, data: Any, start: int, end: int) -> None:
        """Add positions [start, end) of what `save` returned to a sequence id that holds exactly those before."""

    def cut(self, data: Any, start: int, end: int) -> SavedState:
        """Return positions [start, end) of what `save` returned, as `save` would have; needs free cells for all of it."""

    def save_state(self, seq_id: int, end: int) -> SavedState:
        """Return the state of a sequence id that goes on at position `end`: what it holds beside cells, or all of it."""

    def load_state(self, seq_id: int, data: Any, end: int) -> None:
        """Give a sequence id what `save_state` returned; the cells before `end` are there, if they are kept apart."""

    def truncate(self, seq_id: int, end: int) -> None:
        """Remove the positions of a sequence id from `end` on, which the last row had; needed where drafts can be verified.

        Where memory has a state that cannot be cut, `end` is where that row began, which had drafts.
        """

    def remove(self, seq_id: int) -> None:
        """Empty a sequence id."""

    def step(self, rows: Many[Row], lora: Lora) -> list[RowOutput]:
        """Run one pass over the rows, which are of one kind, and draw for those that want it.

        A row with drafts draws along them: behind its last known token and behind each draft, while what is drawn is the
        next draft. Drafts from the first that was not drawn on are not kept; where that would be too many to be cut from memory,
        nothing of the row is. A drawn end of generation is the last draw.

        Raises `Unsupported` for a kind of row that this backend cannot compute.
        """

    def embed(self, texts: list[list[int]], pooling: str | None) -> list[Any]:
        """Return a vector, or a score, for each text, with pooling "none" a vector for each token; one pass."""

    def embed_media(self, item: EmbeddingItem) -> Any:
        """Return the vector of a prompt with media, that of its last token. Raises why its media have no embeddings."""

    def detach_adapter(self, adapter: str) -> None:
        """Stop applying an adapter that no row needs any more; does nothing for one that is not applied. Engine's thread."""

    def load_adapter(self, adapter: str, path: str) -> None:
        """Load the LoRA adapter of a file under a key that is new. May take long; raises `AdapterError`. Any thread."""

    def adapter_fingerprint(self, adapter: str) -> bytes:
        """Return 16 bytes that identify the content of a loaded adapter. Raises `AdapterNotFound`. Any thread."""

    def free_adapter(self, adapter: str) -> None:
        """Free a detached adapter; does nothing for one that is not there. Any thread."""

    def positions(self, seq_id: int) -> int:
        """Return the position behind the last one that a sequence id holds; 0 where it is empty. For checks."""

    def abort(self) -> None:
        """Abort the pass that is running, which raises `Aborted`."""

    def abort_embedding(self) -> None:
        """Abort the pass that is running if it embeds texts; it raises `Aborted`. Any thread."""

    def close(self) -> None:
        """Free the memory."""


def prepare_embedding(backend: Backend, request: EmbeddingRequest) -> str | None:
    """Prepare a backend for the texts of a request, and those with media, and return the pooling. Raises as the backend does."""
    pooling = request.pooling
    if request.media:
        pooling = backend.prepare_media_embedding(pooling, request.longest_media_prompt, request.largest_whole_item)
    return backend.prepare_embedding(pooling, request.longest_text) if request.longest_text else pooling


_log = logging.getLogger("paceline.engine")


class Executor:
    """Runs plans on a backend and returns the outcome of each row; never raises for a row or a pass that fails."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._has_warned = False
        self._embedded: set[int] = set()  # keys of the requests that a running pass embeds, without cancelled ones
        self._lock = threading.RLock()  # a cancel may come from a finaliser

    def run(self, plan: Plan) -> PlanOutput:
        """Return the outcome of every row or text of the plan."""
        output = PlanOutput()
        errors: dict[int, PacelineError] = {}
        if plan.operations:
            output.transfers = TransferOutput()
            errors = self._operate(plan.operations, output.transfers)
        start = self._clock.now()
        if isinstance(plan, EmbeddingPlan):
            with self._lock:
                self._embedded = {item.request.key for item in plan.items}
            try:
                self._embed(plan.items, plan.pooling, output)
            finally:
                with self._lock:
                    self._embedded = set()
        elif plan.rows:
            output.rows = self._step(plan.rows, plan.lora, errors, output)
        output.step_s = self._clock.now() - start
        return output

    def note_cancelled(self, key: int) -> None:
        """Abort the running pass if it embeds texts of cancelled requests alone; `key` is the latest of them. Any thread."""
        with self._lock:
            if key in self._embedded:
                self._embedded.remove(key)
                if not self._embedded:
                    self._backend.abort_embedding()

    def detach_adapter(self, adapter: str) -> None:
        """Stop applying an adapter."""
        self._backend.detach_adapter(adapter)

    def _operate(self, operations: list[Operation], output: TransferOutput) -> dict[int, PacelineError]:
        """Carry out the cache operations in order; return the errors of copies and loads, by the sequence id they fill.

        A save that fails saves nothing, so that its tokens are computed again where they are needed; the first is logged.
        """
        errors: dict[int, PacelineError] = {}
        for operation in operations:
            try:
                self._carry_out(operation, output)
            except Exception as error:
                if isinstance(operation, (Remove, Truncate)):
                    raise
                if isinstance(operation, (Save, Cut, SaveState)):
                    self._warn(operation, error)
                    continue
                seq_id = operation.to_seq_id if isinstance(operation, Copy) else operation.seq_id
                if seq_id not in errors and isinstance(operation, (Load, LoadState)):
                    output.failed_loads.append(operation)
                errors.setdefault(seq_id, as_paceline_error(error))
                output.failed_seq_ids.add(seq_id)
        return errors

    def _warn(self, save: Save | Cut | SaveState, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            num_tokens = save.num_tokens if isinstance(save, SaveState) else save.end - save.start
            _log.warning(
                "%d tokens could not be saved to host memory; further failures are not logged",
                num_tokens,
                exc_info=error,
            )

    def _carry_out(self, operation: Operation, output: TransferOutput) -> None:
        """Carry out an operation, whose cells the backend addresses by their positions."""
        begin = self._clock.now()
        match operation:
            case Copy(from_seq_id, to_seq_id, num_tokens, cells_only, layout):
                copy = self._backend.copy_cells if cells_only else self._backend.copy
                copy(from_seq_id, to_seq_id, layout.position(num_tokens))
            case Load(seq_id, data, start, end, layout):
                self._backend.load(seq_id, data, layout.position(start), layout.position(end))
                output.loading_s += self._clock.now() - begin
            case Save(seq_id, start, end, layout=layout):
                data = self._backend.save(seq_id, layout.position(start), layout.position(end))
                output.saved.append((operation, data))
                output.saving_s += self._clock.now() - begin
            case Cut(data, start, end, layout=layout):
                part = self._backend.cut(data, layout.position(start), layout.position(end))
                output.saved.append((operation, part))
                output.saving_s += self._clock.now() - begin
            case SaveState(seq_id, num_tokens, layout=layout):
                data = self._backend.save_state(seq_id, layout.position(num_tokens))
                output.saved_states.append((operation, data))
                output.state_saving_s += self._clock.now() - begin
            case LoadState(seq_id, data, num_tokens, layout):
                self._backend.load_state(seq_id, data, layout.position(num_tokens))
            case Truncate(seq_id, num_tokens, layout):
                self._backend.truncate(seq_id, layout.position(num_tokens))
            case Remove(seq_id):
                self._backend.remove(seq_id)

    def _step(
        self, rows: list[Row], lora: Lora, errors: dict[int, PacelineError], output: PlanOutput
    ) -> list[RowOutput]:
        if not errors:
            return self._step_in_parts(rows, lora, output)
        failed = [errors.get(_seq_id(row)) for row in rows]
        sound = [row for row, error in zip(rows, failed, strict=True) if error is None]
        results = iter(self._step_in_parts(sound, lora, output) if sound else [])
        return [next(results) if error is None else RowOutput(error=error, computed=False) for error in failed]

    def _step_in_parts(self, rows: list[Row], lora: Lora, output: PlanOutput) -> list[RowOutput]:
        output.num_passes += 1
        try:
            return self._backend.step(rows, lora)
        except Aborted as error:
            return [RowOutput(error=error, computed=False) for _ in rows]
        except Exception as error:  # noqa: BLE001 - an engine outlives whatever a pass raises
            if len(rows) == 1:
                return [RowOutput(error=as_paceline_error(error), computed=False)]
        half = len(rows) // 2
        return self._step_in_parts(rows[:half], lora, output) + self._step_in_parts(rows[half:], lora, output)

    def _embed(self, items: list[EmbeddingItem], pooling: str | None, output: PlanOutput) -> None:
        output.num_passes += 1
        vectors: list[Any] = [None] * len(items)
        errors: list[PacelineError | None] = [None] * len(items)
        try:
            if items[0].media:  # alone, as the queue has it
                vectors = [self._backend.embed_media(items[0])]
            else:
                vectors = self._backend.embed([item.token_ids for item in items], pooling)
        except Exception as error:  # noqa: BLE001 - as above
            if len(items) > 1 and not isinstance(error, Aborted):
                half = len(items) // 2
                self._embed(items[:half], pooling, output)
                self._embed(items[half:], pooling, output)
                return
            errors = [as_paceline_error(error)] * len(items)
        output.vectors += vectors
        output.errors += errors


def _seq_id(row: Row) -> int:
    assert row.sequence.seq_id is not None  # noqa: S101 - it runs
    return row.sequence.seq_id


def as_paceline_error(error: BaseException) -> PacelineError:
    """Return the error itself if it is a `PacelineError`, else one that carries it."""
    if isinstance(error, PacelineError):
        return error
    wrapped = EngineError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
