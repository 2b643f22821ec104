"""Masks of allowed tokens that other threads fill while a forward pass runs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline import _native, validation


class MaskSlots:
    """A fixed number of bitmasks over a vocabulary: uint32 words, bit `t % 32` of word `t // 32` is set where token t is allowed.

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
