"""What the engine has pushed and the reader has not taken: joined chunks, a token count, and whether that is too much.

Pure: knows neither threads nor loops; whoever holds one guards it. Joining costs time in proportion to what is joined, and
a backlog that nobody reads keeps few objects.
"""

from __future__ import annotations

from paceline.streaming.chunk import StreamChunk

_FAN = 64  # chunks that become one


class Pieces:
    """Chunks of one choice, two or more, that its reader will get as one.

    The list is a number in base 64: every 64 chunks become one, 64 such become one again. So each token is copied once a
    digit, and 100,000 chunks are held as fewer than 200.
    """

    __slots__ = ("_chunks", "_num_added", "num_tokens")

    def __init__(self, first: StreamChunk, second: StreamChunk) -> None:
        self._chunks = [first, second]
        self._num_added = 2
        self.num_tokens = len(first.token_ids) + len(second.token_ids)

    def add(self, chunk: StreamChunk) -> None:
        """Appends the next chunk."""
        self._chunks.append(chunk)
        self._num_added += 1
        self.num_tokens += len(chunk.token_ids)
        if not self._num_added % _FAN:
            self._compact()

    def joined(self) -> StreamChunk:
        """All of them as one."""
        return StreamChunk.joined_all(self._chunks)

    def _compact(self) -> None:
        count = self._num_added
        while count and not count % _FAN:
            self._chunks[-_FAN:] = [StreamChunk.joined_all(self._chunks[-_FAN:])]
            count //= _FAN


class Backlog:
    """Per choice what waits. A choice is ripe, and may be taken, with `interval` tokens or its ending.

    ripe: the choices that are, in the order in which they became so. num_tokens: all that wait. num_ripe: of them, those
    that may be taken. is_behind: more than `limit` could have been taken, and they have not yet fallen to half of it;
    num_times_behind counts how often that began.
    """

    __slots__ = ("_held", "_interval", "_limit", "is_behind", "num_ripe", "num_times_behind", "num_tokens", "ripe")

    def __init__(self, interval: int = 1, limit: int | None = None) -> None:
        self._interval = interval
        self._limit = limit
        self._held: dict[int, StreamChunk | Pieces] = {}
        self.ripe: dict[int, None] = {}
        self.num_tokens = 0
        self.num_ripe = 0
        self.is_behind = False
        self.num_times_behind = 0

    def add(self, chunk: StreamChunk) -> bool:
        """Takes in what a tick brought to one choice; answers whether the reader has fallen behind by it."""
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
        elif held is None and num_new >= self._interval:  # the common case: the reader has taken what was there
            self.ripe[choice] = None
            self.num_ripe += num_new
        elif chunk.finish_reason is not None or _count(self._held[choice]) >= self._interval:
            self._ripen(choice)
        return self._limit is not None and self._falls_behind(self._limit)

    def take(self) -> StreamChunk | Pieces:
        """Hands out all that waits of the choice that became ripe first; there must be one. See `whole`."""
        choice = next(iter(self.ripe))
        del self.ripe[choice]
        held = self._held.pop(choice)
        num_taken = _count(held)
        self.num_tokens -= num_taken
        self.num_ripe -= num_taken
        if self.is_behind and self._limit is not None and self.num_ripe <= self._limit // 2:
            self.is_behind = False
        return held

    def close(self, last: StreamChunk) -> StreamChunk:
        """Makes ripe whatever is left, and answers the stream's last chunk: with what its choice had, if that was unripe."""
        choice = last.choice
        if choice in self._held and choice not in self.ripe:
            held = self._held.pop(choice)
            self.num_tokens -= _count(held)
            last = whole(held).joined(last)
        for other in self._held:
            if other not in self.ripe:
                self._ripen(other)
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
    """The one chunk that was taken. Its time grows with its length: nothing for a lock."""
    return held.joined() if isinstance(held, Pieces) else held
