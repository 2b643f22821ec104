"""Answers of /v1/completions, whole and in events. Pure; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from paceline.completion import Choice, Completion
from paceline.server.openai.answers import FINISH, AnyChoice, Events, PromptScores, Telling, prompt_extras
from paceline.server.openai.logprobs import Columns, ColumnsWriter
from paceline.streaming import StreamChunk, TokenLogprobs


class CompletionChoice(AnyChoice, kw_only=True):
    """One text. Its index is over all prompts, those of the first prompt first."""

    text: str
    logprobs: Columns | None
    finish_reason: str | None


def completion_body(telling: Telling, completions: Sequence[Completion]) -> bytes:
    """The whole answer; the completions in the order of the prompts."""
    choices = [_whole(telling, number, one, choice) for number, one in enumerate(completions) for choice in one.choices]
    return telling.whole(choices, [one.usage for one in completions])


def _whole(telling: Telling, prompt: int, completion: Completion, choice: Choice) -> CompletionChoice:
    scores = completion.prompt_logprobs or ()
    return CompletionChoice(
        index=prompt * telling.n + choice.index,
        text=choice.text,
        logprobs=_columns(telling, prompt, scores, choice),
        finish_reason=FINISH[choice.finish_reason],
        stop_reason=UNSET if choice.stop is None else choice.stop,
        token_ids=choice.token_ids if telling.token_ids else UNSET,
        **prompt_extras(telling, prompt, scores),
    )


def _columns(telling: Telling, prompt: int, scores: Sequence[TokenLogprobs], choice: Choice) -> Columns | None:
    if telling.num_top is None or choice.logprobs is None:
        return None
    writer = ColumnsWriter(telling.shown, telling.spelt, telling.num_top)
    columns = echoed(telling, prompt, scores, writer)
    return _joined(columns, writer.write(choice.token_ids, choice.logprobs))


def echoed(telling: Telling, prompt: int, scores: Sequence[TokenLogprobs], writer: ColumnsWriter) -> Columns:
    """The columns of a prompt that is told again; none of one that is not."""
    if not telling.echoes:
        return Columns()
    columns = writer.write(telling.prompts[prompt], (None, *scores))
    writer.end_prompt()
    return columns


def _joined(first: Columns, second: Columns) -> Columns:
    return Columns(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


class CompletionStream:
    """Events of a streamed answer: called with each chunk as it comes, answers the JSON of events."""

    def __init__(self, telling: Telling) -> None:
        self._telling = telling
        self._events = Events(telling)
        self._scores = [PromptScores(telling.num_scored(index)) for index in range(len(telling.prompts))]
        self._writers: dict[int, ColumnsWriter] = {}

    def __call__(self, prompt: int, chunk: StreamChunk) -> list[bytes]:
        """The events of a chunk of this prompt."""
        self._events.note(chunk)
        ready = self._scores[prompt].pass_on(chunk)
        events = [self._events.of(self._choice(prompt, one)) for one in ready if self._tells(one)]
        if chunk.finish_reason in FINISH and self._events.is_over:
            events[-1:] = self._events.ending(events[-1])
        return events

    def _tells(self, chunk: StreamChunk) -> bool:
        """Whether there is something to tell: tokens that make no text yet are none, where only the text is asked for."""
        if chunk.text or chunk.finish_reason in FINISH:
            return True
        telling = self._telling
        return bool(chunk.token_ids) and (telling.token_ids or telling.num_top is not None)

    def _choice(self, prompt: int, chunk: StreamChunk) -> CompletionChoice:
        telling, index = self._telling, prompt * self._telling.n + chunk.choice
        is_first = index not in self._writers
        if is_first:
            self._writers[index] = ColumnsWriter(telling.shown, telling.spelt, telling.num_top or 0)
        scores: Sequence[TokenLogprobs] = self._scores[prompt].values
        extras: dict[str, Any] = prompt_extras(telling, prompt, scores) if is_first else {}
        logprobs = None
        if telling.num_top is not None:
            writer = self._writers[index]
            before = echoed(telling, prompt, scores, writer) if is_first else Columns()
            logprobs = _joined(before, writer.write(chunk.token_ids, chunk.logprobs))
        return CompletionChoice(
            index=index,
            text=chunk.text,
            logprobs=logprobs,
            finish_reason=FINISH.get(chunk.finish_reason) if chunk.finish_reason is not None else None,
            stop_reason=UNSET if chunk.stop is None else chunk.stop,
            token_ids=chunk.token_ids if telling.token_ids else UNSET,
            **extras,
        )
