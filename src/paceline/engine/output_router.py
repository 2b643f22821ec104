"""Routes the events of a tick to their readers: channels of streams, futures of embeddings and questions.

`deliver` runs on the engine's thread and never waits; the other methods may run on any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, TypeVar

from paceline.engine.core import Ask, Cancel, EndSlow, SetInterval, SetPaused
from paceline.engine.inbox import Inbox, Wait
from paceline.errors import EngineStopped, PacelineError
from paceline.scheduling.records import Answered, Delta, Embedded, EmbeddingRequest, Event, Released, Started
from paceline.sequence import Request
from paceline.streaming import FinishReason, StreamChannel, StreamChunk, StreamSender
from paceline.streaming.chunk import completion_of

_A = TypeVar("_A")
_B = TypeVar("_B")


class PendingResults:
    """Futures by the key of their command or request; each is resolved once, by the thread that removes it."""

    def __init__(self) -> None:
        self._futures: dict[int, Future[Any]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._futures))  # a copy in one step; tuple() may be interrupted by other threads

    def add(self, key: int) -> Future[Any]:
        """Return a new future, to be set by `resolve`."""
        future: Future[Any] = Future()
        self._futures[key] = future
        return future

    def discard(self, key: int) -> None:
        """Remove the future of a refused request."""
        self._futures.pop(key, None)

    def resolve(self, key: int, result: Any, error: PacelineError | None = None) -> None:
        """Set the result or the error; do nothing if the key is resolved or its future was cancelled."""
        future = self._futures.pop(key, None)
        if future is None:
            return
        try:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        except InvalidStateError:  # its caller cancelled it
            return


def map_future(source: Future[_A], function: Callable[[_A], _B]) -> Future[_B]:
    """Return a future of the function's result, computed on the thread that sets the source; it fails if source or function fail.

    Cancelling the returned future only ends the wait: `source` goes on.
    """
    mapped: Future[_B] = Future()

    def pass_on(done: Future[_A]) -> None:
        if not mapped.set_running_or_notify_cancel():
            return
        try:
            result = function(done.result())
        except Exception as error:  # noqa: BLE001 - it is the future's outcome
            mapped.set_exception(error)
        else:
            mapped.set_result(result)

    source.add_done_callback(pass_on)
    return mapped


def end_each(keys: Iterable[int], end: Callable[[int], object]) -> None:
    """Call `end` with every key, and once more with the keys for which it raised, for instance because memory is short.

    Raises the first exception of the second attempts, after all of them.
    """
    failed: list[int] = []
    for key in keys:
        try:
            end(key)
        except Exception:  # noqa: BLE001 - tried again below
            failed.append(key)
    failures: list[Exception] = []
    for key in failed:
        try:
            end(key)
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)
    if failures:
        raise failures[0]


class OutputRouter:
    """Holds the senders of all open requests but not their channels, so that losing a channel cancels its request."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._sending = threading.Lock()
        self._is_over = False
        self._senders: dict[int, StreamSender] = {}
        self._results = PendingResults()

    def submit(
        self, request: Request, request_index: int, channel: StreamChannel | None = None, *, waits: bool = False
    ) -> StreamChannel:
        """Accept a request and return its channel, which the caller may have made.

        waits: whether it waits in line if there is no room.

        Raises `QueueFull` or `EngineStopped`, and `InvalidParams` for a channel that has served before. A channel of a refused
        request can be used again.
        """
        channel = StreamChannel.create() if channel is None else channel
        key, options, inbox = request.key, request.options, self._inbox

        def cancel() -> None:
            request.cancelled = True
            inbox.put(Cancel(key))

        def send_backlog() -> None:
            with self._sending:  # so that the last command has the last state
                is_behind = sender.is_behind
                inbox.put(EndSlow(key) if is_behind and options.slow_reader == "cancel" else SetPaused(key, is_behind))

        def send_interval() -> None:
            with self._sending:  # so that the last command has the last interval
                inbox.put(SetInterval(key, sender.interval))

        def check_interval() -> None:
            if sender.interval != interval:  # set just now, perhaps before the engine had the request
                send_interval()

        sender = channel.attach(
            request_index=request_index,
            interval=options.interval,
            max_buffered_tokens=options.max_buffered_tokens,
            on_cancel=cancel,
            on_backlog=send_backlog,
            on_interval=send_interval,
            assemble=partial(
                completion_of,
                prompt=request.prompt,
                wants_logprobs=request.params.logprobs is not None,
                wants_prompt_logprobs=request.params.prompt_logprobs is not None,
                index=request_index,
            ),
        )
        interval = sender.interval
        if interval != options.interval:  # set on the channel since the request was prepared
            request.set_interval(interval)
        self._senders[key] = sender
        try:
            wait = Wait(check_interval, lambda error: self._end(key, error)) if waits else None
            inbox.submit(request, len(request.prompt), wait=wait)
        except PacelineError:
            self._senders.pop(key, None)
            sender.detach()  # else it would cancel when it is dropped, and the request may be tried again
            raise
        check_interval()
        return channel

    def submit_embedding(self, request: EmbeddingRequest, *, waits: bool = False) -> Future[list[Any]]:
        """Accept an embedding request and return a future of the vectors; cancelling it cancels. waits: see `submit`."""
        future = self._results.add(request.key)

        def cancel_if_wanted(done: Future[list[Any]]) -> None:
            if done.cancelled():
                request.cancelled = True
                self._inbox.put(Cancel(request.key))

        try:
            wait = Wait(lambda: None, lambda error: self._end(request.key, error)) if waits else None
            self._inbox.submit(request, request.num_tokens, wait=wait)
        except PacelineError:
            self._results.discard(request.key)
            raise
        future.add_done_callback(cancel_if_wanted)
        return future

    def ask(self, command: Ask) -> Future[Any]:
        """Put a command into the inbox; the engine's answer resolves the future."""
        future = self._results.add(command.key)
        self._inbox.put(command)
        if self._is_over:  # `close` sets this before it resolves the futures, so none is left
            self.end_all(EngineStopped("the engine was shut down; make a new one"))
        return future

    def deliver(self, events: Iterable[Event]) -> None:
        """Deliver the events of a tick in order. Raises the first failure, after the other events were delivered."""
        failure: Exception | None = None
        for event in events:
            try:
                self._hand_out(event)
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if failure is not None:
            raise failure

    def _hand_out(self, event: Event) -> None:
        match event:
            case Delta(key, chunk, is_last):
                if chunk is not None:  # else the reader has nothing to read
                    self._pass_on(key, chunk, is_last=is_last)
            case Started(key):
                self._inbox.started(key)
            case Released(key):
                self._release(key)
            case Answered(key, result):
                self._results.resolve(key, result)
            case Embedded(key, vectors, error):
                self._results.resolve(key, vectors, error)

    def _pass_on(self, key: int, chunk: StreamChunk, *, is_last: bool) -> None:
        sender = self._senders.get(key)
        if sender is None:  # it was ended here already, after a failure of the engine itself
            return
        if is_last:
            sender.finish(chunk)
        else:
            sender.push(chunk)

    def end_all(self, error: PacelineError) -> None:
        """End all accepted requests and all questions with an error. Requests in the line keep waiting.

        Raises the error that kept a stream from being ended, after all others were ended.
        """
        keys = [key for key in (*self._senders, *self._results) if not self._inbox.is_in_line(key)]
        end_each(keys, lambda key: self._end(key, error))

    def _end(self, key: int, error: PacelineError) -> None:
        """End a request or a question with an error, in an order in which it can be tried again."""
        sender = self._senders.get(key)
        if sender is not None:
            sender.finish(StreamChunk(index=0, finish_reason=FinishReason.ERROR, error=error))
        self._results.resolve(key, [], error)
        self._inbox.ended(key)
        if sender is not None:
            sender.release()
        self._senders.pop(key, None)

    def close(self) -> None:
        """End everything that is open, and every later question, as the thread has ended."""
        self._is_over = True
        self.end_all(EngineStopped("the engine was shut down; make a new one"))

    def _release(self, key: int) -> None:
        sender = self._senders.get(key)
        if sender is not None and not sender.is_finished:  # its end has failed: `end_all` tries again
            return
        try:
            self._inbox.ended(key)
        finally:
            self._senders.pop(key, None)
            if sender is not None:
                sender.release()
