"""From a tick's events to those who wait for them: channels of streams, futures of embeddings.

`deliver` runs on the engine's thread and never waits; everything else may come from any.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from typing import Any

from paceline.engine.commands import Cancel, EndSlow, Question, SetPaused
from paceline.engine.inbox import Inbox
from paceline.errors import EngineStopped, PacelineError
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.events import (
    Delta,
    Embedded,
    Ended,
    Event,
    Exported,
    HeldBack,
    Imported,
    Inspected,
    Released,
    Started,
)
from paceline.scheduling.sequence import Request
from paceline.streaming import FinishReason, StreamChannel, StreamChunk, StreamFeed


class Delivery:
    """Knows the reader of every request that has not ended; of a channel only the feed, so that it can be forgotten."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._telling = threading.Lock()
        self._is_over = False
        self._feeds: dict[int, StreamFeed] = {}
        self._futures: dict[int, Future[list[Any]]] = {}

    def submit(self, request: Request, request_index: int) -> StreamChannel:
        """Accepts a request, and answers its channel. Raises `QueueFull` or `EngineStopped`."""
        channel, key, options, inbox = StreamChannel.create(), request.key, request.options, self._inbox

        def cancel() -> None:
            request.cancelled = True
            inbox.put(Cancel(key))

        def tell_backlog() -> None:
            with self._telling:  # so that what is told last is how things are
                is_behind = feed.is_behind
                inbox.put(EndSlow(key) if is_behind and options.slow_reader == "cancel" else SetPaused(key, is_behind))

        feed = channel.attach(
            request_index=request_index,
            interval=options.interval,
            max_buffered_tokens=options.max_buffered_tokens,
            on_cancel=cancel,
            on_backlog=tell_backlog,
        )
        self._feeds[key] = feed
        try:
            inbox.submit(request, len(request.prompt))
        except PacelineError as error:
            self._feeds.pop(key, None)
            # Else the channel would cancel when it is dropped, and the request may be tried again.
            feed.finish(StreamChunk(index=0, finish_reason=FinishReason.ERROR, error=error))
            raise
        return channel

    def submit_embedding(self, request: EmbeddingRequest) -> Future[list[Any]]:
        """Accepts an embedding request; the future gives the vectors, and cancels when it is cancelled."""
        future: Future[list[Any]] = Future()
        self._futures[request.key] = future

        def cancel_if_wanted(done: Future[list[Any]]) -> None:
            if done.cancelled():
                request.cancelled = True
                self._inbox.put(Cancel(request.key))

        try:
            self._inbox.submit(request, request.num_tokens)
        except PacelineError:
            self._futures.pop(request.key, None)
            raise
        future.add_done_callback(cancel_if_wanted)
        return future

    def ask(self, command: Question) -> Future[list[Any]]:
        """Passes a question to the engine; its answer resolves the future."""
        future = self._futures[command.key] = Future()
        self._inbox.put(command)
        if self._is_over:  # there is no thread to answer; whoever sets this looks at the futures afterwards
            self.end_all(EngineStopped("the engine was shut down; make a new one"))
        return future

    def deliver(self, events: list[Event]) -> None:
        """Hands out what a tick brought, in order."""
        for event in events:
            match event:
                case Delta(key, chunk) | Ended(key, chunk):
                    self._pass_on(key, chunk, is_last=isinstance(event, Ended))
                case HeldBack():
                    pass  # its reader has nothing to read
                case Started(key):
                    self._inbox.started(key)
                case Released(key):
                    self._release(key)
                case Exported(key, ranges) | Imported(key, ranges):
                    self._answer(key, ranges, None)
                case Inspected(key, snapshot):
                    self._answer(key, [snapshot], None)
                case Embedded(key, vectors, error):
                    self._answer(key, vectors, error)

    def _pass_on(self, key: int, chunk: StreamChunk, *, is_last: bool) -> None:
        feed = self._feeds.get(key)
        if feed is None:  # it was ended here already, after a failure of the engine's own
            return
        if is_last:
            feed.finish(chunk)
        else:
            feed.push(chunk)

    def end_all(self, error: PacelineError) -> None:
        """Ends whatever is still open with an error; where all is well, nothing is."""
        for key, feed in list(self._feeds.items()):  # not tuple(), which other threads may come in the middle of
            feed.finish(StreamChunk(index=0, finish_reason=FinishReason.ERROR, error=error))
            self._release(key)
        for key in list(self._futures):
            self._answer(key, [], error)
            self._inbox.ended(key)

    def close(self) -> None:
        """There is no thread any more: whatever is still asked ends at once."""
        self._is_over = True
        self.end_all(EngineStopped("the engine was shut down; make a new one"))

    def _answer(self, key: int, result: list[Any], error: PacelineError | None) -> None:
        future = self._futures.pop(key, None)
        if future is not None:
            _resolve(future, result, error)

    def _release(self, key: int) -> None:
        feed = self._feeds.pop(key, None)
        self._inbox.ended(key)
        if feed is not None:
            feed.release()


def _resolve(future: Future[list[Any]], vectors: list[Any], error: PacelineError | None) -> None:
    try:
        if error is None:
            future.set_result(vectors)
        else:
            future.set_exception(error)
    except InvalidStateError:  # its caller cancelled it: nobody waits
        return
