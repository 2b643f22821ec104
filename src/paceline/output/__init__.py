"""From drawn tokens to stream chunks: text as it becomes readable, stop strings, log-probabilities, endings.

Pure; knows no KV cache and no scheduling. `Detokenizer`, `StopFilter` and `TextPipe` work on bytes of tokens alone;
`OutputProcessor` puts them together for one choice of a request.
"""

from paceline.output.processor import (
    Detokenizer,
    OutputProcessor,
    ReleasedTokens,
    StopFilter,
    StopMatch,
    TextPiece,
    TextPipe,
    Vocabulary,
)

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
