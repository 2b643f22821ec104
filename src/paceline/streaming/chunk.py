"""The chunks of a stream and its finish reasons. Frozen records; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import chain
from typing import Final

import msgspec

from paceline.errors import PacelineError


class FinishReason(StrEnum):
    """Why a choice ended. A member is a string: `choice.finish_reason == "length"`.

    If several reasons apply in one tick, the first of these counts.

    Attributes:
        ERROR: The choice failed; its last chunk has the error.
        CANCELLED: The caller cancelled the request or left its stream.
        DEADLINE: A timeout of `RequestOptions` expired.
        SHUTDOWN: The engine stopped.
        SLOW_READER: The reader fell behind.
        STOP: A stop string, a stop token or the model's end-of-generation token came, or a constraint was complete. `stop`
            has the string or the token id; it is None after a complete constraint.
        LENGTH: max_tokens were generated, or the context is full.
        TOOL_CALLS: A message of a chat came to its end with tool calls; only chats have this reason.
    """

    ERROR = "error"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    SLOW_READER = "slow_reader"
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"

    @property
    def rank(self) -> int:
        """The place in that order; lower wins."""
        return _RANKS[self]


_RANKS = {reason: rank for rank, reason in enumerate(FinishReason)}

ENGINE_REASONS: Final = tuple(reason for reason in FinishReason if reason is not FinishReason.TOOL_CALLS)
"""The reasons of an engine's requests."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token of the vocabulary as text.

    Attributes:
        id: Token id.
        text: Text of the token, also of a control token. U+FFFD stands for bytes that are no whole character.
        bytes: Bytes of the token as numbers; `bytes(token.bytes)` makes bytes of them.
    """

    id: int = -1
    text: str = ""
    bytes: tuple[int, ...] = ()


_NO_TOKEN = TokenText()


@dataclass(frozen=True, slots=True, repr=False)
class TokenLogprobs:
    """Log-probabilities at the position of one token, natural logarithms.

        for one in llm.generate("A fox", logprobs=2).logprobs:
            print(repr(one.token.text), one.own, [(top.text, value) for top, value in one.top])

    Attributes:
        own: Log-probability of the token itself.
        token_ids: Ids of the most likely tokens, most likely first.
        values: Their log-probabilities.
        token: The token itself.
        tokens: The most likely tokens, in the order of token_ids.
    """

    own: float
    token_ids: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    token: TokenText = _NO_TOKEN
    tokens: tuple[TokenText, ...] = ()

    @property
    def top(self) -> tuple[tuple[TokenText, float], ...]:
        """The most likely tokens, each with its log-probability."""
        return tuple(zip(self.tokens, self.values, strict=True))

    def __repr__(self) -> str:
        top = ", ".join(f"{token.text!r}: {value:.3f}" for token, value in zip(self.tokens, self.values, strict=False))
        return f"TokenLogprobs({self.token.text!r}: {self.own:.3f}, top={{{top}}})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Usage:
    """Token counts and times of a request.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Prompt tokens with KV that was reused instead of computed.
        cached_from: The place of that KV: "running", "device" or "host"; None if nothing was reused.
        completion_tokens: Generated tokens, of all choices.
        draft_tokens: Tokens that speculation proposed and a pass verified.
        accepted_tokens: Draft tokens that were accepted.
        queue_s: Seconds in the queue.
        prefill_s: Seconds from the start of prefill to the first token.
        decode_s: Seconds from the first token to the end.
        ttft_s: Seconds from submit to the first token; None without one.
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

    def __repr__(self) -> str:
        """Return the counts and times that are not zero, times in milliseconds' precision."""
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        shown = ((name, round(value, 3) if isinstance(value, float) else value) for name, value in values if value)
        return f"Usage({', '.join(f'{name}={value!r}' for name, value in shown)})"


class StreamChunk(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Part of one choice of a stream.

    Attributes:
        index: Place of its first token among the choice's generated tokens.
        token_ids: The generated tokens.
        text: Text that became complete; well-formed UTF-8. It may lag behind the tokens by an unfinished character or a
            possible stop string.
        logprobs: One per token of token_ids, if requested.
        choice: The choice that it belongs to.
        prompt_logprobs: One per prompt token but the first, if requested; in choice 0.
        finish_reason: Why the choice ended; on its last chunk.
        stop: The stop string, or the id of the stop token or end-of-generation token, that ended it.
        stop_token_ids: Tokens of the stop, which are in no token_ids.
        usage: Token counts and times; on the terminal chunk, the last of the stream.
        error: Why the choice failed, with the reason ERROR.
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

    @property
    def has_output(self) -> bool:
        """Whether it has tokens or text."""
        return bool(self.text or self.token_ids)

    def joined(self, later: StreamChunk) -> StreamChunk:
        """Join this chunk with the next one of the same choice; the later one's ending counts.

        Args:
            later: The chunk that follows this one.

        Returns:
            One chunk with the tokens and texts of both.
        """
        return StreamChunk.joined_all((self, later))

    @staticmethod
    def joined_all(chunks: Sequence[StreamChunk]) -> StreamChunk:
        """Join consecutive chunks of one choice, in time linear in their length.

        Args:
            chunks: At least one chunk.

        Returns:
            One chunk with the tokens and texts of all.
        """
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
