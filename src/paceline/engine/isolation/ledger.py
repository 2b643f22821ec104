"""What the front knows of every request that has not ended: enough to end it, and enough to let it go on elsewhere. Pure.

message of the worker ──> note ──> events for the readers          and what was told is written down
request ──> generate / embed ──> message for a worker, new or next
request ──> end ──> events, where there is no worker to end it
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from paceline.engine.isolation import messages
from paceline.errors import Cancelled, DeadlineExceeded, EngineStopped, PacelineError
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.events import Delta, Embedded, Ended, Event, Released, Started
from paceline.scheduling.sequence import Request, Sequence
from paceline.streaming.chunk import FinishReason, StreamChunk, TokenLogprobs, Usage

_DEFAULT_PARAMS, _DEFAULT_OPTIONS = SamplingParams(), RequestOptions()


@dataclass(slots=True)
class _Choice:
    """What was told of a choice, beside the ids, which its `Sequence` knows."""

    is_begun: bool = False
    num_told: int | None = None
    untold: list[TokenLogprobs] = field(default_factory=list)
    num_scored: int = 0
    state: bytes | None = None


class Ledger:
    """The open requests. Their `Request` objects are the front's own: no sampler, and of the answer only what was told."""

    def __init__(self) -> None:
        self._requests: dict[int, Request | EmbeddingRequest] = {}
        self._choices: dict[int, list[_Choice]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._requests))

    def add(self, request: Request | EmbeddingRequest) -> None:
        """Opens a request's page."""
        self._requests[request.key] = request
        if isinstance(request, Request):
            self._choices[request.key] = [_Choice() for _ in request.sequences]

    def find(self, key: int) -> Request | EmbeddingRequest | None:
        """A request that is open."""
        return self._requests.get(key)

    def started(self) -> set[int]:
        """Those that ever ran."""
        return {key for key, request in self._requests.items() if request.started_s is not None}

    # ---- from the worker

    def note(self, part: messages.Part) -> list[Event]:
        """Writes down what the worker said, and answers what the readers are to be told. `Failed` is for `end`."""
        match part:
            case messages.Chunk():
                return self._note_chunk(part)
            case messages.Lived(key, life, started):
                return self._note_life(key, life, started=started)
            case messages.Freed(key):
                return self._close(key)
            case messages.Vectors(key, vectors, error):
                return [Embedded(key, [_array(one) for one in vectors], error)] if key in self._requests else []
            case messages.Failed():
                raise AssertionError("a request that failed is ended, not noted")

    def _note_chunk(self, part: messages.Chunk) -> list[Event]:
        request, chunk = self._requests.get(part.key), part.chunk
        if not isinstance(request, Request):
            return []
        sequence, choice = request.sequences[part.choice], self._choices[part.key][part.choice]
        sequence.known += part.drawn
        sequence.num_known += len(part.drawn)
        choice.is_begun = True
        choice.state = part.state
        if chunk is None:
            choice.untold += part.untold
            return []
        choice.untold, choice.num_told = list(part.untold), sequence.num_known - sequence.num_prompt
        choice.num_scored += len(chunk.prompt_logprobs)
        if chunk.finish_reason is not None:
            sequence.reason, sequence.error = chunk.finish_reason, chunk.error
            request.num_open -= 1
        return [(Ended if part.is_last else Delta)(part.key, chunk)]

    def _note_life(self, key: int, life: messages.Life, *, started: bool) -> list[Event]:
        request = self._requests.get(key)
        if request is None:
            return []
        request.started_s = life.started_s
        if isinstance(request, Request):
            request.first_token_s = life.first_token_s
            request.num_cached, request.cached_from = life.num_cached, life.cached_from
        return [Started(key)] if started else []

    def _close(self, key: int) -> list[Event]:
        self._choices.pop(key, None)
        return [] if self._requests.pop(key, None) is None else [Released(key)]

    # ---- to a worker

    def message(self, key: int) -> messages.Generate | messages.Embed:
        """The request as a worker takes it, with all that was told of it."""
        request = self._requests[key]
        if isinstance(request, EmbeddingRequest):
            return messages.Embed(
                key=key,
                texts=request.texts,
                pooling=request.pooling,
                options=changed_options(request.options),
                submitted_s=request.submitted_s,
                started_s=request.started_s,
            )
        return messages.Generate(
            key=key,
            prompt=request.prompt,
            params=_changed(request.params, _DEFAULT_PARAMS),
            options=changed_options(request.options),
            echo=request.echo,
            submitted_s=request.submitted_s,
            life=messages.Life(request.started_s, request.first_token_s, request.num_cached, request.cached_from),
            told=[
                _told(sequence, choice) for sequence, choice in zip(request.sequences, self._choices[key], strict=True)
            ],
        )

    # ---- without a worker

    def due(self, keys: Iterable[int], now_s: float) -> dict[int, FinishReason]:
        """Those of the requests that have to end now, and why: cancelled, too late, too slow a reader."""
        found = {}
        for key in keys:
            request = self._requests[key]
            if request.cancelled:
                found[key] = FinishReason.CANCELLED
            elif now_s >= request.deadline_s():
                found[key] = FinishReason.DEADLINE
            elif isinstance(request, Request) and request.is_slow:
                found[key] = FinishReason.SLOW_READER
        return found

    def next_deadline_s(self, keys: Iterable[int]) -> float:
        """When the first of them ends for want of time."""
        return min((self._requests[key].deadline_s() for key in keys), default=math.inf)

    def end(self, key: int, reason: FinishReason, now_s: float, error: PacelineError | None = None) -> list[Event]:
        """Ends a request that no worker will end, with all that was held back."""
        request = self._requests[key]
        if isinstance(request, EmbeddingRequest):
            return [Embedded(key, [], error or _embedding_error(reason)), *self._close(key)]
        events: list[Event] = []
        for sequence in [one for one in request.sequences if one.reason is None]:
            chunk = _last_chunk(sequence, self._choices[key][sequence.choice], reason, error)
            sequence.reason = chunk.finish_reason
            request.num_open -= 1
            events.append(
                Delta(key, chunk)
                if request.num_open
                else Ended(key, msgspec.structs.replace(chunk, usage=usage_of(request, now_s)))
            )
        return [*events, *self._close(key)]


