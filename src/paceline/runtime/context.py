"""A context: the KV memory of a model and the forward passes over it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from paceline import _native, validation
from paceline.errors import Closed, InvalidParams, InvalidType, PacelineError, PromptTooLong, StateError, Unsupported
from paceline.keywords import ContextKeywords, with_keywords
from paceline.runtime.attention import use_kernel_of_environment
from paceline.runtime.context_options import CELL_OPTIONS, ContextOptions
from paceline.runtime.model import Adapter, MemoryClass, Model
from paceline.runtime.native_core import Closeable, native_fact
from paceline.runtime.sampler import Sampler
from paceline.runtime.sequence_state import HEAD_BYTES, CellState, SequenceState, check_head, layout_fingerprint
from paceline.runtime.step import MaskSlots, StepResult, StepRow, columns_of, native_arguments, native_error, result_of

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


_MOST = 1e30  # within the range of a float32


class Positions(NamedTuple):
    """The first and the last position that a sequence holds in memory."""

    first: int
    last: int


class DraftWish(NamedTuple):
    """A draft to make: 1 to `max_tokens` tokens after the newest token of a sequence, `token_id` at `position`."""

    seq_id: int
    position: int
    token_id: int
    max_tokens: int


class OperationTime(NamedTuple):
    """The time of all operations of a kind and name in some passes, over all layers.

    Attributes:
        operation: ggml's name of the operation, like MUL_MAT.
        name: llama.cpp's name of the result, like ffn_up.
        type: The type of the first operand, like q8_0.
        num_times: The number of computations.
        seconds: The time of all of them.
        num_bytes: Bytes read and written.
        num_products: Pairs of numbers multiplied and summed by matrix products and attention.
    """

    operation: str
    name: str
    type: str
    num_times: int
    seconds: float
    num_bytes: float
    num_products: float


class Context(Closeable):
    """KV memory for `n_seq_max` sequences of one model, and the forward passes over it.

    May be called from any thread, one call at a time: a second one waits; `abort()` may be called at any time. Calls that
    compute release the GIL. After an error every sequence is as it was before the call. The options are the fields of
    `ContextOptions`; an unknown option raises `TypeError`.

    After a fork it raises `Closed` in the child, which has none of its threads: make the context there, or use "spawn".

    A context keeps its model alive. `close()`, the end of a `with` block or garbage collection frees its memory.
    """

    @with_keywords(ContextOptions)
    def __init__(
        self,
        model: Model,
        *,
        draft_heads: Model | None = None,
        is_checked: bool = True,
        times_operations: bool = False,
        **options: Unpack[ContextKeywords],
    ) -> None:
        """Make a context.

        Args:
            model: The model.
            draft_heads: The model with the draft heads that follow every pass, for `draft`: this model, loaded with
                `draft_heads=True`, or an EAGLE-3 or DFlash file. A second KV cache, for the heads, mirrors this context.
            is_checked: Whether llama.cpp plans a large context first, and a lack of host memory refuses it. A caller that knows
                that it fits passes False, since the plan reads the model's header again.
            times_operations: Whether passes compute each operation by itself, for `operation_times`, which takes longer.
            **options: The fields of `ContextOptions`.
        """
        self._native: _native.Context | None = None
        if not isinstance(model, Model):
            raise InvalidType(f"model must be a Model, not {type(model).__name__}")
        validation.reject_unknown(options, ContextOptions.names(), "ContextOptions")
        self.options = ContextOptions(**options)
        self._model_fingerprint = model.fingerprint
        trained = model.metadata.get(f"{model.native.architecture}.rope.scaling.original_context_length", "")
        self._original_length = int(trained) if trained.isdecimal() else None
        self._resolved = self.options.resolve(model, is_checked=is_checked)
        use_kernel_of_environment()
        given = dict(self._resolved)
        given["times_operations"] = validation.boolean("times_operations", times_operations)
        self._heads_fingerprint = None
        if draft_heads is not None:
            given["heads"] = validation.instance("draft_heads", draft_heads, Model).native
            self._heads_fingerprint = draft_heads.fingerprint
        self._native = _native.Context(model.native, _native.ContextOptions(**given))
        self.memory_class: MemoryClass = MemoryClass(self._native.memory_class)
        self.has_state_apart: bool = self._native.has_state_apart
        # Ranges of a full-size window cache are saved in pieces of this many positions; 0: in one.
        self._piece_size = model.n_swa if self.memory_class is not model.memory_class else 0
        self.n_vocab: int = model.n_vocab
        self._starts_with = model.native.decoder_start_token if model.has_encoder else None
        self._adapters: dict[Adapter, float] = {}

    @property
    def native(self) -> _native.Context:
        """The native object. Raises `Closed` after `close()`."""
        if self._native is None:
            raise Closed("the context was closed")
        return self._native

    # ---- sizes

    n_ctx: int = native_fact("n_ctx")
    """KV cells."""
    max_positions: int = native_fact("max_positions")
    """Most positions of a sequence: n_ctx, or its share if kv_unified is off, or the model's own limit."""
    n_batch: int = native_fact("n_batch")
    """Most tokens of a call."""
    max_rollback: int = native_fact("max_rollback")
    """Wrong drafts that a step can cut from recurrent state: as requested if llama.cpp supports it, else 0."""
    n_ubatch: int = native_fact("n_ubatch")
    """Most tokens computed at once."""
    n_seq_max: int = native_fact("n_seq_max")
    """Number of sequences; their ids are 0 to n_seq_max - 1."""
    n_outputs_max: int = native_fact("n_outputs_max")
    """Most rows of logits of a call."""

    # ---- forward passes

    def decode(
        self,
        token_ids: TokenIds,
        *,
        seq_ids: int | TokenIds = 0,
        positions: TokenIds | None = None,
        wants_logits: Literal["last", "all", "none"] | Sequence[bool] | npt.NDArray[np.bool_] = "last",
    ) -> None:
        """Compute tokens and store their keys and values.

        token_ids: (n,), 1 <= n <= n_batch. seq_ids: one id for all, or (n,). positions: (n,), the next positions of each
        sequence, which are the default; with M-RoPE the first may be a later one. wants_logits: the tokens for which `logits(i)`
        is available afterwards: the last of each sequence, all, none, or (n,) bools.

        Raises `InvalidParams` (nothing was computed), `NoKvSlot`, `PromptTooLong`, `Aborted`, `DecodeError`.
        """
        tokens = _int_array("token_ids", token_ids)
        ids = (
            np.full(len(tokens), _index("seq_ids", seq_ids), dtype=np.int32)
            if isinstance(seq_ids, (int, np.integer))
            else _int_array("seq_ids", seq_ids)
        )
        if len(ids) != len(tokens):
            raise InvalidParams(f"seq_ids must have {len(tokens)} entries as token_ids has, not {len(ids)}")
        at = self._next_positions(ids) if positions is None else _int_array("positions", positions)
        self.native.decode(tokens, at, ids, _wanted(wants_logits, ids))

    def _next_positions(self, seq_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        positions = np.empty_like(seq_ids)
        for seq_id in np.unique(seq_ids).tolist():
            here = seq_ids == seq_id
            start, count = self.native.positions(seq_id)[1] + 1, int(here.sum())
            if start + count > self.max_positions:
                raise PromptTooLong(
                    f"token_ids: {count} tokens do not fit behind position {start} of sequence {seq_id}; "
                    f"positions must be below {self.max_positions}, the most that a sequence can have"
                )
            positions[here] = np.arange(start, start + count, dtype=np.int32)
        return positions

    def step(
        self, rows: Sequence[StepRow], *, masks: MaskSlots | None = None, mask_timeout_s: float = 10.0
    ) -> StepResult:
        """Run one tick's native work: a forward pass over the rows, then a draw by each sampler, in one call without the GIL.

        Everything is checked first. If the pass fails, every sequence is unchanged and no sampler has advanced. A sampler
        that cannot draw (everything masked, NaN) fails alone: see `SamplerDraws.error`.

        Raises as `decode`, and `Unsupported` for drafts if the model's memory cannot drop wrong drafts.
        """
        options = _mask_options(masks, mask_timeout_s)
        return result_of(rows, _native.step(self.native, **native_arguments(**columns_of(rows)), **options))

    def step_columns(self, *, masks: MaskSlots | None = None, mask_timeout_s: float = 10.0, **columns: Any) -> Any:
        """Run a step of rows that are given as columns, the fields of `StepRow` in the plural, each with an entry for each row.

        Returns the arrays of the core. Raises as `step`.
        """
        options = _mask_options(masks, mask_timeout_s)
        try:
            return _native.step(self.native, **native_arguments(**columns), **options)
        except PacelineError:
            raise
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise InvalidType(f"step_columns takes a list for each field of StepRow: {error!s:.200}") from error

    def plain_step(
        self,
        seq_ids: list[int],
        positions: list[int],
        token_ids: list[list[int]],
        samplers: list[Sampler | None],
    ) -> list[int | PacelineError | None]:
        """Run a step for rows that need only their next token; each list has one entry for each row.

        positions: the position of each row's first token. Lists avoid objects for rows, which cost microseconds after a pass.
        Returns the token that each row's sampler drew, or its error; None for a row without a sampler.
        Raises as `step`.
        """
        drawn: list[int | PacelineError | None]
        try:
            # Without a property call for each row.
            natives = [None if sampler is None else sampler._native for sampler in samplers]  # noqa: SLF001
            if natives.count(None) != samplers.count(None):
                raise Closed("the sampler was closed")
            drawn, failed = _native.plain_step(self.native, seq_ids, positions, token_ids, natives)
        except (AttributeError, TypeError) as error:
            raise InvalidType(f"plain_step takes lists of ints, lists of ids and samplers: {error!s:.200}") from error
        finally:
            natives = []  # a traceback would keep the native samplers, and so the model
        for index, kind, message in failed:
            drawn[index] = native_error(kind, message)
        if len(drawn) == len(samplers):
            return drawn
        results = iter(drawn)
        return [None if sampler is None else next(results) for sampler in samplers]

    def draft(
        self, wishes: Sequence[DraftWish | tuple[int, int, int, int]], *, min_probability: float = 0.0
    ) -> list[list[int]]:
        """Draft several sequences in one call of the draft heads: the likeliest token at each position.

        A draft ends after `max_tokens`, before a token less probable than min_probability, or at the last head. It is empty if
        the heads could not follow the sequence (it ends with an image, for example) or the sequence does not end at the wish's
        position.

        Raises `InvalidParams`, `Unsupported` without draft heads, `NoKvSlot` if no cells are free for the drafts, and `Aborted`
        or `DecodeError` if a pass of the heads fails; every sequence is then unchanged.
        """
        probability = validation.number("min_probability", min_probability, 0, 1)
        try:
            return self.native.draft(list(wishes), probability)
        except TypeError as error:
            raise InvalidType(f"wishes must be of integers: {error!s:.200}") from error

    def decode_embeddings(
        self,
        seq_id: int,
        position: int,
        embeddings: npt.NDArray[np.float32],
        *,
        places: npt.NDArray[np.int32] | None = None,
        is_causal: bool = True,
        scratch_seq_id: int = -1,
    ) -> None:
        """Compute embeddings of a `MediaPart`, or some of them, in place of tokens, and store their keys and values.

        Args:
            seq_id: The sequence.
            position: The next position of the sequence. With `places`, the first position of the item, also for its later cells.
            embeddings: float32 (n, n_embd), at most n_batch rows, and at most n_ubatch if attention is not causal. They must not
                change during the call.
            places: int32 (n, 3), for M-RoPE.
            is_causal: Whether attention among these cells is causal.
            scratch_seq_id: An empty sequence, needed for the later cells of an item with places.

        Raises `InvalidParams` (nothing was computed), `NoKvSlot`, `PromptTooLong`, `Unsupported`, `Aborted`, `DecodeError`;
        the sequence is then unchanged.
        """
        causal = validation.boolean("is_causal", is_causal)
        scratch = validation.integer("scratch_seq_id", scratch_seq_id, -1, 2**31 - 1)
        try:
            self.native.decode_embeddings(
                _index("seq_id", seq_id), _index("position", position), embeddings, places, causal, scratch
            )
        except TypeError:
            raise InvalidType(
                "embeddings must be an array of float32 (n, n_embd) and places one of int32 (n, 3), both contiguous"
            ) from None

    def encode(self, token_ids: TokenIds) -> None:
        """Run the encoder of an encoder-decoder model; later passes attend to its output for these tokens."""
        self.native.encode(_int_array("token_ids", token_ids))

    def logits(self, index: int) -> npt.NDArray[np.float32]:
        """Return the logits after token `index` of the last call, float32 (n_vocab,), as a copy."""
        return self.native.logits(validation.integer("index", index, 0, 2**31 - 1))

    def embeddings(self, index: int) -> npt.NDArray[np.float32]:
        """Return the hidden state of token `index` of the last call, float32 (n_embd_out,); needs `embeddings=True`."""
        return self.native.embeddings(validation.integer("index", index, 0, 2**31 - 1))

    def abort(self) -> None:
        """End the pass that is running in another thread, which raises `Aborted`; do nothing if none is running.

        The CPU backend stops within a pass; a GPU finishes the part it has begun.
        """
        self.native.abort()

    def operation_times(self) -> list[OperationTime]:
        """Return the times of operations in the passes since the last call, in the order of computation.

        Operations of draft heads are not included. Raises `Unsupported` without `times_operations=True`.
        """
        return [
            OperationTime(op.operation, op.name, op.type, op.num_times, op.seconds, op.bytes, op.products)
            for op in self.native.operation_times()
        ]

    def generate(
        self, sampler: Sampler, token_ids: TokenIds, max_tokens: int | None = None, *, seq_id: int = 0
    ) -> Iterator[int]:
        """Generate without an engine: compute the prompt, then yield one token at a time.

        Ends after `max_tokens` (None: from the sampler's params), when the context is full, or before an end-of-generation token
        or a token of the params' `stop_token_ids`. Stop strings need text: see `paceline.TextPipe`. The prompt is appended to
        the sequence, which afterwards holds the prompt and all yielded tokens, except the last token if max_tokens or the
        context ended it. The sampler gets the prompt as history. Arguments are checked at the call, not at the first `next`.

        Raises `PromptTooLong` if the prompt does not fit.
        """
        validation.instance("sampler", sampler, Sampler)
        prompt = _int_array("token_ids", token_ids).copy()
        limit = sampler.params.max_tokens if max_tokens is None else validation.integer("max_tokens", max_tokens, 0)
        held = self.positions(seq_id)
        start = 0 if held is None else held.last + 1
        if len(prompt) == 0:
            raise InvalidParams("token_ids is empty; a prompt needs at least one token, such as the BOS token")
        if start + len(prompt) > self.max_positions:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and sequence {seq_id} holds {start}; the context has {self.max_positions}"
            )
        sampler.accept_prompt(prompt)
        return self._generate(sampler, prompt, start, limit, seq_id)

    def _generate(
        self, sampler: Sampler, prompt: npt.NDArray[np.int32], position: int, limit: int | None, seq_id: int
    ) -> Iterator[int]:
        if self._starts_with is not None:
            self.encode(prompt)
            prompt = np.array([self._starts_with], dtype=np.int32)
        while len(prompt) > self.n_batch:
            self.step([StepRow(seq_id=seq_id, position=position, token_ids=prompt[: self.n_batch])])
            position, prompt = position + self.n_batch, prompt[self.n_batch :]
        tokens: Sequence[int] | npt.NDArray[np.int32] = prompt
        count = 0
        while limit is None or count < limit:
            if position + len(tokens) > self.max_positions:
                return
            row = StepRow(seq_id=seq_id, position=position, token_ids=tokens, samplers=(sampler,))
            draws = self.step([row]).rows[0].draws[0]
            if draws.error is not None:
                raise draws.error
            position += len(tokens)
            token = draws.token_ids[0]
            if sampler.is_eog(token) or token in sampler.params.stop_token_ids:
                return
            yield token
            tokens = [token]
            count += 1

    # ---- memory

    def positions(self, seq_id: int) -> Positions | None:
        """Return the positions of a sequence, or None if it is empty. Sliding windows drop first positions as they advance."""
        first, last = self.native.positions(_index("seq_id", seq_id))
        return None if last < 0 else Positions(first, last)

    def remove(self, seq_id: int, start: int = 0) -> None:
        """Remove the positions from `start` on; from 0 on, the whole sequence.

        Raises `Unsupported` if `start` is not 0 and the memory cannot be cut there: recurrent state never can, a sliding
        window only as far back as it still covers.
        """
        self.native.remove(_index("seq_id", seq_id), _index("start", start))

    def copy(self, from_seq_id: int, to_seq_id: int, start: int = 0, end: int | None = None) -> None:
        """Let a sequence share positions [start, end) of another; `end` None: all. Nothing is computed or moved.

        The source must hold them all; the target must be empty, or end just before `start`. Raises `Unsupported` for a
        part of a recurrent or hybrid model's sequence, for positions outside a sliding window, and without kv_unified.
        """
        self.native.copy(
            _index("from_seq_id", from_seq_id),
            _index("to_seq_id", to_seq_id),
            _index("start", start),
            -1 if end is None else _index("end", end),
        )

    def copy_cells(self, from_seq_id: int, to_seq_id: int, num_tokens: int) -> None:
        """Let an empty sequence share the cells of the first tokens of another, without the state beside them.

        The copy can compute after `load_cells` of the missing cells and `load_state`. Raises `Unsupported` without
        `has_state_apart`.
        """
        self.native.copy_cells(
            _index("from_seq_id", from_seq_id), _index("to_seq_id", to_seq_id), _index("num_tokens", num_tokens)
        )

    def keep(self, seq_id: int) -> None:
        """Remove every sequence but this one."""
        self.native.keep(_index("seq_id", seq_id))

    def clear(self) -> None:
        """Remove every sequence."""
        self.native.clear(False)

    # ---- state

    @property
    def fingerprint(self) -> bytes:
        """16 bytes, equal for contexts that can load each other's saved sequences: model, adapters and the layout of cells."""
        layout = [(name, self._resolved[name]) for name in CELL_OPTIONS]
        if self._piece_size:
            layout.append(("piece_size", self._piece_size))
        if self._original_length is not None and self.max_positions > self._original_length:
            layout.append(("rope_factors", "long"))  # of models that have others for short contexts
        if self._heads_fingerprint is not None:
            layout.append(("draft_heads", self._heads_fingerprint))
        adapters = sorted((adapter.fingerprint, scale) for adapter, scale in self._adapters.items() if scale != 0)
        return layout_fingerprint(self._model_fingerprint, (layout, adapters))

    def save_sequence(self, seq_id: int, *, token_ids: Sequence[int] = (), partial: bool = False) -> bytes:
        """Return a sequence's state as bytes, for `load_sequence` of a context with the same model and layout.

        token_ids: the tokens of the sequence, returned when it is loaded. partial: saves only sliding windows and recurrent
        state, which is small; it takes a sequence that has advanced back to this point, while the sequence still holds its cells.
        """
        validation.boolean("partial", partial)
        ids = tuple(validation.token_ids("token_ids", token_ids, self.n_vocab))
        payload, last = self.native.save(_index("seq_id", seq_id), partial)
        return SequenceState(self.fingerprint, ids, partial, last, payload).to_bytes()

    def load_sequence(self, seq_id: int, data: bytes | bytearray | memoryview) -> tuple[int, ...]:
        """Replace a sequence by a saved one, and return the token ids saved with it.

        Raises `StateError` if the bytes are no saved sequence, damaged, or of another model or layout; if they are partial and
        of a later point than the sequence (which is then unchanged); or if they do not fit into the free cells (the sequence is
        then empty).
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InvalidType(f"data must be bytes, not {type(data).__name__}")
        # bytes cannot change between their check and their use.
        state = SequenceState.from_bytes(bytes(data), self.fingerprint)
        self.native.restore(_index("seq_id", seq_id), state.payload, state.partial, state.last)
        return state.token_ids

    def save_sequence_file(self, path: str | os.PathLike[str], seq_id: int, *, token_ids: Sequence[int] = ()) -> int:
        """Save a sequence to a file, atomically, and return its size in bytes; as `save_sequence`."""
        data = self.save_sequence(seq_id, token_ids=token_ids)
        target = validation.path("path", path)
        aside = target.parent / f".{target.name}.{os.getpid()}.{threading.get_ident()}.part"
        try:
            aside.write_bytes(data)
            aside.replace(target)
        except OSError as error:
            raise StateError(f"cannot write the saved sequence {target}: {error.strerror or error}") from None
        finally:
            with suppress(OSError):
                aside.unlink()
        return len(data)

    def load_sequence_file(self, path: str | os.PathLike[str], seq_id: int) -> tuple[int, ...]:
        """Load a sequence from a file; as `load_sequence`."""
        try:
            with validation.open_file(validation.path("path", path)) as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(HEAD_BYTES)
                check_head(head, size)
                data = head + file.read(size - len(head))
        except OSError as error:
            raise StateError(f"cannot read the saved sequence {path}: {error.strerror or error}") from None
        return self.load_sequence(seq_id, data)

    def save_cells(self, seq_id: int, start: int, end: int, *, scratch_seq_id: int) -> CellState:
        """Return positions [start, end) of a sequence as stored in memory, for `load_cells` of this same context.

        scratch_seq_id: an empty sequence for intermediate copies. With `has_state_apart` the cells are saved without the state.
        Memory of other classes than attention can only be saved whole: start must be 0 and end the length of the sequence, else
        `Unsupported` is raised; the scratch sequence is not used.
        """
        seq_id, start, end = _index("seq_id", seq_id), _index("start", start), _index("end", end)
        if self._is_whole:
            return self._save_whole(seq_id, start, end)
        payload = self.native.save_range(seq_id, start, end, _index("scratch_seq_id", scratch_seq_id))
        payload.flags.writeable = False
        return CellState(start, end, payload)

    def load_cells(self, seq_id: int, state: CellState, start: int, end: int, *, scratch_seq_id: int) -> None:
        """Append positions [start, end) of saved cells to a sequence that holds exactly the positions before `start`.

        With `has_state_apart` the sequence must be empty or have cells alone, and `load_state` follows.
        """
        validation.instance("state", state, CellState)
        seq_id, start, end = _index("seq_id", seq_id), _index("start", start), _index("end", end)
        if self._is_whole:
            self._load_whole(seq_id, state, start, end)
            return
        scratch = _index("scratch_seq_id", scratch_seq_id)
        self.native.load_range(seq_id, state.payload, state.start, state.end, start, end, scratch)

    def cut_cells(self, state: CellState, start: int, end: int, *, scratch_seq_id: int) -> CellState:
        """Return positions [start, end) of saved cells as `save_cells` would have returned them.

        scratch_seq_id: an empty sequence that holds the cells for a moment. Raises `Unsupported` if memory is saved whole, and
        `StateError` if the cells do not fit into the free cells.
        """
        validation.instance("state", state, CellState)
        start, end, scratch = _index("start", start), _index("end", end), _index("scratch_seq_id", scratch_seq_id)
        payload = self.native.cut_range(state.payload, state.start, state.end, start, end, scratch)
        payload.flags.writeable = False
        return CellState(start, end, payload)

    def save_state(self, seq_id: int, num_tokens: int) -> CellState:
        """Return the state of a sequence that holds num_tokens, for `load_state` of this same context.

        With `has_state_apart` the result is the state beside the cells, with an empty range; else it is the whole sequence.
        """
        seq_id, num_tokens = _index("seq_id", seq_id), _index("num_tokens", num_tokens)
        if not self.has_state_apart:
            return self._save_whole(seq_id, 0, num_tokens)
        payload, last = self.native.save(seq_id, True)
        if last + 1 != num_tokens:
            raise InvalidParams(f"sequence {seq_id} holds {last + 1} tokens, not {num_tokens}")
        payload.flags.writeable = False
        return CellState(num_tokens, num_tokens, payload)

    def load_state(self, seq_id: int, state: CellState, num_tokens: int) -> None:
        """Load a state of `save_state`. With `has_state_apart` the sequence must hold the cells of num_tokens."""
        validation.instance("state", state, CellState)
        seq_id, num_tokens = _index("seq_id", seq_id), _index("num_tokens", num_tokens)
        if not self.has_state_apart:
            self._load_whole(seq_id, state, 0, num_tokens)
            return
        if (state.start, state.end) != (num_tokens, num_tokens):
            raise InvalidParams(
                f"this state continues after {state.start} to {state.end} tokens, not after {num_tokens}"
            )
        self.native.restore(seq_id, state.payload, True, num_tokens - 1)

    @property
    def _is_whole(self) -> bool:
        return self.memory_class is not MemoryClass.ATTENTION and not self.has_state_apart

    def _save_whole(self, seq_id: int, start: int, end: int) -> CellState:
        payload, last = self.native.save(seq_id, False)
        if (start, end) != (0, last + 1):
            raise Unsupported(
                f"this model's memory is saved whole: start must be 0 and end {last + 1}, not {start} and {end}"
            )
        payload.flags.writeable = False
        return CellState(start, end, payload)

    def _load_whole(self, seq_id: int, state: CellState, start: int, end: int) -> None:
        if (start, end) != (state.start, state.end):
            raise Unsupported(f"this state is loaded whole, {state.start} to {state.end}, not {start} to {end}")
        self.native.restore(seq_id, state.payload, False, end - 1)

    # ---- threads and adapters

    @property
    def n_threads(self) -> int:
        """Threads for a pass over one token."""
        return self.native.threads[0]

    @property
    def n_threads_batch(self) -> int:
        """Threads for a pass over more tokens."""
        return self.native.threads[1]

    def set_threads(self, n_threads: int, n_threads_batch: int | None = None) -> None:
        """Change the number of threads. n_threads_batch: None means n_threads."""
        batch = n_threads if n_threads_batch is None else n_threads_batch
        self.native.set_threads(
            validation.integer("n_threads", n_threads, 1, 512), validation.integer("n_threads_batch", batch, 1, 512)
        )

    @property
    def adapters(self) -> Mapping[Adapter, float]:
        """The LoRA adapters that apply, with their scales."""
        return dict(self._adapters)

    def set_adapters(self, adapters: Mapping[Adapter, float]) -> None:
        """Apply these LoRA adapters and no others from the next pass on; an empty mapping removes all.

        The KV cache so far was computed with the previous adapters: clear it if that matters. Raises `AdapterError`
        for an adapter of another model.
        """
        given: object = adapters
        if not isinstance(given, Mapping) or not all(isinstance(adapter, Adapter) for adapter in given):
            raise InvalidType("adapters must be a mapping of Adapter to scale")
        scales = {adapter: validation.number("scale", scale, -_MOST, _MOST) for adapter, scale in adapters.items()}
        self.native.set_adapters([(adapter.native, scale) for adapter, scale in scales.items()])
        self._adapters = scales

    def close(self) -> None:
        """Free the memory as soon as no call is running; idempotent."""
        self._native = None
        self._adapters = {}

    def __repr__(self) -> str:
        return "Context(closed)" if self._native is None else f"Context(n_ctx={self.n_ctx}, n_seq_max={self.n_seq_max})"


def _mask_options(masks: MaskSlots | None, mask_timeout_s: float) -> dict[str, Any]:
    if masks is not None and not isinstance(masks, MaskSlots):
        raise InvalidType(f"masks must be MaskSlots, not {type(masks).__name__}")
    milliseconds = round(validation.number("mask_timeout_s", mask_timeout_s, 0, 86400) * 1000)
    return {"masks": None if masks is None else masks.native, "mask_timeout_ms": milliseconds}


def _index(name: str, value: object) -> int:
    return validation.integer(name, value, 0, 2**31 - 1)


def _int_array(name: str, values: object) -> npt.NDArray[np.int32]:
    """Return an int32 array of ids; the native side checks their range against the model."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1:
        return np.ascontiguousarray(values)
    return np.array(validation.token_ids(name, values, 2**31 - 1), dtype=np.int32)


def _wanted(wants: object, seq_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    if isinstance(wants, str):
        kind = validation.choice("wants_logits", wants, ("last", "all", "none"))
        flags = np.full(len(seq_ids), 1 if kind == "all" else 0, dtype=np.uint8)
        if kind == "last":
            flags[list({int(seq_id): index for index, seq_id in enumerate(seq_ids)}.values())] = 1
        return flags
    array = np.asarray(wants)
    if array.dtype != np.bool_ or array.ndim != 1:
        raise InvalidType(f'wants_logits must be "last", "all", "none" or bools, not {wants!r:.80}')
    return array.astype(np.uint8)
