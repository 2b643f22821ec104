"""The chunks of a stream, its finish reasons, and the result of a finished request. Frozen records; any thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import msgspec

from paceline import validation
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
        REPETITION: The choice repeated itself, see `SamplingParams.max_repetition`.
        LENGTH: max_tokens were generated, or the context is full.
        TOOL_CALLS: A message of a chat came to its end with tool calls; only chats have this reason.
    """

    ERROR = "error"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    SLOW_READER = "slow_reader"
    STOP = "stop"
    REPETITION = "repetition"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"

    @property
    def rank(self) -> int:
        """The place in that order; lower wins."""
        return _RANKS[self]


_RANKS = {reason: rank for rank, reason in enumerate(FinishReason)}

CUT_REASONS: Final = (FinishReason.REPETITION, FinishReason.LENGTH)
"""The reasons of choices that did not come to their own end, and are no failures."""

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
        cached_from: The place of that KV: "running", "device", "host" or "disk"; None if nothing was reused.
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
        prompt_logprobs: One per prompt token from `prompt_logprobs_start` on, never of the first, if requested; in choice 0.
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


_MOST_CHARS = 80
_NAMES_ELSEWHERE = {  # attributes of completions in other packages
    "content": "text",
    "outputs": "text, or choices if n > 1",
    "prompt": "prompt_token_ids",
    "response": "text",
    "stop_reason": "stop",
}


def shortened(text: str) -> str:
    """Return the repr of a text that is cut after 80 characters, for reprs of records."""
    return repr(text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 1] + "\u2026")


def record_repr(record: object, **facts: object) -> str:
    """Return a repr with the facts that are not None; texts are shortened."""
    shown = ((name, shortened(fact) if type(fact) is str else repr(fact)) for name, fact in facts.items())
    given = [f"{name}={text}" for (name, text), fact in zip(shown, facts.values(), strict=True) if fact is not None]
    return f"{type(record).__name__}({', '.join(given)})"


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance by name, without copying their values."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Choice:
    """One choice of a completion.

    Attributes:
        index: Its number among the n choices.
        text: The generated text, without the stop string.
        token_ids: The generated tokens, without the tokens of the stop.
        finish_reason: Why it ended.
        stop: The stop string, or the id of the stop token or end-of-generation token, that ended it.
        stop_token_ids: The tokens of the stop.
        logprobs: One for each of token_ids; None if they were not requested.
        error: Why it failed, with the reason ERROR; text and tokens are the part that was generated until then.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: PacelineError | None = None

    def __repr__(self) -> str:
        return record_repr(
            self,
            text=self.text,
            tokens=len(self.token_ids),
            finish_reason=str(self.finish_reason),
            stop=self.stop,
            error=self.error,
        )


C = TypeVar("C", bound=Choice)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CompletionOf(Generic[C]):
    """The choices of a request, of text or of a chat."""

    choices: tuple[C, ...]
    prompt_token_ids: tuple[int, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0

    if not TYPE_CHECKING:  # type checkers refuse unknown names
        _names_elsewhere = _NAMES_ELSEWHERE  # without a type: encoders take each annotated name for a field

        def __getattr__(self, name: str) -> object:
            raise validation.no_attribute(self, name, self._names_elsewhere)

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the first choice."""
        return self.choices[0].finish_reason

    @property
    def _num_choices(self) -> int | None:
        return None if len(self.choices) == 1 else len(self.choices)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Completion(CompletionOf[Choice]):
    """The choices of a request; the fields of the first one are properties of their own.

    If n > 1 and some choices failed, they have an `error` and the others are whole.

    Attributes:
        choices: All choices, by index.
        prompt_token_ids: The prompt as it was computed, after truncation.
        usage: Token counts and times.
        prompt_logprobs: One for each prompt token from `prompt_logprobs_start` on, and none for the first token; None if they
            were not requested.
        index: The request's place in the list that was passed to `generate`.
    """

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def stop(self) -> str | int | None:
        """Stop string or token id of the first choice."""
        return self.choices[0].stop

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens of the stop of the first choice."""
        return self.choices[0].stop_token_ids

    @property
    def error(self) -> PacelineError | None:
        """Error of the first choice."""
        return self.choices[0].error

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of the first choice."""
        return self.choices[0].logprobs

    def __repr__(self) -> str:
        first = self.choices[0]
        return record_repr(
            self,
            text=first.text,
            tokens=self.usage.completion_tokens,
            finish_reason=str(first.finish_reason),
            stop=first.stop,
            error=first.error,
            choices=self._num_choices,
        )

    def raise_for_error(self) -> None:
        """Raise the error of the first choice that failed, if one did.

        Raises:
            PacelineError: The error of that choice.
        """
        for choice in self.choices:
            if choice.error is not None:
                raise choice.error

    def unless_failed(self) -> Completion:
        """Return the completion itself.

        Raises:
            PacelineError: All choices failed; the error of the first one.
        """
        if all(choice.error is not None for choice in self.choices):
            self.raise_for_error()
        return self


