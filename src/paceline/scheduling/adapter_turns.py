"""Whose adapters apply in the next tick: a pass has one set of them, so sequences with different sets take turns."""

from __future__ import annotations

from paceline.scheduling.sequence import Sequence

Lora = tuple[tuple[str, float], ...]


class AdapterTurns:
    """Gives each set of adapters a share of `itl_target_s`; then it is the turn of the one that has waited longest."""

    def __init__(self, itl_target_s: float) -> None:
        self._itl_target_s = itl_target_s
        self._current: Lora = ()
        self._since_s = 0.0

    def choose(self, sequences: list[Sequence], now_s: float) -> tuple[Lora, list[Sequence]]:
        """The adapters of this tick and, of these sequences, those that want them."""
        groups: dict[Lora, list[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(sequence.request.lora, []).append(sequence)
        if not groups:
            return self._current, []
        is_over = now_s - self._since_s >= self._itl_target_s / len(groups)
        if self._current not in groups or (len(groups) > 1 and is_over):
            others = {lora: group for lora, group in groups.items() if lora != self._current}
            self._current = min(others, key=lambda lora: min(one.last_tick for one in others[lora]))
            self._since_s = now_s
        return self._current, groups[self._current]
