"""Warnings about the parts of a request that are left out or read differently, merged by their sentence. Pure; any thread."""

from __future__ import annotations

from paceline.server.api_errors import clean_message, invalid_request


class InputWarnings:
    """Collects warnings. A sentence that holds for several places is reported once, with the first place and a count."""

    def __init__(self, *, strict: bool = False) -> None:
        """strict: whether unknown members are refused."""
        self._strict = strict
        self._places: dict[str, tuple[str, int]] = {}

    def add(self, place: str, sentence: str) -> None:
        """Add a warning about a place, for example input[3]."""
        first, count = self._places.get(sentence, (place, 0))
        self._places[sentence] = (first, count + 1)

    def add_unknown(self, place: str, name: object, sentence: str) -> None:
        """Add a warning about a member that is not known. Raises `ApiException` if strict."""
        if self._strict:
            field = clean_message(f"{place}.{str(name)[:80]}")
            message = f"{field} is not a field of this endpoint; leave it out"
            raise invalid_request(message, place.partition("[")[0], "unknown_parameter")
        self.add(place, sentence)

    def sentences(self) -> tuple[str, ...]:
        """Return the warnings in the order of their first places."""
        return tuple(
            f"{place}: {sentence}" if count == 1 else f"{place} and {count - 1} more: {sentence}"
            for sentence, (place, count) in self._places.items()
        )
