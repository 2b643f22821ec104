"""The channel: states, order, joining, endings, cancelling, threads and event loops."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DecodeError, InvalidParams
from paceline.streaming import END, TIMEOUT, FinishReason, StreamChannel, StreamChunk, StreamState, TokenLogprobs, Usage


def delta(index: int, *tokens: int, choice: int = 0, text: str | None = None) -> StreamChunk:
    written = "".join(chr(97 + token % 26) for token in tokens) if text is None else text
    logprobs = tuple(TokenLogprobs(-float(token)) for token in tokens)
    return StreamChunk(index=index, token_ids=tokens, text=written, logprobs=logprobs, choice=choice)


def ending(index: int, reason: FinishReason = FinishReason.LENGTH, *tokens: int, choice: int = 0) -> StreamChunk:
    return StreamChunk(index=index, token_ids=tokens, finish_reason=reason, usage=Usage(), choice=choice)


@pytest.fixture
def channel() -> StreamChannel:
    made = StreamChannel.create()
    made.attach()
    return made


def test_a_channel_goes_from_new_to_attached_to_finished() -> None:
    """The states of its life, and what is known in each."""
    channel = StreamChannel.create()
    assert (channel.state, channel.request_index, channel.finish_reason) == (StreamState.NEW, -1, None)
    channel.attach(request_index=3, interval=2)
    assert (channel.state, channel.request_index, channel.interval) == (StreamState.ATTACHED, 3, 2)
    channel.finish(ending(0, FinishReason.END))
    assert (channel.state, channel.is_finished, channel.finish_reason) == (StreamState.FINISHED, True, FinishReason.END)


def test_a_channel_serves_one_request(channel: StreamChannel) -> None:
    """Attaching again raises, while it serves and after the end."""
    with pytest.raises(InvalidParams, match="one request in its life"):
        channel.attach()
    channel.finish(ending(0))
    with pytest.raises(InvalidParams, match="is finished"):
        channel.attach()


@pytest.mark.parametrize("interval", [0, -1, True, 1.5])
def test_a_bad_interval_is_refused_and_the_channel_still_new(interval: int) -> None:
    """An interval is a positive integer; after the error the channel can be attached."""
    channel = StreamChannel.create()
    with pytest.raises(InvalidParams, match="interval"):
        channel.attach(interval=interval)
    channel.attach()


def test_nothing_yet_a_chunk_and_the_end_are_three_answers(channel: StreamChannel) -> None:
    """TIMEOUT while nothing is there, chunks in order, END for ever after the terminal one was taken."""
    assert channel.get(0) is TIMEOUT
    channel.push(delta(0, 1))
    assert channel.get(0) == delta(0, 1)
    assert channel.get(0) is TIMEOUT
    channel.finish(ending(1))
    assert channel.get(0) == ending(1)
    assert channel.get(0) is END
    assert channel.get() is END


def test_a_reader_that_sees_the_end_finds_the_terminal_chunk(channel: StreamChannel) -> None:
    """Finished means that the terminal chunk is in the queue, behind what came before."""
    channel.push(delta(0, 1))
    channel.finish(ending(1, FinishReason.STOP, 2))
    assert channel.is_finished
    assert [chunk.token_ids for chunk in channel] == [(1,), (2,)]


def test_the_first_ending_wins(channel: StreamChannel) -> None:
    """Later endings and later deltas are ignored and raise nothing."""
    assert channel.finish(ending(0, FinishReason.CANCELLED))
    assert not channel.finish(ending(0, FinishReason.ERROR))
    channel.push(delta(0, 1))
    assert [chunk.finish_reason for chunk in channel] == [FinishReason.CANCELLED]


def test_an_error_is_on_the_terminal_chunk(channel: StreamChannel) -> None:
    """The reader gets the exception itself."""
    error = DecodeError("broken")
    channel.finish(StreamChunk(index=0, finish_reason=FinishReason.ERROR, error=error))
    assert [chunk.error for chunk in channel] == [error]


def test_what_waits_is_joined_and_nothing_is_lost(channel: StreamChannel) -> None:
    """A slow reader finds one chunk with all ids, text and logprobs of those it missed."""
    for index in range(5):
        channel.push(delta(index, index + 10))
    assert channel.num_buffered == 5
    assert channel.get(0) == delta(0, 10, 11, 12, 13, 14)
    assert channel.num_buffered == 0


def test_an_interval_holds_chunks_back_until_they_are_ripe() -> None:
    """Two tokens wait for a third; the ending brings what was left."""
    channel = StreamChannel.create()
    channel.attach(interval=3)
    channel.push(delta(0, 1))
    channel.push(delta(1, 2))
    assert channel.get(0) is TIMEOUT
    assert channel.num_buffered == 2
    channel.push(delta(2, 3))
    assert channel.get(0) == delta(0, 1, 2, 3)
    channel.push(delta(3, 4))
    channel.finish(ending(4, FinishReason.LENGTH, 5))
    last = channel.get(0)
    assert isinstance(last, StreamChunk)
    assert (last.index, last.token_ids, last.finish_reason) == (3, (4, 5), FinishReason.LENGTH)


def test_a_burst_is_one_chunk() -> None:
    """Several tokens of one tick come together, whatever the interval below their number."""
    channel = StreamChannel.create()
    channel.attach(interval=2)
    channel.push(delta(0, 1, 2, 3, 4))
    assert channel.get(0) == delta(0, 1, 2, 3, 4)


def test_choices_are_told_apart_and_end_one_by_one(channel: StreamChannel) -> None:
    """Each choice has its own chunks and ending; the terminal chunk is the last of all."""
    channel.push(delta(0, 1, choice=0))
    channel.push(delta(0, 2, choice=1))
    channel.push(delta(1, 3, choice=0))
    channel.push(ending(1, FinishReason.END, choice=1))
    channel.finish(ending(2, FinishReason.LENGTH, choice=0))
    chunks = list(channel)
    assert [(chunk.choice, chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
        (0, (1, 3), None),
        (1, (2,), FinishReason.END),
        (0, (), FinishReason.LENGTH),
    ]


def test_an_unripe_choice_is_not_lost_when_the_stream_ends() -> None:
    """What a choice had held back comes out even if another choice's ending is the terminal chunk."""
    channel = StreamChannel.create()
    channel.attach(interval=10)
    channel.push(delta(0, 1, choice=1))
    channel.finish(ending(0, FinishReason.ERROR))
    assert [(chunk.choice, chunk.token_ids) for chunk in channel] == [(1, (1,)), (0, ())]


