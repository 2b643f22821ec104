"""From token ids to text that can be shown: piece table, then stop strings, then UTF-8."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.output.detokenizer import Detokenizer
from paceline.output.stops import StopFilter, StopMatch

PipeState = tuple[tuple[tuple[int, bytes], ...], bytes]


class TextPiece(msgspec.Struct, frozen=True):
    """What one step adds to a sequence: ids and well-formed text. Either may be empty without the other."""

    token_ids: tuple[int, ...]
    text: str


class TextPipe:
    """Turns the tokens of one sequence into text and ends it at a stop string.

    `pieces`: the bytes of every token, by id (`Tokenizer.pieces`). What `push` and, in the end, `finish` return joins
    to the ids and the text before the stop; without a stop, of the whole sequence.
    """

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._filter = StopFilter(stops)
        self._detokenizer = Detokenizer()

    @classmethod
    def from_state(cls, pieces: Sequence[bytes], stops: Sequence[str], state: PipeState) -> TextPipe:
        """Resume where the pipe that returned `state` stood."""
        pipe = cls(pieces)
        pipe._filter = StopFilter.from_state(stops, state[0])
        pipe._detokenizer = Detokenizer.from_state(state[1])
        return pipe

    def go_on_from(self, earlier: TextPipe) -> None:
        """Take over what another pipe, which looked for no stops, holds back; this one has to be new."""
        self._detokenizer = earlier._detokenizer

    @property
    def match(self) -> StopMatch | None:
        """The stop that was found; nothing may be pushed any more, and `finish` still has to be called."""
        return self._filter.match

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held back: the next token's text depends on nothing before it."""
        return not (self._filter.is_holding or self._detokenizer.state())

    def push(self, token_id: int) -> TextPiece:
        """Take the next token and return what can be shown now."""
        released = self._filter.push(token_id, self._pieces[token_id])
        return TextPiece(released.token_ids, self._detokenizer.push(released.data))

    def finish(self) -> TextPiece:
        """End the sequence, for whatever reason: return what was held back and belongs to no stop."""
        released = self._filter.finish()
        text = self._detokenizer.push(released.data) + self._detokenizer.finish()
        return TextPiece(released.token_ids, text)

    def state(self) -> PipeState:
        """Return what is held back, for `from_state`: tokens that may belong to a stop, bytes of an unfinished character."""
        return self._filter.state(), self._detokenizer.state()
