"""What the front knows of every request that has not ended: enough to end it, and enough to continue it in another worker. Pure.

message of the worker ──> note ──> events for the readers          and what was reported is recorded
request ──> generate / embed ──> message for a worker, new or next
request ──> end ──> events, where there is no worker to end it
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from paceline.engine.worker import messages
from paceline.errors import PacelineError
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import (
    Delta,
    Embedded,
    EmbeddingRequest,
    Ended,
    Event,
    Released,
    Started,
    due_reason,
    embedding_error,
)
from paceline.sequence import GenerationState, Request, Sequence
from paceline.streaming.chunk import FinishReason, StreamChunk, Usage

_DEFAULT_PARAMS, _DEFAULT_OPTIONS = SamplingParams(), RequestOptions()


class ReplayLog:
    """The open requests. Their `Request` objects are the front's own: no sampler, and of the output only what was reported."""

    def __init__(self) -> None:
        self._requests: dict[int, Request | EmbeddingRequest] = {}
        self._states: dict[int, list[GenerationState | None]] = {}
        self._unreleased: set[int] = set()  # requests that have ended here, and whose slots the worker has not released

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._requests))

    def add(
        self, request: Request | EmbeddingRequest, states: SequenceOf[GenerationState | None] | None = None
    ) -> None:
        """Add a request, without output, or with what another engine has generated of it: states, one a choice."""
        self._requests[request.key] = request
        if not isinstance(request, Request):
            return
        known: list[GenerationState | None] = [None] * len(request.sequences) if states is None else list(states)
        self._states[request.key] = known
        for sequence, state in zip(request.sequences, known, strict=True):
            if state is not None:
                sequence.num_tokens += len(state.token_ids)
                sequence.reason = state.reason
                request.num_open -= state.reason is not None

    def generated(self, key: int) -> list[int]:
        """Return what the first open choice of a request has generated: with the prompt what its next engine computes first."""
        request = self._requests.get(key)
        if not isinstance(request, Request):
            return []
        open_states = (self._states[key][one.choice] for one in request.sequences if one.reason is None)
        return next((list(one.token_ids) for one in open_states if one is not None), [])

    def find(self, key: int) -> Request | EmbeddingRequest | None:
        """Return the open request of this key."""
        return self._requests.get(key)

    def started(self) -> set[int]:
        """Return the requests that ever ran."""
        return {key for key, request in self._requests.items() if request.started_s is not None}

    # ---- from the worker

    def note(self, part: messages.Part) -> list[Event]:
        """Record what the worker reports, and return the events for the readers. `Failed` is for `end`."""
        match part:
            case messages.Chunk():
                return self._note_chunk(part)
            case messages.Lived(key, life, started):
                return self._note_life(key, life, started=started)
            case messages.Freed(key):
                return self._close(key)
            case messages.Vectors(key, vectors, error):
                return self._note_vectors(key, vectors, error)
            case messages.Failed():
                raise AssertionError("a request that failed is ended, not noted")

    def _note_vectors(self, key: int, vectors: list[bytes], error: PacelineError | None) -> list[Event]:
        request = self._requests.get(key)
        if not isinstance(request, EmbeddingRequest):
            return []
        arrays = [np.frombuffer(one, dtype=np.float32) for one in vectors]
        if request.pooling == "none":  # a row for each token
            arrays = [one.reshape(len(ids), -1) for one, ids in zip(arrays, request.texts, strict=not error)]
        return [Embedded(key, arrays, error)]

    def _note_chunk(self, part: messages.Chunk) -> list[Event]:
        request, chunk = self._requests.get(part.key), part.chunk
        if not isinstance(request, Request):
            return []
        states = self._states[part.key]
        state = states[part.choice] = states[part.choice] or GenerationState()
        sequence = request.sequences[part.choice]
        state.token_ids += part.drawn
        sequence.num_tokens += len(part.drawn)
        state.sampler_state = part.sampler_state
        if chunk is None:
            state.unsent_logprobs += part.unsent_logprobs
            return []
        state.unsent_logprobs, state.num_sent = list(part.unsent_logprobs), len(state.token_ids)
        if chunk.logprobs or chunk.prompt_logprobs:
            chunk = sequence.output.with_token_texts(chunk, request.prompt[state.num_scored + 1 :])
        state.num_scored += len(chunk.prompt_logprobs)
        if chunk.finish_reason is not None:
            state.reason = chunk.finish_reason
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
        self._states.pop(key, None)
        return [] if self._requests.pop(key, None) is None and not self.is_unreleased(key) else self.release(key)

    def is_unreleased(self, key: int) -> bool:
        """Return whether a request has ended here while the worker still has its slots."""
        return key in self._unreleased

    @property
    def unreleased(self) -> frozenset[int]:
        """The requests that have ended here while the worker still has their slots."""
        return frozenset(self._unreleased)

    def release(self, key: int) -> list[Event]:
        """Return the event of a request whose slots the worker has released, or lost with its process."""
        self._unreleased.discard(key)
        return [Released(key)]

    # ---- to a worker

    def message(self, key: int) -> messages.Generate | messages.Embed:
        """Return the request as a worker takes it, with the state of its choices."""
        request = self._requests[key]
        if isinstance(request, EmbeddingRequest):
            return messages.Embed(
                key=key,
                texts=request.texts,
                pooling=request.pooling,
                options=changed_options(request.options),
                submitted_s=request.submitted_s,
                started_s=request.started_s,
                media=request.media,
                attachments=_attachment_data(request),
            )
        return messages.Generate(
            key=key,
            prompt=request.prompt,
            params=_changed(request.params, _DEFAULT_PARAMS),
            options=changed_options(request.options),
            echo=request.echo,
            submitted_s=request.submitted_s,
            life=messages.Life(request.started_s, request.first_token_s, request.num_cached, request.cached_from),
            states=self._states[key],
            media=request.media,
            attachments=_attachment_data(request),
        )

    # ---- without a worker

    def due(self, keys: Iterable[int], now_s: float) -> dict[int, FinishReason]:
        """Return those of the requests that have to end now, and why; see `due_reason`."""
        reasons = {key: due_reason(self._requests[key], now_s) for key in keys}
        return {key: reason for key, reason in reasons.items() if reason is not None}

    def next_deadline_s(self, keys: Iterable[int]) -> float:
        """Return when the first of them reaches a deadline."""
        return min((self._requests[key].deadline_s() for key in keys), default=math.inf)

    def end(
        self,
        key: int,
        reason: FinishReason,
        now_s: float,
        error: PacelineError | None = None,
        *,
        keeps_slots: bool = False,
    ) -> list[Event]:
        """End a request that no worker will end, with all that was held back.

        keeps_slots: whether a worker that does not respond has the request. `Released` then comes when the worker frees the slots
        or is gone, and the worker's other messages about the request are dropped.
        """
        if not keeps_slots:
            return self._end(key, reason, now_s, error)
        events = self._end(key, reason, now_s, error)[:-1]  # without `Released`
        self._unreleased.add(key)
        return events

    def _end(self, key: int, reason: FinishReason, now_s: float, error: PacelineError | None) -> list[Event]:
        request = self._requests[key]
        if isinstance(request, EmbeddingRequest):
            return [Embedded(key, [], error or embedding_error(reason)), *self._close(key)]
        events: list[Event] = []
        for sequence in [one for one in request.sequences if one.reason is None]:
            chunk = _last_chunk(sequence, self._states[key][sequence.choice], reason, error)
            sequence.reason = chunk.finish_reason
            request.num_open -= 1
            events.append(
                Delta(key, chunk)
                if request.num_open
                else Ended(key, msgspec.structs.replace(chunk, usage=usage_of(request, now_s)))
            )
        return [*events, *self._close(key)]

    def drop(self, key: int, error: PacelineError) -> list[Event]:
        """End a request with an error and nothing else, after `end` has failed; what was held back is lost."""
        request = self._requests[key]
        if isinstance(request, EmbeddingRequest):
            return [Embedded(key, [], error), *self._close(key)]
        for sequence in request.sequences:
            sequence.reason = sequence.reason or FinishReason.ERROR
        request.num_open = 0
        return [Ended(key, StreamChunk(index=0, finish_reason=FinishReason.ERROR, error=error)), *self._close(key)]


