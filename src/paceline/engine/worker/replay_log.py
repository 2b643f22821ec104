"""The open requests of a front, with the state that ends a request here or continues it in another worker. One thread.

event of the worker ──> note ──> events for the readers, and the state of the request is recorded
request ──> message ──> for the first worker or the next one
request ──> end ──> events, if no worker can end the request
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

import msgspec
import numpy as np

from paceline.clock import Clock
from paceline.engine.backend import as_paceline_error
from paceline.engine.output_router import OutputRouter, end_each
from paceline.engine.worker import messages
from paceline.engine.worker.worker_telemetry import RequestsWatch, usage_of
from paceline.errors import PacelineError
from paceline.scheduling.records import (
    Delta,
    Embedded,
    EmbeddingRequest,
    Failed,
    Released,
    RequestEvent,
    Started,
    due_reason,
    embedding_error,
)
from paceline.sequence import GenerationState, Request
from paceline.streaming.chunk import FinishReason, StreamChunk


class ReplayLog:
    """The open requests. Their `Request` objects are the front's own, without samplers, and have the reported output only.

    Attributes:
        unreleased: Requests that have ended here while the worker still has their slots.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request | EmbeddingRequest] = {}
        self._states: dict[int, list[GenerationState | None]] = {}
        self.unreleased: set[int] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._requests))

    def add(
        self, request: Request | EmbeddingRequest, states: SequenceOf[GenerationState | None] | None = None
    ) -> None:
        """Add a request. states: of its choices, if another engine has generated a part of it."""
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
        """Return the generated tokens of the first open choice of a request, which its next engine computes with the prompt."""
        request = self._requests.get(key)
        if not isinstance(request, Request):
            return []
        states = [self._states[key][sequence.choice] for sequence in request.sequences if sequence.reason is None]
        return next((list(state.token_ids) for state in states if state is not None), [])

    def find(self, key: int) -> Request | EmbeddingRequest | None:
        """Return the open request of this key."""
        return self._requests.get(key)

    def started(self) -> set[int]:
        """Return the requests that ever ran."""
        return {key for key, request in self._requests.items() if request.progress.started_s is not None}

    # ---- from the worker

    def note(self, event: RequestEvent) -> list[RequestEvent]:
        """Record an event of the worker, and return the events for the readers. `Failed` is for `end`."""
        request = self._requests.get(event.key)
        if isinstance(event, (Started, Delta)) and request is not None and event.progress is not None:
            request.progress = event.progress
        match event, request:
            case Delta(), Request():
                return self._note_delta(event, request)
            case Released(key), _:
                return self._close(key)
            case Started(), Request() | EmbeddingRequest():
                return [event]
            case Embedded(), EmbeddingRequest():
                return self._note_vectors(event, request)
            case Failed(), _:
                raise AssertionError("a request that failed is ended, not noted")
        return []

    def _note_vectors(self, event: Embedded, request: EmbeddingRequest) -> list[RequestEvent]:
        arrays = [np.frombuffer(vector, dtype=np.float32) for vector in event.vectors]
        if request.pooling == "none":  # a row for each token
            texts = zip(arrays, request.texts, strict=not event.error)
            arrays = [array.reshape(len(ids), -1) for array, ids in texts]
        return [Embedded(event.key, arrays, event.error)]

    def _note_delta(self, event: Delta, request: Request) -> list[RequestEvent]:
        states, chunk = self._states[event.key], event.chunk
        state = states[event.choice] = states[event.choice] or GenerationState()
        sequence = request.sequences[event.choice]
        state.token_ids += event.drawn
        sequence.num_tokens += len(event.drawn)
        state.sampler_state = event.sampler_state
        if chunk is None:
            state.unsent_logprobs += event.unsent_logprobs
            return []
        state.unsent_logprobs, state.num_sent = list(event.unsent_logprobs), len(state.token_ids)
        if chunk.logprobs or chunk.prompt_logprobs:
            chunk = sequence.output.with_token_texts(
                chunk, request.prompt[request.params.first_scored + state.num_scored :]
            )
            event = msgspec.structs.replace(event, chunk=chunk)
        state.num_scored += len(chunk.prompt_logprobs)
        if chunk.finish_reason is not None:
            state.reason = chunk.finish_reason
            sequence.reason, sequence.error = chunk.finish_reason, chunk.error
            request.num_open -= 1
        return [event]

    def _close(self, key: int) -> list[RequestEvent]:
        self._states.pop(key, None)
        return [] if self._requests.pop(key, None) is None and key not in self.unreleased else self.release(key)

    def release(self, key: int) -> list[RequestEvent]:
        """Return the event of a request after the worker has released its slots, or lost them with its process."""
        self.unreleased.discard(key)
        return [Released(key)]

    # ---- to a worker

    def message(self, key: int) -> messages.EngineRequest:
        """Return the request as a worker takes it, with the state of its choices."""
        return messages.engine_request(self._requests[key], self._states.get(key))

    # ---- without a worker

    def due(self, keys: Iterable[int], now_s: float) -> dict[int, FinishReason]:
        """Return the requests that have to end now, with the reasons; see `due_reason`."""
        reasons = {key: due_reason(self._requests[key], now_s) for key in keys}
        return {key: reason for key, reason in reasons.items() if reason is not None}

    def next_deadline_s(self, keys: Iterable[int]) -> float:
        """Return the first deadline of the requests; infinite without deadlines."""
        return min((self._requests[key].deadline_s() for key in keys), default=math.inf)

    def end(
        self,
        key: int,
        reason: FinishReason,
        now_s: float,
        error: PacelineError | None = None,
        *,
        keeps_slots: bool = False,
    ) -> list[RequestEvent]:
        """End a request that no worker will end, with the text that was held back.

        keeps_slots: whether a worker that does not respond has the request. `Released` then comes when the worker frees the slots
        or is gone, and the worker's other messages about the request are dropped.
        """
        request = self._requests[key]
        events: list[RequestEvent] = []
        if isinstance(request, EmbeddingRequest):
            events.append(Embedded(key, [], error or embedding_error(reason)))
        else:
            for sequence in [sequence for sequence in request.sequences if sequence.reason is None]:
                state = self._states[key][sequence.choice]
                if state is not None:
                    sequence.output.resume(state.token_ids, state.num_sent, state.unsent_logprobs)
                sequence.output.finish()
                chunk = sequence.output.last_chunk(reason, error)
                sequence.reason = chunk.finish_reason
                request.num_open -= 1
                is_last = not request.num_open
                if is_last:
                    chunk = msgspec.structs.replace(chunk, usage=usage_of(request, now_s))
                events.append(Delta(key, chunk, is_last, sequence.choice))
        released = self._close(key)
        if not keeps_slots:
            return events + released
        self.unreleased.add(key)
        return events

    def drop(self, key: int, error: PacelineError) -> list[RequestEvent]:
        """End a request with an error only, after `end` has failed. The text that was held back is lost."""
        request = self._requests[key]
        if isinstance(request, EmbeddingRequest):
            return [Embedded(key, [], error), *self._close(key)]
        for sequence in request.sequences:
            sequence.reason = sequence.reason or FinishReason.ERROR
        request.num_open = 0
        chunk = StreamChunk(index=0, finish_reason=FinishReason.ERROR, error=error)
        return [Delta(key, chunk, is_last=True), *self._close(key)]


