"""Readers in other threads and on event loops: none misses a wake-up, is woken for nothing, or disturbs the engine."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable

import pytest
from tests.unit.streaming.pieces import arrival, delta, ending

from paceline.streaming import END, TIMEOUT, FinishReason, StreamChannel, StreamChunk, StreamSender


def tokens_of(chunks: list[StreamChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def pair() -> tuple[StreamChannel, StreamSender]:
    channel = StreamChannel.create()
    return channel, channel.attach()


def test_a_reader_that_waits_is_woken_by_a_chunk() -> None:
    """A blocked get returns with the pushed chunk."""
    channel, sender = pair()
    waiting = arrival(sender._readers)
    seen: list[object] = []
    thread = threading.Thread(daemon=True, target=lambda: seen.append(channel.get()))
    thread.start()
    assert waiting.wait(30)
    sender.push(delta(0, 1))
    thread.join(30)
    assert seen == [delta(0, 1)]


def test_a_reader_that_waits_is_woken_by_the_end() -> None:
    """A blocked get returns with the terminal chunk though nothing was queued before."""
    channel, sender = pair()
    waiting = arrival(sender._readers)
    seen: list[object] = []
    thread = threading.Thread(daemon=True, target=lambda: seen.append(channel.get()))
    thread.start()
    assert waiting.wait(30)
    sender.finish(ending(0))
    thread.join(30)
    assert seen == [ending(0)]


def test_a_reader_is_not_woken_for_what_it_cannot_take() -> None:
    """An interval's first tokens do not wake the waiting reader."""
    channel = StreamChannel.create()
    sender = channel.attach(interval=2)
    waiting = arrival(sender._readers)
    seen: list[object] = []
    thread = threading.Thread(daemon=True, target=lambda: seen.append(channel.get()))
    thread.start()
    assert waiting.wait(30)
    sender.push(delta(0, 1))
    assert len(sender._readers.wakers) == 1
    sender.push(delta(1, 2))
    thread.join(30)
    assert seen == [delta(0, 1, 2)]


def test_a_thread_that_waits_for_the_end_sleeps_through_the_tokens() -> None:
    """`wait_finished` is woken once, by the terminal chunk, and takes nothing."""
    channel, sender = pair()
    waiting = arrival(sender._end_waiters)
    results: list[bool] = []
    thread = threading.Thread(daemon=True, target=lambda: results.append(channel.wait_finished()))
    thread.start()
    assert waiting.wait(30)
    for index in range(10):
        sender.push(delta(index, index))
    assert len(sender._end_waiters.wakers) == 1
    sender.finish(ending(10))
    thread.join(30)
    assert results == [True]
    assert tokens_of(list(channel)) == list(range(10))


def test_waiting_for_the_end_has_a_limit() -> None:
    """`wait_finished` returns whether the terminal chunk has come."""
    channel, sender = pair()
    assert not channel.wait_finished(0.001)
    assert not sender._end_waiters.wakers
    sender.finish(ending(0))
    assert channel.wait_finished(0.001)


def read_by_loop(channel: StreamChannel, seen: list[StreamChunk]) -> None:
    seen += channel


def read_by_get(channel: StreamChannel, seen: list[StreamChunk]) -> None:
    while (taken := channel.get(0.5)) is not END:
        if isinstance(taken, StreamChunk):
            seen.append(taken)


def read_by_consume(channel: StreamChannel, seen: list[StreamChunk]) -> None:
    channel.consume(seen.append)


def read_by_loop_async(channel: StreamChannel, seen: list[StreamChunk]) -> None:
    async def main() -> None:
        seen.extend([chunk async for chunk in channel])

    asyncio.run(main())


READERS = [read_by_loop, read_by_get, read_by_consume, read_by_loop_async]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("interval", [1, 3])
def test_whatever_the_threads_do_a_reader_gets_everything_in_order(
    read: Callable[[StreamChannel, list[StreamChunk]], None], interval: int
) -> None:
    """Many rounds of an engine's thread against a reader that starts at the same moment."""
    for _ in range(30):
        channel = StreamChannel.create()
        sender = channel.attach(interval=interval)
        barrier = threading.Barrier(2)
        seen: list[StreamChunk] = []

        def run(
            channel: StreamChannel = channel, barrier: threading.Barrier = barrier, seen: list[StreamChunk] = seen
        ) -> None:
            barrier.wait(30)
            read(channel, seen)

        thread = threading.Thread(daemon=True, target=run)
        thread.start()
        barrier.wait(30)
        for index in range(20):
            sender.push(delta(index, index))
        sender.finish(ending(20))
        thread.join(30)
        assert not thread.is_alive()
        assert tokens_of(seen) == list(range(20))
        assert [chunk.index for chunk in seen] == [len(tokens_of(seen[:place])) for place in range(len(seen))]
        assert seen[-1].finish_reason is FinishReason.LENGTH
        assert not channel.is_cancelled


