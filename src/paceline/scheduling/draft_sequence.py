"""A sequence in the memory of a draft model: what is known of it, what is computed, what is only proposed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.kv_cache import TEXT_LAYOUT, TOKEN_BYTES, Namespace, PendingPrefix, PromptLayout, pack_tokens


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
