"""From drawn tokens to stream chunks: text as it becomes readable, stop strings, log-probabilities, endings.

Pure; knows no KV cache and no scheduling. `Detokenizer`, `StopFilter` and `TextPipe` work on bytes of tokens alone;
`OutputProcessor` puts them together for one choice of a request.
"""

from paceline.output.detokenizer import Detokenizer
from paceline.output.processor import OutputProcessor, Vocabulary
from paceline.output.stops import ReleasedTokens, StopFilter, StopMatch
from paceline.output.text_pipe import TextPiece, TextPipe

__all__ = [
    "Detokenizer",
    "OutputProcessor",
    "ReleasedTokens",
    "StopFilter",
    "StopMatch",
    "TextPiece",
    "TextPipe",
    "Vocabulary",
]
