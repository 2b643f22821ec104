"""The reference for completions: plain functions of the drawn tokens, which share nothing with the tested code."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.streaming import FinishReason


@dataclass(frozen=True)
class Expected:
    """The expectation for a choice: its tokens, their text, its finish reason and the text taken by the end."""

    token_ids: list[int]
    text: str
    reason: FinishReason
    stop: str | int | None
    stop_token_ids: list[int]


def expected_output(
    drawn: Sequence[int],
    *,
    pieces: Sequence[bytes],
    ends: Collection[int],
    stops: Sequence[str] = (),
    stop_ids: Collection[int] = (),
    min_tokens: int = 0,
    max_tokens: int | None = None,
    cut_off: FinishReason | None = None,
) -> Expected:
    """Return the completion made of tokens that would be drawn one after another. cut_off: why no more come than are given."""
    used: list[int] = []
    tail: list[int] = []
    reason = cut_off
    stop: str | int | None = None
    for token in drawn:
        if token in ends or token in stop_ids:
            reason, stop, tail = FinishReason.STOP, token, [token]
            break
        used.append(token)
        if _is_settled(_bytes(used[min_tokens:], pieces), stops):
            reason = FinishReason.STOP
            break
        if max_tokens is not None and len(used) >= max_tokens:
            reason = FinishReason.LENGTH
            break
    assert reason is not None, "the tokens given neither end the completion nor are cut off"
    before, after = _bytes(used[:min_tokens], pieces), _bytes(used[min_tokens:], pieces)
    found = _first(after, stops)
    if found is None:
        return Expected(used, (before + after).decode("utf-8", "replace"), reason, stop, tail)
    begin, stop = found
    kept = min_tokens
    while kept < len(used) and len(_bytes(used[min_tokens : kept + 1], pieces)) <= begin:
        kept += 1
    if reason is FinishReason.LENGTH:
        reason = FinishReason.STOP
    text = (before + after[:begin]).decode("utf-8", "replace")
    return Expected(used[:kept], text, reason, stop, [*used[kept:], *tail])


def _bytes(tokens: Sequence[int], pieces: Sequence[bytes]) -> bytes:
    return b"".join(pieces[token] for token in tokens)


def _first(data: bytes, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the start of the first stop in the bytes, and the shortest that begins there."""
    for begin in range(len(data)):
        for stop in sorted(stops, key=lambda stop: len(stop.encode())):
            if data.startswith(stop.encode(), begin):
                return begin, stop
    return None


def _is_settled(data: bytes, stops: Sequence[str]) -> bool:
    """Whether a stop is complete, at some place in the bytes, that none which had begun before it could displace."""
    for length in range(1, len(data) + 1):
        seen = data[:length]
        found = _first(seen, stops)
        if found and not any(stop.encode().startswith(seen[begin:]) for begin in range(found[0]) for stop in stops):
            return True
    return False
