"""A caller's stream on an event loop: opening, reading, and leaving at every moment."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
from tests.unit.streaming.pieces import delta, ending

from paceline.errors import Closed, DecodeError, QueueFull
from paceline.streaming import END, TIMEOUT, AsyncStream, FinishReason, StreamChannel, StreamChunk, StreamSender, Usage


class FrontDoor:
    """Submits requests for streams when the test lets it, and once. Keeps only the engine's ends."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.num_opened = 0
        self.began = asyncio.Event()
        self.may_submit = asyncio.Event()
        self.senders: list[StreamSender] = []

    async def open(self) -> StreamChannel:
        self.num_opened += 1
        self.began.set()
        await self.may_submit.wait()
        if self.refuses:
            raise QueueFull("as many requests wait as may")
        channel = StreamChannel.create()
        self.senders.append(channel.attach())
        return channel


class OpenFrontDoor(FrontDoor):
    """Submits at once; an accepted request has already generated a token."""

    async def open(self) -> StreamChannel:
        self.may_submit.set()
        channel = await super().open()
        self.senders[-1].push(delta(0, 1))
        return channel


def test_nothing_is_submitted_before_the_stream_is_entered() -> None:
    """A stream that was only made, and cancelled, closed or forgotten, costs nothing."""

    async def main() -> None:
        door = FrontDoor()
        stream = AsyncStream(door.open)
        assert (stream.finish_reason, stream.usage, stream.is_finished, stream.num_buffered) == (None, None, False, 0)
        await stream.released()
        stream.cancel()
        assert stream.is_cancelled
        await stream.aclose()
        del stream
        AsyncStream(door.open)
        gc.collect()
        assert door.num_opened == 0

    asyncio.run(main())


def test_entering_submits_once_and_the_loop_reads_to_the_end() -> None:
    """Afterwards reason and usage are known, and nothing was cancelled."""

    async def main() -> None:
        door = OpenFrontDoor()
        async with AsyncStream(door.open) as stream:
            assert stream.num_buffered == 1
            door.senders[0].finish(ending(1, FinishReason.STOP, 2))
            assert [chunk.token_ids async for chunk in stream] == [(1,), (2,)]
        assert (stream.finish_reason, stream.usage, stream.is_finished) == (FinishReason.STOP, Usage(), True)
        assert (door.num_opened, stream.is_cancelled) == (1, False)

    asyncio.run(main())


def test_without_a_block_the_first_chunk_submits() -> None:
    """A loop over a stream that was just made works, and leaving it cancels at once."""

    async def main() -> None:
        door = OpenFrontDoor()
        async for chunk in AsyncStream(door.open):
            assert chunk == delta(0, 1)
            break
        assert door.senders[0].is_cancelled

    asyncio.run(main())


def test_single_chunks_can_be_taken() -> None:
    """`get` submits the request if need be, returns TIMEOUT and END, and leaves the stream open."""

    async def main() -> None:
        door = OpenFrontDoor()
        stream = AsyncStream(door.open)
        assert await stream.get() == delta(0, 1)
        assert await stream.get(0.001) is TIMEOUT
        assert not stream.is_cancelled
        door.senders[0].finish(ending(1))
        assert await stream.get() == ending(1)
        assert await stream.get() is END

    asyncio.run(main())


def test_a_refusal_is_raised_where_the_stream_is_entered() -> None:
    """Also by the first chunk that is asked for; a refused stream is not submitted again."""

    async def main() -> None:
        door = FrontDoor(refuses=True)
        door.may_submit.set()
        stream = AsyncStream(door.open)
        with pytest.raises(QueueFull):
            async with stream:
                pytest.fail("a refused stream was entered")
        with pytest.raises(Closed, match="not accepted"):
            await stream.get()
        assert door.num_opened == 1
        with pytest.raises(QueueFull):
            async for _ in AsyncStream(door.open):
                pass

    asyncio.run(main())


