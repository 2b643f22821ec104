"""Both managers with real models, a process each."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, AsyncModelManager, ModelEntry, ModelManager, demo_model_path, estimate_memory
from paceline.engine import dry_run, memory_needs
from paceline.errors import (
    EngineStopped,
    InvalidParams,
    ModelFileNotFound,
    ModelNotFound,
    ModelUnloaded,
    NotEnoughMemory,
)
from paceline.runtime import memory
from paceline.streaming import FinishReason
from paceline.testing.models import LlamaSpec, write_model

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"num_slots": 2, "n_ctx": 512}
PROMPT = "The little fox"
EXACT: dict[str, Any] = {"flash_attn": "off", "type_k": "f32", "type_v": "f32", "n_threads": 1}  # whatever the batches
SINGLE: dict[str, Any] = {**SMALL, **EXACT, "num_slots": 1}  # nor does a second sequence share a pass
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}


def entry(name: str, **fields: Any) -> ModelEntry:
    options = {**SMALL, **fields.pop("options", {})}
    return ModelEntry(name=name, options=options, **fields)


@pytest.fixture(scope="module")
def alone() -> str:
    """Return the demo model's text without a manager."""
    with LLM(**SMALL) as llm:
        return llm.generate(PROMPT, max_tokens=12, temperature=0).text


@pytest.fixture(scope="module")
def single() -> str:
    """Return its text with one slot, independent of other load."""
    with LLM(**SINGLE) as llm:
        return llm.generate(PROMPT, max_tokens=12, temperature=0, cache_prompt=False).text


async def state_of(models: AsyncModelManager, name: str, state: str, timeout_s: float = 30) -> None:
    """Wait for a state."""
    async with asyncio.timeout(timeout_s):
        while models.status(name).state != state:
            await asyncio.sleep(0.05)


def test_three_models_take_turns_in_the_room_for_two(single: str) -> None:
    """Every request gets the text of the model alone."""

    async def check() -> None:
        entries = [entry(name, options=SINGLE) for name in "abc"]
        async with AsyncModelManager(entries, max_loaded=2, patience_s=0.1) as models:

            async def ask(name: str) -> str:
                async with models.use(name) as llm:
                    assert sum(status.is_loaded for status in models.statuses()) <= 2
                    return (await llm.generate(PROMPT, max_tokens=12, temperature=0, cache_prompt=False)).text

            assert await asyncio.gather(*map(ask, "abcabc")) == [single] * 6
            pids = [status.worker_pid for status in models.statuses() if status.is_loaded]
            assert len(set(pids)) == len(pids) == 2
            assert os.getpid() not in pids
        assert [status.state for status in models.statuses()] == ["unloaded"] * 3

    asyncio.run(check())


def test_a_killed_process_takes_no_other_model_along(alone: str) -> None:
    """Its own request is replayed; the other model's stream does not notice."""

    async def check() -> None:
        async with AsyncModelManager([entry("a", options=EXACT), entry("b", options=EXACT)]) as models:
            async with models.use("a") as first, models.use("b") as second:
                expected = (await second.generate(PROMPT, **LONG)).token_ids
                victim = models.status("a").worker_pid
                assert victim is not None
                pid = models.status("b").worker_pid
                replayed = asyncio.create_task(first.generate(PROMPT, **LONG))
                got: list[int] = []
                async with second.stream(PROMPT, **LONG) as stream:
                    async for chunk in stream:
                        if not got:
                            os.kill(victim, signal.SIGKILL)
                        got += chunk.token_ids
                assert got == list(expected)
                assert (await replayed).token_ids == expected
                assert models.status("b").worker_pid == pid
            assert models.status("a").worker_pid != victim

    asyncio.run(check())


def test_an_engine_that_gives_up_is_loaded_anew_by_the_next_use(alone: str) -> None:
    """Its users get why; the model is failed, and no other one."""

    async def check() -> None:
        async with AsyncModelManager([entry("a", options={"max_restarts": 0}), entry("b")]) as models:
            await models.load("b")
            async with models.use("a") as llm:
                running = asyncio.create_task(llm.generate(PROMPT, **LONG))
                await asyncio.sleep(0.05)
                pid = models.status("a").worker_pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(EngineStopped, match="max_restarts=0"):
                    await running
            await state_of(models, "a", "failed")
            assert models.status("b").state == "loaded"
            async with models.use("a") as llm:
                assert (await llm.generate(PROMPT, max_tokens=12, temperature=0)).text == alone

    asyncio.run(check())


