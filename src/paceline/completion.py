"""What a finished request gives back: the answer whole, put together from the stream that brought it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer. token_ids and logprobs end before the stop, whose tokens are in stop_token_ids.

    stop: the stop string or the id that ended it. logprobs: one a token, None where they were not asked for. error: why
    it failed, with the finish reason ERROR; text and tokens are what there was until then.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: PacelineError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request's answers: the first one's fields by themselves, all of them in `choices`.

    Where n > 1 and some choices failed, those have an `error` and the others are whole; `raise_for_error` looks at them all.

    prompt_token_ids: as they were computed, after truncation. prompt_logprobs: one for each of them but the first, None
    where they were not asked for. index: the request's place in its caller's list.
    """

    choices: tuple[Choice, ...]
    prompt_token_ids: tuple[int, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Of the first choice."""
        return self.choices[0].finish_reason

    @property
    def stop(self) -> str | int | None:
        """Of the first choice."""
        return self.choices[0].stop

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Of the first choice."""
        return self.choices[0].stop_token_ids

    @property
    def error(self) -> PacelineError | None:
        """Of the first choice."""
        return self.choices[0].error

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Of the first choice."""
        return self.choices[0].logprobs

    def raise_for_error(self) -> None:
        """Raises the error of the first choice that failed, if one did."""
        for choice in self.choices:
            if choice.error is not None:
                raise choice.error


@dataclass(frozen=True, slots=True)
class Score:
    """How well a document fits a query, as a reranker sees it; higher is better. index: its place in the caller's list."""

    index: int
    score: float


def completion_of(
    chunks: Iterable[StreamChunk],
    *,
    prompt: Sequence[int],
    wants_logprobs: bool,
    wants_prompt_logprobs: bool,
    index: int,
) -> Completion:
    """Puts a stream's chunks together, to the terminal one, which ends every choice that has not ended before."""
    by_choice: dict[int, list[StreamChunk]] = {}
    usage: Usage | None = None
    received = list(chunks)
    for chunk in received:
        by_choice.setdefault(chunk.choice, []).append(chunk)
        usage = chunk.usage or usage
    scored = tuple(one for chunk in by_choice.get(0, ()) for one in chunk.prompt_logprobs)
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
        logprobs=tuple(one for chunk in chunks for one in chunk.logprobs) if wants_logprobs else None,
        error=last.error,
    )
