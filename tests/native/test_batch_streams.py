"""`LLM.stream` and `AsyncLLM.stream` of several prompts: a channel for each, refused before anything runs or each for itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.native.conftest import TinyModels

from paceline import LLM, AsyncLLM, BatchStream, Completion, FinishReason, SamplingParams, StreamChannel, Usage
from paceline.errors import BatchError, EngineStopped, InvalidParams, InvalidType, PromptTooLong, QueueFull

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {
    "num_slots": 2, "n_ctx": 1024, "n_threads": 1, "flash_attn": "off", "type_k": "f32", "type_v": "f32",
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 900, "ignore_eos": True}
PROMPTS = ["Hello", "The quick brown fox", "a"]


@pytest.fixture(scope="module")
def path(tiny_models: TinyModels) -> Path:
    """The file of a tiny model."""
    return tiny_models("llama")


@pytest.fixture(scope="module", params=["thread", "process"])
def llm(request: pytest.FixtureRequest, path: Path) -> Iterator[LLM]:
    """Load it, in this process and in a worker."""
    with LLM(path, isolation=request.param, **SMALL) as made:
        yield made


def texts(found: list[tuple[int, str]], count: int) -> list[str]:
    return ["".join([text for place, text in found if place == index]) for index in range(count)]


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_each_prompt_has_the_text_that_it_has_alone(llm: LLM) -> None:
    """Read together, one stream alone, or from channels of the caller's; ids and texts may be mixed."""
    prompts: list[Any] = [*PROMPTS, [1, 2, 3]]
    expected = [llm.generate(prompt, **GREEDY).text for prompt in prompts]
    with llm.stream(prompts, **GREEDY) as streams:
        assert isinstance(streams, BatchStream)
        assert [stream.request_index for stream in streams.streams] == [0, 1, 2, 3]
        assert texts([(index, chunk.text) for index, chunk in streams], 4) == expected
    channels = [StreamChannel.create() for _ in prompts]
    kept = llm.stream(prompts, channel=channels, request_index=5, **GREEDY)
    assert [channel.request_index for channel in channels] == [5, 6, 7, 8]
    assert ["".join([chunk.text for chunk in channel]) for channel in channels] == expected
    assert len(kept.streams) == 4
    streams = llm.stream(prompts, **GREEDY)
    assert "".join([chunk.text for chunk in streams.streams[1]]) == expected[1]
    streams.close()
    assert list(llm.stream([], **GREEDY)) == []


def facts(completion: Completion) -> Any:
    """Return all of a completion but its times and the values of its log-probabilities, which depend a little on the batch."""
    return json.loads(json.dumps(asdict(replace(completion, usage=Usage()))), parse_float=lambda _: None)


