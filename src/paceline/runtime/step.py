"""The records of `Context.step`: rows, draws, and masks of allowed tokens. Only the native core sees them as arrays.

A row is one sequence's share of a forward pass:

    token_ids   t0 t1 ... tn-1 | d1 ... dm       the last num_drafts are proposed, the others known
    drawn at            tn-1   | d1 ... dm       by its samplers, if it has any
    scored      t0 t1 ...                        each of the first len(targets), against its target
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline import _native, errors, validation
from paceline.errors import PacelineError
from paceline.runtime.sampler import Sampler


class MaskSlots:
    """A fixed number of bitmasks over a vocabulary, which other threads fill while a forward pass runs.

    Bit `t % 32` of the uint32 word `t // 32` is set if token t is allowed.

    Per use of a slot: `clear` it, pass its number to `Context.step`, fill `words(slot)` from any thread, then call `ready`
    (or `fail`, which fails that row alone). The step waits for it after the pass, not before.
    """

    def __init__(self, num_slots: int, n_vocab: int) -> None:
        validation.integer("num_slots", num_slots, 1, 4096)
        validation.integer("n_vocab", n_vocab, 1, 2**31 - 1)
        self.native = _native.MaskSlots(num_slots, n_vocab)
        self._words: npt.NDArray[np.uint32] = self.native.array()

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return int(self._words.shape[0])

    def words(self, slot: int) -> npt.NDArray[np.uint32]:
        """Return the slot's words, to be written; a view that keeps the slots alive."""
        view: npt.NDArray[np.uint32] = self._words[self._checked(slot)]
        return view

    def clear(self, slot: int) -> None:
        """Mark a slot as not filled yet."""
        self.native.clear(self._checked(slot))

    def ready(self, slot: int) -> None:
        """Mark a slot as filled; a step that waits for it continues."""
        self.native.ready(self._checked(slot))

    def fail(self, slot: int, reason: str) -> None:
        """Mark a slot as failed: its row fails with this reason."""
        self.native.fail(self._checked(slot), validation.text("reason", reason))

    def _checked(self, slot: int) -> int:
        return validation.integer("slot", slot, 0, self.num_slots - 1)


IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's part of a step.

    Attributes:
        seq_id: The sequence.
        position: The position of the first token: the next position of the sequence, or with M-RoPE (Qwen-VL and others) also a
            later one.
        token_ids: The tokens to compute.
        num_drafts: Proposed tokens at the end of `token_ids`. The sampler draws along them while its draws match. Wrong drafts
            are removed from memory (with recurrent state the whole row is: `SamplerDraws.is_taken_back`). Needs exactly one
            sampler.
        samplers: Each draws from the logits of the last token and accepts its token. Several samplers are n > 1 choices before
            they diverge. Without samplers the row only fills memory.
        targets: The tokens after the first of `token_ids`, to be scored with log-probabilities (prompt logprobs).
        num_logprobs: None for no log-probabilities, 0 for each drawn or scored token, k for the k most likely tokens as well.
        mask_slots: A slot of the step's masks, or -1, for each drawn position: max(len(samplers), num_drafts + 1) entries.
    """

    seq_id: int
    position: int
    token_ids: Sequence[int] | IntArray
    num_drafts: int = 0
    samplers: tuple[Sampler, ...] = ()
    targets: Sequence[int] = ()
    num_logprobs: int | None = None
    mask_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Natural logarithms of the probabilities of n tokens, and of the k most likely tokens at each position.

    Attributes:
        own: float32 (n,), for the n tokens.
        ids: int32 (n, k), the most likely token first; -1 fills up if there are fewer.
        values: float32 (n, k), aligned with ids.
    """

    own: FloatArray
    ids: IntArray
    values: FloatArray