# ---- cancelling


def test_cancel_sets_a_flag_calls_the_engine_once_and_drops_nothing() -> None:
    """It does not finish: the engine does, with what it held back."""
    calls: list[int] = []
    channel = StreamChannel.create()
    channel.attach(on_cancel=lambda: calls.append(1))
    channel.push(delta(0, 1))
    channel.cancel()
    channel.cancel()
    assert (channel.is_cancelled, channel.is_finished, channel.finish_reason, calls) == (True, False, None, [1])
    channel.finish(ending(1, FinishReason.CANCELLED, 2))
    assert [chunk.token_ids for chunk in channel] == [(1,), (2,)]


def test_a_cancel_after_the_end_changes_nothing(channel: StreamChannel) -> None:
    """The reason stays what it was."""
    channel.finish(ending(0, FinishReason.END))
    channel.cancel()
    assert (channel.is_cancelled, channel.finish_reason) == (False, FinishReason.END)


def test_a_cancel_before_attach_reaches_the_engine_at_attach() -> None:
    """Nobody has to look for a cancel that came early."""
    calls: list[int] = []
    channel = StreamChannel.create()
    channel.cancel()
    channel.attach(on_cancel=lambda: calls.append(1))
    assert calls == [1]


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


def leave_by_failing_handler(channel: StreamChannel) -> None:
    def handler(_: StreamChunk) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        channel.consume(handler)


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception, leave_by_forgetting, leave_by_failing_handler])
def test_leaving_the_loop_cancels(channel: StreamChannel, leave: Callable[[StreamChannel], None]) -> None:
    """However a reader goes away, the request is told."""
    channel.push(delta(0, 1))
    leave(channel)
    gc.collect()
    assert channel.is_cancelled


def test_reading_to_the_end_cancels_nothing(channel: StreamChannel) -> None:
    """A loop that ends by itself is no cancel; consume answers the reason."""
    channel.push(delta(0, 1))
    channel.finish(ending(1, FinishReason.STOP))
    seen: list[StreamChunk] = []
    assert channel.consume(seen.append) is FinishReason.STOP
    assert len(seen) == 2
    assert not channel.is_cancelled


# ---- threads and event loops


