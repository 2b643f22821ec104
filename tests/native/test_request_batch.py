"""`LLM.batch` and `AsyncLLM.batch`: requests of an iterable, their results as they end, and leaving early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from tests.polling import wait_until

from paceline import LLM, AsyncLLM, BatchResult, ChatReply, Completion
from paceline.errors import EngineStopped, InvalidParams, InvalidType, PromptTooLong

pytestmark = pytest.mark.native

ENGINE: dict[str, Any] = {"num_slots": 2, "n_ctx": 512, "n_threads": 1}
MOST_OPEN = 8
SHORT = {"max_tokens": 3, "temperature": 0.0}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**ENGINE) as made:
        yield made


def in_order(results: Iterable[BatchResult]) -> list[BatchResult]:
    return sorted(results, key=lambda result: result.index)


def run_async(requests: Any) -> list[BatchResult]:
    async def main() -> list[BatchResult]:
        async with AsyncLLM(**ENGINE) as llm:
            return in_order([result async for result in llm.batch(requests)])

    return asyncio.run(asyncio.wait_for(main(), 60))


REQUESTS: list[Any] = [
    {"custom_id": "text", "prompt": "Once upon a time", **SHORT},
    {"custom_id": "chat", "messages": HELLO, **SHORT},
    "Once upon a time",
    [1, 2, 3],
    {"prompt": "a " * 2000, **SHORT},
    {"custom_id": "neither"},
    {"prompt": "a", "max_tokens": -5},
    {"prompt": ["a", "b"]},
    {"messages": [HELLO, HELLO]},
    {"custom_id": 5, "prompt": "a"},
    None,
    {"prompt": "a", 1: 2},
    {"prompt": "a", "self": 1},
]


@pytest.mark.parametrize("is_async", [False, True])
def test_each_request_has_a_result_or_an_error(llm: LLM, is_async: bool) -> None:
    """Of its kind, with its id; a request with an error holds up no other."""
    results = run_async(REQUESTS) if is_async else in_order(llm.batch(REQUESTS))
    assert [result.index for result in results] == list(range(len(REQUESTS)))
    assert [result.custom_id for result in results] == ["text", "chat", None, None, None, "neither", *[None] * 7]
    assert [type(result.reply) for result in results] == [
        Completion,
        ChatReply,
        Completion,
        Completion,
        *[type(None)] * 9,
    ]
    errors = [PromptTooLong, InvalidParams, InvalidParams, *[InvalidType] * 6]
    assert [type(result.error) for result in results] == [*[type(None)] * 4, *errors]
    expected = llm.generate("Once upon a time", max_tokens=3, temperature=0.0)
    text = results[0].unless_failed()
    assert isinstance(text, Completion) and text.token_ids == expected.token_ids
    with pytest.raises(PromptTooLong):
        results[4].unless_failed()


def test_an_iterable_is_read_as_far_as_the_slots_need(llm: LLM) -> None:
    """However long it is; leaving the loop cancels the rest."""
    num_read = 0

    def endless() -> Iterator[Any]:
        nonlocal num_read
        while True:
            num_read += 1
            yield {"prompt": f"Tale {num_read}", **SHORT}

    results = llm.batch(endless())
    for num_results in range(1, 30):
        next(results)
        assert num_read <= num_results + MOST_OPEN
    results.close()  # type: ignore[attr-defined] # a generator
    wait_until(lambda: llm.engine.num_open == 0)
    assert llm.generate("Once", **SHORT).text  # type: ignore[arg-type]


def test_tools_take_further_rounds(llm: LLM) -> None:
    """The calls of a message run, and the reply is the last round's."""
    called: list[str] = []

    def look(place: str) -> str:
        """Look at a place.

        place: Where.
        """
        called.append(place)
        return "snow"

    request = {"messages": HELLO, "tools": [look], "tool_choice": "required", "run_tools": True, "max_tool_rounds": 1}
    (result,) = llm.batch([{**request, "max_tokens": 200, "temperature": 0.0}])
    num_called = len(called)
    alone = llm.chat(HELLO, tools=[look], tool_choice="required", run_tools=True, max_tool_rounds=1, max_tokens=200, temperature=0.0)  # fmt: skip  # noqa: E501
    assert isinstance(result.reply, ChatReply), result.error
    assert len(result.reply.messages) == len(alone.messages)
    assert len(called) == 2 * num_called > 0


def test_a_single_request_is_refused(llm: LLM) -> None:
    """A text is an iterable too, of letters."""
    for single in ("Once upon a time", {"prompt": "a"}):
        with pytest.raises(InvalidType, match="goes into a list"):
            list(llm.batch(single))  # type: ignore[arg-type]


def test_an_error_of_the_iterable_is_raised(llm: LLM) -> None:
    """After which nothing runs."""

    def broken() -> Iterator[Any]:
        yield {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(llm.batch(broken()))
    wait_until(lambda: llm.engine.num_open == 0)


def test_a_closed_engine_ends_the_batch() -> None:
    """In place of an error for each of any number of requests."""
    with LLM(**ENGINE) as llm:
        pass
    with pytest.raises(EngineStopped):
        list(llm.batch(["a", "b"]))


def test_an_async_iterable_that_waits_holds_up_no_result() -> None:
    """The second request is made of the first result; closing the iterator cancels the rest."""

    async def main() -> None:
        first_ended = asyncio.Event()

        async def requests() -> AsyncIterator[Any]:
            yield {"prompt": "Once", **SHORT}
            await first_ended.wait()
            yield {"prompt": "Twice", "max_tokens": 400, "ignore_eos": True}
            await asyncio.Event().wait()

        async with AsyncLLM(**ENGINE) as llm, aclosing(llm.batch(requests())) as results:
            async for result in results:
                if first_ended.is_set():
                    assert result.index == 1
                    break
                first_ended.set()

    asyncio.run(asyncio.wait_for(main(), 60))
