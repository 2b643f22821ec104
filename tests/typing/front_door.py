"""Programs as users write them, read by the type checker and never run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_type

import numpy as np
import numpy.typing as npt

import paceline
from paceline.chat import MessageDelta


def blocking(llm: paceline.LLM) -> None:
    one = llm.generate("Once upon a time", max_tokens=20)
    assert_type(one, paceline.Completion)
    assert_type(one.text, str)
    assert_type(llm.generate([1, 2, 3]), paceline.Completion)
    assert_type(llm.generate(["a", "b"], progress=True), list[paceline.Completion])
    assert_type(llm.generate([paceline.Image("cat.png"), "What is this?"]), paceline.Completion)
    assert_type(llm.generate(["a", paceline.Image(b""), [1, 2]]), paceline.Completion)
    pictured: list[str | paceline.Image] = ["a", paceline.Image(b"")]
    assert_type(llm.generate([pictured, pictured]), list[paceline.Completion])
    assert_type(llm.model.modalities, frozenset[str])
    assert_type(llm.generate([[1, 2], [3]], paceline.SamplingParams(n=2)), list[paceline.Completion])
    with llm.stream("A fox", interval=4) as stream:
        for chunk in stream:
            assert_type(chunk, paceline.StreamChunk)
            assert_type(chunk.finish_reason, paceline.FinishReason | None)
    with llm.stream(["A fox", "An owl"], [paceline.SamplingParams(), None]) as streams:
        for index, chunk in streams:
            assert_type((index, chunk), tuple[int, paceline.StreamChunk])
    assert_type(llm.stream([1, 2]), paceline.Stream)
    assert_type(llm.stream([paceline.Image("cat.png"), "What is this?"]), paceline.Stream)
    assert_type(llm.embed(["one", "two"]), npt.NDArray[np.float32])
    assert_type(llm.embed([[1, 2], [3]]), npt.NDArray[np.float32])
    assert_type(llm.embed([paceline.Image("cat.png"), "a cat"], pooling="last"), npt.NDArray[np.float32])
    assert_type(llm.embed([pictured, "text", [1, 2]]), npt.NDArray[np.float32])
    assert_type(llm.embed([pictured, pictured]), npt.NDArray[np.float32])
    assert_type(llm.rerank("query", ["one"])[0].score, float)


@dataclass
class Person:
    name: str


def chatting(llm: paceline.LLM) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    assert_type(llm.chat(messages, max_tokens=20), paceline.ChatReply[None])
    assert_type(llm.chat(messages, response_model=Person).parsed, Person)
    assert_type(llm.chat([messages, messages], progress=True), list[paceline.ChatReply[None]])
    assert_type(llm.chat([messages], response_model=Person)[0].parsed, Person)
    with llm.stream_chat(messages) as stream:
        for chunk in stream:
            assert_type(chunk.deltas, tuple[MessageDelta, ...])
        assert_type(stream.collect().content, str)


async def awaiting() -> None:
    async with paceline.AsyncLLM(num_slots=2) as llm:
        assert_type(await llm.generate("a"), paceline.Completion)
        assert_type(await llm.generate(["a", "b"]), list[paceline.Completion])
        async with llm.stream(["a", "b"]) as streams:
            async for index, chunk in streams:
                assert_type((index, chunk), tuple[int, paceline.StreamChunk])
        async with llm.stream("a") as stream:
            async for chunk in stream:
                assert_type(chunk.text, str)
        assert_type((await llm.chat([{"role": "user", "content": "Hello!"}], response_model=Person)).parsed, Person)
        async with llm.stream_chat([{"role": "user", "content": "Hello!"}]) as chat:
            async for part in chat:
                assert_type(part.finish_reason, paceline.FinishReason | None)
        assert_type(await llm.embed("one"), npt.NDArray[np.float32])


class First:
    """A strategy is any object with such a method."""

    def plan(self, view: paceline.SchedulerView, budget: int) -> Sequence[paceline.TokenAllocation]:
        first = view.sequences[0]
        return [paceline.TokenAllocation(first.key, min(budget, first.limit))]


class Counter(paceline.Instrument):
    """An instrument overrides what it needs."""

    ended = 0

    def request_ended(self, record: paceline.EndRecord) -> None:
        self.ended += 1


def own_parts() -> paceline.LLM:
    strategy: paceline.BatchStrategy = First()
    return paceline.LLM("model.gguf", strategy=strategy, instruments=(Counter(),))
