"""What the cache needs of its caller: sequences, costs, limits, and a sink for what happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.kv_cache.prompt_layout import PromptLayout
from paceline.kv_cache.radix_tree import Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLimits:
    """Sizes of one context's memory.

    num_seq_ids: sequence ids for running sequences and cached prefixes. num_cells: cells that all share; None where
    memory is not made of cells. can_share_part: whether a sequence can take over part of another's memory. has_state_apart:
    where it cannot, whether it can take over part of the cells, beside which lies a state that is only taken over as it is;
    else only the whole. host_bytes: capacity of host memory. itl_target_s: inter-token latency target, of which transfers get
    a share. boundary_ids: control tokens, which stand between the messages of a chat.
    """

    num_seq_ids: int
    num_cells: int | None
    can_share_part: bool
    host_bytes: int
    itl_target_s: float
    has_state_apart: bool = False
    boundary_ids: frozenset[int] = frozenset()


class ComputeCost(Protocol):
    """What computing costs, to be weighed against transfers."""

    def seconds(self, num_tokens: int, num_cells: int) -> float:
        """Return the expected time of a pass over `num_tokens` tokens while `num_cells` cells are in use."""


class CacheTelemetry(Protocol):
    """Receives what happens in the cache."""

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        """Report tokens that left `source`: "device" or "host"."""

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        """Report a request whose prompt diverges early from a long cached prefix."""


class CacheRequest(Protocol):
    """The request of a sequence. is_matched: set by the cache at the first match."""

    is_matched: bool

    @property
    def key(self) -> int: ...  # noqa: D102
    @property
    def is_paused(self) -> bool: ...  # noqa: D102


class CacheSequence(Protocol):
    """One sequence, waiting or running.

    The cache sets seq_id (None while it waits), num_computed_tokens, waits_for and computes_all. reads_cache, writes_cache:
    whether it may take a prefix from the cache, and leave one there. turn_key: order of admission.
    """

    seq_id: int | None
    num_computed_tokens: int
    waits_for: PendingPrefix | None
    computes_all: bool

    @property
    def request(self) -> CacheRequest: ...  # noqa: D102
    @property
    def is_running(self) -> bool: ...  # noqa: D102
    @property
    def namespace(self) -> Namespace: ...  # noqa: D102
    @property
    def layout(self) -> PromptLayout: ...  # noqa: D102
    @property
    def num_prompt_tokens(self) -> int: ...  # noqa: D102
    @property
    def num_tokens(self) -> int: ...  # noqa: D102
    @property
    def reads_cache(self) -> bool: ...  # noqa: D102
    @property
    def writes_cache(self) -> bool: ...  # noqa: D102
    @property
    def is_scoring(self) -> bool: ...  # noqa: D102
    @property
    def turn_key(self) -> tuple[float, int]: ...  # noqa: D102

    def token_bytes(self, num_tokens: int) -> bytes:
        """Return the first `num_tokens` tokens as the radix tree keeps them."""


@dataclass(frozen=True, slots=True)
class PendingPrefix:
    """The first `end` tokens of a prompt, which a running sequence is about to have computed."""

    sequence: CacheSequence
    end: int

    @property
    def is_pending(self) -> bool:
        """Whether the sequence still runs and has not computed that far."""
        by = self.sequence
        return by.is_running and not by.request.is_paused and by.num_computed_tokens < self.end
