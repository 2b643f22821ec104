"""A small vocabulary for tests of constraints, and helpers to follow them."""

from __future__ import annotations

import numpy as np

from paceline.constraints import Constraint, TokenTable

WORDS = (
    b"<think>", b"</think>", b"</thi", b"nk>", b">{", b">\n\n", b"</think>{", b" th", b"\xe2\x82",
    b"\x82\xac", b"true", b'{"', b"\n\n",
)  # fmt: skip
EOS = 256 + len(WORDS)
PIECES = (*(bytes([byte]) for byte in range(256)), *WORDS, b"<eos>")
TABLE = TokenTable(
    pieces=PIECES, control_ids=frozenset({EOS}), eog_ids=frozenset({EOS}), encode=lambda text: list(text.encode())
)


def token(piece: bytes) -> int:
    return PIECES.index(piece)


def allowed(constraint: Constraint) -> set[int] | None:
    """Return the tokens that may come; None for all."""
    words = np.zeros(TABLE.num_words, dtype=np.uint32)
    if not constraint.fill_mask(words):
        return None
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: len(PIECES)]).tolist())


def take(constraint: Constraint, *pieces: bytes) -> None:
    """Accept tokens, each of which has to be allowed."""
    for piece in pieces:
        may_come = allowed(constraint)
        assert may_come is None or token(piece) in may_come, piece
        constraint.accept(token(piece))


def spell(constraint: Constraint, text: str) -> None:
    """Accept a text byte by byte."""
    take(constraint, *(bytes([byte]) for byte in text.encode()))


def matches(constraint: Constraint, text: str) -> bool:
    """Return whether a text is whole by a constraint."""
    for byte in text.encode():
        if constraint.is_complete:
            return False
        may_come = allowed(constraint)
        if may_come is not None and byte not in may_come:
            return False
        constraint.accept(byte)
    return constraint.may_end
