"""`AsyncLLM`: as `LLM`, and the event loop goes on whatever the engine does."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.conftest import TinyModels
from tests.polling import async_wait_until

from paceline import LLM, AsyncLLM, AsyncStream, FinishReason, SamplingParams, StreamChannel
from paceline.errors import BatchError, EngineStopped, InvalidParams, ModelLoadError, QueueFull

pytestmark = pytest.mark.native

# Room for a completion that no test reads to its end, however long a busy machine lets a test wait.
SMALL: dict[str, Any] = {
    "num_slots": 2, "n_ctx": 32768, "rope_freq_scale": 1.0, "n_threads": 1,
    "flash_attn": "off", "type_k": "f32", "type_v": "f32",
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 30_000, "ignore_eos": True}
PROMPTS = ["Hello", "The quick brown fox", "a"]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


def test_its_output_is_that_of_the_blocking_one(tiny_models: TinyModels) -> None:
    """generate, lists, stream, embed: the same results."""
    path = tiny_models("llama")
    with LLM(path, **SMALL) as blocking:
        expected = [blocking.generate(prompt, **GREEDY).text for prompt in PROMPTS]
        vectors = blocking.embed(PROMPTS, pooling="mean")

    async def main() -> None:
        async with AsyncLLM(path, **SMALL) as llm:
            assert (await llm.generate(PROMPTS[0], **GREEDY)).text == expected[0]
            assert [completion.text for completion in await llm.generate(PROMPTS, **GREEDY)] == expected
            async with llm.stream(PROMPTS[1], **GREEDY) as stream:
                assert "".join([chunk.text async for chunk in stream]) == expected[1]
            together = await asyncio.gather(*(llm.generate(prompt, **GREEDY) for prompt in PROMPTS))
            assert [completion.text for completion in together] == expected
            assert np.allclose(await llm.embed(PROMPTS, pooling="mean"), vectors, atol=1e-4)
            assert llm.stats().resident == 0
            assert llm.tokenizer.n_vocab == llm.model.n_vocab

    run(main)


def test_cancelling_a_task_frees_its_slot(tiny_models: TinyModels) -> None:
    """Whatever it was doing: generating, a list, reading a stream, embedding."""

    async def main() -> None:
        async with AsyncLLM(tiny_models("llama"), **SMALL) as llm:

            async def read() -> None:
                async with llm.stream("Hello", **ENDLESS) as stream:
                    async for _ in stream:
                        pass

            for work in (
                lambda: llm.generate("Hello", **ENDLESS),
                lambda: llm.generate(PROMPTS * 2, **ENDLESS),
                read,
                lambda: llm.embed(["some text"] * 2000, pooling="mean"),
            ):
                submitted = llm.stats().submitted
                task = asyncio.ensure_future(work())
                await async_wait_until(lambda submitted=submitted: llm.stats().submitted > submitted)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                del task
                await async_wait_until(lambda: llm.stats().resident + llm.stats().queued == 0)
            assert llm.stats().cancelled >= 4
            assert len((await llm.generate("Hello", **GREEDY)).token_ids) == 16

    run(main)


def test_leaving_a_stream_cancels_it_and_released_waits_for_the_slot(tiny_models: TinyModels) -> None:
    """The block, a break, and a stream without a reader."""

    async def main() -> None:
        async with AsyncLLM(tiny_models("llama"), **SMALL) as llm:
            async with llm.stream("Hello", **ENDLESS) as stream:
                async for _ in stream:
                    break
            await stream.released()
            assert stream.finish_reason is FinishReason.CANCELLED
            forgotten = llm.stream("Hello", **ENDLESS)
            await forgotten.get()
            del forgotten
            gc.collect()
            await async_wait_until(lambda: llm.stats().resident == 0)

    run(main)


def test_the_loop_goes_on_while_a_model_loads_and_a_prompt_is_computed() -> None:
    """Another task makes progress during loading, tokenising and prefill."""

    async def main() -> None:
        counter = itertools.count()
        last = 0

        async def count() -> None:
            nonlocal last
            while True:
                last = next(counter)
                await asyncio.sleep(0.001)

        ticking = asyncio.ensure_future(count())
        llm = AsyncLLM(num_slots=2, n_ctx=2048, n_threads=1)
        seen = [last]
        await llm.start()
        seen.append(last)
        await llm.generate("long ago " * 300, max_tokens=1)
        seen.append(last)
        await llm.aclose()
        ticking.cancel()
        assert seen[1] - seen[0] > 5
        assert seen[2] - seen[1] > 5

    run(main)


def test_a_list_may_be_longer_than_the_queue_and_each_has_its_outcome(tiny_models: TinyModels) -> None:
    """Refused requests are tried again when there is room; a failure is raised with all outcomes."""

    async def main() -> None:
        async with AsyncLLM(tiny_models("llama"), **{**SMALL, "num_slots": 1}, max_queue=1, when_full="refuse") as llm:
            many = await llm.generate(PROMPTS * 3, **GREEDY)
            assert [completion.finish_reason for completion in many] == [FinishReason.LENGTH] * 9
            assert [completion.index for completion in many] == list(range(9))
            with pytest.raises(BatchError) as caught:
                await llm.generate(["Hello", [99999], "a"], **GREEDY)
            assert [type(outcome).__name__ for outcome in caught.value.outcomes] == [
                "Completion",
                "InvalidParams",
                "Completion",
            ]
            streams = [llm.stream("Hello", **ENDLESS) for _ in range(3)]
            await streams[0].get()
            await streams[1].__aenter__()
            with pytest.raises(QueueFull):
                await streams[2].__aenter__()
            for stream in streams:
                await stream.aclose()

    run(main)


def test_prompts_of_a_list_have_params_of_their_own(tiny_models: TinyModels) -> None:
    """As with `LLM`."""

    async def main() -> None:
        async with AsyncLLM(tiny_models("llama"), **SMALL) as llm:
            many = await llm.generate(["a", "b"], [SamplingParams(max_tokens=3), None], ignore_eos=True)
            assert [len(completion.token_ids) for completion in many] == [3, 256]
            with pytest.raises(InvalidParams, match="params must have an entry for each of the 2 prompts, not 1"):
                await llm.generate(["a", "b"], [None])

    run(main)


def test_more_tasks_than_places_wait_for_room(tiny_models: TinyModels) -> None:
    """Three hundred at once, of every kind of request; a task that is cancelled while it waits leaves nothing behind."""

    async def main() -> None:
        async with AsyncLLM(tiny_models("llama"), **SMALL, max_queue=4) as llm:
            expected = (await llm.generate("Hello", **GREEDY)).token_ids
            tasks = [asyncio.ensure_future(llm.generate("Hello", **GREEDY)) for _ in range(300)]
            streamed = [asyncio.ensure_future(tokens_of(llm.stream("Hello", **GREEDY))) for _ in range(20)]
            embedded = [asyncio.ensure_future(llm.embed("Hello")) for _ in range(20)]
            late = asyncio.ensure_future(llm.generate("Hello", **GREEDY, queue_timeout_s=0.001))
            await asyncio.sleep(0.05)
            for task in tasks[1::3]:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(item, asyncio.CancelledError) for item in found[1::3])
            assert {completion.token_ids for completion in [*found[::3], *found[2::3]]} == {expected}  # type: ignore[union-attr]
            assert set(await asyncio.gather(*streamed)) == {expected}
            vectors = await asyncio.gather(*embedded)
            assert all(np.allclose(vector, vectors[0], atol=1e-4) for vector in vectors)
            assert (await late).finish_reason is FinishReason.DEADLINE
            while llm.engine.num_open:
                await asyncio.sleep(0.01)
            assert (llm.stats().resident, llm.stats().queued) == (0, 0)

    async def tokens_of(stream: AsyncStream) -> tuple[int, ...]:
        return tuple([token async for chunk in stream for token in chunk.token_ids])

    run(main)


def test_bad_input_is_refused_and_the_engine_goes_on(tiny_models: TinyModels) -> None:
    """At the call or on entering the stream."""

    async def main() -> None:
        async with AsyncLLM(tiny_models("llama"), **SMALL) as llm:
            for prompt, options in (([10**7], {}), ("x", {"max_tokens": -1}), ("x", {"grammar": "root ::= ("})):
                with pytest.raises((InvalidParams, ValueError)):
                    await llm.generate(prompt, **options)
                with pytest.raises((InvalidParams, ValueError)):
                    async with llm.stream(prompt, **options):
                        pass
            with pytest.raises(InvalidParams, match="use stream"):
                await llm.generate("x", interval=2)
            assert len((await llm.generate("Hello", **GREEDY)).token_ids) == 16

    run(main)


def test_closing_ends_running_requests(tiny_models: TinyModels) -> None:
    """Readers get their terminal chunk, later calls are refused, closing again does nothing."""

    async def main() -> None:
        llm = AsyncLLM(tiny_models("llama"), **SMALL)
        stream = llm.stream("Hello", **ENDLESS)
        await stream.get()
        await asyncio.gather(llm.aclose(), llm.aclose(drain=False))
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish_reason is FinishReason.SHUTDOWN
        with pytest.raises(EngineStopped):
            await llm.generate("Hello")
        await llm.aclose()

    run(main)


def test_a_model_that_cannot_be_loaded_raises_and_can_be_closed(tmp_path: Path) -> None:
    """Every call raises; closing an unopened engine is a no-op."""
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"nothing")

    async def main() -> None:
        llm = AsyncLLM(bad)
        with pytest.raises(ModelLoadError):
            await llm.start()
        with pytest.raises(ModelLoadError):
            await llm.generate("Hello")
        await llm.aclose()
        await AsyncLLM(bad).aclose()

    run(main)


def test_a_load_that_failed_is_tried_again(tmp_path: Path, tiny_models: TinyModels) -> None:
    """The next request loads again, and succeeds if the file exists by then."""
    path = tmp_path / "model.gguf"

    async def main() -> None:
        llm = AsyncLLM(path, **SMALL)
        with pytest.raises(ModelLoadError):
            await llm.generate("Hello", **GREEDY)
        path.write_bytes(tiny_models("llama").read_bytes())
        assert len((await llm.generate("Hello", **GREEDY)).token_ids) == 16
        await llm.aclose()

    run(main)


def test_a_request_that_is_cancelled_while_the_model_loads_leaves_the_load_to_others(tiny_models: TinyModels) -> None:
    """The first caller may go; the second one's model is there."""

    async def main() -> None:
        llm = AsyncLLM(tiny_models("llama"), **SMALL)
        first = asyncio.ensure_future(llm.generate("Hello", **GREEDY))
        second = asyncio.ensure_future(llm.generate("Hello", **GREEDY))
        await asyncio.sleep(0)
        first.cancel()
        assert len((await second).token_ids) == 16
        with pytest.raises(asyncio.CancelledError):
            await first
        await llm.aclose()

    run(main)