class SamplerDraws(msgspec.Struct, frozen=True):
    """The draws of one sampler in a step: one token, or the accepted drafts and one more.

    Attributes:
        token_ids: The drawn tokens.
        logprobs: Their log-probabilities, if the row asks for them.
        error: The reason if it stopped. Tokens drawn before stay valid; other samplers and rows are not affected.
        is_taken_back: Whether the row is not in memory, since a draft was wrong and the memory cannot be cut there. The drawn
            tokens stay valid; a later row computes the known tokens and the right drafts again.
    """

    token_ids: tuple[int, ...]
    logprobs: TopLogprobs | None
    error: PacelineError | None
    is_taken_back: bool = False


class StepRowResult(msgspec.Struct, frozen=True):
    """A row's draws, one per sampler, and the log-probabilities of its targets."""

    draws: tuple[SamplerDraws, ...]
    scored: TopLogprobs | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results in the order of the rows, and the seconds of the forward pass and of the draws."""

    rows: tuple[StepRowResult, ...]
    decode_s: float
    sample_s: float


def columns_of(rows: Sequence[StepRow]) -> dict[str, Any]:
    """Return the arguments of `Context.step_columns` for rows. Raises `InvalidType` for rows of a wrong type."""
    if not isinstance(rows, Sequence):  # an iterator would be empty the second time
        raise errors.InvalidType(f"rows must be a list of StepRow, not {rows!r:.80}")
    for index, row in enumerate(rows):
        _check_types(index, row)
    return {
        "seq_ids": [row.seq_id for row in rows],
        "positions": [row.position for row in rows],
        "token_ids": [row.token_ids for row in rows],
        "num_drafts": [row.num_drafts for row in rows],
        "samplers": [row.samplers for row in rows],
        "targets": [row.targets for row in rows],
        "num_logprobs": [row.num_logprobs for row in rows],
        "mask_slots": [row.mask_slots for row in rows],
    }


def native_arguments(  # noqa: PLR0913 - the columns of a step
    *,
    seq_ids: list[int],
    positions: list[int],
    token_ids: Sequence[Sequence[int] | IntArray],
    num_drafts: list[int],
    samplers: Sequence[Sequence[Sampler]],
    targets: Sequence[Sequence[int] | IntArray],
    num_logprobs: Sequence[int | None],
    mask_slots: Sequence[tuple[int, ...]],
) -> dict[str, Any]:
    """Return the arrays of the native step, and its samplers. Each argument has one entry for each row, as in `StepRow`."""
    return {
        **_columns(
            seq_ids=seq_ids,
            positions=positions,
            num_tokens=list(map(len, token_ids)),
            num_drafts=num_drafts,
            num_samplers=list(map(len, samplers)),
            num_scored=list(map(len, targets)),
            num_logprobs=[-1 if count is None else count for count in num_logprobs],
        ),
        "token_ids": _joined("token_ids", token_ids),
        "targets": _joined("targets", targets),
        "mask_slots": _ints("mask_slots", _joined_slots(seq_ids, num_drafts, samplers, mask_slots)),
        "samplers": [sampler.native for drawing in samplers for sampler in drawing],
    }


def result_of(rows: Sequence[StepRow], output: Any) -> StepResult:
    """Convert a native step's arrays to records."""
    failed = {sampler: native_error(kind, message) for sampler, kind, message in output.errors}
    taken_back = output.taken_back
    counts = output.num_drawn.tolist()
    tokens = output.token_ids.tolist()
    drawn = _Cursor(output.drawn_own, output.drawn_ids, output.drawn_values)
    scored = _Cursor(output.scored_own, output.scored_ids, output.scored_values)
    results, sampler, start = [], 0, 0
    for row in rows:
        draws = []
        for _ in row.samplers:
            count = counts[sampler]
            logprobs = drawn.take(count, row.num_logprobs)
            draws.append(
                SamplerDraws(tuple(tokens[start : start + count]), logprobs, failed.get(sampler), sampler in taken_back)
            )
            start += count
            sampler += 1
        row_scored = scored.take(len(row.targets), row.num_logprobs or 0) if len(row.targets) else None
        results.append(StepRowResult(tuple(draws), row_scored))
    return StepResult(tuple(results), output.decode_us / 1e6, output.sample_us / 1e6)