def test_cancel_races_the_natural_end() -> None:
    """Whichever is first, there is one terminal chunk with one reason, and everything before it."""
    for _ in range(100):
        channel = StreamChannel.create()
        barrier = threading.Barrier(2)
        cancelled = threading.Event()
        sender = channel.attach(on_cancel=cancelled.set)

        def cancel(channel: StreamChannel = channel, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(30)
            channel.cancel()

        thread = threading.Thread(daemon=True, target=cancel)
        thread.start()
        barrier.wait(30)
        sender.push(delta(0, 1))
        reason = FinishReason.CANCELLED if cancelled.is_set() else FinishReason.STOP
        assert sender.finish(ending(1, reason))
        thread.join(30)
        chunks = list(channel)
        assert tokens_of(chunks) == [1]
        assert [chunk.finish_reason for chunk in chunks] == [None, reason]
        assert channel.finish_reason is reason


def test_being_behind_settles_on_what_is_there() -> None:
    """Whatever the order of the calls, the state that the engine reads after the last one is that of the backlog."""
    for _ in range(30):
        channel = StreamChannel.create()
        pokes: list[bool] = []
        sender = channel.attach(max_buffered_tokens=1, on_backlog=lambda pokes=pokes: pokes.append(True))  # type: ignore[misc]
        seen: list[StreamChunk] = []
        thread = threading.Thread(daemon=True, target=lambda channel=channel, seen=seen: seen.extend(channel))  # type: ignore[misc]
        thread.start()
        for index in range(30):
            sender.push(delta(2 * index, 2 * index, 2 * index + 1))
        sender.finish(ending(60))
        thread.join(30)
        assert tokens_of(seen) == list(range(60))
        assert not sender.is_behind
        assert sender.num_times_behind <= len(pokes) <= 2 * sender.num_times_behind


# ---- event loops


def test_an_event_loop_reads_without_blocking() -> None:
    """Chunks pushed from a thread arrive in order while another task of the loop runs."""
    channel, sender = pair()
    beating = threading.Event()

    def produce() -> None:
        beating.wait(30)  # the loop is at work on something else
        for index in range(50):
            sender.push(delta(index, index))
        sender.finish(ending(50))

    async def main() -> tuple[list[int], int]:
        beats = 0
        reading = True

        async def beat() -> None:
            nonlocal beats
            while reading:
                beats += 1
                beating.set()
                await asyncio.sleep(0)

        other = asyncio.create_task(beat())
        thread = threading.Thread(daemon=True, target=produce)
        thread.start()
        seen = [chunk async for chunk in channel]
        reading = False
        await other
        thread.join(30)
        return tokens_of(seen), beats

    tokens, beats = asyncio.run(main())
    assert tokens == list(range(50))
    assert beats > 0


def test_the_readers_of_one_loop_are_woken_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight streams that get a token in one tick cost the engine one write to the loop's pipe."""
    pairs = [pair() for _ in range(8)]
    calls: list[object] = []

    async def main() -> list[object]:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(channel.get_async()) for channel, _ in pairs]
        await asyncio.sleep(0)
        call_soon_threadsafe = loop.call_soon_threadsafe

        def count(*args: object, **options: object) -> object:
            calls.append(args)
            return call_soon_threadsafe(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        for number, (_, sender) in enumerate(pairs):
            sender.push(delta(0, number))
        return list(await asyncio.gather(*tasks))

    assert asyncio.run(main()) == [delta(0, number) for number in range(8)]
    assert len(calls) == 1


def test_an_async_get_times_out() -> None:
    """TIMEOUT, no trace of the waiting, and the next chunk is not lost."""
    channel, sender = pair()

    async def main() -> tuple[object, object, object]:
        first = await channel.get_async(0)
        second = await channel.get_async(0.001)
        assert not sender._readers.wakers
        sender.push(delta(0, 1))
        return first, second, await channel.get_async(0.001)

    assert asyncio.run(main()) == (TIMEOUT, TIMEOUT, delta(0, 1))


def test_cancelling_a_task_that_gets_loses_nothing() -> None:
    """A get that is abandoned, even after a chunk came, leaves the chunk to the next one."""
    channel, sender = pair()

    async def main() -> object:
        task = asyncio.create_task(channel.get_async())
        await asyncio.sleep(0)
        sender.push(delta(0, 1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await channel.get_async()

    assert asyncio.run(main()) == delta(0, 1)
    assert not channel.is_cancelled


def test_one_thread_may_have_several_loops_in_its_life() -> None:
    """A reader on a second loop of the same thread is woken there."""
    for _ in range(2):
        channel, sender = pair()

        async def main(channel: StreamChannel = channel, sender: StreamSender = sender) -> object:
            task = asyncio.create_task(channel.get_async())
            await asyncio.sleep(0)
            sender.push(delta(0, 1))
            return await task

        assert asyncio.run(main()) == delta(0, 1)


def test_a_reader_whose_loop_is_gone_does_not_hurt_the_engine() -> None:
    """Pushing to a channel with a closed event loop under its reader raises nothing."""
    channel, sender = pair()
    loop = asyncio.new_event_loop()
    task = loop.create_task(channel.get_async())
    loop.run_until_complete(asyncio.sleep(0))
    wakers = list(sender._readers.wakers)
    assert len(wakers) == 1
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    for _ in range(2):
        sender._readers.wakers.extend(wakers)
        sender.push(delta(0, 1))
    assert sender.finish(ending(1))
    del task, loop, wakers
    gc.collect()


def test_released_comes_when_the_slot_is_free() -> None:
    """Waiting for it ends with `release`, not when the stream does."""
    channel, sender = pair()
    sender.finish(ending(0))
    assert not channel.wait_released(0)
    assert not channel.is_released

    async def main() -> None:
        waiting = asyncio.create_task(channel.released())
        await asyncio.sleep(0)
        assert not waiting.done()
        sender.release()
        await asyncio.wait_for(waiting, 30)

    asyncio.run(main())
    assert channel.wait_released(0)
    assert channel.is_released


def test_the_end_can_be_awaited() -> None:
    """`finished` returns when the terminal chunk is there, and leaves it."""
    channel, sender = pair()

    async def main() -> None:
        waiting = asyncio.create_task(channel.finished())
        await asyncio.sleep(0)
        sender.push(delta(0, 1))
        await asyncio.sleep(0)
        assert not waiting.done()
        sender.finish(ending(1))
        await asyncio.wait_for(waiting, 30)

    asyncio.run(main())
    assert tokens_of(list(channel)) == [1]
