"""Drafts with a second, smaller model, which proposes the tokens of the large model. Pure; the model is behind `DraftBackend`.

Its sequences are ordinary ones of a KV cache of their own, and lag behind: `begin` and `observe` only note tokens, and missing
tokens are computed when drafts are asked for, a part at a time. So a sequence that was without drafts for a while, was preempted,
or goes on in a new process catches up, from the longest prefix that is cached here.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from paceline.kv_cache import (
    TEXT_LAYOUT,
    TOKEN_BYTES,
    CacheSequence,
    Copy,
    KVCache,
    KVCacheLimits,
    Namespace,
    NotAdmitted,
    Operation,
    Remove,
    SequenceGroup,
    Truncate,
)

_USUAL_LAG = 2  # tokens: the last proposed one, which was not computed, and the one behind it
_PUT_OFF_TICKS = 16  # that a sequence without room waits, so that it does not take cells from others in each of them
_IDLE_SHARE = 0.25  # of the cells, that cached prefixes may take beside what runs: each slows every pass


class DraftRow(msgspec.Struct):
    """Tokens of a sequence id to compute, from `position` on. draws: whether the next token is wanted."""

    seq_id: int
    position: int
    token_ids: list[int]
    draws: bool


class DraftToken(NamedTuple):
    """The likeliest next token. probability: by the draft model; 1 if it was not asked for probabilities."""

    token_id: int
    probability: float


class DraftBackend(Protocol):
    """A context of a draft model, of llama.cpp or a fake. A call that raises has changed nothing."""

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Copy the positions before `end` of one sequence id to another, which is empty."""

    def truncate(self, seq_id: int, end: int) -> None:
        """Remove the positions of a sequence id from `end` on."""

    def remove(self, seq_id: int) -> None:
        """Empty a sequence id."""

    def step(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        """Compute all rows in one pass; return the drawn token of each, None for a row that draws none."""


class DraftSequence(CacheSequence):
    """A sequence of the draft model's KV cache: the known tokens of one key, then proposed tokens that are not rejected yet.

    seq_id: None while it has no cells. is_possible: whether the draft model has all of its tokens. put_off_until: tick from
    which on it may have cells again.
    """

    namespace: Namespace
    writes_cache: bool

    __slots__ = ("is_possible", "key", "last_tick", "namespace", "num_known", "put_off_until", "writes_cache")

    def __init__(
        self, key: int, token_ids: Sequence[int], namespace: Namespace, *, writes_cache: bool, is_possible: bool
    ) -> None:
        super().__init__(list(token_ids), b"", TEXT_LAYOUT)
        self.key, self.is_possible = key, is_possible
        self.request = SequenceGroup(key, is_matched=True)
        self.namespace, self.writes_cache = namespace, writes_cache
        self.num_known = self.num_prompt_tokens
        self.last_tick = self.put_off_until = 0

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens that may come from the cache, also after a failed load."""
        return len(self.token_ids) - 1

    @property
    def turn_key(self) -> tuple[float, int]:
        """Order of arrival."""
        return (0.0, self.key)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens left to compute before it can have drafts."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def drafts(self) -> list[int]:
        """The proposed tokens."""
        return self.token_ids[self.num_known :]

    def reject(self, num_tokens: int) -> None:
        """Take back the last proposed tokens."""
        self._cut(max(self.num_known, len(self.token_ids) - num_tokens))

    def learn(self, token_ids: Sequence[int]) -> int:
        """Take the tokens that the sequence got: right proposed tokens, then others; return the number of right ones."""
        num_right = 0
        for proposed, token_id in zip(self.drafts, token_ids, strict=False):
            if proposed != token_id:
                break
            num_right += 1
        self._cut(self.num_known + num_right)
        self.token_ids += token_ids[num_right:]
        self.num_known = len(self.token_ids)
        return num_right

    def _cut(self, num_tokens: int) -> None:
        del self.token_ids[num_tokens:]
        del self.packed[num_tokens * TOKEN_BYTES :]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """The limits of a draft model's context.

    num_cells, num_seq_ids: of its memory; more ids than sequences that draft at once. n_batch: most tokens of a pass, at least
    the number of sequences. max_positions: tokens of one sequence. n_vocab: of the draft model; target_n_vocab: of the target,
    larger token ids are not proposed. eog_ids: ends of generation; no draft follows them. p_min: less likely tokens are not
    proposed. chunk_size: most tokens in a tick of all sequences that lag behind.
    """

    num_cells: int
    num_seq_ids: int
    n_batch: int
    max_positions: int
    n_vocab: int
    target_n_vocab: int
    eog_ids: frozenset[int] = frozenset()
    p_min: float = 0.0
    chunk_size: int = 256


class ModelDrafter:
    """Drafts with a second model: one pass of it for each step, over all sequences that draft so far.

    A sequence has no drafts while the memory has no room for it. After an error the memory is emptied and filled anew.
    """

    def __init__(self, backend: DraftBackend, limits: DraftLimits) -> None:
        self._backend, self._limits = backend, limits
        self._chunk_size = limits.chunk_size
        self._sequences: dict[int, DraftSequence] = {}
        self._tick = 0
        self._num_caught_up = 0
        self._cache = self._new_cache()

    def _new_cache(self) -> KVCache:
        limits = KVCacheLimits(
            num_seq_ids=self._limits.num_seq_ids,
            num_cells=self._limits.num_cells,
            can_share_part=True,
            host_bytes=0,
            itl_target_s=1.0,  # for transfers to host memory, of which there are none
        )
        return KVCache(limits, _NoTelemetry(), _IdleCost(self._limits.num_cells))

    # ---- sequences

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        self.begin_shared(key, token_ids, ())

    def begin_shared(self, key: int, token_ids: Sequence[int], namespace: Hashable | None) -> None:
        """See `SharingDrafter`: sequences share the computed prefixes of their prompts."""
        writes_cache, is_possible = namespace is not None, self._knows(token_ids)
        own = (namespace,) if writes_cache else (None, key)
        self._sequences[key] = DraftSequence(key, token_ids, own, writes_cache=writes_cache, is_possible=is_possible)

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        sequence = self._sequences[key]
        num_before = sequence.num_known
        num_right = sequence.learn(token_ids)
        sequence.is_possible = sequence.is_possible and self._knows(token_ids)
        if sequence.is_running and sequence.num_computed_tokens > num_before + num_right:
            self._cache.discard(sequence)  # computed and not rejected, but wrong: others may have seen it

    def rollback(self, key: int, num_tokens: int) -> None:
        sequence = self._sequences[key]
        sequence.reject(num_tokens)
        if sequence.is_running and sequence.num_computed_tokens > sequence.num_tokens:
            self._cut(sequence, sequence.num_tokens)

    def end(self, key: int) -> None:
        """See `Drafter`: its tokens become a cached prefix."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None and sequence.is_running:
            self._cache.release(sequence)
            for other in self._sequences.values():
                other.put_off_until = 0

    def lag(self, key: int) -> float:
        """Return the tokens to compute before a sequence can have drafts; infinite if it never can."""
        sequence = self._sequences[key]
        if not self._is_possible(sequence):
            return math.inf
        num_missing = sequence.num_uncomputed_tokens
        if not sequence.is_running:
            num_missing -= self._cache.num_matched(sequence, self._tick)
        return max(0, num_missing - _USUAL_LAG)

    @property
    def num_caught_up(self) -> int:
        """Tokens that the last `propose_all` computed of sequences that lagged behind."""
        return self._num_caught_up

    def limit_catch_up(self, num_tokens: int) -> int:
        """Set the tokens that `propose_all` may compute of sequences that lag behind, at most `chunk_size`; return the number."""
        self._chunk_size = min(num_tokens, self._limits.chunk_size)
        return self._chunk_size

    def _knows(self, token_ids: Sequence[int]) -> bool:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._limits.n_vocab)

    def _is_possible(self, sequence: DraftSequence) -> bool:
        """Return whether the draft model has all tokens of a sequence, and room for one more."""
        return sequence.is_possible and sequence.num_tokens < min(self._limits.max_positions, self._limits.num_cells)

    # ---- drafts

    def propose(self, key: int, max_tokens: int) -> list[int]:
        return self.propose_all([(key, max_tokens)])[0]

    def propose_all(self, wanted: Sequence[tuple[int, int]]) -> list[list[int]]:
        """See `BatchDrafter`. Raises what the backend raises."""
        self._tick += 1
        self._num_caught_up = 0
        asked = {key: self._sequences[key] for key, _ in wanted}
        for sequence in self._sequences.values():
            sequence.request.is_paused = sequence.key not in asked
        for sequence in asked.values():
            sequence.last_tick = self._tick
        try:
            self._cache.begin_tick(is_generating=True)
            possible = [sequence for sequence in asked.values() if self._is_possible(sequence)]
            self._admit(possible)
            self._draft(self._catch_up([sequence for sequence in possible if sequence.is_running]), dict(wanted))
            self._cache.offload(None, self._tick, is_generating=True)
        except BaseException:
            self._empty()
            raise
        return [asked[key].drafts for key, _ in wanted]

    def _admit(self, asked: list[DraftSequence]) -> None:
        """Give cells to sequences without any, as far as there is room; take a cell back if nothing is left to compute."""
        for sequence in asked:
            if sequence.is_running and not sequence.num_uncomputed_tokens:
                self._cut(sequence, sequence.num_tokens - 1)  # a cell alone does not say what follows
        for sequence in asked:
            if sequence.is_running or sequence.put_off_until > self._tick:
                continue
            if not self._has_free_id():
                return
            match = self._cache.match(sequence, self._tick, is_alone=False)
            while match is NotAdmitted.NO_CELLS and self._release_idle():
                match = self._cache.match(sequence, self._tick, is_alone=False)
            if not isinstance(match, NotAdmitted):
                self._cache.allocate(sequence, match, self._tick)
            elif match is NotAdmitted.NO_CELLS:
                sequence.put_off_until = self._tick + _PUT_OFF_TICKS

    def _cut(self, sequence: DraftSequence, num_tokens: int) -> None:
        """Keep only the first tokens; keep none if others share later cells, until the sequence starts from these cells."""
        if self._cache.may_truncate(sequence, num_tokens):
            self._cache.truncate(sequence, num_tokens)
        else:
            self._cache.discard(sequence)

    def _has_free_id(self) -> bool:
        """Return whether there is an id for a sequence, beside the id of the prefix that it starts from."""
        num_running = sum([sequence.is_running for sequence in self._sequences.values()])
        return num_running + 1 < self._limits.num_seq_ids or self._release_idle()

    def _catch_up(self, asked: list[DraftSequence]) -> list[tuple[DraftSequence, DraftToken]]:
        """Compute missing tokens, shortest backlog first; return the drawn token of each sequence that has caught up.

        The first sequence always gets room: else all sequences could hold cells and wait for each other's cells for good.
        """
        rows: list[DraftRow] = []
        computed = []
        num_tokens, num_late = 0, self._chunk_size
        ordered = sorted(asked, key=lambda sequence: (sequence.num_uncomputed_tokens, sequence.key))
        for sequence in ordered:
            if not sequence.is_running:
                break  # this one and the next were released for the first
            num_missing = sequence.num_uncomputed_tokens
            num_usual = min(num_missing, _USUAL_LAG)
            num_added = min(num_missing, num_usual + num_late, self._limits.n_batch - num_tokens)
            if num_added < 1:
                break
            if not self._make_room(num_tokens + num_added, () if rows else ordered[1:]):
                continue
            num_tokens += num_added
            num_late -= max(0, num_added - num_usual)
            self._num_caught_up += max(0, num_added - num_usual)
            rows.append(_row(sequence, num_added))
            computed.append(sequence)
        return self._compute(rows, computed)

    def _draft(self, drawn: list[tuple[DraftSequence, DraftToken]], depths: dict[int, int]) -> None:
        """Continue from the drawn tokens, one pass for each further token, while they are likely enough and wanted."""
        limits = self._limits
        while drawn:
            going_on = []
            for sequence, token in drawn:
                if (
                    token.token_id >= limits.target_n_vocab
                    or token.probability < limits.p_min
                    or not depths[sequence.key]
                ):
                    continue
                sequence.token_ids.append(token.token_id)
                is_deep = len(sequence.drafts) >= depths[sequence.key]
                is_last = is_deep or token.token_id in limits.eog_ids
                if not is_last and sequence.num_tokens < limits.max_positions:
                    going_on.append(sequence)
            while going_on and not self._make_room(len(going_on)):
                going_on.pop()
            drawn = self._compute([_row(sequence, 1) for sequence in going_on], going_on)

    def _compute(self, rows: list[DraftRow], sequences: list[DraftSequence]) -> list[tuple[DraftSequence, DraftToken]]:
        self._operate(self._cache.take_operations())
        if not rows:
            return []
        drawn = self._backend.step(rows)
        for sequence, row in zip(sequences, rows, strict=True):
            self._cache.commit(sequence, len(row.token_ids))
        return [(sequence, token) for sequence, token in zip(sequences, drawn, strict=True) if token is not None]

    # ---- room

    def _make_room(self, num_tokens: int, others: Sequence[DraftSequence] = ()) -> bool:
        """Free cells: of cached prefixes, of the sequences not asked for longest, then of others, the last first.

        Returns whether there are enough. Others that lose their cells are put off.
        """
        left = list(others)
        while self._cache.num_free < num_tokens:
            if self._cache.evict(self._tick) or self._release_idle():
                continue
            if not left:
                return False
            victim = left.pop()
            self._cache.release(victim)
            victim.put_off_until = self._tick + _PUT_OFF_TICKS
        return True

    def _release_idle(self) -> bool:
        """Turn the running sequence that was not asked for longest into a cached prefix; return whether there was one."""
        idle = [sequence for sequence in self._sequences.values() if sequence.is_running and sequence.request.is_paused]
        if not idle:
            return False
        self._cache.release(min(idle, key=lambda sequence: sequence.last_tick))
        return True

    def _operate(self, operations: list[Operation]) -> None:
        for operation in operations:
            match operation:
                case Copy(from_seq_id, to_seq_id, num_tokens):
                    self._backend.copy(from_seq_id, to_seq_id, num_tokens)
                case Truncate(seq_id, num_tokens):
                    self._backend.truncate(seq_id, num_tokens)
                case Remove(seq_id):
                    self._backend.remove(seq_id)
                case _:
                    raise AssertionError(f"{operation!r:.80} without host memory")

    def _empty(self) -> None:
        """Forget all computed tokens, and remove them before the next pass."""
        for sequence in self._sequences.values():
            sequence.reject(sequence.num_tokens)
            sequence.seq_id, sequence.num_computed_tokens, sequence.waits_for = None, 0, None
        self._cache = self._new_cache()
        self._cache.clear()

    def check(self) -> None:
        """Assert the invariants between ticks."""
        self._cache.check()
        for sequence in self._sequences.values():
            assert sequence.num_computed_tokens <= sequence.num_tokens  # noqa: S101 - our own invariant


def _row(sequence: DraftSequence, num_tokens: int) -> DraftRow:
    assert sequence.seq_id is not None  # noqa: S101 - it runs
    start = sequence.num_computed_tokens
    end = start + num_tokens
    return DraftRow(sequence.seq_id, start, sequence.token_ids[start:end], draws=end == sequence.num_tokens)


class _IdleCost:
    """A cost model that allows a fixed share of the cells to be idle."""

    def __init__(self, num_cells: int) -> None:
        self.idle_cell_s = 0.0  # not measured
        self._per_cell_s = 0.1 / (_IDLE_SHARE * num_cells)  # `KVCache.update_idle_limit` finds the share again

    def seconds(self, num_tokens: int, num_cells: int) -> float:  # noqa: ARG002 - see the class
        """Return the expected time of a pass."""
        return 1.0 + self._per_cell_s * num_cells


class _NoTelemetry:
    """Reports nothing: instruments know only the target's cache."""

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        """See `CacheTelemetry`."""

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        """See `CacheTelemetry`."""
