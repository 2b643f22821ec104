"""Cancelling: its effects, every way in which a reader leaves, and calls from within anything."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable

import pytest
from tests.unit.streaming.pieces import arrival, delta, ending

from paceline.streaming import END, FinishReason, StreamChannel, StreamChunk, StreamSender


class Engine:
    """Ends a request when it is cancelled, at once and with a token that it held back."""

    def __init__(self, channel: StreamChannel) -> None:
        self.sender = channel.attach(on_cancel=self.cancel)

    def cancel(self) -> None:
        self.sender.finish(ending(1, FinishReason.CANCELLED, 99))


def test_cancel_sets_a_flag_calls_the_engine_once_and_drops_nothing() -> None:
    """It does not finish: the engine does, with its held-back text."""
    calls: list[int] = []
    channel = StreamChannel.create()
    sender = channel.attach(on_cancel=lambda: calls.append(1))
    sender.push(delta(0, 1))
    channel.cancel()
    channel.cancel()
    assert (channel.is_cancelled, channel.is_finished, channel.finish_reason, calls) == (True, False, None, [1])
    sender.finish(ending(1, FinishReason.CANCELLED, 2))
    assert [chunk.token_ids for chunk in channel] == [(1,), (2,)]


def test_a_cancel_after_the_end_changes_nothing() -> None:
    """The reason does not change, and the engine hears nothing."""
    calls: list[int] = []
    channel = StreamChannel.create()
    channel.attach(on_cancel=lambda: calls.append(1)).finish(ending(0, FinishReason.STOP))
    channel.cancel()
    assert (channel.is_cancelled, channel.finish_reason, calls) == (False, FinishReason.STOP, [])


def test_a_cancel_before_attach_reaches_the_engine_at_attach() -> None:
    """A cancel that came early needs no polling."""
    calls: list[int] = []
    channel = StreamChannel.create()
    channel.cancel()
    sender = channel.attach(on_cancel=lambda: calls.append(1))
    assert (sender.is_cancelled, calls) == (True, [1])
    channel.cancel()
    assert calls == [1]


def test_of_many_cancels_at_once_one_reaches_the_engine() -> None:
    """Eight threads cancel together, in many rounds."""
    for _ in range(50):
        calls: list[int] = []
        channel = StreamChannel.create()
        channel.attach(on_cancel=lambda calls=calls: calls.append(1))  # type: ignore[misc]
        barrier = threading.Barrier(8)

        def cancel(channel: StreamChannel = channel, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(30)
            channel.cancel()

        threads = [threading.Thread(daemon=True, target=cancel) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert calls == [1]


def test_two_cancels_that_saw_no_flag_call_the_engine_once() -> None:
    """The second one finds no callback, though it looked at the flag before the first set it."""
    calls: list[int] = []
    channel = StreamChannel.create()
    sender = channel.attach(on_cancel=lambda: calls.append(1))
    channel.cancel()
    sender._is_cancelled = False
    channel.cancel()
    assert calls == [1]


def test_a_cancel_races_attach_and_is_heard_once() -> None:
    """Whichever comes first, the engine is called, and once."""
    for _ in range(200):
        calls: list[int] = []
        channel = StreamChannel.create()
        barrier = threading.Barrier(2)

        def cancel(channel: StreamChannel = channel, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(30)
            channel.cancel()

        thread = threading.Thread(daemon=True, target=cancel)
        thread.start()
        barrier.wait(30)
        channel.attach(on_cancel=lambda calls=calls: calls.append(1))  # type: ignore[misc]
        thread.join(30)
        assert calls == [1]


def test_cancel_wakes_a_waiting_reader_with_the_engines_last_chunk() -> None:
    """A blocked get returns when another thread cancels, since the engine ends the request."""
    channel = StreamChannel.create()
    engine = Engine(channel)
    waiting = arrival(engine.sender._readers)
    seen: list[object] = []
    thread = threading.Thread(daemon=True, target=lambda: seen.append(channel.get()))
    thread.start()
    assert waiting.wait(30)
    channel.cancel()
    thread.join(30)
    assert [type(chunk) for chunk in seen] == [StreamChunk]
    assert channel.get(0) is END


def test_cancel_does_not_keep_consume_from_the_last_chunk() -> None:
    """A consumer that waits while another thread cancels still gets the ending."""
    channel = StreamChannel.create()
    sender = channel.attach()
    waiting = arrival(sender._readers)
    seen: list[StreamChunk] = []
    reasons: list[FinishReason] = []
    thread = threading.Thread(daemon=True, target=lambda: reasons.append(channel.consume(seen.append)))
    thread.start()
    assert waiting.wait(30)
    channel.cancel()
    assert thread.is_alive()
    assert reasons == []
    sender.push(delta(0, 1))
    sender.finish(ending(1, FinishReason.CANCELLED, 2))
    thread.join(30)
    assert reasons == [FinishReason.CANCELLED]
    assert [token for chunk in seen for token in chunk.token_ids] == [1, 2]


# ---- leaving


def leave_by_break(channel: StreamChannel) -> None:
    for _ in channel:
        break


def leave_by_exception(channel: StreamChannel) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in channel:
            raise ZeroDivisionError


def leave_by_forgetting(channel: StreamChannel) -> None:
    iterator = iter(channel)
    next(iterator)
    del iterator
    gc.collect()


def leave_by_never_starting(channel: StreamChannel) -> None:
    iter(channel)
    gc.collect()


def leave_by_a_cycle(channel: StreamChannel) -> None:
    cycle: list[object] = [iter(channel)]
    cycle.append(cycle)
    del cycle
    gc.collect()


def leave_by_failing_handler(channel: StreamChannel) -> None:
    def handler(_: StreamChunk) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        channel.consume(handler)


def leave_by_interrupt(channel: StreamChannel) -> None:
    def interrupted() -> StreamChunk:
        raise KeyboardInterrupt

    iterator = iter(channel)
    iterator._get = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert channel.is_cancelled  # while the iterator is still held


def leave_async_by_break(channel: StreamChannel) -> None:
    async def main() -> None:
        async for _ in channel:
            break
        assert channel.is_cancelled  # at once, not when the loop comes to it

    asyncio.run(main())


def leave_async_by_cancelling_the_task(channel: StreamChannel) -> None:
    async def main() -> None:
        waiting = asyncio.Event()

        async def read() -> None:
            async for _ in channel:
                waiting.set()

        task = asyncio.create_task(read())
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert channel.is_cancelled

    asyncio.run(main())


def leave_async_with_the_loop(channel: StreamChannel) -> None:
    async def main() -> None:
        async def read() -> None:
            async for _ in channel:
                pass

        main.task = asyncio.create_task(read())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_exception,
        leave_by_forgetting,
        leave_by_never_starting,
        leave_by_a_cycle,
        leave_by_failing_handler,
        leave_by_interrupt,
        leave_async_by_break,
        leave_async_by_cancelling_the_task,
        leave_async_with_the_loop,
    ],
)
def test_leaving_the_loop_cancels(leave: Callable[[StreamChannel], None]) -> None:
    """However a reader goes away, the request is cancelled."""
    channel = StreamChannel.create()
    channel.attach().push(delta(0, 1))
    leave(channel)
    assert channel.is_cancelled


def test_reading_to_the_end_cancels_nothing() -> None:
    """A loop that ends by itself is no cancel; `consume` returns the reason."""
    channel = StreamChannel.create()
    sender = channel.attach()
    sender.push(delta(0, 1))
    sender.finish(ending(1, FinishReason.STOP))
    seen: list[StreamChunk] = []
    assert channel.consume(seen.append) is FinishReason.STOP
    assert len(seen) == 2
    assert not channel.is_cancelled


def attached() -> StreamSender:
    """The engine's end of a channel that is not read."""
    return StreamChannel.create().attach()


