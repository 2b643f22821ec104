"""What a reader of a stream gets at once, and why a stream ends. Frozen records; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

import msgspec

from paceline.errors import PacelineError


class FinishReason(Enum):
    """Why a sequence ended. Within one tick the one that stands first here wins."""

    ERROR = "error"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    SLOW_READER = "slow_reader"
    STOP = "stop"
    END = "end"
    LENGTH = "length"

    @property
    def rank(self) -> int:
        """Its place in that order; lower wins."""
        return _RANKS[self]


_RANKS = {reason: rank for rank, reason in enumerate(FinishReason)}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one token: its natural-log probability, and the most likely tokens' ids and theirs, most likely first."""

    own: float
    token_ids: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request took. Tokens are counts, times are seconds.

    cached_tokens: of the prompt, taken from memory instead of computed; cached_from says where they were ("running",
    "device", "host"). draft_tokens were proposed, accepted_tokens of them kept. ttft_s: from submit to the first token.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_from: str | None = None
    completion_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float | None = None


class StreamChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Part of one choice of a stream.

    index: of its first token among the choice's generated tokens. token_ids and logprobs belong together, one each.
    text: what became readable, well-formed by itself; it may lag behind the tokens by an unfinished character or a
    possible stop. finish_reason: set on the last chunk of a choice, and with it `stop`, the stop string or the id that
    ended it, and `stop_token_ids`, the tokens that this took and that are in no token_ids. prompt_logprobs: one for each
    prompt token but the first, where they were asked for. error: why a choice failed. usage: on the terminal chunk, which
    is the last of the stream.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    stop_token_ids: tuple[int, ...] = ()
    usage: Usage | None = None
    error: PacelineError | None = None

    def joined(self, later: StreamChunk) -> StreamChunk:
        """This chunk and the next one of the same choice as one; nothing is lost, the later one's ending stands."""
        return StreamChunk.joined_all((self, later))

    @staticmethod
    def joined_all(chunks: Sequence[StreamChunk]) -> StreamChunk:
        """Chunks of one choice that follow each other, at least one, as one chunk, in time that grows with their length."""
        if len(chunks) == 1:
            return chunks[0]
        return msgspec.structs.replace(
            chunks[-1],
            index=chunks[0].index,
            token_ids=tuple(chain.from_iterable([chunk.token_ids for chunk in chunks])),
            text="".join([chunk.text for chunk in chunks]),
            logprobs=tuple(chain.from_iterable([chunk.logprobs for chunk in chunks])),
            prompt_logprobs=tuple(chain.from_iterable([chunk.prompt_logprobs for chunk in chunks])),
        )
