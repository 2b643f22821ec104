"""A vocabulary without a model: every letter is a token, its code point is its id, and 300 begins a text."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from paceline.runtime import Tokenizer
from paceline.runtime.tokenizer import FimTokens

BOS = 300


class Letters:
    """The parts of a `Tokenizer` that llama-server's routes use."""

    n_vocab = 400
    bos = BOS
    add_bos = True
    eog_ids = frozenset({399, 398})

    def __init__(self, **fim: int) -> None:
        self.fim = FimTokens(**fim)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [BOS] * add_special + [ord(letter) % self.n_vocab for letter in text]

    def min_tokens(self, text: str) -> int:
        return len(text) // 8

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join("<s>" if token == BOS else chr(token) for token in ids)

    def pieces(self, special: bool) -> tuple[bytes, ...]:
        return tuple(bytes([token]) if token < 256 else chr(token).encode() for token in range(self.n_vocab))


def letters(**fim: int) -> Tokenizer:
    """Its text; fim: the tokens to fill in the middle with."""
    return cast("Tokenizer", Letters(**fim))


def namespace(**members: Any) -> Any:
    """Anything with these members."""
    return SimpleNamespace(**members)
