"""Messages on a stream of bytes: four bytes of length, big-endian, then the message. Pure."""

from __future__ import annotations

from paceline.errors import EngineError

MAX_BYTES = 2**30
_HEADER = 4


def framed(message: bytes) -> bytes:
    """Return the message with its length in front. Raises `EngineError` for one that no reader would take."""
    _check_size(len(message))
    return len(message).to_bytes(_HEADER, "big") + message


class FrameReader:
    """Takes bytes as they come, split anywhere, and gives whole messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Return the messages that are whole now. Raises `EngineError` where a length makes no sense."""
        self._data += data
        messages, begin = [], 0
        while (end := self._end(begin)) is not None:
            messages.append(bytes(self._data[begin + _HEADER : end]))
            begin = end
        del self._data[:begin]
        return messages

    @property
    def num_uncomputed_tokens(self) -> int:
        """Bytes of a message that is not whole; where the stream ends, they were cut off."""
        return len(self._data)

    def _end(self, begin: int) -> int | None:
        if len(self._data) - begin < _HEADER:
            return None
        size = int.from_bytes(self._data[begin : begin + _HEADER], "big")
        _check_size(size)
        end = begin + _HEADER + size
        return end if end <= len(self._data) else None


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise EngineError(f"a message of {size} bytes, and {MAX_BYTES} is the most that goes between processes")