_log = logging.getLogger("paceline.engine")


class FrontRequests:
    """The open requests of a front (the replay log), with their readers and the telemetry."""

    def __init__(self, router: OutputRouter, clock: Clock, watch: RequestsWatch) -> None:
        self._router, self._clock, self._watch = router, clock, watch
        self._replay_log = ReplayLog()

    def take(self, event: RequestEvent) -> None:
        """Record an event of a request, and deliver it."""
        if isinstance(event, Failed):
            if event.key in self._replay_log.unreleased:
                self._release(event.key)
            else:
                self.end(event.key, FinishReason.ERROR, event.error)
            return
        request = self._replay_log.find(event.key)
        events = self._replay_log.note(event)
        if request is not None or events:
            self._noted(event)
        self._deliver(events, request)

    def end(
        self, key: int, reason: FinishReason, error: PacelineError | None = None, *, keeps_slots: bool = False
    ) -> None:
        """End a request that no engine will end; do nothing if it has ended. keeps_slots: see `ReplayLog.end`."""
        request = self._replay_log.find(key)
        if request is None:
            return
        try:
            events = self._replay_log.end(key, reason, self._clock.now(), error, keeps_slots=keeps_slots)
        except Exception as failure:  # noqa: BLE001 - it fails alone
            _log.exception("a request could not be ended in order; its stream ends as it is")
            events = self._replay_log.drop(key, as_paceline_error(failure))
        self._ended_here(key, events)
        self._deliver(events, request)

    def end_all(self, reason: FinishReason, error: PacelineError | None = None) -> None:
        """End every request."""
        end_each(self._replay_log, lambda key: self.end(key, reason, error))

    def _release(self, key: int) -> None:
        """Release the slots of a request that this front has ended."""
        events = self._replay_log.release(key)
        self._ended_here(key, events)
        self._deliver(events, None)

    def _deliver(self, events: list[RequestEvent], request: object) -> None:
        for event in events:
            self._watch.saw(event, request)
            if isinstance(event, Released):
                self._forget(event.key)
        self._router.deliver(events)

    # ---- for subclasses

    def _noted(self, event: RequestEvent) -> None:
        """Look at an event that was recorded, before it is delivered."""

    def _ended_here(self, key: int, events: list[RequestEvent]) -> None:
        """Look at the events of a request that was ended by this front, before they are delivered."""

    def _forget(self, key: int) -> None:
        """Forget a request that has ended."""
