"""What the tokens of a model are as bytes and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from paceline.request import RequestOptions
from paceline.streaming.chunk import TokenLogprobs, TokenText

_MAX_SHOWN = 8  # combinations of preserved tokens whose tables are kept


class TokenTexts(dict[int, str | None]):
    """The texts of tokens by id, None for parts of characters.

    Each is made when it is first needed: of a large vocabulary most never are, and all of them take 10 MB. Any thread.
    """

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._pieces[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class _Tokens(dict[int, TokenText]):
    """The tokens with their texts by id, made and kept when they are first needed. Any thread."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> TokenText:
        piece = self._pieces[token_id]
        token = self[token_id] = TokenText(token_id, piece.decode("utf-8", "replace"), tuple(piece))
        return token


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of a model's tokens, without and with the text of control tokens, and its end-of-generation tokens.

    names_tokens: whether log-probabilities get the texts of their tokens. A worker leaves that to the front, which has one text
    for all entries of a token.
    """

    pieces: Sequence[bytes]
    pieces_special: Sequence[bytes]
    eog_ids: frozenset[int]
    names_tokens: bool = True
    _shown: dict[tuple[int, ...], tuple[Sequence[bytes], TokenTexts]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self.pieces)

    @cached_property
    def _texts_special(self) -> TokenTexts:
        return TokenTexts(self.pieces_special)

    @cached_property
    def _tokens(self) -> _Tokens:
        return _Tokens(self.pieces_special)

    def with_texts(self, token_id: int, logprobs: TokenLogprobs) -> TokenLogprobs:
        """Return the log-probabilities at the position of this token with the texts of all their tokens."""
        if not self.names_tokens:
            return logprobs
        tokens, top = self._tokens, logprobs.token_ids
        return TokenLogprobs(logprobs.own, top, logprobs.values, tokens[token_id], tuple([tokens[one] for one in top]))

    def shown(self, options: RequestOptions) -> tuple[Sequence[bytes], TokenTexts]:
        """Return the bytes and the texts of all tokens, as the options of a request want control tokens shown."""
        if options.special:
            return self.pieces_special, self._texts_special
        if not options.preserved_tokens:
            return self.pieces, self._texts
        found = self._shown.get(options.preserved_tokens)
        if found is None:
            pieces = list(self.pieces)
            for token_id in options.preserved_tokens:
                pieces[token_id] = self.pieces_special[token_id]
            found = pieces, TokenTexts(pieces)
            if len(self._shown) >= _MAX_SHOWN:
                self._shown.clear()
            self._shown[options.preserved_tokens] = found
        return found
