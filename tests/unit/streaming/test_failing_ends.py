"""A stream's end when memory runs out in the middle of it: no waiting reader, no lost text."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.running_engine import LONG_S
from tests.unit.streaming.pieces import arrival, delta, ending

from paceline.streaming import END, FinishReason, StreamChannel, StreamChunk


def no_memory(*_: Any) -> Any:
    raise MemoryError


def test_an_ending_that_cannot_be_joined_comes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream has ended all the same, and held-back text comes in chunks before the last chunk."""
    channel = StreamChannel.create()
    sender = channel.attach(interval=10)
    sender.push(delta(0, 1, choice=0))
    sender.push(delta(0, 2, 3, choice=1))
    with monkeypatch.context() as patch:
        patch.setattr(StreamChunk, "joined_all", no_memory)
        assert sender.finish(ending(1, FinishReason.LENGTH, 4, choice=0))
    assert (channel.is_finished, channel.finish_reason, channel.num_buffered) == (True, FinishReason.LENGTH, 4)
    assert [channel.get(0) for _ in range(4)] == [
        delta(0, 1, choice=0),
        delta(0, 2, 3, choice=1),
        ending(1, FinishReason.LENGTH, 4, choice=0),
        END,
    ]
    assert channel.num_buffered == 0


def test_a_reader_that_cannot_be_woken_keeps_no_other_reader_asleep(caplog: pytest.LogCaptureFixture) -> None:
    """`finish` and `release` wake the others, log the failure, and try that reader again; neither raises."""
    channel = StreamChannel.create()
    sender = channel.attach()
    waiting = arrival(sender._end_waiters)
    failures = [MemoryError(), None]
    calls: list[object] = []

    def broken() -> None:
        failure = failures.pop(0)
        if failure is not None:
            raise failure
        calls.append("woken")

    sender._end_waiters.wakers.append(broken)
    waiting.clear()
    reader = threading.Thread(target=channel.wait_finished, args=(LONG_S,))
    reader.start()
    assert waiting.wait(LONG_S)
    assert sender.finish(ending(0))
    reader.join(LONG_S)
    assert not reader.is_alive()
    assert calls == []
    assert "could not be woken" in caplog.text
    sender.release()
    assert calls == ["woken"]


def test_a_loop_that_could_not_be_called_once_is_called_the_next_time() -> None:
    """Readers of an event loop do not sleep for ever because memory ran out when the first of them was to be woken."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        first, second = StreamChannel.create(), StreamChannel.create()
        feeds = [item.attach() for item in (first, second)]
        readers = [asyncio.create_task(item.get_async()) for item in (first, second)]
        while not all(sender._readers.wakers for sender in feeds):
            await asyncio.sleep(0)
        call, loop.call_soon_threadsafe = loop.call_soon_threadsafe, no_memory  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            feeds[0].push(delta(0, 1))
        loop.call_soon_threadsafe = call  # type: ignore[method-assign]
        feeds[1].push(delta(0, 2))
        assert await asyncio.wait_for(asyncio.gather(*readers), LONG_S) == [delta(0, 1), delta(0, 2)]

    asyncio.run(main())
