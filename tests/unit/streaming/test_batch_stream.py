"""`BatchStream` and `AsyncBatchStream`: several channels read as one, on a thread and on an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Sequence

import pytest

from paceline.errors import BatchError, Closed, DecodeError, InvalidParams
from paceline.streaming import (
    END,
    TIMEOUT,
    AsyncBatchStream,
    BatchStream,
    FinishReason,
    StreamChannel,
    StreamChunk,
    StreamSender,
    Usage,
)


def attached(count: int) -> tuple[list[StreamChannel], list[StreamSender], list[int]]:
    """Channels of requests 0, 1, ..., the engine's ends of them, and the numbers of cancelled requests."""
    channels = [StreamChannel.create() for _ in range(count)]
    cancelled: list[int] = []
    senders = [
        channel.attach(request_index=index, on_cancel=lambda index=index: cancelled.append(index))  # type: ignore[misc]
        for index, channel in enumerate(channels)
    ]
    return channels, senders, cancelled


def piece(text: str) -> StreamChunk:
    return StreamChunk(index=0, token_ids=(1,), text=text)


def last(error: Exception | None = None) -> StreamChunk:
    reason = FinishReason.STOP if error is None else FinishReason.ERROR
    return StreamChunk(index=1, finish_reason=reason, usage=Usage(), error=error)  # type: ignore[arg-type]


def opener(channels: Sequence[StreamChannel]) -> Callable[[], Awaitable[Sequence[StreamChannel]]]:
    async def submit() -> Sequence[StreamChannel]:
        await asyncio.sleep(0)
        return channels

    return submit


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def test_chunks_of_all_come_with_their_places_in_turns() -> None:
    """Chunks of one do not keep the others waiting; the loop ends after the last chunk of all."""
    channels, senders, cancelled = attached(3)
    batch = BatchStream(channels)
    for _ in range(2):
        for place in (0, 2):
            senders[place].push(piece(f"{place}"))
        assert [batch.get(0), batch.get(0), batch.get(0)] == [(0, piece("0")), (2, piece("2")), TIMEOUT]
    senders[1].push(piece("1"))
    for sender in senders:
        sender.finish(last())
    found = list(batch)
    assert sorted(place for place, chunk in found if chunk.finish_reason) == [0, 1, 2]
    assert (1, piece("1")) in found
    assert batch.get() is END and cancelled == []


def test_a_thread_waits_for_whichever_comes_first() -> None:
    """Until the timeout; a chunk of any of them ends the wait."""
    channels, senders, _ = attached(3)
    batch = BatchStream(channels)
    assert batch.get(0.01) is TIMEOUT
    timer = threading.Timer(0.05, lambda: senders[2].push(piece("late")))
    timer.start()
    assert batch.get(20) == (2, piece("late"))
    timer.join()
    assert all(not sender._readers.wakers for sender in senders)
    with pytest.raises(InvalidParams, match="timeout_s"):
        batch.get(-1)


