"""Token bytes to text: UTF-8 as it arrives, and the stop strings that end it.

Pure and without a thread of its own; knows nothing of models or vocabularies: bytes of tokens are handed in.
"""

from paceline.text.detokenizer import Detokenizer
from paceline.text.pipe import TextPiece, TextPipe
from paceline.text.stops import Released, StopFilter, StopMatch

__all__ = ["Detokenizer", "Released", "StopFilter", "StopMatch", "TextPiece", "TextPipe"]
