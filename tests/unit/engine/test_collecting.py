"""Callers that wait for results: lists that share an engine with few places, and callers who leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.running_engine import LONG_S, Running

from paceline.engine.results import AsyncBatch, Batch, Outcome, collect, collect_async, submit_async
from paceline.errors import DecodeError, PacelineError, QueueFull
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.sequence import Request
from paceline.streaming import FinishReason, StreamChannel, StreamChunk
from paceline.streaming.chunk import Completion, completion_of

Run = Callable[[Any, list[str]], list[Outcome]]


def preparing(engine: Any) -> Callable[[str], Request]:
    return lambda prompt: engine.prepare(prompt, SamplingParams(max_tokens=3), RequestOptions())


def run_blocking(engine: Any, prompts: list[str]) -> list[Outcome]:
    return Batch(engine, preparing(engine), lambda *_: None).run(prompts)


def run_async(engine: Any, prompts: list[str]) -> list[Outcome]:
    return within(AsyncBatch(engine, preparing(engine)).run(prompts))


def within(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, LONG_S))


class FewPlaces:
    """The engine of a list: how many requests may be open at once, and how many were."""

    def __init__(self, running: Running, *, when_full: str = "wait") -> None:
        self._running, self.waits = running, list[bool]()
        self.config = SimpleNamespace(num_slots=1, max_queue=1, when_full=when_full)

    def prepare(self, prompt: str, params: SamplingParams, options: RequestOptions) -> Request:
        return self._running.request(prompt, max_tokens=params.max_tokens)

    def accept(self, request: Request, request_index: int = 0, *, waits: bool) -> StreamChannel:
        self.waits.append(waits)
        return self._running.router.submit(request, request_index, waits=waits)


@pytest.mark.parametrize("run", [run_blocking, run_async])
def test_a_list_has_as_many_open_requests_as_the_engine_takes(run: Run) -> None:
    """Its own requests give places back before the next one is prepared: none of them waits in line."""
    with Running(max_requests=2) as running:
        engine = FewPlaces(running, when_full="refuse")
        outcomes = run(engine, [f"prompt {index}" for index in range(20)])
    assert [type(outcome) for outcome in outcomes] == [Completion] * 20
    assert running.inbox.num_refused == 0


@pytest.mark.parametrize("run", [run_blocking, run_async])
def test_a_list_waits_for_the_requests_of_others(run: Run) -> None:
    """In line, while others fill the engine; with when_full="refuse" each prompt is refused."""
    with Running(max_requests=2) as running:
        running.hold()
        others = [running.submit("other", max_tokens=1) for _ in range(2)]
        running.wait_for_pass()
        refused = run(FewPlaces(running, when_full="refuse"), ["a", "b", "c"])
        threading.Timer(0.1, running.backend.gate.set).start()
        outcomes = run(FewPlaces(running), ["a", "b", "c"])
        assert all(channel.is_finished for channel in others)
    assert [type(item) for item in refused] == [QueueFull] * 3
    assert [type(outcome) for outcome in outcomes] == [Completion] * 3


def test_a_bounded_list_leaves_places_to_others() -> None:
    """No more of its requests than its bound are open at once, and later ones wait in line if others have taken the places."""
    with Running(max_requests=3) as running:
        engine = FewPlaces(running, when_full="refuse")
        num_open: list[int] = []
        accept = engine.accept

        def counted(request: Request, request_index: int = 0, *, waits: bool) -> StreamChannel:
            channel = accept(request, request_index, waits=waits)
            num_open.append(running.inbox.num_open)
            return channel

        engine.accept = counted  # type: ignore[method-assign]
        batch = AsyncBatch[str](engine, preparing(engine), max_open=1)  # type: ignore[arg-type]
        outcomes = within(batch.run([f"prompt {index}" for index in range(6)]))
    assert [type(outcome) for outcome in outcomes] == [Completion] * 6
    assert num_open == [1] * 6
    assert engine.waits == [False, *[True] * 5]


def test_an_error_of_the_callback_ends_a_list() -> None:
    """Its open requests are cancelled, and no other one begins."""

    def refuse(outcome: Outcome) -> None:
        raise DecodeError("not good")

    with Running(max_requests=10) as running:
        engine = FewPlaces(running)
        batch = AsyncBatch[str](engine, preparing(engine), refuse, max_open=2)  # type: ignore[arg-type]
        with pytest.raises(DecodeError, match="not good"):
            within(batch.run(["a", "b", "c", "d", "e", "f"]))
        assert len(engine.waits) <= 3


def ended_with(*errors: PacelineError | None) -> StreamChannel:
    """A channel of so many choices, of which some failed."""
    channel = StreamChannel.create()
    assemble = partial(completion_of, prompt=(1,), wants_logprobs=False, wants_prompt_logprobs=False, index=0)
    sender = channel.attach(assemble=assemble)
    chunks = [
        StreamChunk(
            index=0,
            choice=choice,
            text="text",
            finish_reason=FinishReason.ERROR if error else FinishReason.LENGTH,
            error=error,
        )
        for choice, error in enumerate(errors)
    ]
    for chunk in chunks[:-1]:
        sender.push(chunk)
    sender.finish(chunks[-1])
    return channel


@pytest.mark.parametrize("is_async", [False, True])
def test_a_choice_that_fails_takes_no_good_one_along(is_async: bool) -> None:
    """Of several choices the error is raised if all of them failed; else it is in the choice."""
    broken, also_broken = DecodeError("first"), DecodeError("second")

    def collected(*errors: PacelineError | None) -> Completion:
        channel = ended_with(*errors)
        return within(collect_async(channel)) if is_async else collect(channel)

    some = collected(broken, None)
    assert [choice.error for choice in some.choices] == [broken, None]
    assert some.choices[1].text == "text"
    for errors in ((broken,), (broken, also_broken)):
        with pytest.raises(DecodeError, match="first"):
            collected(*errors)


def test_a_caller_that_leaves_while_its_request_is_made_cancels_it() -> None:
    """The thread that resolves it finds no waiter; also if its event loop is gone by then."""
    is_left, is_made = threading.Event(), threading.Event()
    made: Future[list[Any]] = Future()

    def submit() -> Future[list[Any]]:
        is_made.set()
        assert is_left.wait(LONG_S)
        return made

    async def main() -> None:
        waiting = asyncio.ensure_future(submit_async(submit))
        while not is_made.is_set():
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        is_left.set()

    within(main())
    assert made.cancelled()


def test_a_caller_that_leaves_before_the_result_cancels_it() -> None:
    """The engine's future is cancelled with the task."""
    made: Future[list[Any]] = Future()

    async def main() -> None:
        waiting = asyncio.ensure_future(submit_async(lambda: made))
        while not made._done_callbacks:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    within(main())
    assert made.cancelled()


def test_a_result_and_an_error_arrive() -> None:
    """The engine's result, or its error."""
    done: Future[list[Any]] = Future()
    done.set_result([1, 2])

    def refuse() -> Future[list[Any]]:
        raise QueueFull("full")

    assert within(submit_async(lambda: done)) == [1, 2]
    with pytest.raises(QueueFull):
        within(submit_async(refuse))
