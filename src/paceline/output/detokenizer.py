"""Bytes of tokens to text, as they arrive: the UTF-8 decoder of one sequence."""

from __future__ import annotations

import codecs

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes the bytes of one sequence, split anywhere.

    Every piece is well-formed text, and all pieces joined are what `bytes.decode("utf-8", "replace")` makes of all:
    one U+FFFD for each maximal invalid subpart. At most three bytes are held back, the beginning of a character.
    """

    def __init__(self) -> None:
        self._decoder = _new_decoder("replace")

    @classmethod
    def from_state(cls, state: bytes) -> Detokenizer:
        """Resume where the detokenizer that returned `state` stood."""
        detokenizer = cls()
        detokenizer._decoder.setstate((state, 0))
        return detokenizer

    def push(self, data: bytes) -> str:
        """Return the text that is complete with these bytes; may be empty."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return what was held back: nothing, or one replacement character; the detokenizer is as new afterwards."""
        return self._decoder.decode(b"", final=True)

    def state(self) -> bytes:
        """Return the bytes that are held back."""
        return self._decoder.getstate()[0]