def test_a_sleeping_model_is_woken_by_its_next_use(alone: str) -> None:
    """Its process is gone meanwhile, and with it its memory."""

    async def check() -> None:
        async with AsyncModelManager([entry("a", options={"sleep_idle_s": 0.3})], memory_budget="1 GiB") as models:
            for _ in range(2):
                async with models.use("a") as llm:
                    assert (await llm.generate(PROMPT, max_tokens=12, temperature=0)).text == alone
                await state_of(models, "a", "sleeping")
                async with asyncio.timeout(20):
                    while models.status("a").taken_bytes is not None:
                        await asyncio.sleep(0.05)

    asyncio.run(check())


def test_unloading_ends_what_still_runs_with_an_error_that_says_so(alone: str) -> None:
    """Streams and completions end as the contract says, later calls raise; the next use loads again."""

    async def check() -> None:
        async with AsyncModelManager([entry("a", options={"n_ctx": 4096})]) as models:
            ends: list[FinishReason | None] = []
            began = asyncio.Event()

            async def stream() -> None:
                async with models.use("a") as llm, llm.stream(PROMPT, max_tokens=1000, ignore_eos=True) as chunks:
                    async for chunk in chunks:
                        began.set()
                        ends.append(chunk.finish_reason)

            async def complete() -> None:
                async with models.use("a") as llm:
                    completion = await llm.generate(PROMPT, max_tokens=1000, ignore_eos=True)
                    ends.append(completion.finish_reason)
                    await llm.generate(PROMPT)

            tasks = [asyncio.create_task(stream()), asyncio.create_task(complete())]
            await began.wait()
            await models.unload("a", timeout_s=0.0)
            await tasks[0]
            with pytest.raises(ModelUnloaded, match="'a' was unloaded while it was in use"):
                await tasks[1]
            assert [end for end in ends if end is not None] == [FinishReason.SHUTDOWN] * 2
            assert models.status("a").state == "unloaded"
            async with models.use("a") as llm:
                assert (await llm.generate(PROMPT, max_tokens=12, temperature=0)).text == alone

    asyncio.run(check())


def test_closing_cancels_a_load() -> None:
    """The waiter is woken, and no process is left."""

    async def check() -> None:
        models = AsyncModelManager([entry("a")])
        waiting = asyncio.create_task(models.load("a"))
        await state_of(models, "a", "loading")
        await models.aclose()
        with pytest.raises(EngineStopped, match="closed"):
            await waiting
        assert models.status("a").worker_pid is None

    asyncio.run(check())


def test_the_need_is_planned_and_held(alone: str) -> None:
    """A budget below it is refused with the figures; the process takes no more than it counts for."""

    async def check() -> None:
        async with AsyncModelManager([entry("a")], memory_budget="50 MiB") as models:
            with pytest.raises(NotEnoughMemory, match=r"'a' cannot be loaded: it needs \d+ MiB.*is 50 MiB"):
                await models.load("a")
        async with AsyncModelManager([entry("a")], memory_budget="1 GiB") as models:
            async with models.use("a") as llm:
                assert (await llm.generate(PROMPT, max_tokens=12, temperature=0)).text == alone
            status = models.status("a")
            assert status.needed_bytes is not None
            if status.taken_bytes is not None:
                assert 10 << 20 < status.taken_bytes < status.needed_bytes

    asyncio.run(check())


def test_a_context_that_is_left_open_gets_an_eighth_of_the_budget(tmp_path: Path) -> None:
    """The loaded memory equals the plan; a model with a given context has that context."""
    spec = LlamaSpec(n_embd=256, n_layer=8, n_ctx_train=65536)
    path = write_model(tmp_path / "long.gguf", spec)
    cell_bytes = estimate_memory(path, n_ctx=1024, num_slots=1, dry_run=False).cache_bytes // 1024
    entries = [
        ModelEntry(name="open", model=path, options={"num_slots": 1}),
        ModelEntry(name="given", model=path, options={"num_slots": 1, "n_ctx": 8192}),
    ]

    async def check() -> None:
        async with AsyncModelManager(entries, memory_budget=8 * 20_000 * cell_bytes) as models:
            async with models.use("open") as llm:
                assert llm.limits.num_cells == llm.limits.max_positions == 20_000 // 256 * 256
            planned = models.status("open").needed_bytes
            assert planned is not None and 19_968 * cell_bytes < planned < 8 * 20_000 * cell_bytes
            async with models.use("given") as llm:
                assert llm.limits.num_cells == 8192

    asyncio.run(check())


