"""Hooks into the engine's life: what an instrument may watch. Pure records; called on the engine's thread.

Only hooks that a subclass overrides are called. One that raises is logged once, and its instrument removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from paceline.streaming.chunk import FinishReason, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request as instruments see it. key: unique in this engine; request_id: the caller's name, if it gave one."""

    key: int
    request_id: str | None
    kind: Literal["generate", "embed"]
    prompt_tokens: int
    num_choices: int
    max_tokens: int | None
    priority: int
    submitted_s: float


class RowRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's share of a tick. Of num_tokens computed, num_new tokens came out; 0 while a prompt is unfinished.

    num_decode: 1 where the row went on from a generated token, the rest of num_tokens - num_drafts is prefill.
    first: whether the sequence's first token came out.
    """

    slot: int
    key: int
    choice: int
    position: int
    num_tokens: int
    num_decode: int
    num_drafts: int
    num_new: int
    first: bool


class TickRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tick that computed something. Seconds on the engine's clock; step_s: of elapsed_s, the pass itself.

    num_running: sequences that have one of the num_slots slots, with or without a row; num_waiting: requests in the queue.
    An embedding tick has no rows: num_embedded texts of num_embedded_tokens tokens became vectors.
    """

    index: int
    kind: Literal["generate", "embed"]
    start_s: float
    elapsed_s: float
    step_s: float
    rows: tuple[RowRecord, ...]
    num_slots: int
    num_running: int
    num_waiting: int
    num_cells: int
    budget: int
    num_embedded: int = 0
    num_embedded_tokens: int = 0

    @property
    def own_s(self) -> float:
        """What the engine took for itself: of elapsed_s, outside of the pass."""
        return self.elapsed_s - self.step_s

    @property
    def num_decode(self) -> int:
        """Rows that went on from a generated token."""
        return sum(row.num_decode for row in self.rows)

    @property
    def num_prefill(self) -> int:
        """Prompt tokens computed."""
        return sum(row.num_tokens - row.num_decode - row.num_drafts for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """How a request ended.

    reason: of its choices' reasons the one that stands first in `FinishReason`, so ERROR where one failed. error_code: of
    that choice's error, if it has one.
    """

    key: int
    reason: FinishReason
    usage: Usage
    now_s: float
    error_code: str | None = None


class Instrument:
    """Base of everything that watches an engine. Override what you need; the arguments are frozen records."""

    def request_queued(self, record: RequestRecord) -> None:
        """A request was accepted."""

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """A sequence got its slot, for the first time or again after a preemption."""

    def request_ended(self, record: EndRecord) -> None:
        """A request has ended; its terminal chunk is on its way."""

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """A sequence gave its slot back: it ended, or was preempted."""

    def preempted(self, key: int, choice: int, num_computed: int, now_s: float) -> None:
        """A sequence lost its slot, with so many computed tokens, and waits to go on.

        Cells were short, its reader paused it while others wait, or the beginning that it was to have could not be had. Host
        memory keeps the tokens where it can; else they are computed again.
        """

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:
        """So many tokens of a prompt were taken from memory instead of computed; source as in `Usage.cached_from`."""

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        """Of a long cached prompt only the beginning matched: the sign of a template that re-renders what was said."""

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        """So many tokens of an idle prefix made way; source: where they were, "device" or "host".

        Host memory keeps those of the device where it can; those of the host are gone.
        """

    def engine_restarted(self, now_s: float) -> None:
        """The engine's process died and another one took over."""

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:
        """A slow reader made its request pause, or go on again."""

    def tick_finished(self, record: TickRecord) -> None:
        """A tick has computed something and its events are on their way."""
