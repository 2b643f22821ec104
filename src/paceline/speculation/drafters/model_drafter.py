"""What a drafter with a model needs of it: rows in, the likeliest next tokens out. llama.cpp, or a fake; engine's thread."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from paceline.kv_cache import (
    TEXT_LAYOUT,
    TOKEN_BYTES,
    Copy,
    KVCache,
    KVCacheLimits,
    Namespace,
    NotAdmitted,
    Operation,
    PendingPrefix,
    PromptLayout,
    Remove,
    Truncate,
    pack_tokens,
)

_USUAL_LAG = 2  # tokens: the last proposed one, which was not computed, and the one behind it
_PUT_OFF_TICKS = 16  # that a sequence without room waits, so that it does not take cells from others in each of them
_IDLE_SHARE = 0.25  # of the cells, that cached prefixes may take beside what runs: each slows every pass


class DraftRow(msgspec.Struct):
    """Tokens of one sequence id to be computed from `position` on. draws: whether its next token is wanted."""

    seq_id: int
    position: int
    token_ids: list[int]
    draws: bool


class DraftToken(NamedTuple):
    """The likeliest next token. probability: that the model gives it; 1 where it was not asked for probabilities."""

    token_id: int
    probability: float


class DraftBackend(Protocol):
    """A context of a draft model. What raises has changed nothing, except for the operations that went before it."""

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Copy the positions before `end` of one sequence id to another, which is empty."""

    def truncate(self, seq_id: int, end: int) -> None:
        """Remove the positions of a sequence id from `end` on."""

    def remove(self, seq_id: int) -> None:
        """Empty a sequence id."""

    def step(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        """Compute all rows in one pass; return what each draws, None for one that does not."""


class DraftSequence:
    """One key's tokens: those that are known, and behind them those that were proposed and not rejected yet.

    It is a sequence of the KV cache, and a request with that one sequence. seq_id: None while it has no cells.
    is_paused: whether it is not asked for in this tick, so that no other one waits for what it would compute.
    is_possible: whether the draft model has all of its tokens. put_off_until: tick from which on it may have cells again.
    """

    def __init__(
        self, key: int, token_ids: Sequence[int], namespace: Namespace, *, writes_cache: bool, is_possible: bool
    ) -> None:
        self.key, self.is_possible = key, is_possible
        self.namespace: Namespace = namespace
        self.writes_cache = writes_cache
        self.token_ids = list(token_ids)
        self.num_known = self.num_prompt_tokens = len(self.token_ids)
        self.layout: PromptLayout = TEXT_LAYOUT
        self.seq_id: int | None = None
        self.num_computed_tokens = 0
        self.waits_for: PendingPrefix | None = None
        self.computes_all = self.is_scoring = False
        self.reads_cache = self.is_matched = True
        self.is_paused = False
        self.last_tick = self.put_off_until = 0
        self._packed = bytearray()

    @property
    def request(self) -> DraftSequence:
        """Itself."""
        return self

    @property
    def sequences(self) -> tuple[DraftSequence, ...]:
        """Itself."""
        return (self,)

    @property
    def is_running(self) -> bool:
        """Whether it has cells."""
        return self.seq_id is not None

    @property
    def turn_key(self) -> tuple[float, int]:
        """The order of keys, which is that of arrival."""
        return (0.0, self.key)

    @property
    def num_tokens(self) -> int:
        """Known and proposed tokens."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Those that are left to compute before it can have drafts."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def drafts(self) -> list[int]:
        """The proposed tokens."""
        return self.token_ids[self.num_known :]

    def token_bytes(self, num_tokens: int) -> bytes:
        """Return the first tokens as the radix tree keeps them."""
        have = len(self._packed) // TOKEN_BYTES
        if have < num_tokens:
            self._packed += pack_tokens(self.token_ids[have:num_tokens])
        return bytes(self._packed[: num_tokens * TOKEN_BYTES])

    def propose(self, token_id: int) -> None:
        """Add a token that is only proposed."""
        self.token_ids.append(token_id)

    def reject(self, num_tokens: int) -> None:
        """Take back the last proposed tokens."""
        self._cut(max(self.num_known, len(self.token_ids) - num_tokens))

    def learn(self, token_ids: Sequence[int]) -> int:
        """Take in what the sequence has got: proposed tokens that were right, then others; return how many were right."""
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
        del self._packed[num_tokens * TOKEN_BYTES :]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """What a draft model's context allows.

    num_cells, num_seq_ids: of its memory; more ids than sequences draft at once. n_batch: most tokens of a pass, at least as
    many as sequences. max_positions: tokens of one sequence. n_vocab: of the draft model; target_n_vocab: no token from there on
    is proposed. eog_ids: ends of generation, behind which nothing is. p_min: a token that the draft model finds less likely is
    not proposed. chunk_size: most tokens of a tick, all together, of sequences that lag behind.
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

    Where its memory has no room for a sequence there are no drafts. After an error its memory is emptied, and filled anew.
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

    # ---- what sequences are

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        self.begin_shared(key, token_ids, ())

    def begin_shared(self, key: int, token_ids: Sequence[int], namespace: Hashable | None) -> None:
        """See `SharingDrafter`: sequences share what is computed of their prompts."""
        writes_cache, is_possible = namespace is not None, self._knows(token_ids)
        own = (namespace,) if writes_cache else (None, key)
        self._sequences[key] = DraftSequence(key, token_ids, own, writes_cache=writes_cache, is_possible=is_possible)

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        sequence = self._sequences[key]
        num_before = sequence.num_known
        num_right = sequence.learn(token_ids)
        sequence.is_possible = sequence.is_possible and self._knows(token_ids)
        if sequence.is_running and sequence.num_computed_tokens > num_before + num_right:
            self._cache.discard(sequence)  # computed and not rejected, but wrong: others may have seen it

    def rollback(self, key: int, num_tokens: int) -> None:
        """See `Drafter`."""
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
        """See `LaggingDrafter`."""
        sequence = self._sequences[key]
        if not self._is_possible(sequence):
            return math.inf
        num_missing = sequence.num_uncomputed_tokens
        if not sequence.is_running:
            num_missing -= self._cache.num_matched(sequence, self._tick)
        return max(0, num_missing - _USUAL_LAG)

    @property
    def num_caught_up(self) -> int:
        """See `LaggingDrafter`."""
        return self._num_caught_up

    def limit_catch_up(self, num_tokens: int) -> int:
        """See `LaggingDrafter`; `chunk_size` is the most."""
        self._chunk_size = min(num_tokens, self._limits.chunk_size)
        return self._chunk_size

    def _knows(self, token_ids: Sequence[int]) -> bool:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._limits.n_vocab)

    def _is_possible(self, sequence: DraftSequence) -> bool:
        """Return whether the draft model has its tokens, and room for one more than them."""
        return sequence.is_possible and sequence.num_tokens < min(self._limits.max_positions, self._limits.num_cells)

    # ---- drafts

    def propose(self, key: int, max_tokens: int) -> list[int]:
        """See `Drafter`."""
        return self.propose_all([(key, max_tokens)])[0]

    def propose_all(self, wanted: Sequence[tuple[int, int]]) -> list[list[int]]:
        """See `BatchDrafter`. Raises what the backend raises."""
        self._tick += 1
        self._num_caught_up = 0
        asked = {key: self._sequences[key] for key, _ in wanted}
        for sequence in self._sequences.values():
            sequence.is_paused = sequence.key not in asked
        for sequence in asked.values():
            sequence.last_tick = self._tick
        try:
            self._cache.begin_tick(is_generating=True)
            possible = [one for one in asked.values() if self._is_possible(one)]
            self._admit(possible)
            self._draft(self._catch_up([one for one in possible if one.is_running]), dict(wanted))
            self._cache.offload(None, self._tick, is_generating=True)
        except BaseException:
            self._empty()
            raise
        return [asked[key].drafts for key, _ in wanted]

    def _admit(self, asked: list[DraftSequence]) -> None:
        """Give cells to sequences that have none, as far as there is room; take one back where nothing is left to compute."""
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
        """Keep the first tokens alone; where others share what is behind them, nothing, until it starts from their cells."""
        if self._cache.may_truncate(sequence, num_tokens):
            self._cache.truncate(sequence, num_tokens)
        else:
            self._cache.discard(sequence)

    def _has_free_id(self) -> bool:
        """Return whether there is an id beside that of the prefix which a sequence starts from."""
        num_running = sum([one.is_running for one in self._sequences.values()])
        return num_running + 1 < self._limits.num_seq_ids or self._release_idle()

    def _catch_up(self, asked: list[DraftSequence]) -> list[tuple[DraftSequence, DraftToken]]:
        """Compute what sequences miss, those first that miss least; return what those draw that miss nothing more.

        The first of them gets room in any case: else all could hold cells, and wait for those of the others for good.
        """
        rows: list[DraftRow] = []
        computed = []
        num_tokens, num_late = 0, self._chunk_size
        ordered = sorted(asked, key=lambda one: (one.num_uncomputed_tokens, one.key))
        for sequence in ordered:
            if not sequence.is_running:
                break  # as those behind it, released for the first one
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
        """Go on from what was drawn, a pass for each further token, while sequences are sure enough and may."""
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
                sequence.propose(token.token_id)
                is_deep = len(sequence.drafts) >= depths[sequence.key]
                is_last = is_deep or token.token_id in limits.eog_ids
                if not is_last and sequence.num_tokens < limits.max_positions:
                    going_on.append(sequence)
            while going_on and not self._make_room(len(going_on)):
                going_on.pop()
            drawn = self._compute([_row(one, 1) for one in going_on], going_on)

    def _compute(self, rows: list[DraftRow], sequences: list[DraftSequence]) -> list[tuple[DraftSequence, DraftToken]]:
        self._operate(self._cache.take_operations())
        if not rows:
            return []
        drawn = self._backend.step(rows)
        for sequence, row in zip(sequences, rows, strict=True):
            self._cache.commit(sequence, len(row.token_ids))
        return [(one, token) for one, token in zip(sequences, drawn, strict=True) if token is not None]

    # ---- room

    def _make_room(self, num_tokens: int, others: Sequence[DraftSequence] = ()) -> bool:
        """Free cells of cached prefixes, of sequences that were not asked for longest, then of others, the last first.

        Returns whether there are enough. Others that lose theirs are put off.
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
        """Make the running sequence that was not asked for longest a cached prefix; return whether there was one."""
        idle = [one for one in self._sequences.values() if one.is_running and one.is_paused]
        if not idle:
            return False
        self._cache.release(min(idle, key=lambda one: one.last_tick))
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
        """Forget what is computed, and have all of it removed before the next pass."""
        for sequence in self._sequences.values():
            sequence.reject(sequence.num_tokens)
            sequence.seq_id, sequence.num_computed_tokens, sequence.waits_for = None, 0, None
        self._cache = self._new_cache()
        self._cache.clear()

    def check(self) -> None:
        """Assert what must hold between ticks."""
        self._cache.check()
        for sequence in self._sequences.values():
            assert sequence.num_computed_tokens <= sequence.num_tokens  # noqa: S101 - our own invariant


def _row(sequence: DraftSequence, num_tokens: int) -> DraftRow:
    assert sequence.seq_id is not None  # noqa: S101 - it runs
    start = sequence.num_computed_tokens
    end = start + num_tokens
    return DraftRow(sequence.seq_id, start, sequence.token_ids[start:end], draws=end == sequence.num_tokens)


class _IdleCost:
    """A cost model by which a share of the cells may be idle, whatever passes take."""

    def __init__(self, num_cells: int) -> None:
        self._per_cell_s = 0.1 / (_IDLE_SHARE * num_cells)  # `KVCache.update_idle_limit` finds the share again

    def seconds(self, num_tokens: int, num_cells: int) -> float:  # noqa: ARG002 - see the class
        """Return the expected time of a pass."""
        return 1.0 + self._per_cell_s * num_cells


class _NoTelemetry:
    """Reports nothing: instruments know one cache, the target's."""

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        """See `CacheTelemetry`."""

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        """See `CacheTelemetry`."""
