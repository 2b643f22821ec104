"""Answers of POST /completion and /infill in llama-server's shapes: whole, or as the events of a stream.

One `Answers` for one HTTP request; on the event loop. It also remembers what each sequence has come to, for its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.completion import Completion
from paceline.runtime import Tokenizer
from paceline.server.llama_server.completion_request import CompletionRequest
from paceline.server.llama_server.probabilities import ProbabilityShapes
from paceline.server.llama_server.progress import ProgressChunk
from paceline.server.timings import TimingsSoFar, timings_of
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage

_STOP_TYPES = {FinishReason.END: "eos", FinishReason.LENGTH: "limit", FinishReason.STOP: "word"}
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, kw_only=True)
class Telling:
    """One answer as it comes. index: its place in the HTTP answer; prompt: which; slot: the number that it runs under."""

    index: int
    prompt: int
    slot: int
    timings: TimingsSoFar
    token_ids: list[int] = field(default_factory=list)
    num_stop_tokens: int = 0
    has_new_line: bool = False
    finish_reason: FinishReason | None = None
    stop: str | int | None = None

    @property
    def num_predicted(self) -> int:
        """Tokens that were drawn, those of its stop included."""
        return len(self.token_ids) + self.num_stop_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What answers tell beside the request. max_positions: of a sequence. clock: seconds from any point on."""

    model: str
    tokenizer: Tokenizer
    max_positions: int
    clock: Callable[[], float]


class Answers:
    """slots: the number of each sequence's slot, prompt by prompt, choice by choice."""

    def __init__(self, request: CompletionRequest, setup: Setup, slots: Sequence[int]) -> None:
        self._request, self._setup = request, setup
        self._num_choices = request.params.n
        self._began_s = setup.clock()
        self.sequences = [self._telling(index, slot) for index, slot in enumerate(slots)]
        self._shapes = (
            None if request.params.logprobs is None else ProbabilityShapes(setup.tokenizer, of_drawn=request.of_drawn)
        )

    def _telling(self, index: int, slot: int) -> Telling:
        prompt = index // self._num_choices
        timings = TimingsSoFar(self._setup.clock, len(self._request.prompts[prompt]), self._began_s)
        return Telling(index=index, prompt=prompt, slot=slot, timings=timings)

    # ---- whole

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any] | list[dict[str, Any]]:
        """One answer, or a list where there are several."""
        answers = [answer for completion in completions for answer in self._of_completion(completion)]
        return answers[0] if len(answers) == 1 else answers

    def _of_completion(self, completion: Completion) -> Iterator[dict[str, Any]]:
        for choice in completion.choices:
            sequence = self._sequence(completion.index, choice.index)
            sequence.token_ids = list(choice.token_ids)
            sequence.has_new_line = "\n" in choice.text
            self._end(sequence, choice.finish_reason, choice.stop, len(choice.stop_token_ids))
            tokens = sequence.token_ids if self._request.return_tokens else []
            probabilities = self._probabilities(choice.token_ids, choice.logprobs or ())
            yield self._final(sequence, completion.usage, choice.text, tokens, probabilities)

    # ---- streamed

    def events(self, prompt: int, chunk: StreamChunk) -> Iterator[bytes]:
        """The events that a chunk becomes. The last one of every choice comes when all choices of its prompt have ended."""
        sequence = self._sequence(prompt, chunk.choice)
        if isinstance(chunk, ProgressChunk):
            yield _encode(self._partial(sequence, chunk) | {"prompt_progress": self._progress(chunk)})
            return
        if chunk.token_ids or chunk.text:
            yield _encode(self._partial(sequence, chunk))
        if chunk.finish_reason is not None:
            self._end(sequence, chunk.finish_reason, chunk.stop, len(chunk.stop_token_ids))
        if chunk.usage is not None and chunk.finish_reason is not None:
            for choice in range(self._num_choices):  # one that failed has no reason; the stream's error follows
                yield _encode(self._final(self._sequence(prompt, choice), chunk.usage, "", [], None))

    def _partial(self, sequence: Telling, chunk: StreamChunk) -> dict[str, Any]:
        sequence.token_ids += chunk.token_ids
        sequence.has_new_line = sequence.has_new_line or "\n" in chunk.text
        event: dict[str, Any] = {
            "index": sequence.index,
            "content": chunk.text,
            "tokens": chunk.token_ids,
            "stop": False,
            "id_slot": sequence.slot,
            "tokens_predicted": len(sequence.token_ids),
            "tokens_evaluated": len(self._request.prompts[sequence.prompt]),
        }
        if self._request.timings_per_token:
            event["timings"] = sequence.timings.told(len(sequence.token_ids))
        if probabilities := self._probabilities(chunk.token_ids, chunk.logprobs):
            event["completion_probabilities"] = probabilities
        return event

    def _progress(self, chunk: ProgressChunk) -> dict[str, int]:
        return {
            "total": len(self._request.prompts[0]),
            "cache": chunk.cache,
            "processed": chunk.processed,
            "time_ms": round(1000 * (self._setup.clock() - self._began_s)),
        }

    # ---- both

    def _sequence(self, prompt: int, choice: int) -> Telling:
        return self.sequences[prompt * self._num_choices + choice]

    @staticmethod
    def _end(sequence: Telling, reason: FinishReason, stop: str | int | None, num_stop_tokens: int) -> None:
        sequence.finish_reason, sequence.stop, sequence.num_stop_tokens = reason, stop, num_stop_tokens

    def _probabilities(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]] | None:
        return None if self._shapes is None or not logprobs else self._shapes.entries(ids, logprobs)

    def _final(
        self,
        sequence: Telling,
        usage: Usage,
        content: str,
        tokens: Sequence[int],
        probabilities: list[dict[str, Any]] | None,
    ) -> dict[str, Any]:
        request, reason = self._request, sequence.finish_reason
        num_prompt, num_predicted = len(request.prompts[sequence.prompt]), sequence.num_predicted
        is_full = num_prompt + num_predicted >= self._setup.max_positions
        answer: dict[str, Any] = {
            "index": sequence.index,
            "content": content,
            "tokens": tokens,
            "id_slot": sequence.slot,
            "stop": True,
            "model": self._setup.model,
            "tokens_predicted": num_predicted,
            "tokens_evaluated": num_prompt,
            "generation_settings": request.settings,
            "prompt": request.texts[sequence.prompt],
            "has_new_line": sequence.has_new_line,
            "truncated": reason is FinishReason.LENGTH and is_full,
            "stop_type": "none" if reason is None else _STOP_TYPES.get(reason, "none"),
            "stopping_word": sequence.stop if isinstance(sequence.stop, str) else "",
            "tokens_cached": num_prompt + max(0, num_predicted - 1),
            "timings": timings_of(usage, num_predicted),
        }
        if probabilities is not None:
            answer["completion_probabilities"] = probabilities
        if request.response_fields:
            answer = picked(answer, request.response_fields)
        return answer | {"warnings": request.warnings} if request.warnings else answer


def picked(answer: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The fields that are there, under their names; a name with slashes goes into objects."""
    result: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for name in path.split("/"):
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            result[path] = value
    return result
