"""The result of a finished request, assembled from the chunks of its stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from paceline import validation
from paceline.errors import PacelineError
from paceline.streaming.chunk import FinishReason, StreamChunk, TokenLogprobs, Usage

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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Completion:
    """The choices of a request; the fields of the first one are properties of their own.

    If n > 1 and some choices failed, they have an `error` and the others are whole.

    Attributes:
        choices: All choices, by index.
        prompt_token_ids: The prompt as it was computed, after truncation.
        usage: Token counts and times.
        prompt_logprobs: One for each prompt token but the first; None if they were not requested.
        index: The request's place in the list that was passed to `generate`.
    """

    choices: tuple[Choice, ...]
    prompt_token_ids: tuple[int, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0

    if not TYPE_CHECKING:  # type checkers refuse unknown names

        def __getattr__(self, name: str) -> object:
            raise validation.no_attribute(self, name, _NAMES_ELSEWHERE)

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the first choice."""
        return self.choices[0].finish_reason

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
            choices=None if len(self.choices) == 1 else len(self.choices),
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


@dataclass(frozen=True, slots=True)
class Classification:
    """The class of a text, by a model with a classification head.

    Attributes:
        label: The most likely class.
        probs: The probability of each class. A model with one output has one, of which nothing follows for others.
        labels: The names of the classes, in the order of `probs`; "LABEL_0" and so on if the model's file has no names.
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