def test_what_the_machine_cannot_hold_evicts_none(alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget, too: it is refused before room is made for it."""
    monkeypatch.setattr(memory, "usable_memory", lambda: 20 << 20)
    monkeypatch.setattr(memory_needs, "plan", dry_run.answer)  # in this process, which has that little

    async def check() -> None:
        huge = entry("huge", model=demo_model_path(), options={"n_ctx": 16384})
        async with AsyncModelManager([entry("a"), huge], max_loaded=1) as models:
            await models.load("a")
            with pytest.raises(NotEnoughMemory, match=r"KV cache .* 20 MiB are all that there is; n_ctx \d+ would fit"):
                await models.load("huge")
            assert [status.state for status in models.statuses()] == ["loaded", "failed"]
            async with models.use("a", load=False) as llm:
                assert (await llm.generate(PROMPT, max_tokens=12, temperature=0)).text == alone

    asyncio.run(check())


def test_a_file_that_is_missing_fails_every_waiter_and_not_the_next_try(tmp_path: Path, alone: str) -> None:
    """The model is failed until its file is there."""
    path = tmp_path / "late.gguf"

    async def check() -> None:
        async with AsyncModelManager([entry("late", model=path)], memory_budget="1 GiB") as models:
            found = await asyncio.gather(models.load("late"), models.load("late"), return_exceptions=True)
            assert [type(item) for item in found] == [ModelFileNotFound] * 2
            assert isinstance(models.status("late").error, ModelFileNotFound)
            shutil.copy(demo_model_path(), path)
            async with models.use("late") as llm:
                assert (await llm.generate(PROMPT, max_tokens=12, temperature=0)).text == alone

    asyncio.run(check())


def test_options_are_checked_before_anything_is_loaded() -> None:
    """With the name of the model."""
    for options in ({"n_cxt": 5}, {"num_slots": 0}, {"offline": 3}):
        with pytest.raises(InvalidParams, match="model 'a': "):
            AsyncModelManager([ModelEntry(name="a", options=options)])
    with pytest.raises(InvalidParams, match="model 'a': "):
        ModelManager([ModelEntry(name="a", model="hf:nothing")])


def test_threads_share_the_blocking_manager(tmp_path: Path, single: str) -> None:
    """From a file, with more models than may be loaded; all get their text."""
    path = tmp_path / "models.toml"
    shutil.copy(demo_model_path(), tmp_path / "demo.gguf")
    path.write_text(
        'max_loaded = 2\npatience_s = 0.1\n[defaults]\nmodel = "demo.gguf"\nnum_slots = 1\nn_ctx = 512\n'
        'flash_attn = "off"\ntype_k = "f32"\ntype_v = "f32"\nn_threads = 1\n'
        "[models.a]\n[models.b]\naliases = ['x']\n[models.c]\n",
        encoding="utf-8",
    )
    texts: list[str] = []
    with ModelManager(path) as models:

        def ask(name: str) -> None:
            with models.use(name) as llm:
                texts.append(llm.generate(PROMPT, max_tokens=12, temperature=0, cache_prompt=False).text)

        threads = [threading.Thread(target=ask, args=(name,)) for name in "axcabc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == [single] * 6
        with pytest.raises(ModelNotFound, match="there are a, b, c"):
            models.unload("nothing")
        models.reload("a")
        assert models.status("a").state == "loaded"
        models.update([models.entry("a"), models.entry("c")])
        assert models.names() == ["a", "c"]
        models.update(dataclasses.replace(models.settings, max_loaded=1))
        assert (models.settings.max_loaded, models.settings.patience_s, models.names()) == (1, 0.1, ["a", "c"])
        models.add(entry("d"))
        models.remove("c")
        assert models.names() == ["a", "d"]
        assert [status.name for status in models.statuses()] == ["a", "d"]
    models.close()
    with pytest.raises(EngineStopped, match="closed"), models.use("a"):
        pass


def test_the_blocking_manager_ends_running_requests_when_it_is_closed() -> None:
    """A completion in another thread is cut off, later calls raise, and close returns."""
    models = ModelManager([entry("a", options={"n_ctx": 4096})])
    caught: list[BaseException] = []
    began = threading.Event()

    def ask() -> None:
        try:
            with models.use("a") as llm:
                began.set()
                assert llm.generate(PROMPT, max_tokens=1000, ignore_eos=True).finish_reason is FinishReason.SHUTDOWN
                llm.generate(PROMPT)
        except EngineStopped as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    began.wait()
    time.sleep(0.2)
    models.close()
    thread.join()
    assert len(caught) == 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_a_manager_that_is_dropped_ends_its_processes() -> None:
    """As an LLM that is dropped ends its own."""
    models = ModelManager([entry("a")])
    models.load("a")
    pid = models.status("a").worker_pid
    assert pid is not None
    del models
    gc.collect()
    until_s = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}/stat").exists()
