"""Warnings about the parts of a request that are left out or read differently, merged by their sentence. Pure; any thread."""

from __future__ import annotations

_MAX_SENTENCES = 50  # so that a request cannot make its response arbitrarily long


class InputWarnings:
    """Collects warnings. A sentence that holds for several places is reported once, with the first place and a count."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, int]] = {}
        self._num_dropped = 0

    def add(self, place: str, sentence: str) -> None:
        """Add a warning about a place such as input[3]."""
        if sentence not in self._places and len(self._places) == _MAX_SENTENCES:
            self._num_dropped += 1
            return
        first, count = self._places.get(sentence, (place, 0))
        self._places[sentence] = (first, count + 1)

    def sentences(self) -> tuple[str, ...]:
        """Return the warnings in the order of their first places."""
        found = [
            f"{place}: {sentence}" if count == 1 else f"{place} and {count - 1} more: {sentence}"
            for sentence, (place, count) in self._places.items()
        ]
        if self._num_dropped:
            found.append(f"{self._num_dropped} more warnings are not shown")
        return tuple(found)
