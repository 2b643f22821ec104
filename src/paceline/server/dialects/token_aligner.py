"""Finds the tokens of a text among those that were generated. Pure; any one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.server.dialects.logprobs import ChatLogprob, Pieces, chat_logprobs
from paceline.streaming import TokenLogprobs


class TokenAligner:
    """The generated tokens that no text has been found for yet, by their bytes.

    What is between texts (the marks of the format) belongs to none of them. A token that lies across two texts counts for
    the first. Where a text is not to be found, since the format escapes it or a character was cut, it has no tokens.
    """

    def __init__(self, pieces: Pieces, num_top: int | None = None, max_bytes: int | None = None) -> None:
        """pieces: the bytes of every token. num_top: of log-probabilities, with each token; None: none are reported.

        max_bytes: beyond which tokens are dropped when a text is not found among them; None: none are.
        """
        self._pieces, self._num_top, self._max_bytes = pieces, num_top, max_bytes
        self._bytes = bytearray()
        self._tokens: deque[tuple[int, TokenLogprobs | None]] = deque()  # where it ends, and its logprobs
        self._num_dropped = 0  # bytes that were found or skipped

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add generated tokens. logprobs: one for each, or none."""
        for index, token in enumerate(ids):
            self._bytes += self._pieces[token]
            end = self._num_dropped + len(self._bytes)
            self._tokens.append((end, logprobs[index] if logprobs else None))

    def take(self, text: str) -> tuple[int, list[ChatLogprob]]:
        """Return the number of tokens that make a text, and their log-probabilities; they and those before are dropped."""
        wanted = text.encode()
        at = self._bytes.find(wanted)
        if at < 0 or not wanted:
            if self._max_bytes is not None and len(self._bytes) > self._max_bytes:
                self.clear()
            return 0, []
        start, end = self._num_dropped + at, self._num_dropped + at + len(wanted)
        while self._tokens and self._tokens[0][0] <= start:
            self._tokens.popleft()
        found: list[tuple[int, TokenLogprobs | None]] = []
        while self._tokens and (not found or found[-1][0] < end):
            found.append(self._tokens.popleft())
        del self._bytes[: at + len(wanted)]
        self._num_dropped = end
        return len(found), self._logprobs([one for _, one in found if one is not None])

    def clear(self) -> None:
        """Drop all tokens."""
        self._num_dropped += len(self._bytes)
        self._bytes.clear()
        self._tokens.clear()

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> list[ChatLogprob]:
        return [] if self._num_top is None else chat_logprobs(found, self._num_top)