def test_a_failed_stream_yields_its_last_chunk_and_then_raises_its_error() -> None:
    """The order is the same as without an event loop."""

    async def main() -> None:
        door = OpenFrontDoor()
        seen: list[StreamChunk] = []
        with pytest.raises(DecodeError, match="broken"):
            async with AsyncStream(door.open) as stream:
                door.senders[0].finish(ending(1, FinishReason.ERROR, 2, error=DecodeError("broken")))
                async for chunk in stream:
                    seen.append(chunk)  # noqa: PERF401 - what came before the error counts
        assert [chunk.finish_reason for chunk in seen] == [None, FinishReason.ERROR]
        assert isinstance(stream.error, DecodeError)

    asyncio.run(main())


# ---- leaving


def test_leaving_the_block_cancels_and_reading_afterwards_is_refused() -> None:
    """By its end or by an exception, whether or not anything was read."""

    async def main() -> None:
        door = OpenFrontDoor()
        async with AsyncStream(door.open) as stream:
            pass
        assert door.senders[0].is_cancelled
        with pytest.raises(Closed, match="was closed"):
            await stream.get()
        with pytest.raises(Closed, match="was closed"):
            async with stream:
                pass
        with pytest.raises(ZeroDivisionError):
            async with AsyncStream(door.open):
                raise ZeroDivisionError
        assert door.senders[1].is_cancelled

    asyncio.run(main())


def test_cancelling_the_task_that_reads_cancels_the_request() -> None:
    """An abandoned task does not leave its request running."""

    async def main() -> None:
        door = OpenFrontDoor()
        reading = asyncio.Event()

        async def read() -> None:
            async for _ in stream:
                reading.set()

        stream = AsyncStream(door.open)
        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert door.senders[0].is_cancelled

    asyncio.run(main())


def test_a_forgotten_stream_cancels() -> None:
    """It has no reader any more."""

    async def main() -> None:
        door = OpenFrontDoor()
        stream = AsyncStream(door.open)
        await stream.get()
        assert not door.senders[0].is_cancelled
        del stream
        gc.collect()
        assert door.senders[0].is_cancelled

    asyncio.run(main())


def test_a_task_cancelled_while_it_opens_leaves_no_request_running() -> None:
    """The request is accepted after the task is gone, and cancelled at once."""

    async def main() -> None:
        door = FrontDoor()
        entered = asyncio.create_task(AsyncStream(door.open).__aenter__())
        await door.began.wait()
        entered.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entered
        assert door.senders == []
        door.may_submit.set()
        while not door.senders or not door.senders[0].is_cancelled:
            await asyncio.sleep(0)
        assert door.num_opened == 1

    asyncio.run(main())


def test_a_task_cancelled_just_when_it_has_opened_leaves_no_request_running() -> None:
    """The request is accepted, and its task cancelled before it could go on."""

    async def main() -> None:
        door = FrontDoor()
        kept: list[StreamChannel] = []

        async def open() -> StreamChannel:  # noqa: A001
            kept.append(await door.open())
            entering.cancel()
            return kept[0]

        entering = asyncio.create_task(AsyncStream(open).__aenter__())
        await door.began.wait()
        door.may_submit.set()
        with pytest.raises(asyncio.CancelledError):
            await entering
        while not kept[0].is_cancelled:
            await asyncio.sleep(0)

    asyncio.run(main())


def test_a_refusal_without_a_reader_is_dropped() -> None:
    """A task cancelled while it opens leaves no unseen exception behind."""
    complaints: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        door = FrontDoor(refuses=True)
        entering = asyncio.create_task(AsyncStream(door.open).__aenter__())
        await door.began.wait()
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        door.may_submit.set()
        for _ in range(10):
            await asyncio.sleep(0)
        del entering
        gc.collect()

    asyncio.run(main())
    assert complaints == []


def test_a_loop_that_ends_while_a_stream_opens_ends_in_peace() -> None:
    """The opening is cancelled with everything else of the loop."""
    complaints: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        door = FrontDoor()
        main.entering = asyncio.create_task(AsyncStream(door.open).__aenter__())  # type: ignore[attr-defined]
        await door.began.wait()

    asyncio.run(main())
    gc.collect()
    assert complaints == []


