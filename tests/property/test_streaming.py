"""Any bursts, any choices, any times of reading: a reader's joined chunks equal the pushed chunks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from paceline.streaming import FinishReason, StreamChannel, StreamChunk, StreamSender, TokenLogprobs, Usage

CHOICES = 3


@dataclass
class Pushed:
    """The pushed parts of one choice, as plain lists."""

    ids: list[int]
    text: str
    logprobs: list[float]
    prompt_logprobs: list[float]


@st.composite
def bursts(draw: st.DrawFn) -> StreamChunk:
    """Up to five tokens of a choice, with text that lags behind or has none; the index is set when it is pushed."""
    ids = draw(st.lists(st.integers(0, 50_000), max_size=5))
    return StreamChunk(
        index=0,
        token_ids=tuple(ids),
        text=draw(st.text("aé🙂", max_size=4)),
        logprobs=tuple(TokenLogprobs(-float(token)) for token in ids),
        prompt_logprobs=tuple(map(TokenLogprobs, draw(st.sampled_from([(), (-1.0,), (-2.0, -3.0)])))),
        choice=draw(st.integers(0, CHOICES - 1)),
    )


STEPS = st.lists(bursts() | st.just("read"), max_size=40)


def placed(chunk: StreamChunk, index: int, reason: FinishReason | None = None) -> StreamChunk:
    return StreamChunk(
        index=index,
        token_ids=chunk.token_ids,
        text=chunk.text,
        logprobs=chunk.logprobs,
        prompt_logprobs=chunk.prompt_logprobs,
        choice=chunk.choice,
        finish_reason=reason,
        usage=Usage() if reason else None,
    )


def note(pushed: dict[int, Pushed], chunk: StreamChunk) -> int:
    """Add a chunk to the lists; return the index of its first token."""
    mine = pushed[chunk.choice]
    index = len(mine.ids)
    mine.ids += chunk.token_ids
    mine.text += chunk.text
    mine.logprobs += [entry.own for entry in chunk.logprobs]
    mine.prompt_logprobs += [entry.own for entry in chunk.prompt_logprobs]
    return index


def check(seen: list[StreamChunk], pushed: dict[int, Pushed], interval: int) -> None:
    """Compare the read chunks with the lists."""
    read = {choice: Pushed([], "", [], []) for choice in range(CHOICES)}
    for chunk in seen:
        assert chunk.index == note(read, chunk)
        assert len(chunk.logprobs) == len(chunk.token_ids)
        chunk.text.encode()
    assert read == pushed
    assert [chunk.finish_reason for chunk in seen if chunk.usage] == [FinishReason.STOP]
    assert seen[-1].usage is not None
    last_of = {chunk.choice: place for place, chunk in enumerate(seen)}
    for place, chunk in enumerate(seen):
        assert len(chunk.token_ids) >= interval or place == last_of[chunk.choice]


@given(steps=STEPS, last=bursts(), ends=st.sets(st.integers(0, CHOICES - 1)), interval=st.integers(1, 6))
def test_any_reader_gets_everything_once_and_in_order(
    steps: list[StreamChunk | str], last: StreamChunk, ends: set[int], interval: int
) -> None:
    """Ids, text and logprobs per choice, whatever the bursts, the interval, the moments of reading and of the choices' ends."""
    channel = StreamChannel.create()
    sender = channel.attach(interval=interval)
    pushed = {choice: Pushed([], "", [], []) for choice in range(CHOICES)}
    seen: list[StreamChunk] = []
    for step in steps:
        if isinstance(step, StreamChunk):
            sender.push(placed(step, note(pushed, step)))
        elif isinstance(taken := channel.get(0), StreamChunk):
            seen.append(taken)
        held = sum(len(item.ids) for item in pushed.values()) - sum(len(chunk.token_ids) for chunk in seen)
        assert channel.num_buffered == held
    for choice in ends - {last.choice}:
        sender.push(StreamChunk(index=len(pushed[choice].ids), choice=choice, finish_reason=FinishReason.LENGTH))
    sender.finish(placed(last, note(pushed, last), FinishReason.STOP))
    seen += channel
    check(seen, pushed, interval)
    assert channel.num_buffered == 0


@given(steps=STEPS, last=bursts(), interval=st.integers(1, 6))
def test_an_event_loops_reader_gets_the_same(steps: list[StreamChunk | str], last: StreamChunk, interval: int) -> None:
    """A task that reads whenever the loop lets it finds all of it too."""
    channel = StreamChannel.create()
    sender = channel.attach(interval=interval)
    pushed = {choice: Pushed([], "", [], []) for choice in range(CHOICES)}

    async def read() -> list[StreamChunk]:
        return [chunk async for chunk in channel]

    async def main() -> list[StreamChunk]:
        task = asyncio.create_task(read())
        for step in steps:
            if isinstance(step, StreamChunk):
                sender.push(placed(step, note(pushed, step)))
            else:
                await asyncio.sleep(0)
        sender.finish(placed(last, note(pushed, last), FinishReason.STOP))
        return await task

    check(asyncio.run(main()), pushed, interval)


@given(steps=STEPS, limit=st.integers(1, 12))
def test_being_behind_follows_what_could_be_taken(steps: list[StreamChunk | str], limit: int) -> None:
    """It begins above the limit, ends at half of it, and the engine is notified of each change and of nothing else."""
    reported: list[bool] = []
    channel = StreamChannel.create()
    sender: StreamSender = channel.attach(
        max_buffered_tokens=limit, on_backlog=lambda: reported.append(sender.is_behind)
    )
    ripe: dict[int, int] = {}
    expected: list[bool] = []
    is_behind = False
    for step in steps:
        if isinstance(step, StreamChunk):
            if step.token_ids:
                ripe[step.choice] = ripe.get(step.choice, 0) + len(step.token_ids)
            sender.push(step)
        elif isinstance(taken := channel.get(0), StreamChunk):
            del ripe[taken.choice]
        waiting = sum(ripe.values())
        changed = waiting <= limit // 2 if is_behind else waiting > limit
        if changed:
            is_behind = not is_behind
            expected.append(is_behind)
        assert sender.is_behind == is_behind
    assert reported == expected
    assert sender.num_times_behind == expected.count(True)