def _attachment_data(request: Request | EmbeddingRequest) -> tuple[messages.AttachmentData, ...]:
    return tuple(messages.AttachmentData(one.format, one.extent, one.data, one.name) for one in request.attachments)


def changed_options(options: RequestOptions) -> dict[str, Any]:
    """Return request options as messages carry them."""
    return _changed(options, _DEFAULT_OPTIONS)


def worst_reason(request: Request) -> FinishReason:
    """Return why a request ended, for instruments: of its choices' reasons the one of the highest rank."""
    return min((one.reason for one in request.sequences if one.reason is not None), key=lambda reason: reason.rank)


def _last_chunk(
    sequence: Sequence, state: GenerationState | None, reason: FinishReason, error: PacelineError | None
) -> StreamChunk:
    if state is not None:
        sequence.output.resume(state.token_ids, state.num_sent, state.unsent_logprobs)
    sequence.output.finish()
    return sequence.output.last_chunk(reason, error)


def usage_of(request: Request, now_s: float) -> Usage:
    """Return what a request took so far, by what the front knows of it."""
    return replace(
        request.usage(now_s),
        completion_tokens=sum(one.num_tokens - one.num_prompt_tokens for one in request.sequences),
    )


def _changed(record: Any, default: Any) -> dict[str, Any]:
    """Return the fields that differ from the defaults; pairs of names and scales as a mapping, which is how they are given."""
    changed = {
        field.name: getattr(record, field.name)
        for field in dataclasses.fields(record)
        if getattr(record, field.name) != getattr(default, field.name)
    }
    if changed.get("lora"):
        changed["lora"] = dict(changed["lora"])
    return changed
