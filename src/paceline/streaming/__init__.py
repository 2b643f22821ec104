"""How tokens reach a reader: chunks, and the channel between the engine and one reader.

Knows nothing of models or scheduling. The contract is written down in docs/architecture.md, *Streams*.
"""

from paceline.streaming.channel import END, TIMEOUT, StreamChannel, StreamState
from paceline.streaming.chunk import FinishReason, StreamChunk, TokenLogprobs, Usage

__all__ = ["END", "TIMEOUT", "FinishReason", "StreamChannel", "StreamChunk", "StreamState", "TokenLogprobs", "Usage"]
