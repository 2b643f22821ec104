"""How tokens reach a reader: chunks, the channel between the engine and one reader, and the stream a caller holds.

Knows nothing of models or scheduling. The contract is written down in docs/architecture.md, *Streams*.
"""

from paceline.streaming.channel import StreamChannel
from paceline.streaming.chunk import FinishReason, StreamChunk, TokenLogprobs, Usage
from paceline.streaming.feed import END, TIMEOUT, Nothing, StreamFeed, StreamState
from paceline.streaming.stream import AsyncStream, Stream

__all__ = [
    "END",
    "TIMEOUT",
    "AsyncStream",
    "FinishReason",
    "Nothing",
    "Stream",
    "StreamChannel",
    "StreamChunk",
    "StreamFeed",
    "StreamState",
    "TokenLogprobs",
    "Usage",
]