class _Cursor:
    """Takes the logprobs of consecutive ranges of tokens."""

    def __init__(self, own: FloatArray, ids: IntArray, values: FloatArray) -> None:
        self._own, self._ids, self._values = own, ids, values
        self._next = 0

    def take(self, count: int, k: int | None) -> TopLogprobs | None:
        part = slice(self._next, self._next + count)
        self._next += count
        return None if k is None else TopLogprobs(self._own[part], self._ids[part, :k], self._values[part, :k])


def _check_types(index: int, row: object) -> None:
    if not isinstance(row, StepRow):
        raise errors.InvalidType(f"rows[{index}] must be a StepRow, not {type(row).__name__}")
    try:
        num_samplers = (len(row.token_ids), len(row.targets), len(row.mask_slots), len(row.samplers))[-1]
    except TypeError:
        for name in ("token_ids", "targets", "mask_slots", "samplers"):
            value = getattr(row, name)
            if not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
                raise errors.InvalidType(f"rows[{index}].{name} must be a sequence, not {value!r:.80}") from None
        raise
    if num_samplers and not all([isinstance(sampler, Sampler) for sampler in row.samplers]):  # noqa: C419 - the faster way
        raise errors.InvalidType(f"rows[{index}].samplers must be Samplers, not {row.samplers!r:.80}")


def _joined_slots(
    seq_ids: list[int],
    num_drafts: list[int],
    samplers: Sequence[Sequence[Sampler]],
    mask_slots: Sequence[tuple[int, ...]],
) -> list[int]:
    """Return all mask slots, with -1 for rows without any; an empty list if no row has any."""
    if not any(map(len, mask_slots)):
        return []
    joined: list[int] = []
    for seq_id, drafts, drawing, slots in zip(seq_ids, num_drafts, samplers, mask_slots, strict=True):
        num_needed = max(len(drawing), drafts + 1) if drawing else 0
        if len(slots) not in (0, num_needed):
            raise errors.InvalidParams(f"mask_slots of sequence {seq_id} must be {num_needed}, not {len(slots)}")
        joined += slots if len(slots) else (-1,) * num_needed
    return joined


_FIELD_NAMES = {"seq_ids": "seq_id", "positions": "position"}  # of columns, in errors


def _columns(**columns: list[int]) -> dict[str, IntArray]:
    """Convert columns to the rows of an array, or one by one if a value is wrong."""
    if set(map(type, chain.from_iterable(columns.values()))) <= {int}:
        with suppress(OverflowError):
            return dict(zip(columns, np.array(list(columns.values()), dtype=np.int32), strict=True))
    return {name: _ints(_FIELD_NAMES.get(name, name), values) for name, values in columns.items()}


def _joined(name: str, parts: Sequence[Sequence[int] | IntArray]) -> IntArray:
    """Concatenate the parts. Arrays of the right type are not converted, since prompts are long."""
    if not any(isinstance(part, np.ndarray) for part in parts):  # many short rows, as in a tick: a single array
        return _ints(name, list(chain.from_iterable(parts)))
    return np.concatenate([_ints(name, part) for part in parts])


def _ints(name: str, values: Iterable[int] | IntArray) -> IntArray:
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1:
        return values
    listed: list[object] = values if isinstance(values, list) else list(values)
    if not set(map(type, listed)) <= {int}:  # refuse bools; NumPy would round 1.5 and read "1"
        wrong = [value for value in listed if isinstance(value, bool) or not isinstance(value, (int, np.integer))]
        if wrong:
            raise errors.InvalidType(f"{name} must be integers, not {wrong[0]!r:.80}")
    try:
        return np.array(listed, dtype=np.int32)
    except OverflowError:
        raise errors.InvalidParams(f"{name} must be integers of 32 bits, and one of them is not") from None


def native_error(kind: str, message: str) -> PacelineError:
    """Return an error of the class that the native core names."""
    made: PacelineError = getattr(errors, kind)(message)
    return made
