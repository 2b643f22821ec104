"""Responses of POST /completion and /infill in llama-server's shapes: whole, or as the events of a stream.

One `CompletionRenderer` for each HTTP request; on the event loop. It also keeps each sequence's token ids for its
slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.completion import Completion
from paceline.runtime import Tokenizer
from paceline.server.api_errors import ApiError, llama_error_event
from paceline.server.dialects.llama_server.completion_request import CompletionRequest
from paceline.server.dialects.token_reports import LlamaLogprobs, RunningTimings, TokenSplitter, final_timings
from paceline.server.prefill_progress import ProgressChunk
from paceline.server.sse import EventWriter
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, kw_only=True)
class ChoiceState:
    """State of one choice. index: in the response; prompt: index of its prompt; slot: number that it runs under."""

    index: int
    prompt: int
    slot: int
    timings: RunningTimings
    splitter: TokenSplitter | None = None
    token_ids: list[int] = field(default_factory=list)
    num_stop_tokens: int = 0
    has_new_line: bool = False
    finish_reason: FinishReason | None = None
    stop: str | int | None = None

    @property
    def num_predicted(self) -> int:
        """Number of tokens drawn, those of its stop included."""
        return len(self.token_ids) + self.num_stop_tokens

    def parts(self, chunk: StreamChunk) -> Sequence[StreamChunk]:
        """Return the parts of a chunk that become an event each."""
        return (chunk,) if self.splitter is None else self.splitter.split(chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderContext:
    """What responses report beside the request. max_positions: of a sequence. clock: seconds from any point on.

    special: control tokens have text.
    """

    model: str
    tokenizer: Tokenizer
    max_positions: int
    clock: Callable[[], float]
    special: bool = False


class CompletionRenderer(EventWriter):
    """Renders the response to one request, whole or as the events of a stream."""

    done = b""

    def __init__(self, request: CompletionRequest, context: RenderContext, slots: Sequence[int]) -> None:
        """Begin a response. slots: the number of each sequence's slot, by prompt, then choice."""
        self._request, self._context = request, context
        self._num_choices = request.params.n
        self._logprobs = (
            None
            if request.params.logprobs is None
            else LlamaLogprobs(context.tokenizer, of_drawn=request.of_drawn, special=context.special)
        )
        started_s = context.clock()
        self.sequences = [self._choice_state(index, slot, started_s) for index, slot in enumerate(slots)]

    def _choice_state(self, index: int, slot: int, started_s: float) -> ChoiceState:
        prompt = index // self._num_choices
        timings = RunningTimings(self._context.clock, len(self._request.prompts[prompt]), started_s)
        splitter = (
            None if self._logprobs is None else TokenSplitter(self._context.tokenizer.pieces(self._context.special))
        )
        return ChoiceState(index=index, prompt=prompt, slot=slot, timings=timings, splitter=splitter)

    # ---- whole

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any] | list[dict[str, Any]]:
        """Return one result, or a list if there are several."""
        results = [body for completion in completions for body in self._of_completion(completion)]
        return results[0] if len(results) == 1 else results

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

    def failure(self, api_error: ApiError) -> bytes:
        """Return the JSON of the event that reports an error."""
        return llama_error_event(api_error)

    def __call__(self, prompt: int, chunk: StreamChunk) -> Iterator[bytes]:
        """Yield the JSON of a chunk's events; final events come when all choices of a prompt have ended."""
        sequence = self._sequence(prompt, chunk.choice)
        if isinstance(chunk, ProgressChunk):
            yield from self._progress(sequence, chunk)
            return
        if chunk.token_ids or chunk.text:
            yield from (_encode(self._partial(sequence, part)) for part in sequence.parts(chunk))
        if chunk.finish_reason is not None:
            self._end(sequence, chunk.finish_reason, chunk.stop, len(chunk.stop_token_ids))
        if chunk.usage is not None and chunk.finish_reason is not None:
            for choice in range(self._num_choices):  # one that failed has no reason; the stream's error follows
                yield _encode(self._final(self._sequence(prompt, choice), chunk.usage, "", [], None))

    def _partial(self, sequence: ChoiceState, chunk: StreamChunk) -> dict[str, Any]:
        sequence.token_ids += chunk.token_ids
        sequence.has_new_line = sequence.has_new_line or "\n" in chunk.text
        event = self._event(sequence, chunk)
        if self._request.timings_per_token:
            event["timings"] = sequence.timings.during_decode(len(sequence.token_ids))
        if self._logprobs is not None:
            event["completion_probabilities"] = self._logprobs.entries(chunk.token_ids, chunk.logprobs)
        return event

    def _progress(self, sequence: ChoiceState, chunk: ProgressChunk) -> Iterator[bytes]:
        """Yield the event of prefill progress; none if only its timings were asked for."""
        timings = [  # of each sequence: all of them have this prompt
            one.timings.during_prefill(chunk.processed, chunk.cache, chunk.elapsed_s) for one in self.sequences
        ]
        if not self._request.return_progress:
            return
        progress = chunk.body(len(self._request.prompts[0]))
        shown_timings = {"timings": timings[0]} if self._request.timings_per_token else {}
        yield _encode(self._event(sequence, chunk) | shown_timings | {"prompt_progress": progress})

    def _event(self, sequence: ChoiceState, chunk: StreamChunk) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "content": chunk.text,
            "tokens": chunk.token_ids,
            "stop": False,
            "id_slot": sequence.slot,
            "tokens_predicted": len(sequence.token_ids),
            "tokens_evaluated": len(self._request.prompts[sequence.prompt]),
        }

    # ---- both

    def _sequence(self, prompt: int, choice: int) -> ChoiceState:
        return self.sequences[prompt * self._num_choices + choice]

    @staticmethod
    def _end(sequence: ChoiceState, reason: FinishReason, stop: str | int | None, num_stop_tokens: int) -> None:
        sequence.finish_reason, sequence.stop, sequence.num_stop_tokens = reason, stop, num_stop_tokens

    def _probabilities(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]] | None:
        return None if self._logprobs is None or not logprobs else self._logprobs.entries(ids, logprobs)

    def _final(
        self,
        sequence: ChoiceState,
        usage: Usage,
        content: str,
        tokens: Sequence[int],
        probabilities: list[dict[str, Any]] | None,
    ) -> dict[str, Any]:
        request, reason = self._request, sequence.finish_reason
        num_prompt, num_predicted = len(request.prompts[sequence.prompt]), sequence.num_predicted
        is_full = num_prompt + num_predicted >= self._context.max_positions
        body: dict[str, Any] = {
            "index": sequence.index,
            "content": content,
            "tokens": tokens,
            "id_slot": sequence.slot,
            "stop": True,
            "model": self._context.model,
            "tokens_predicted": num_predicted,
            "tokens_evaluated": num_prompt,
            "generation_settings": request.settings,
            "prompt": request.texts[sequence.prompt],
            "has_new_line": sequence.has_new_line,
            "truncated": reason is FinishReason.LENGTH and is_full,
            "stop_type": self._stop_type(reason, sequence.stop),
            "stopping_word": sequence.stop if isinstance(sequence.stop, str) else "",
            "tokens_cached": num_prompt + max(0, num_predicted - 1),
            "timings": final_timings(usage, num_predicted),
        }
        if probabilities is not None:
            body["completion_probabilities"] = probabilities
        if request.response_fields:
            body = select_fields(body, request.response_fields)
        return body | {"warnings": request.warnings} if request.warnings else body

    def _stop_type(self, reason: FinishReason | None, stop: str | int | None) -> str:
        """Return llama-server's name of an end. A complete grammar counts as the model's own end, as it does there."""
        if reason is FinishReason.LENGTH:
            return "limit"
        if reason is not FinishReason.STOP:
            return "none"
        if stop is None:
            return "eos"
        return "eos" if stop in self._context.tokenizer.eog_ids and not self._request.params.ignore_eos else "word"


def select_fields(body: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the fields that exist, by their paths; a path with slashes leads into objects."""
    result: dict[str, Any] = {}
    for path in fields:
        value: Any = body
        for name in path.split("/"):
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            result[path] = value
    return result
