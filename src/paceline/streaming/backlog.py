"""Chunks that the engine has pushed and the reader has not taken, coalesced, with a token count for backpressure.

Pure: no threads, no loops; the owner's lock guards it. Coalescing takes time linear in the joined chunks, and a backlog that is
never read holds few objects.
"""

from __future__ import annotations

from paceline.streaming.chunk import StreamChunk

_FAN = 64  # chunks that become one


class Pieces:
    """Chunks of one choice that become one chunk.

    Every 64 chunks are joined into one, and 64 of these into one again, as carrying works in base 64. So each token is copied
    once per level, and 100,000 chunks are held as fewer than 200.
    """

    __slots__ = ("_chunks", "_num_added", "num_tokens")

    def __init__(self, *chunks: StreamChunk) -> None:
        self._chunks = list(chunks)
        self._num_added = len(chunks)
        self.num_tokens = sum([len(chunk.token_ids) for chunk in chunks])

    def add(self, chunk: StreamChunk) -> None:
        """Append the next chunk."""
        self._chunks.append(chunk)
        self._num_added += 1
        self.num_tokens += len(chunk.token_ids)
        if not self._num_added % _FAN:
            self._compact()

    def joined(self) -> StreamChunk:
        """Join all chunks into one."""
        return StreamChunk.joined_all(self._chunks)

    def _compact(self) -> None:
        count = self._num_added
        while count and not count % _FAN:
            self._chunks[-_FAN:] = [StreamChunk.joined_all(self._chunks[-_FAN:])]
            count //= _FAN


class Backlog:
    """Unread chunks by choice. A choice is ripe, and can be taken, with `interval` tokens or its last chunk.

    Once the backlog is closed everything can be taken, ripe or not.

    Attributes:
        interval: Tokens that make a choice ripe.
        ripe: Ripe choices, in the order in which they became so.
        num_tokens: All unread tokens.
        num_ripe: Unread tokens that can be taken.
        is_behind: Whether more than `limit` tokens could be taken, and they have not fallen to half of it since.
        num_times_behind: How often `is_behind` became true.
    """

    __slots__ = (
        "_held", "_is_closed", "_limit", "interval", "is_behind", "num_ripe", "num_times_behind", "num_tokens", "ripe",
    )  # fmt: skip

    def __init__(self, interval: int = 1, limit: int | None = None) -> None:
        self.interval = interval
        self._limit = limit
        self._is_closed = False
        self._held: dict[int, StreamChunk | Pieces] = {}
        self.ripe: dict[int, None] = {}
        self.num_tokens = 0
        self.num_ripe = 0
        self.is_behind = False
        self.num_times_behind = 0

    def add(self, chunk: StreamChunk) -> bool:
        """Add a chunk and return whether the reader has fallen behind by it."""
        choice = chunk.choice
        num_new = len(chunk.token_ids)
        held = self._held.get(choice)
        if held is None:
            self._held[choice] = chunk
        elif isinstance(held, Pieces):
            held.add(chunk)
        else:
            self._held[choice] = Pieces(held, chunk)
        self.num_tokens += num_new
        if choice in self.ripe:
            self.num_ripe += num_new
        elif held is None and num_new >= self.interval:  # the common case: the reader has taken what was there
            self.ripe[choice] = None
            self.num_ripe += num_new
        elif chunk.finish_reason is not None or _count(self._held[choice]) >= self.interval:
            self._ripen(choice)
        return self._limit is not None and self._falls_behind(self._limit)

    def set_interval(self, interval: int) -> bool:
        """Change the interval and return whether the reader has fallen behind by it. A ripe chunk stays ripe."""
        self.interval = interval
        for choice, held in self._held.items():
            if choice not in self.ripe and _count(held) >= interval:
                self._ripen(choice)
        return self._limit is not None and self._falls_behind(self._limit)

    @property
    def has_rest(self) -> bool:
        """Whether the backlog is closed and something still waits."""
        return self._is_closed and bool(self._held)

    def take(self) -> StreamChunk | Pieces:
        """Remove and return all chunks of the choice that became ripe first; there must be one. See `whole`."""
        choice = next(iter(self.ripe or self._held))
        held = self._held.pop(choice)
        num_taken = _count(held)
        self.num_tokens -= num_taken
        if choice in self.ripe:
            del self.ripe[choice]
            self.num_ripe -= num_taken
        if self.is_behind and self._limit is not None and self.num_ripe <= self._limit // 2:
            self.is_behind = False
        return held

    def close(self, last: StreamChunk) -> StreamChunk:
        """Close the backlog and return the stream's last chunk, joined to the unripe chunk of its choice.

        The backlog is closed and complete even if the join raises, as it does when memory is short.
        """
        self._is_closed = True
        choice = last.choice
        if choice in self._held and choice not in self.ripe:
            held = self._held[choice]
            last = whole(held).joined(last)
            del self._held[choice]
            self.num_tokens -= _count(held)
        return last

    def _ripen(self, choice: int) -> None:
        self.ripe[choice] = None
        self.num_ripe += _count(self._held[choice])

    def _falls_behind(self, limit: int) -> bool:
        if self.is_behind or self.num_ripe <= limit:
            return False
        self.is_behind = True
        self.num_times_behind += 1
        return True


def _count(held: StreamChunk | Pieces) -> int:
    return held.num_tokens if isinstance(held, Pieces) else len(held.token_ids)


def whole(held: StreamChunk | Pieces) -> StreamChunk:
    """Return the chunks of `take` as one chunk. Takes time linear in its length, so call it without the lock."""
    return held.joined() if isinstance(held, Pieces) else held
