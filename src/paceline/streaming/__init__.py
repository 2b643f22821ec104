"""Streaming: chunks, the channel between the engine and the one reader of a request, streams, and completions.

Knows nothing of models or scheduling.
"""

from paceline.streaming.channel import StreamChannel
from paceline.streaming.chunk import FinishReason, StreamChunk, TokenLogprobs, TokenText, Usage
from paceline.streaming.sender import END, TIMEOUT, Nothing, StreamSender, StreamState
from paceline.streaming.stream import AsyncBatchStream, AsyncStream, BatchStream, Stream

__all__ = [
    "END",
    "TIMEOUT",
    "AsyncBatchStream",
    "AsyncStream",
    "BatchStream",
    "FinishReason",
    "Nothing",
    "Stream",
    "StreamChannel",
    "StreamChunk",
    "StreamSender",
    "StreamState",
    "TokenLogprobs",
    "TokenText",
    "Usage",
]