@dataclass(frozen=True, slots=True)
class Score:
    """How well a document fits a query, by a reranking model.

    Attributes:
        index: The document's place in the list that was passed to `rerank`.
        score: Higher fits better; the scale is the model's.
    """

    index: int
    score: float


LengthNormalization = Literal["none", "tokens", "bytes"]


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """The log-likelihood of a choice after a prompt, by a model that generates; natural logarithms.

    Attributes:
        index: The choice's place in the list that was passed to `score`.
        logprob: The log-probability of the choice: the sum of `logprobs`.
        token_ids: The scored tokens: the tokens of prompt and choice after the prefix that all choices share.
        logprobs: The log-probability of each of token_ids.
        num_bytes: Bytes of the choice; of token ids, bytes of their text.
        is_greedy: Whether each of token_ids is the model's likeliest.
    """

    index: int
    logprob: float
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_bytes: int
    is_greedy: bool

    def normalized(self, by: LengthNormalization) -> float:
        """Return the log-probability divided by the length of the choice.

        Args:
            by: The unit of the length: "tokens" or "bytes"; "none" returns the log-probability itself.

        Returns:
            The quotient, in nats for each token or byte.
        """
        if by == "none":
            return self.logprob
        return self.logprob / (len(self.token_ids) if by == "tokens" else max(1, self.num_bytes))


@dataclass(frozen=True, slots=True)
class Classification:
    """The class of a text, by a model with a classification head or by the likelihood of choices.

    Attributes:
        label: The most likely class.
        probs: The probability of each class. A model with one output has one, of which nothing follows for others.
        labels: The names of the classes, in the order of `probs`; "LABEL_0" and so on if the model's file has no names. Of
            `decide`: the choices.
    """

    label: str
    probs: tuple[float, ...]
    labels: tuple[str, ...]


def completion_of(
    chunks: Iterable[StreamChunk],
    *,
    prompt: Sequence[int],
    wants_logprobs: bool,
    wants_prompt_logprobs: bool,
    index: int,
) -> Completion:
    """Assemble a stream's chunks, up to the terminal one, which ends every choice that has not ended before."""
    by_choice: dict[int, list[StreamChunk]] = {}
    usage: Usage | None = None
    received = list(chunks)
    for chunk in received:
        by_choice.setdefault(chunk.choice, []).append(chunk)
        usage = chunk.usage or usage
    scored = tuple(logprobs for chunk in by_choice.get(0, ()) for logprobs in chunk.prompt_logprobs)
    return Completion(
        choices=tuple(
            _choice(number, parts, received[-1], wants_logprobs) for number, parts in sorted(by_choice.items())
        ),
        prompt_token_ids=tuple(prompt),
        usage=Usage() if usage is None else usage,
        prompt_logprobs=scored if wants_prompt_logprobs else None,
        index=index,
    )


def _choice(number: int, chunks: list[StreamChunk], terminal: StreamChunk, wants_logprobs: bool) -> Choice:
    last = terminal if chunks[-1].finish_reason is None else chunks[-1]
    assert last.finish_reason is not None  # noqa: S101 - a stream ends with its terminal chunk
    return Choice(
        index=number,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=last.finish_reason,
        stop=last.stop,
        stop_token_ids=last.stop_token_ids,
        logprobs=tuple(token for chunk in chunks for token in chunk.logprobs) if wants_logprobs else None,
        error=last.error,
    )