def test_a_reader_in_another_thread_is_woken(channel: StreamChannel) -> None:
    """A blocked get returns when a chunk comes, and when the stream ends."""
    seen: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: seen.extend(chunk.token_ids for chunk in channel))
    thread.start()
    for index in range(50):
        channel.push(delta(index, index))
    channel.finish(ending(50))
    thread.join(30)
    assert [token for tokens in seen for token in tokens] == list(range(50))


def test_an_event_loop_reads_without_blocking(channel: StreamChannel) -> None:
    """Chunks pushed from a thread arrive in order while another task of the loop runs."""
    beating = threading.Event()

    async def main() -> tuple[list[int], int]:
        tokens: list[int] = []
        beats = 0
        reading = True

        async def beat() -> None:
            nonlocal beats
            while reading:
                beats += 1
                beating.set()
                await asyncio.sleep(0)

        other = asyncio.create_task(beat())
        thread = threading.Thread(target=produce)
        thread.start()
        async for chunk in channel:
            tokens += chunk.token_ids
        reading = False
        await other
        thread.join(30)
        return tokens, beats

    def produce() -> None:
        beating.wait(30)  # the loop is at work on something else
        for index in range(50):
            channel.push(delta(index, index))
        channel.finish(ending(50))

    tokens, beats = asyncio.run(main())
    assert tokens == list(range(50))
    assert beats > 0


def test_cancelling_the_task_that_reads_cancels_the_request(channel: StreamChannel) -> None:
    """An abandoned task does not leave its request running."""

    async def main() -> None:
        async def read() -> None:
            async for _ in channel:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The generator is closed by the loop's hooks at the latest.

    asyncio.run(main())
    gc.collect()
    assert channel.is_cancelled


def test_an_async_get_times_out(channel: StreamChannel) -> None:
    """TIMEOUT, and the next chunk is not lost."""

    async def main() -> tuple[object, object]:
        first = await channel.get_async(0.001)
        channel.push(delta(0, 1))
        return first, await channel.get_async(0.001)

    assert asyncio.run(main()) == (TIMEOUT, delta(0, 1))


def test_a_reader_whose_loop_is_gone_does_not_hurt_the_engine(channel: StreamChannel) -> None:
    """Pushing to a channel whose event loop was closed raises nothing."""

    async def main() -> None:
        asyncio.get_running_loop().create_task(channel.get_async())
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    wakers = list(channel._wakers)
    assert len(wakers) == 1
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    channel._wakers.extend(wakers)
    channel.push(delta(0, 1))
    assert channel.finish(ending(1))


def test_released_comes_after_the_slot_is_free(channel: StreamChannel) -> None:
    """Waiting for it ends when the engine says so, not when the stream does."""
    channel.finish(ending(0))
    assert not channel.wait_released(0)

    async def main() -> None:
        waiting = asyncio.create_task(channel.released())
        await asyncio.sleep(0)
        assert not waiting.done()
        channel.release()
        await asyncio.wait_for(waiting, 30)

    asyncio.run(main())
    assert channel.wait_released(0)


# ---- any history


@given(
    bursts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=30),
    reads=st.sets(st.integers(0, 30)),
    interval=st.integers(1, 5),
)
def test_any_reader_gets_everything_once_and_in_order(
    bursts: list[tuple[int, int]], reads: set[int], interval: int
) -> None:
    """Whatever the bursts, the interval and the moments of reading: joined chunks equal what was pushed, per choice."""
    channel = StreamChannel.create()
    channel.attach(interval=interval)
    pushed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    seen: list[StreamChunk] = []
    for step, (choice, size) in enumerate(bursts):
        start = len(pushed[choice])
        tokens = tuple(range(start, start + size))
        pushed[choice] += tokens
        channel.push(delta(start, *tokens, choice=choice))
        if step in reads and isinstance(chunk := channel.get(0), StreamChunk):
            seen.append(chunk)
    channel.finish(ending(len(pushed[0]), FinishReason.END))
    seen += channel
    for choice, tokens in pushed.items():
        mine = [chunk for chunk in seen if chunk.choice == choice]
        assert [token for chunk in mine for token in chunk.token_ids] == tokens
        assert [chunk.index for chunk in mine] == [
            sum(len(one.token_ids) for one in mine[:i]) for i in range(len(mine))
        ]
        assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in mine)
    assert [chunk.finish_reason for chunk in seen[:-1]] == [None] * (len(seen) - 1)
    assert seen[-1].finish_reason is FinishReason.END
