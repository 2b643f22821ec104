"""Turns of requests with texts to tokenise: never more bytes than the limit, in order, fairly by tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.params import SamplingParams
from paceline.server.in_flight import MAX_TEXT_BYTES, SMALL_TEXT_BYTES, ByteBudget, TurnQueue, while_wanted
from paceline.server.running_request import less_waited, streamed_or_whole, timeouts_of

Turn = asyncio.Future[None]


def run(test: Callable[[TurnQueue], Coroutine[Any, Any, None]], max_bytes: int = 100) -> None:
    async def on_loop() -> None:
        await test(TurnQueue(max_bytes))

    asyncio.run(on_loop())


def begun(*turns: Turn) -> list[bool]:
    return [turn.done() for turn in turns]


def test_requests_of_a_tenant_take_turns_in_order() -> None:
    """At most half of the bytes at once, the others wait; the end of a turn begins the next."""

    async def test(queue: TurnQueue) -> None:
        turns = [queue.enter("a", 25) for _ in range(4)]
        assert begun(*turns) == [True, True, False, False]
        assert queue.num_waiting == 2
        queue.leave("a", 25)
        assert begun(*turns) == [True, True, True, False]

    run(test)


def test_a_tenant_may_have_everything_if_the_queue_says_so() -> None:
    """Another tenant has the next turn all the same."""

    async def test() -> None:
        queue = TurnQueue(3, 3)
        first = [queue.enter("a", size) for size in (2, 1, 1, 1)]
        second = queue.enter("b", 1)
        assert begun(*first, second) == [True, True, False, False, False]
        queue.leave("a", 2)
        assert begun(*first, second) == [True, True, True, False, True]

    asyncio.run(test())


def test_another_tenant_does_not_wait_for_a_flood() -> None:
    """It has the other half at once, and the next free turn after that."""

    async def test(queue: TurnQueue) -> None:
        flood = [queue.enter("a", 50) for _ in range(20)]
        first, second = queue.enter("b", 50), queue.enter("b", 50)
        third = queue.enter("c", 50)
        assert begun(flood[0], flood[1], first, second, third) == [True, False, True, False, False]
        queue.leave("a", 50)
        assert begun(flood[1], second, third) == [True, False, False]
        queue.leave("a", 50)
        assert begun(flood[2], second, third) == [False, False, True]

    run(test)


def test_a_request_with_more_bytes_than_there_are_is_alone() -> None:
    """It waits for all others to end, and none that comes later overtakes it."""

    async def test(queue: TurnQueue) -> None:
        small, large, later = queue.enter("a", 10), queue.enter("b", 1000), queue.enter("c", 10)
        assert begun(small, large, later) == [True, False, False]
        queue.leave("a", 10)
        assert begun(large, later) == [True, False]
        queue.leave("b", 1000)
        assert begun(later) == [True]

    run(test)


def test_a_request_that_leaves_the_queue_holds_nobody_up() -> None:
    """Neither the requests of its tenant nor others'."""

    async def test(queue: TurnQueue) -> None:
        queue.enter("a", 50)
        left, large, next_of_tenant = queue.enter("a", 50), queue.enter("b", 100), queue.enter("a", 50)
        left.cancel()
        large.cancel()
        await asyncio.sleep(0)
        assert queue.num_waiting == 1
        queue.leave("a", 50)
        assert begun(next_of_tenant) == [True]

    run(test)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 150), st.sampled_from(["enter", "leave", "cancel"]))))
def test_every_request_gets_its_turn_and_the_bytes_are_never_exceeded(steps: list[tuple[str, int, str]]) -> None:
    """Whatever comes, ends and leaves the queue."""

    async def test(queue: TurnQueue) -> None:
        running: list[tuple[str, int]] = []
        waiting: list[tuple[str, int, Turn]] = []

        def settle() -> None:
            for entry in [entry for entry in waiting if entry[2].done()]:
                waiting.remove(entry)
                running.append(entry[:2])
            assert sum(min(size, 100) for _, size in running) <= 100

        for tenant, size, step in steps:
            if step == "enter":
                waiting.append((tenant, size, queue.enter(tenant, size)))
            elif step == "leave" and running:
                queue.leave(*running.pop(size % len(running)))
            elif step == "cancel" and waiting:
                waiting.pop(size % len(waiting))[2].cancel()
                await asyncio.sleep(0)
            settle()
            assert queue.num_waiting == len(waiting)
        while running:
            queue.leave(*running.pop())
            settle()
        assert not waiting

    run(test)


def test_a_small_request_does_not_wait_for_a_large_one() -> None:
    """Each kind has a queue of its own."""

    async def test(_: TurnQueue) -> None:
        texts = ByteBudget(1)
        assert texts.texts_queue(MAX_TEXT_BYTES).enter("", MAX_TEXT_BYTES).done()
        assert not texts.texts_queue(SMALL_TEXT_BYTES + 1).enter("", SMALL_TEXT_BYTES + 1).done()
        assert texts.texts_queue(SMALL_TEXT_BYTES).enter("", SMALL_TEXT_BYTES).done()

    run(test)


def test_timeouts_count_while_a_request_waits() -> None:
    """The rest of them is the engine's; other options and malformed values stay."""
    options = {"timeout_s": 5, "queue_timeout_s": "soon", "ttft_timeout_s": None, "tenant": "a"}
    assert timeouts_of(options) == {"timeout_s": 5}
    assert less_waited(options, 0.0) == options
    assert less_waited(options, 2.0) == {**options, "timeout_s": 3.0}
    assert less_waited(options, 9.0) == {**options, "timeout_s": 0.001}
    assert timeouts_of(streamed_or_whole({"timeout_s": 5}, SamplingParams(), streaming=True, waited_s=2.0)) == {
        "timeout_s": 3.0
    }


def test_parts_are_prepared_in_any_case_outside_of_a_turn() -> None:
    """Without a client there is none that could leave."""
    assert list(while_wanted("abc")) == ["a", "b", "c"]


@pytest.mark.parametrize("size", [0, 1])
def test_an_empty_request_needs_no_room(size: int) -> None:
    """A request without a body begins at once, and waits like others if one waits for bytes."""

    async def test(queue: TurnQueue) -> None:
        assert queue.enter("a", 100 - size).done()
        assert queue.enter("b", size).done()

    run(test)
