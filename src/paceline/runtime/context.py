"""A context: the KV memory of a model and the forward passes over it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline import _native, validation
from paceline.errors import Closed, InvalidParams, InvalidType, PromptTooLong, StateError, Unsupported
from paceline.runtime.adapters import Adapter
from paceline.runtime.attention import use_kernel_of_environment
from paceline.runtime.closing import Closing
from paceline.runtime.context_options import CELL_OPTIONS, ContextOptions
from paceline.runtime.masks import MaskSlots
from paceline.runtime.model import MemoryClass, Model
from paceline.runtime.sampler import Sampler
from paceline.runtime.sequence_state import CellState, SequenceState, layout_fingerprint
from paceline.runtime.step import StepResult, StepRow, flatten, unflatten

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


_MOST = 1e30  # within the range of a float32


class Positions(NamedTuple):
    """The first and the last position that a sequence holds in memory."""

    first: int
    last: int


class Context(Closing):
    """KV memory for `n_seq_max` sequences of one model, and the passes that fill it.

    May be called from any thread, one call at a time: a second one waits. `abort()` may come at any time. Everything that
    computes releases the GIL. After an error every sequence is where it was before the call. The options are those of
    `ContextOptions`; unknown ones raise `TypeError`.

    After a fork it raises `Closed` in the child, which has none of its threads: make the context there, or use "spawn".

    A context keeps its model alive. `close()`, the end of a `with` block or the collector frees its memory.
    """

    def __init__(self, model: Model, **options: Any) -> None:
        self._native: _native.Context | None = None
        if not isinstance(model, Model):
            raise InvalidType(f"model must be a Model, not {type(model).__name__}")
        validation.reject_unknown(options, ContextOptions.names(), "ContextOptions")
        self.options = ContextOptions(**options)
        self._model_fingerprint = model.fingerprint
        self._resolved = self.options.resolve(model)
        use_kernel_of_environment()
        self._native = _native.Context(model.native, **self._resolved)
        self.memory_class: MemoryClass = model.memory_class
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

    @property
    def n_ctx(self) -> int:
        """KV cells."""
        return self.native.n_ctx

    @property
    def max_positions(self) -> int:
        """Positions that one sequence may have: n_ctx, its share where kv_unified is off, or what the model knows."""
        return self.native.max_positions

    @property
    def n_batch(self) -> int:
        """Most tokens of a call."""
        return self.native.n_batch

    @property
    def n_ubatch(self) -> int:
        """Most tokens computed at once."""
        return self.native.n_ubatch

    @property
    def n_seq_max(self) -> int:
        """Number of sequences; their ids are 0 to n_seq_max - 1."""
        return self.native.n_seq_max

    @property
    def n_outputs_max(self) -> int:
        """Most rows of logits of a call."""
        return self.native.n_outputs_max

    # ---- forward passes

    def decode(
        self,
        token_ids: TokenIds,
        *,
        seq_ids: int | TokenIds = 0,
        positions: TokenIds | None = None,
        wants_logits: Literal["last", "all", "none"] | Sequence[bool] | npt.NDArray[np.bool_] = "last",
    ) -> None:
        """Computes tokens and keeps their keys and values.

        token_ids: (n,), 1 <= n <= n_batch. seq_ids: one id for all, or (n,). positions: (n,), where each sequence goes on;
        by default just there. wants_logits: for which tokens `logits(i)` can be asked afterwards: the last of each
        sequence, all, none, or (n,) bools.

        Raises `InvalidParams` (nothing was computed), `NoKvSlot`, `PromptTooLong`, `Aborted`, `DecodeError`.
        """
        tokens = _int_array("token_ids", token_ids)
        ids = (
            np.full(len(tokens), _seq_id("seq_ids", seq_ids), dtype=np.int32)
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
                    f"positions must be below {self.max_positions}, the size of the context"
                )
            positions[here] = np.arange(start, start + count, dtype=np.int32)
        return positions

    def step(
        self, rows: Sequence[StepRow], *, masks: MaskSlots | None = None, mask_timeout_s: float = 10.0
    ) -> StepResult:
        """One tick's native work: a pass over the rows, then a draw by each sampler, in one call without the GIL.

        Everything is checked first. If the pass fails, every row is back where it was and no sampler has moved. A sampler
        that cannot draw (everything masked, NaN) fails alone: see `SamplerDraws.error`.

        Raises as `decode`, and `Unsupported` for drafts on a model with recurrent state.
        """
        if masks is not None and not isinstance(masks, MaskSlots):
            raise InvalidType(f"masks must be MaskSlots, not {type(masks).__name__}")
        milliseconds = round(validation.number("mask_timeout_s", mask_timeout_s, 0, 86400) * 1000)
        output = _native.step(
            self.native, **flatten(rows), masks=None if masks is None else masks.native, mask_timeout_ms=milliseconds
        )
        return unflatten(rows, output)

    def encode(self, token_ids: TokenIds) -> None:
        """Runs the encoder of an encoder-decoder model; passes after that attend to what it made of the tokens."""
        self.native.encode(_int_array("token_ids", token_ids))

    def logits(self, index: int) -> npt.NDArray[np.float32]:
        """The logits after token `index` of the last call, float32 (n_vocab,). The array is the caller's to keep."""
        return self.native.logits(validation.integer("index", index, 0, 2**31 - 1))

    def embeddings(self, index: int) -> npt.NDArray[np.float32]:
        """The hidden state of token `index` of the last call, float32 (n_embd_out,); needs `embeddings=True`."""
        return self.native.embeddings(validation.integer("index", index, 0, 2**31 - 1))

    def abort(self) -> None:
        """Ends the pass that is running in another thread, which raises `Aborted`; does nothing if none is running.

        The CPU backend stops within a pass; a GPU finishes the part it has begun.
        """
        self.native.abort()

    def generate(
        self, sampler: Sampler, token_ids: TokenIds, max_tokens: int | None = None, *, seq_id: int = 0
    ) -> Iterator[int]:
        """Generates with no engine: computes the prompt, then yields one token at a time.

        Ends after `max_tokens` (None: those of the sampler's params), when the context is full, or before an
        end-of-generation token or one of the params' `stop_token_ids`, which is not yielded. Stop strings need text: see
        `paceline.TextPipe`. The sequence goes on from what it holds; afterwards it holds the prompt and all yielded tokens,
        or all but the last where max_tokens or the context ended it. The sampler gets the prompt as history. Checks come
        at the call, not at the first `next`.

        Raises `PromptTooLong` where the prompt does not fit.
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
        """What a sequence holds, or None where it is empty. Sliding windows forget their first positions as they go on."""
        first, last = self.native.positions(_seq_id("seq_id", seq_id))
        return None if last < 0 else Positions(first, last)

    def remove(self, seq_id: int, start: int = 0) -> None:
        """Takes the positions from `start` on out of memory; from 0 on, the whole sequence.

        Raises `Unsupported` where `start` is not 0 and the memory cannot be cut there: recurrent state never can, a sliding
        window only as far back as it still covers.
        """
        self.native.remove(_seq_id("seq_id", seq_id), _position("start", start))

    def copy(self, from_seq_id: int, to_seq_id: int, start: int = 0, end: int | None = None) -> None:
        """Lets a sequence share positions [start, end) of another; `end` None: all. Nothing is computed or moved.

        The source must hold them all; the target must be empty, or end just before `start`. Raises `Unsupported` for a
        part of a recurrent or hybrid model's sequence, for what a sliding window has left, and without kv_unified.
        """
        self.native.copy(
            _seq_id("from_seq_id", from_seq_id),
            _seq_id("to_seq_id", to_seq_id),
            _position("start", start),
            -1 if end is None else _position("end", end),
        )

    def keep(self, seq_id: int) -> None:
        """Empties every sequence but this one."""
        self.native.keep(_seq_id("seq_id", seq_id))

    def clear(self) -> None:
        """Empties every sequence."""
        self.native.clear(False)

    # ---- state

    @property
    def fingerprint(self) -> bytes:
        """16 bytes shared by contexts whose saved sequences fit each other: model, adapters and all that shapes a cell."""
        layout = [(name, self._resolved[name]) for name in CELL_OPTIONS]
        adapters = sorted((adapter.fingerprint, scale) for adapter, scale in self._adapters.items() if scale != 0)
        return layout_fingerprint(self._model_fingerprint, (layout, adapters))

    def save_sequence(self, seq_id: int, *, token_ids: Sequence[int] = (), partial: bool = False) -> bytes:
        """A sequence's state as bytes that `load_sequence` of a context with the same model and layout takes.

        token_ids: kept with it, so that one knows later what it holds. partial: only sliding windows and recurrent state,
        which is small; it brings a sequence back to this point that has gone on since, as long as it still holds it.
        """
        validation.boolean("partial", partial)
        ids = tuple(validation.token_ids("token_ids", token_ids, self.n_vocab))
        payload, last = self.native.save(_seq_id("seq_id", seq_id), partial)
        return SequenceState(self.fingerprint, ids, partial, last, payload).to_bytes()

    def load_sequence(self, seq_id: int, data: bytes | bytearray | memoryview) -> tuple[int, ...]:
        """Puts a saved sequence in the place of what this one holds, and answers the token ids saved with it.

        Raises `StateError` where the bytes are no saved sequence, damaged, or of another model or layout, or partial and
        of a later point than the sequence holds (it is then as it was), or where they do not fit into the free cells (the
        sequence is then empty).
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InvalidType(f"data must be bytes, not {type(data).__name__}")
        # bytes cannot change between their check and their use.
        state = SequenceState.from_bytes(bytes(data), self.fingerprint)
        self.native.restore(_seq_id("seq_id", seq_id), state.payload, state.partial, state.last)
        return state.token_ids

    def save_sequence_file(self, path: str | os.PathLike[str], seq_id: int, *, token_ids: Sequence[int] = ()) -> int:
        """As `save_sequence` into a file, whole or not at all; answers its size in bytes."""
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
        """As `load_sequence` from a file."""
        try:
            data = validation.path("path", path).read_bytes()
        except OSError as error:
            raise StateError(f"cannot read the saved sequence {path}: {error.strerror or error}") from None
        return self.load_sequence(seq_id, data)

    def save_cells(self, seq_id: int, start: int, end: int, *, scratch_seq_id: int) -> CellState:
        """Positions [start, end) of a sequence as they lie in memory, for `load_cells` of this same context.

        scratch_seq_id: an empty sequence, which it goes through. Where only wholes can be saved (any memory but attention)
        start is 0, end all that the sequence holds, and the scratch sequence is not used. `Unsupported` otherwise.
        """
        seq_id, start, end = _seq_id("seq_id", seq_id), _position("start", start), _position("end", end)
        if self.memory_class is MemoryClass.ATTENTION:
            payload = self.native.save_range(seq_id, start, end, _seq_id("scratch_seq_id", scratch_seq_id))
        else:
            payload, last = self.native.save(seq_id, False)
            if (start, end) != (0, last + 1):
                raise Unsupported(
                    f"this model's memory is saved whole: start must be 0 and end {last + 1}, not {start} and {end}"
                )
        payload.flags.writeable = False
        return CellState(start, end, payload)

    def load_cells(self, seq_id: int, state: CellState, start: int, end: int, *, scratch_seq_id: int) -> None:
        """Adds positions [start, end) of what `save_cells` answered to a sequence that holds exactly those before."""
        validation.instance("state", state, CellState)
        seq_id, start, end = _seq_id("seq_id", seq_id), _position("start", start), _position("end", end)
        if self.memory_class is MemoryClass.ATTENTION:
            scratch = _seq_id("scratch_seq_id", scratch_seq_id)
            self.native.load_range(seq_id, state.payload, state.start, state.end, start, end, scratch)
            return
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
        """Changes the number of threads; the second is the first where it is left out."""
        batch = n_threads if n_threads_batch is None else n_threads_batch
        self.native.set_threads(
            validation.integer("n_threads", n_threads, 1, 512), validation.integer("n_threads_batch", batch, 1, 512)
        )

    @property
    def adapters(self) -> Mapping[Adapter, float]:
        """The LoRA adapters that apply, with their scales."""
        return dict(self._adapters)

    def set_adapters(self, adapters: Mapping[Adapter, float]) -> None:
        """Applies these LoRA adapters from the next pass on, and no others; an empty mapping takes all away.

        What is in memory already was computed with the adapters before: clear it where that matters. Raises `AdapterError`
        for an adapter of another model.
        """
        given: object = adapters
        if not isinstance(given, Mapping) or not all(isinstance(adapter, Adapter) for adapter in given):
            raise InvalidType("adapters must be a mapping of Adapter to scale")
        scales = {adapter: validation.number("scale", scale, -_MOST, _MOST) for adapter, scale in adapters.items()}
        self.native.set_adapters([(adapter.native, scale) for adapter, scale in scales.items()])
        self._adapters = scales

    def close(self) -> None:
        """Frees the memory as soon as no call is running; idempotent."""
        self._native = None
        self._adapters = {}

    def __repr__(self) -> str:
        return "Context(closed)" if self._native is None else f"Context(n_ctx={self.n_ctx}, n_seq_max={self.n_seq_max})"


def _seq_id(name: str, value: object) -> int:
    return validation.integer(name, value, 0, 2**31 - 1)


def _position(name: str, value: object) -> int:
    return validation.integer(name, value, 0, 2**31 - 1)


def _int_array(name: str, values: object) -> npt.NDArray[np.int32]:
    """An int32 array of ids; the native side checks their range against the model."""
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