def test_a_channel_without_references_cancels() -> None:
    """The engine's end does not keep the reader's alive, and works on without it."""
    sender = attached()
    gc.collect()
    assert sender.is_cancelled
    sender.push(delta(0, 1))
    assert sender.finish(ending(1, FinishReason.CANCELLED))


def test_an_ended_channel_keeps_nothing_of_the_engine() -> None:
    """A caller may hold the results of a million requests without holding their engine."""
    import weakref

    channel = StreamChannel.create()
    engine = Engine(channel)
    watched = weakref.ref(engine)
    engine.sender.finish(ending(0))
    del engine
    gc.collect()
    assert watched() is None
    assert channel.is_finished


def test_cancelling_needs_no_lock() -> None:
    """A finalizer or a signal handler may cancel while the thread it interrupts is inside the channel's lock."""
    calls: list[int] = []
    channel = StreamChannel.create()
    sender = channel.attach(on_cancel=lambda: calls.append(1))
    sender.push(delta(0, 1))
    with sender._lock:
        channel.cancel()
        facts = (channel.is_cancelled, channel.is_finished, channel.state, channel.num_buffered, channel.finish_reason)
    assert calls == [1]
    assert facts[0]
    assert facts[3] == 1


def test_a_channel_that_is_done_goes_without_the_garbage_collector() -> None:
    """Nothing in it refers back to it, so that 100,000 requests leave nothing to collect."""
    import weakref

    gc.disable()
    try:
        channel = StreamChannel.create()
        sender = channel.attach(max_buffered_tokens=3, on_cancel=list, on_backlog=list)
        for index in range(100):
            sender.push(delta(index, index))
        sender.finish(ending(100))
        assert len(list(channel)) == 2
        assert channel.wait_finished(0)
        watched = [weakref.ref(channel), weakref.ref(sender)]
        del channel, sender
        assert [item() for item in watched] == [None, None]
    finally:
        gc.enable()
