"""The interface of a backend (llama.cpp, or a fake), and the executor that runs plans on it.

The engine's thread calls `copy` to `detach_adapter`, and the executor; any thread may call the other methods.

Memory is addressed by positions. In a text positions are cells; a range of positions includes all cells of its media items.

An exception fails all rows or texts of its call, and nothing of them is kept. An error of a single row goes into its
`RowOutput`.
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
        """The bytes of the tokens, and the end-of-generation tokens."""

    def make_samplers(self, params: SamplingParams, prompt: list[int]) -> tuple[object, ...]:
        """Return a sampler for each of `params.n` choices, after the prompt. May take long. Raises `RequestError`s."""

    def resume_sampler(self, sampler: object, token_ids: Many[int], state: bytes | None) -> None:
        """Bring a new sampler to the state of another sampler, which drew these tokens and had this `sampler_state`."""

    def sampler_state(self, sampler: object) -> bytes:
        """Return the state of a sampler with draws that depend on more than seed and tokens."""

    def prepare_embedding(self, pooling: str | None, num_tokens: int) -> str:
        """Prepare for texts of up to num_tokens tokens, and return the pooling. May take long.

        Raises `RequestError`s and `NotEnoughMemory`.
        """

    def prepare_media_embedding(self, pooling: str | None, num_tokens: int, num_at_once: int) -> str:
        """Prepare for prompts with media of up to num_tokens tokens and cells, and return the pooling. May take long.

        num_at_once: cells of the largest item that one pass must compute. Raises `Unsupported` for another pooling than "last",
        and as `prepare_embedding`.
        """

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Copy the positions before `end` of one sequence id to an empty sequence id."""

    def copy_cells(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Copy the cells of these positions without the state beside them; `load_state` makes the copy usable."""

    def save(self, seq_id: int, start: int, end: int) -> SavedState:
        """Return the cells at positions [start, end) of a sequence id, for host memory."""

    def load(self, seq_id: int, data: Any, start: int, end: int) -> None:
        """Add positions [start, end) of saved cells to a sequence id that holds exactly the positions before."""

    def cut(self, data: Any, start: int, end: int) -> SavedState:
        """Return positions [start, end) of saved cells, as `save` would. Needs free cells for all of them."""

    def save_state(self, seq_id: int, end: int) -> SavedState:
        """Return the state with which a sequence id goes on at position `end`: its state beside cells, or all of its memory."""

    def load_state(self, seq_id: int, data: Any, end: int) -> None:
        """Load a saved state into a sequence id, which has the cells before `end` if cells are kept apart from states."""

    def saved_cells(self, start: int, end: int, payload: Any) -> SavedState:
        """Return what `save` or `save_state` made, of its positions and its bytes (`start`, `end` and `payload`). Any thread."""

    def truncate(self, seq_id: int, end: int) -> None:
        """Remove the positions of a sequence id from `end` on, all of which the last row had. Needed if drafts can be verified.

        If memory has a state that cannot be cut, `end` is the beginning of that row.
        """

    def remove(self, seq_id: int) -> None:
        """Empty a sequence id."""

    def step(self, rows: Many[Row], lora: Lora) -> list[RowOutput]:
        """Run one pass over rows of one kind, and draw for the rows that draw.

        A row with drafts draws after its last known token and after each draft, as long as the drawn token is the next draft.
        Drafts from the first wrong one on are not kept; if memory cannot be cut there, nothing of the row is kept. A drawn end
        of generation is the last draw.

        Raises `Unsupported` for a kind of row that this backend cannot compute.
        """

    def embed(self, texts: list[list[int]], pooling: str | None) -> list[Any]:
        """Run one pass and return a vector or a score for each text; with pooling "none", a vector for each token."""

    def embed_media(self, item: EmbeddingItem) -> Any:
        """Return the vector of the last token of a prompt with media. Raises the error of media without embeddings."""

    def detach_adapter(self, adapter: str) -> None:
        """Stop applying an adapter that no row needs any more; does nothing if it is not applied. Engine's thread."""

    def load_adapter(self, adapter: str, path: str) -> None:
        """Load the LoRA adapter of a file under a new key. May take long. Raises `AdapterError`. Any thread."""

    def adapter_fingerprint(self, adapter: str) -> bytes:
        """Return 16 bytes that identify the content of a loaded adapter. Raises `AdapterNotFound`. Any thread."""

    def free_adapter(self, adapter: str) -> None:
        """Free a detached adapter; does nothing for an unknown key. Any thread."""

    def positions(self, seq_id: int) -> int:
        """Return the position after the last one of a sequence id; 0 if it is empty. For checks."""

    def abort(self) -> None:
        """Abort the running pass, which raises `Aborted`."""

    def abort_embedding(self) -> None:
        """Abort the running pass if it embeds texts; it raises `Aborted`. Any thread."""

    def close(self) -> None:
        """Free the memory."""


def prepare_embedding(backend: Backend, request: EmbeddingRequest) -> str | None:
    """Prepare a backend for the texts and media of a request, and return the pooling. Raises as the backend does."""
    pooling = request.pooling
    if request.media:
        pooling = backend.prepare_media_embedding(pooling, request.longest_media_prompt, request.largest_whole_item)
    return backend.prepare_embedding(pooling, request.longest_text) if request.longest_text else pooling


_log = logging.getLogger("paceline.engine")


class Executor:
    """Runs plans on a backend and returns the outcome of each row; never raises for a failed row or pass."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._has_warned = False
        self._embedded: set[int] = set()  # keys of the requests that the running pass embeds and that are not cancelled
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
        """Abort the running pass if every request that it embeds is cancelled; `key` is the latest of them. Any thread."""
        with self._lock:
            if key in self._embedded:
                self._embedded.remove(key)
                if not self._embedded:
                    self._backend.abort_embedding()

    def detach_adapter(self, adapter: str) -> None:
        """Stop applying an adapter."""
        self._backend.detach_adapter(adapter)

    def _operate(self, operations: list[Operation], output: TransferOutput) -> dict[int, PacelineError]:
        """Carry out the cache operations in order; return the errors of copies and loads by the sequence id that they fill.

        A failed save saves nothing, and its tokens are computed again when they are needed. Only the first failure is logged.
        """
        errors: dict[int, PacelineError] = {}
        for operation in operations:
            try:
                self._carry_out(operation, output)
            except Exception as error:
                if isinstance(operation, (Remove, Truncate)):
                    raise
                if isinstance(operation, (Save, SaveState)):
                    if not self._has_warned:
                        self._has_warned = True
                        _log.warning(
                            "%d tokens could not be saved to host memory; further failures are not logged",
                            operation.num_tokens
                            if isinstance(operation, SaveState)
                            else operation.end - operation.start,
                            exc_info=error,
                        )
                    continue
                seq_id = operation.to_seq_id if isinstance(operation, Copy) else operation.seq_id
                if seq_id not in errors and isinstance(operation, (Load, LoadState)):
                    output.failed_loads.append(operation)
                errors.setdefault(seq_id, as_paceline_error(error))
                output.failed_seq_ids.add(seq_id)
        return errors

    def _carry_out(self, operation: Operation, output: TransferOutput) -> None:
        begin = self._clock.now()
        match operation:
            case Copy(from_seq_id, to_seq_id, num_tokens, cells_only, layout):
                copy = self._backend.copy_cells if cells_only else self._backend.copy
                copy(from_seq_id, to_seq_id, layout.position(num_tokens))
            case Load(seq_id, data, start, end, layout):
                self._backend.load(seq_id, data, layout.position(start), layout.position(end))
                output.loading_s += self._clock.now() - begin
            case Save(seq_id, start, end, layout=layout, cut_from=whole):
                first, last = layout.position(start), layout.position(end)
                save = (
                    self._backend.save(seq_id, first, last) if whole is None else self._backend.cut(whole, first, last)
                )
                output.saved.append((operation, save))
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
        failed = [None if row.sequence.seq_id is None else errors.get(row.sequence.seq_id) for row in rows]
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


def as_paceline_error(error: BaseException) -> PacelineError:
    """Return the error itself if it is a `PacelineError`, else one that carries it."""
    if isinstance(error, PacelineError):
        return error
    wrapped = EngineError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
