"""The numbers that scheduling needs of its backend and its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.kv_cache import KVCacheLimits
from paceline.request import MAX_DRAFT


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What backend and configuration allow.

    num_slots: sequences that run at once. n_batch: tokens of a tick; n_ubatch: computed at once. chunk_size: prefill tokens
    of one sequence in a tick. max_positions: tokens that one sequence can hold, at most num_cells, which is n_ctx rounded up to a
    multiple of 256. max_scored: rows of logits that a tick can
    spend on prompt tokens; max_drafted: on drafts, 0 without speculation. max_draft: most drafts of one sequence in a tick;
    min_draft: fewer than that are not verified. n_verify: tokens of a tick that has drafts, where that is less than n_batch.
    max_rollback: wrong drafts that can be cut from the end of a row, None: all of them; where there are more, all of the row
    is taken back and computed again. n_vocab: tokens of the vocabulary. itl_target_s: inter-token latency target;
    max_tick_s: the longest tick while no sequence decodes. embed_tokens, embed_texts: most of an embedding tick; a longer
    text has one of its own. max_embedding_tokens: of the longest text. num_cells, can_share_part, has_state_apart,
    host_bytes, boundary_ids: see `KVCacheLimits`; num_seq_ids: as many as slots, and more where parts of prefixes can be
    shared. cannot_generate: where max_positions is 0, what the model is instead, for the error of a request to generate.
    n_ctx_train: tokens that a sequence could have with a larger context; 0: not known.
    """

    num_slots: int
    n_batch: int
    chunk_size: int
    max_positions: int
    num_cells: int | None
    max_scored: int
    can_share_part: bool
    itl_target_s: float
    max_tick_s: float
    has_state_apart: bool = False
    boundary_ids: frozenset[int] = frozenset()
    num_seq_ids: int = 0
    host_bytes: int = 0
    n_ubatch: int = 512
    embed_tokens: int = 2048
    embed_texts: int = 64
    max_embedding_tokens: int = 2048
    max_drafted: int = 0
    max_draft: int = MAX_DRAFT
    min_draft: int = 1
    n_verify: int | None = None
    max_rollback: int | None = None
    n_vocab: int = 0
    cannot_generate: str = ""
    n_ctx_train: int = 0

    def longer_prompts(self, num_tokens: int) -> str:
        """Return how a prompt of `num_tokens`, more than `max_positions`, could be taken, for errors."""
        if max(num_tokens, self.max_positions + 1) <= self.n_ctx_train:
            return f"load the model with a larger n_ctx (at most {self.n_ctx_train})"
        most = max(self.max_positions, self.n_ctx_train)
        return f"take a model that was trained for longer texts (this model takes at most {most} tokens)"

    def for_kv_cache(self) -> KVCacheLimits:
        """Return the part that the KV cache needs."""
        return KVCacheLimits(
            num_seq_ids=self.num_seq_ids,
            num_cells=self.num_cells,
            can_share_part=self.can_share_part,
            has_state_apart=self.has_state_apart,
            host_bytes=self.host_bytes,
            itl_target_s=self.itl_target_s,
            boundary_ids=self.boundary_ids,
        )
