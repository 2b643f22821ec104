"""What each slot does between two ticks, as records. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.scheduling.sequence import Sequence

SlotState = Literal["idle", "prefilling", "decoding", "paused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot. Where it is idle, all but `id` has its default.

    state: "prefilling" while tokens other than the newest are left to compute, so also after a preemption; "paused" where the
    request's reader is too slow. key: of the request in its engine; request_id: the caller's name for it; choice: which of its
    choices. num_prompt_tokens: of the prompt, num_cached of them taken from the cache; num_computed_tokens: tokens in cells;
    num_generated: tokens drawn, those of a stop included; max_tokens: the request's; None: no limit of its own. running_s:
    seconds since the request got its first slot.
    """

    id: int
    state: SlotState = "idle"
    key: int | None = None
    request_id: str | None = None
    choice: int = 0
    num_prompt_tokens: int = 0
    num_cached: int = 0
    num_computed_tokens: int = 0
    num_generated: int = 0
    max_tokens: int | None = None
    running_s: float = 0.0

    @property
    def is_processing(self) -> bool:
        """Whether a sequence has it."""
        return self.key is not None

    @property
    def num_remaining(self) -> int | None:
        """Tokens that may still be drawn; None where only the context limits them."""
        return None if self.max_tokens is None else self.max_tokens - self.num_generated


@dataclass(frozen=True, slots=True)
class SlotsSnapshot:
    """All slots, by id. num_waiting: sequences and embedding requests without a slot."""

    slots: tuple[SlotView, ...]
    num_waiting: int

    def __iter__(self) -> Iterator[SlotView]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_processing(self) -> int:
        """Slots that a sequence has."""
        return sum(slot.is_processing for slot in self.slots)


def slots_snapshot(
    running: Iterable[Sequence], *, num_slots: int, num_waiting: int, now_s: float = 0.0
) -> SlotsSnapshot:
    """Return the slots of an engine that has num_slots. now_s: on the engine's clock."""
    slots = [SlotView(id=slot) for slot in range(num_slots)]
    for sequence in running:
        assert sequence.slot is not None  # noqa: S101 - it runs
        slots[sequence.slot] = _view(sequence, sequence.slot, now_s)
    return SlotsSnapshot(tuple(slots), num_waiting)


def _view(sequence: Sequence, slot: int, now_s: float) -> SlotView:
    request = sequence.request
    return SlotView(
        id=slot,
        state="paused" if request.is_paused else "decoding" if sequence.is_decoding else "prefilling",
        key=request.key,
        request_id=request.options.request_id,
        choice=sequence.choice,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached=request.num_cached,
        num_computed_tokens=sequence.num_computed_tokens,
        num_generated=sequence.num_tokens - sequence.num_prompt_tokens,
        max_tokens=request.params.max_tokens,
        running_s=0.0 if request.started_s is None else now_s - request.started_s,
    )