@pytest.mark.parametrize("leave", ["break", "raise", "with", "close", "drop", "cancel"])
def test_leaving_cancels_all_that_have_not_ended(leave: str) -> None:
    """In every way; one that has ended is left as it is."""
    channels, senders, cancelled = attached(3)
    senders[0].push(piece("a"))
    senders[1].finish(last())
    batch = BatchStream(channels)
    if leave == "break":
        for _ in batch:
            break
    elif leave == "raise":
        with pytest.raises(ZeroDivisionError):
            batch.consume(lambda index, chunk: 1 // 0)
    elif leave == "with":
        with batch:
            assert cancelled == []
    elif leave == "close":
        batch.close()
        batch.close()
    elif leave == "cancel":
        batch.cancel()
        assert batch.get(0) == (0, piece("a"))
    else:
        del batch, channels
        gc.collect()
    assert sorted(cancelled) == [0, 2]
    if leave in ("with", "close"):
        with pytest.raises(Closed, match="these streams were closed"):
            batch.get()


def test_a_failure_ends_its_stream_alone_and_is_raised_at_the_end() -> None:
    """The others go on; the error has the finish reason or the error of each."""
    channels, senders, cancelled = attached(3)
    error = DecodeError("the pass failed")
    senders[1].finish(last(error))
    senders[0].push(piece("a"))
    batch = BatchStream(channels)
    found = []
    with pytest.raises(BatchError, match="1 of 3 streams failed, the first with: the pass failed") as raised:
        for index, chunk in batch:
            found.append((index, chunk.text, chunk.error))
            if len(found) == 2:
                assert cancelled == []
                for place in (0, 2):
                    senders[place].finish(last())
    assert (1, "", error) in found and (0, "a", None) in found and len(found) == 4
    assert raised.value.outcomes == (FinishReason.STOP, error, FinishReason.STOP)


def test_one_stream_may_be_read_cancelled_or_closed_alone() -> None:
    """The batch goes on with the others."""
    channels, senders, cancelled = attached(3)
    batch = BatchStream(channels)
    batch.streams[1].close()
    batch.streams[2].cancel()
    assert cancelled == [1, 2]
    senders[0].push(piece("a"))
    assert batch.streams[0].get(0) == piece("a")
    for sender in senders:
        sender.finish(last())
    assert sorted(index for index, _ in batch) == [0, 2]


def test_the_slots_of_all_are_waited_for() -> None:
    """Until the timeout, which is one for all."""
    channels, senders, _ = attached(2)
    batch = BatchStream(channels)
    senders[0].finish(last())
    senders[0].release()
    assert not batch.wait_released(0.01)
    senders[1].finish(last())
    senders[1].release()
    assert batch.wait_released()


def test_no_prompts_are_a_batch_that_has_ended() -> None:
    """On a thread and on a loop."""

    async def main() -> None:
        async with AsyncBatchStream(opener([])) as streams:
            assert [stream async for stream in streams] == []

    assert list(BatchStream([])) == []
    run(main())


# ---- event loops


def test_a_loop_reads_whichever_comes_first() -> None:
    """Chunks that are there in turns, then as they come; the error of one is raised at the end."""
    channels, senders, cancelled = attached(3)

    async def main() -> None:
        batch = AsyncBatchStream(opener(channels))
        assert batch.streams == ()
        async with batch as streams:
            assert len(streams.streams) == 3
            senders[2].push(piece("c"))
            assert await streams.get() == (2, piece("c"))
            assert await streams.get(0.01) is TIMEOUT
            timer = threading.Timer(0.05, lambda: senders[1].push(piece("late")))
            timer.start()
            assert await streams.get() == (1, piece("late"))
            assert all(not sender._readers.wakers for sender in senders)
            error = DecodeError("no")
            senders[0].finish(last(error))
            senders[1].finish(last())
            senders[2].finish(last())
            with pytest.raises(BatchError) as raised:
                async for index, chunk in streams:
                    assert chunk.finish_reason is (FinishReason.ERROR if index == 0 else FinishReason.STOP)
            assert raised.value.outcomes == (error, FinishReason.STOP, FinishReason.STOP)
        assert cancelled == []

    run(main())


@pytest.mark.parametrize("leave", ["break", "with", "task", "opening"])
def test_leaving_on_a_loop_cancels_all(leave: str) -> None:
    """Also while the requests are being submitted."""
    channels, senders, cancelled = attached(2)
    may_open = threading.Event()

    async def slow() -> Sequence[StreamChannel]:
        await asyncio.to_thread(may_open.wait)
        return channels

    async def read(batch: AsyncBatchStream) -> None:
        async for _ in batch:
            pass

    async def main() -> None:
        batch = AsyncBatchStream(slow if leave == "opening" else opener(channels))
        if leave == "with":
            async with batch:
                assert cancelled == []
            with pytest.raises(Closed):
                await batch.get()
        elif leave == "break":
            senders[0].push(piece("a"))
            async for _ in batch:
                break
        else:
            task = asyncio.create_task(read(batch))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            may_open.set()
            while not cancelled:
                await asyncio.sleep(0.01)
        assert sorted(cancelled) == [0, 1]

    run(main())