def test_streams_are_collected_as_generate_returns_them(llm: LLM, path: Path) -> None:
    """Of one prompt and of several, read in part before; choices and log-probabilities as well; on an event loop, too."""
    options: dict[str, Any] = {"max_tokens": 9, "seed": 3, "n": 2, "logprobs": 1, "prompt_logprobs": 0}
    expected = [facts(completion) for completion in llm.generate(PROMPTS, **options)]
    with llm.stream(PROMPTS, **options) as streams:
        streams.get()
        found = streams.collect()
    assert [facts(completion) for completion in found] == expected
    assert streams.collect() == found
    with llm.stream(PROMPTS[0], **options) as stream:
        stream.get()
        assert facts(stream.collect()) == expected[0]
    with pytest.raises(BatchError) as raised:
        llm.stream(["A fox", "x" * 100_000], max_tokens=2).collect()
    assert [type(outcome) for outcome in raised.value.outcomes] == [Completion, PromptTooLong]

    async def main() -> None:
        async with AsyncLLM(path, **SMALL) as other:
            batch = other.stream(PROMPTS, **options)
            assert [facts(completion) for completion in await batch.collect()] == expected
            async with other.stream(PROMPTS[0], **options) as stream:
                await stream.get()
                assert facts(await stream.collect()) == expected[0]
            assert facts(await stream.collect()) == expected[0]
            assert await other.stream([], **options).collect() == []

    asyncio.run(main())


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    """None for the defaults; keywords override them in all."""
    params = [SamplingParams(max_tokens=3), None, SamplingParams(max_tokens=5)]
    streams = llm.stream(PROMPTS, params, temperature=0, ignore_eos=True)
    found = [index for index, chunk in streams for _ in chunk.token_ids]
    assert [found.count(index) for index in (0, 2)] == [3, 5] and found.count(1) == 256


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"params": [SamplingParams()]}, InvalidParams, "params must have an entry for each of the 2 prompts, not 1"),
        ({"params": [None] * 3}, InvalidParams, "params must have an entry for each of the 2 prompts, not 3"),
        ({"params": [None, {"temperature": 1}]}, InvalidType, r"params\[1\] must be SamplingParams, not dict"),
        ({"params": "ab"}, InvalidType, r"params\[0\] must be SamplingParams, not str"),
        ({"channel": []}, InvalidParams, "channel must have an entry for each of the 2 prompts, not 0"),
        (
            {"channel": StreamChannel.create()},
            InvalidType,
            "channel must be a list with a StreamChannel for each of the 2",
        ),
        ({"channel": [None, 3]}, InvalidType, r"channel\[1\] must be a StreamChannel, not int"),
        ({"channel": [StreamChannel.create()] * 2}, InvalidParams, r"channel\[1\] is channel\[0\]"),
        ({"temperature": -1}, InvalidParams, "temperature"),
        ({"temperatur": 1}, InvalidType, "temperatur"),
        ({"request_index": -1}, InvalidParams, "request_index"),
    ],
)
def test_what_does_not_match_the_prompts_is_refused_before_anything_runs(
    llm: LLM, path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Sizes, types, a channel that stands there twice, and options; a channel can serve another request then."""
    submitted = llm.stats().submitted
    with pytest.raises(error, match=message):
        llm.stream(["a", "b"], **options)
    assert llm.stats().submitted == submitted

    async def main() -> None:
        unloaded = AsyncLLM(path, **SMALL)
        with pytest.raises(error, match=message):
            async with unloaded.stream(["a", "b"], **options):
                pass
        await unloaded.aclose()

    run(main())


def test_used_channels_are_refused_and_new_ones_stay_new(llm: LLM) -> None:
    """Also if the second of two has served before."""
    used, new = StreamChannel.create(), StreamChannel.create()
    list(llm.stream("a", channel=used, **GREEDY))
    with pytest.raises(InvalidParams, match="this channel is finished"):
        llm.stream(["a", "b"], channel=[new, used], **GREEDY)
    assert list(llm.stream("a", channel=new, **GREEDY))


def test_a_prompt_that_is_refused_ends_its_own_stream_alone(llm: LLM) -> None:
    """Too long, or no prompt at all: a chunk with the error on its channel; the others have their texts."""
    expected = llm.generate("Hello", **GREEDY).text
    channels = [StreamChannel.create() for _ in range(3)]
    prompts: list[Any] = [[1] * 5000, "Hello", [1, "x"]]
    streams = llm.stream(prompts, channel=channels, **GREEDY)
    found = []
    with pytest.raises(BatchError, match="2 of 3 streams failed") as raised:
        for index, chunk in streams:
            found.append((index, chunk.text))
    outcomes = raised.value.outcomes
    assert isinstance(outcomes[0], PromptTooLong) and isinstance(outcomes[2], InvalidType)
    assert outcomes[1] is FinishReason.LENGTH and texts(found, 3)[1] == expected
    assert [channel.is_finished and channel.is_released for channel in channels] == [True] * 3
    assert channels[0].finish_reason is FinishReason.ERROR


def test_leaving_the_loop_cancels_all(llm: LLM) -> None:
    """Their slots are free afterwards."""
    streams = llm.stream(PROMPTS, **ENDLESS)
    for _ in streams:
        break
    assert streams.wait_released(30)
    assert {stream.finish_reason for stream in streams.streams} == {FinishReason.CANCELLED}


def test_a_full_queue_ends_the_streams_that_have_no_place(path: Path) -> None:
    """With when_full="refuse"; the others run. Otherwise all wait for room."""
    with LLM(path, max_queue=0, **SMALL) as llm:
        expected = [llm.generate(prompt, **GREEDY).text for prompt in PROMPTS]
        with llm.stream(PROMPTS, **GREEDY) as streams:
            assert texts([(index, chunk.text) for index, chunk in streams], 3) == expected
    with LLM(path, max_queue=0, when_full="refuse", **SMALL) as llm:
        streams = llm.stream(PROMPTS, **GREEDY)
        with pytest.raises(BatchError) as raised:
            list(streams)
        assert [type(outcome) for outcome in raised.value.outcomes] == [FinishReason, FinishReason, QueueFull]
    with pytest.raises(EngineStopped):
        llm.stream(PROMPTS)


def test_several_prompts_on_an_event_loop(path: Path) -> None:
    """The texts of the blocking form; a task that is cancelled cancels all; one failure is one stream's."""
    with LLM(path, **SMALL) as blocking:
        expected = [blocking.generate(prompt, **GREEDY).text for prompt in PROMPTS]

    async def main() -> None:
        async with AsyncLLM(path, **SMALL) as llm:
            async with llm.stream(PROMPTS, **GREEDY) as streams:
                found = [(index, chunk.text) async for index, chunk in streams]
                assert texts(found, 3) == expected
                assert {stream.finish_reason for stream in streams.streams} == {FinishReason.LENGTH}
            channels = [StreamChannel.create() for _ in range(2)]
            bad: list[Any] = [PROMPTS[0], [1] * 5000]
            with pytest.raises(BatchError, match="1 of 2 streams failed"):
                async for index, chunk in llm.stream(bad, [None, None], channel=channels, **GREEDY):
                    assert (chunk.error is None) == (index == 0)
            endless = llm.stream(PROMPTS, **ENDLESS)

            async def read() -> None:
                async for _ in endless:
                    pass

            task = asyncio.create_task(read())
            while not endless.streams:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await endless.released()
            assert {stream.finish_reason for stream in endless.streams} == {FinishReason.CANCELLED}

    run(main())
