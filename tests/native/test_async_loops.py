"""`AsyncLLM` across event loops: it may be used and closed in another loop than it was started in, or without one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.native.conftest import TinyModels

from paceline import AsyncLLM, FinishReason
from paceline.errors import EngineStopped
from paceline.streaming import AsyncStream, StreamChunk

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {
    "num_slots": 2, "n_ctx": 32768, "rope_freq_scale": 1.0, "n_threads": 1,
    "flash_attn": "off", "type_k": "f32", "type_v": "f32",
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 30_000, "ignore_eos": True}
Isolation = Literal["thread", "process"]


@pytest.fixture(params=["thread", "process"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """The place where the engine computes."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def path(tiny_models: TinyModels) -> Path:
    """The file of a tiny model."""
    return tiny_models("llama")


def close_in_new_loop(llm: AsyncLLM) -> None:
    asyncio.run(asyncio.wait_for(llm.aclose(), 60))


def close_blocking(llm: AsyncLLM) -> None:
    llm.close()


def close_in_thread(llm: AsyncLLM) -> None:
    thread = threading.Thread(target=llm.close)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("close", [close_in_new_loop, close_blocking, close_in_thread])
def test_it_closes_in_another_loop_or_without_one(
    path: Path, isolation: Isolation, close: Callable[[AsyncLLM], None]
) -> None:
    """The loop that used it is closed; closing twice does nothing more, and later requests are refused."""
    llm = AsyncLLM(path, isolation=isolation, **SMALL)
    completion = asyncio.run(llm.generate("Hello", **GREEDY))
    assert len(completion.token_ids) == 16
    close(llm)
    assert llm.engine.is_closed
    close(llm)
    with pytest.raises(EngineStopped):
        asyncio.run(llm.generate("Hello", **GREEDY))


def test_a_second_loop_uses_what_the_first_one_started(path: Path, isolation: Isolation) -> None:
    """The model is loaded once, and both loops get the same text."""
    llm = AsyncLLM(path, isolation=isolation, **SMALL)
    first = asyncio.run(llm.generate("Hello", **GREEDY))
    engine = llm.engine

    async def read() -> str:
        async with llm.stream("Hello", **GREEDY) as stream:
            return "".join([chunk.text async for chunk in stream])

    assert asyncio.run(read()) == first.text
    assert llm.engine is engine
    close_in_new_loop(llm)


def test_requests_that_a_closed_loop_left_unfinished_do_not_keep_it_open(path: Path, isolation: Isolation) -> None:
    """asyncio.run cancels the tasks that wait; a loop that is closed under them is no obstacle either."""
    llm = AsyncLLM(path, isolation=isolation, **SMALL)

    async def leave() -> None:
        waiting = [asyncio.create_task(llm.generate("Hello", **ENDLESS)) for _ in range(4)]
        while llm.stats().resident < 2:
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)

    async def started() -> None:
        await llm.start()
        await leave()

    asyncio.run(started())
    close_in_new_loop(llm)
    assert llm.engine.is_closed and llm.engine.num_open == 0


def test_a_stream_of_a_closed_loop_ends_with_the_engine(path: Path, isolation: Isolation) -> None:
    """It was never left: its last chunk says SHUTDOWN, whichever loop reads it, and closing it does nothing more."""
    llm = AsyncLLM(path, isolation=isolation, **SMALL)
    loop = asyncio.new_event_loop()

    async def begin() -> AsyncStream:
        stream = llm.stream("Hello", **ENDLESS)
        assert isinstance(await stream.get(), StreamChunk)
        return stream

    stream = loop.run_until_complete(begin())
    waiting = loop.create_task(read_all(stream))
    loop.run_until_complete(asyncio.sleep(0.01))
    waiting._log_destroy_pending = False  # type: ignore[attr-defined] # it is left on purpose
    loop.close()
    close_in_new_loop(llm)

    async def rest() -> FinishReason | None:
        chunks = [chunk async for chunk in stream]
        await stream.released()
        await stream.aclose()
        return chunks[-1].finish_reason

    assert asyncio.run(rest()) is FinishReason.SHUTDOWN


async def read_all(stream: AsyncStream) -> None:
    async for _ in stream:
        pass


def test_a_stream_is_left_open_and_closed_in_another_loop(path: Path, isolation: Isolation) -> None:
    """Closing it there cancels its request, and the slot is free."""
    llm = AsyncLLM(path, isolation=isolation, **SMALL)

    async def begin() -> AsyncStream:
        stream = llm.stream("Hello", **ENDLESS)
        await stream.get()
        return stream

    stream = asyncio.run(begin())

    async def end() -> None:
        await stream.aclose()
        await stream.released()
        assert stream.is_cancelled and (await llm.slots()).num_waiting == 0
        await llm.aclose()

    asyncio.run(asyncio.wait_for(end(), 60))


def test_closing_while_it_loads_waits_for_the_load(path: Path, isolation: Isolation) -> None:
    """The loop that began to load is closed before the model is there."""
    llm = AsyncLLM(path, isolation=isolation, **SMALL)

    async def begin() -> None:
        asyncio.create_task(llm.start())  # noqa: RUF006 - left on purpose
        await asyncio.sleep(0)

    asyncio.run(begin())
    close_in_new_loop(llm)
    assert llm.engine.is_closed


def test_a_load_whose_thread_cannot_start_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised, and no later request waits for that load."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    llm = AsyncLLM(path, **SMALL)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", start)
        asyncio.run(llm.start())
    assert len(asyncio.run(asyncio.wait_for(llm.generate("Hello", **GREEDY), 60)).token_ids) == 16
    llm.close()


AT_EXIT = """
import asyncio
from paceline import AsyncLLM

llm = AsyncLLM({path!r}, isolation={isolation!r}, num_slots=2, n_ctx=2048, n_threads=1)

async def begin():
    stream = llm.stream("Hello", max_tokens=900, ignore_eos=True)
    await stream.get()
    return stream

stream = asyncio.run(begin())
print("used")
{end}
"""


@pytest.mark.parametrize("end", ["", "del llm, stream", "asyncio.run(llm.aclose())"])
def test_a_program_that_never_closes_it_ends_cleanly(path: Path, isolation: Isolation, end: str) -> None:
    """At its exit, or when the object is dropped, with a stream open: no error is printed and nothing is left."""
    program = AT_EXIT.format(path=str(path), isolation=isolation, end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "used\n", "")