def test_a_channel_of_the_callers_is_attached_on_entering_and_once(tiny_models: TinyModels) -> None:
    """A used channel is refused by the call, or on entering if another request got it meanwhile; neither loads a model."""

    async def main() -> None:
        async with AsyncLLM(tiny_models("llama"), **SMALL) as llm:
            channel = StreamChannel.create()
            channel.interval = 5
            early = llm.stream(PROMPTS[0], channel=channel, request_index=1, **GREEDY)
            late = llm.stream(PROMPTS[1], channel=channel, **GREEDY)
            assert (early.interval, early.request_index, channel.request_index) == (5, 1, -1)
            async with early:
                assert channel.request_index == 1
                with pytest.raises(InvalidParams, match="one request in its life"):
                    await late.get()
                early.interval = 2
                chunks = [chunk async for chunk in early]
            assert "".join(chunk.text for chunk in chunks) == (await llm.generate(PROMPTS[0], **GREEDY)).text
            with pytest.raises(InvalidParams, match="this channel is finished"):
                llm.stream(PROMPTS[0], channel=channel)
            assert [chunk async for chunk in llm.stream(PROMPTS[0], **GREEDY)]
        unloaded = AsyncLLM("no/such/model.gguf")
        with pytest.raises(InvalidParams, match="this channel is finished"):
            unloaded.stream("a", channel=channel)

    run(main)