def test_a_request_submitted_by_a_thread_after_its_task_is_gone_is_cancelled() -> None:
    """No object holds its channel: that is enough."""
    submitted = threading.Event()
    may_submit = threading.Event()
    feeds: list[StreamSender] = []

    def submit() -> StreamChannel:
        may_submit.wait(30)
        channel = StreamChannel.create()
        feeds.append(channel.attach())
        submitted.set()
        return channel

    async def main() -> None:
        entering = asyncio.create_task(AsyncStream(lambda: asyncio.to_thread(submit)).__aenter__())
        await asyncio.sleep(0)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    may_submit.set()
    assert submitted.wait(30)
    loop.run_until_complete(loop.shutdown_default_executor())
    for _ in range(3):
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    gc.collect()
    assert feeds[0].is_cancelled


def test_a_cancel_while_the_stream_opens_reaches_the_request() -> None:
    """It is accepted, cancelled, and can be read to its end."""

    async def main() -> None:
        door = FrontDoor()
        stream = AsyncStream(door.open)
        entering = asyncio.create_task(stream.__aenter__())
        await door.began.wait()
        threading.Thread(daemon=True, target=stream.cancel).start()
        while not stream.is_cancelled:
            await asyncio.sleep(0)
        door.may_submit.set()
        await entering
        assert door.senders[0].is_cancelled
        door.senders[0].finish(ending(0, FinishReason.CANCELLED))
        assert [chunk.finish_reason async for chunk in stream] == [FinishReason.CANCELLED]

    asyncio.run(main())


def test_closing_while_the_stream_opens_cancels_and_refuses_the_reader() -> None:
    """Another task may close a stream that a first task waits for."""

    async def main() -> None:
        door = FrontDoor()
        stream = AsyncStream(door.open)
        getting = asyncio.create_task(stream.get())
        await door.began.wait()
        await stream.aclose()
        door.may_submit.set()
        with pytest.raises(Closed, match="was closed"):
            await getting
        assert door.senders[0].is_cancelled

    asyncio.run(main())


def test_a_second_reader_while_the_stream_opens_is_refused() -> None:
    """One request is submitted, for one reader."""

    async def main() -> None:
        door = FrontDoor()
        stream = AsyncStream(door.open)
        first = asyncio.create_task(stream.get())
        await door.began.wait()
        with pytest.raises(Closed, match="submitted elsewhere"):
            await stream.get()
        door.may_submit.set()
        while not door.senders:
            await asyncio.sleep(0)
        door.senders[0].push(delta(0, 1))
        assert await first == delta(0, 1)
        assert door.num_opened == 1

    asyncio.run(main())


# ---- what it holds


def test_a_stream_keeps_its_maker_until_it_is_closed() -> None:
    """An iterator alone is enough to keep it."""

    class Owner:
        pass

    async def main() -> None:
        door = OpenFrontDoor()
        owner = Owner()
        watched = weakref.ref(owner)
        iterator = aiter(AsyncStream(door.open, keep_alive=owner))
        del owner
        assert await anext(iterator) == delta(0, 1)
        gc.collect()
        assert watched() is not None
        del iterator
        gc.collect()
        assert watched() is None
        assert door.senders[0].is_cancelled

    asyncio.run(main())


def test_the_slot_can_be_awaited() -> None:
    """`released` returns when the engine has freed the slot, also after the block."""

    async def main() -> None:
        door = OpenFrontDoor()
        async with AsyncStream(door.open) as stream:
            pass
        waiting = asyncio.create_task(stream.released())
        door.senders[0].finish(ending(1, FinishReason.CANCELLED))
        await asyncio.sleep(0)
        assert not waiting.done()
        door.senders[0].release()
        await asyncio.wait_for(waiting, 30)

    asyncio.run(main())