def changed_options(options: RequestOptions) -> dict[str, Any]:
    """Request options as messages carry them."""
    return _changed(options, _DEFAULT_OPTIONS)


def worst_reason(request: Request) -> FinishReason:
    """Why a request ended, as instruments are told it: of its choices' reasons the one of the highest rank."""
    return min((one.reason for one in request.sequences if one.reason is not None), key=lambda reason: reason.rank)


def _told(sequence: Sequence, choice: _Choice) -> messages.Told | None:
    if not choice.is_begun:
        return None
    return messages.Told(
        token_ids=tuple(sequence.known[sequence.num_prompt :]),
        num_told=choice.num_told,
        untold=tuple(choice.untold),
        num_scored=choice.num_scored,
        reason=None if sequence.reason is None else sequence.reason.value,
        state=choice.state,
    )


def _last_chunk(sequence: Sequence, choice: _Choice, reason: FinishReason, error: PacelineError | None) -> StreamChunk:
    if choice.is_begun:
        sequence.answer.resume(sequence.known[sequence.num_prompt :], choice.num_told, choice.untold)
    sequence.answer.finish()
    return sequence.answer.last_chunk(reason, error)


def _embedding_error(reason: FinishReason) -> PacelineError:
    if reason is FinishReason.CANCELLED:
        return Cancelled("the request was cancelled")
    if reason is FinishReason.DEADLINE:
        return DeadlineExceeded("the request ran out of time")
    return EngineStopped("the engine was shut down")


def usage_of(request: Request, now_s: float) -> Usage:
    """What a request took so far, by what the front knows of it."""
    return replace(
        request.usage(now_s),
        completion_tokens=sum(one.num_known - one.num_prompt for one in request.sequences),
    )


def _changed(record: Any, default: Any) -> dict[str, Any]:
    """The fields that differ from the defaults; pairs of names and scales as a mapping, which is how they are given."""
    changed = {
        field.name: getattr(record, field.name)
        for field in dataclasses.fields(record)
        if getattr(record, field.name) != getattr(default, field.name)
    }
    if changed.get("lora"):
        changed["lora"] = dict(changed["lora"])
    return changed


def _array(data: bytes) -> Any:
    return np.frombuffer(data, dtype=np.float32)
