"""LLM and AsyncLLM with a process of their own, on the demo model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.exact import EXACT, assert_same_but_for_near_ties
from tests.native.conftest import TinyModels
from tests.possessions import children

from paceline import LLM, AsyncLLM
from paceline.demo import demo_model_path
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import (
    Aborted,
    BatchError,
    DeadlineExceeded,
    EngineDied,
    EngineStopped,
    GrammarError,
    InvalidParams,
    InvalidType,
    ModelLoadError,
    PromptTooLong,
    StateError,
    Unsupported,
)
from paceline.request import RequestOptions
from paceline.runtime import Model
from paceline.streaming import FinishReason, StreamChunk
from paceline.testing.models import KINDS, write_lora

# With these the same tokens have the same logits whether they come as a prompt or one by one.
OPTIONS: dict[str, Any] = {**EXACT, "n_ctx": 4096}
STORY = "Once upon a time"


def isolated(**options: Any) -> LLM:
    return LLM(isolation="process", **{"num_slots": 4, "n_ctx": 4096, **options})


def kill(llm: LLM, number: int = signal.SIGKILL) -> None:
    """Return the worker that this LLM started."""
    engine = llm._engine
    assert isinstance(engine, WorkerEngine)
    assert engine.worker_pid is not None
    os.kill(engine.worker_pid, number)


def test_it_does_what_an_engine_with_a_thread_does() -> None:
    """Generate, lists, choices, streams, logprobs, echo, grammars: the same results."""
    asked: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 30},
        {"seed": 5, "max_tokens": 40, "n": 3, "stop": [" the"]},
        {"seed": 6, "max_tokens": 20, "logprobs": 2, "prompt_logprobs": 1, "echo": True},
        {"seed": 7, "max_tokens": 30, "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"seed": 8, "max_tokens": 30, "mirostat": 2},
    ]
    with isolated(**OPTIONS) as apart, LLM(num_slots=4, **OPTIONS) as here:
        for options in asked:
            one, other = apart.generate(STORY, **options), here.generate(STORY, **options)
            assert one.choices == other.choices
            assert one.prompt_logprobs == other.prompt_logprobs
            scored = [token for item in one.prompt_logprobs or () for token in (item.token, *item.tokens)]
            assert len(set(map(id, scored))) == len({token.id for token in scored})  # one text for each token
            assert one.usage.completion_tokens == other.usage.completion_tokens
        many = apart.generate([STORY, "The cat", "A king"], temperature=0, max_tokens=10)
        assert [completion.text for completion in many] == [
            here.generate(prompt, temperature=0, max_tokens=10).text for prompt in (STORY, "The cat", "A king")
        ]
        with apart.stream(STORY, temperature=0, max_tokens=30) as stream:
            assert "".join(chunk.text for chunk in stream) == here.generate(STORY, temperature=0, max_tokens=30).text
        assert np.allclose(apart.embed(["one", "two"]), here.embed(["one", "two"]), atol=1e-5)
        assert apart.embed("one").shape == here.embed("one").shape == (apart.model.n_embd_out,)
        assert str(apart.model.desc) == here.model.desc
        assert apart.tokenizer.encode(STORY) == here.tokenizer.encode(STORY)
        assert apart.stats().submitted == here.stats().submitted


def test_a_stopped_worker_is_replaced_and_its_requests_go_on() -> None:
    """A stream has the whole text; a request within a deadline that passes before ends without the worker."""
    with isolated(**OPTIONS, hang_timeout_s=3.0) as llm:
        whole = llm.generate(STORY, temperature=0, max_tokens=200, ignore_eos=True)
        with llm.stream(STORY, temperature=0, max_tokens=200, ignore_eos=True) as stream:
            chunk = stream.get()
            assert isinstance(chunk, StreamChunk)
            chunks = [chunk]
            first = llm.heartbeat().worker_pid
            kill(llm, signal.SIGSTOP)
            with pytest.raises(DeadlineExceeded):
                llm.embed("one", timeout_s=0.5)
            chunks += stream
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert_same_but_for_near_ties(llm, llm.tokenizer.encode(STORY), whole.token_ids, ids)
        assert len(ids) == 200
        assert (llm.heartbeat().num_hangs, llm.heartbeat().num_restarts) == (1, 1)
        assert llm.heartbeat().worker_pid not in (None, first)


def test_ctrl_c_ends_a_program_whose_worker_hangs() -> None:
    """The call is interrupted at once, and the process ends within the patience for a worker that does not leave.

    The worker stops before the call: a fast machine writes the longest story in less time than a timer would need.
    """
    code = """
import os, signal, threading, paceline
llm = paceline.LLM(isolation="process", num_slots=2, n_ctx=2048, hang_timeout_s=600)
os.kill(llm.heartbeat().worker_pid, signal.SIGSTOP)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    llm.generate("Once upon a time", max_tokens=900, ignore_eos=True)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_errors_match_an_engine_with_a_thread() -> None:
    """An invalid request raises at once; a request of a list has its own error."""
    with isolated() as llm:
        for options, error in (
            ({"grammar": "root ::= ("}, GrammarError),
            ({"logit_bias": {10**6: 1.0}}, InvalidParams),
            ({"temperatur": 1}, InvalidType),
            ({"lora": {"x": 1.0}}, InvalidParams),
        ):
            with pytest.raises(error):
                llm.generate(STORY, **options)
        with pytest.raises(PromptTooLong):
            llm.generate([1] * 5000)
        with pytest.raises(BatchError, match="1 of 2") as caught:
            llm.generate([[5, 6], [10**6]], max_tokens=3)
        assert isinstance(caught.value.outcomes[1], InvalidParams)
        with pytest.raises(Unsupported):
            llm.rerank("a", ["b"])
        with pytest.raises(Unsupported):
            llm.embed("one", pooling="none")
    with pytest.raises(EngineStopped):
        llm.generate(STORY)


def test_what_cannot_go_to_another_process_is_refused() -> None:
    """Objects and callbacks, each with the way out."""
    model = Model.load(demo_model_path(), vocab_only=True)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (model, {}, "give its path"),
        (None, {"strategy": object()}, "module:attr"),
        (None, {"instruments": [object()]}, "module:attr"),
        (None, {"kv_overrides": {"a": object()}}, "kv_overrides"),
    ]
    for given, options, match in refused:
        with pytest.raises(InvalidParams, match=match):
            LLM(given, isolation="process", **options)
    with pytest.raises(InvalidParams, match='needs isolation="process"'):
        LLM(on_engine_death="fail")
    with pytest.raises(InvalidParams, match='max_restarts=3 needs isolation="process"'):
        LLM(max_restarts=3)
    with pytest.raises(InvalidParams, match="isolation"):
        LLM(isolation="fibre")


def test_a_model_that_cannot_be_loaded_raises_from_either_process(tmp_path: Path) -> None:
    """By the front if the vocabulary is enough to know, by the worker otherwise."""
    with pytest.raises(ModelLoadError, match="cannot read"):
        isolated(model=tmp_path / "none.gguf")
    with pytest.raises(InvalidParams, match="n_batch"):
        isolated(n_batch=-1)


def test_loading_reports_its_progress() -> None:
    """On the caller's thread, in steps that grow to the end; a worker that takes over reports none."""
    fractions: list[float] = []
    threads: set[int] = set()

    def progress(fraction: float) -> None:
        fractions.append(fraction)
        threads.add(threading.get_ident())

    with isolated(progress=progress) as llm:
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
        assert threads == {threading.get_ident()}
        num_fractions = len(fractions)
        kill(llm)
        assert llm.generate(STORY, max_tokens=2).token_ids
        assert len(fractions) == num_fractions


def test_loading_ends_where_that_is_wanted() -> None:
    """By progress returning False, by the event, by an exception of progress; no process stays."""
    wanted = threading.Event()
    wanted.set()

    def broken(fraction: float) -> None:
        raise KeyError("mine")

    before = children()
    for options, error in (
        ({"progress": lambda fraction: False}, Aborted),
        ({"cancel": wanted}, Aborted),
        ({"progress": broken}, KeyError),
    ):
        with pytest.raises(error):
            isolated(**options)
    assert children() <= before
    isolated(progress=lambda fraction: None, cancel=threading.Event()).close()


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"seed": 11}, {"seed": 12, "mirostat": 2}, {"seed": 13, "n": 2}]
)
def test_a_kill_in_mid_stream_changes_no_token(params: dict[str, Any]) -> None:
    """Greedy, seeded, with a sampler that has a state, with two choices: ids and text equal those of an undisturbed run.

    Tokens computed one by one are computed at once after a death, so greedy text may differ from a near tie on.
    """
    options = {"max_tokens": 120, "ignore_eos": True, "stop": ["the old king"], **params}
    with isolated(**OPTIONS) as llm:
        expected = llm.generate(STORY, **options)
        chunks: list[StreamChunk] = []
        kills_at = [25, 60]  # tokens; the engine is rarely more than a few ahead of its reader
        with llm.stream(STORY, max_buffered_tokens=8, **options) as stream:
            for chunk in stream:
                chunks.append(chunk)
                if kills_at and sum(len(chunk.token_ids) for chunk in chunks) >= kills_at[0]:
                    kill(llm)
                    del kills_at[0]
        for choice in expected.choices:
            mine = [chunk for chunk in chunks if chunk.choice == choice.index]
            token_ids = [token for chunk in mine for token in chunk.token_ids]
            text = "".join(chunk.text for chunk in mine)
            if params == {"temperature": 0}:
                assert_same_but_for_near_ties(llm, expected.prompt_token_ids, choice.token_ids, token_ids)
                assert llm.tokenizer.decode(token_ids).startswith(text)
            else:
                assert (tuple(token_ids), text) == (choice.token_ids, choice.text)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == sum(len(chunk.token_ids) for chunk in chunks)
        llm.generate(STORY, max_tokens=1)  # the last kill may have come when all was said: this needs a living worker
        assert llm.stats().number("paceline_engine_restarts_total") >= 1


def test_a_crash_of_the_process_ends_streams_where_that_was_asked_for() -> None:
    """on_engine_death="fail": the error names the signal, and the next request finds a new process."""
    with isolated(on_engine_death="fail") as llm:
        with pytest.raises(EngineDied, match="SIGSEGV") as caught:
            # However late the kill is, the stream has not ended: it pauses for its reader.
            with llm.stream(STORY, max_tokens=None, ignore_eos=True, max_buffered_tokens=8) as stream:
                stream.get()
                kill(llm, signal.SIGSEGV)
                for chunk in stream:
                    last = chunk
        assert last.finish_reason is FinishReason.ERROR
        assert last.error is caught.value
        assert caught.value.signal == "SIGSEGV"
        assert "Segmentation fault" in caught.value.last_words
        assert llm.generate(STORY, max_tokens=3).usage.completion_tokens == 3
        with pytest.raises(EngineDied):
            future = llm._engine.embed([[5]] * 20_000, None, RequestOptions())
            kill(llm)
            future.result()


def test_embeddings_survive_the_process() -> None:
    """They are computed again."""
    with isolated() as llm:
        expected = llm.embed("one")
        future = llm._engine.embed(["one"] * 2000, None, RequestOptions())
        kill(llm)
        assert len(future.result()) == 2000
        assert np.allclose(llm.embed("one"), expected, atol=1e-5)


def test_adapters_encoders_and_rerankers_go_along(tiny_models: TinyModels, tmp_path: Path) -> None:
    """An adapter by its path, after a death too; a model that only embeds; scores."""
    lora = write_lora(tmp_path / "lora.gguf", KINDS["llama"])
    path = tiny_models("llama")
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "lora": {"lora": 1.0}}
    with LLM(path, lora=[lora], num_slots=2) as here, isolated(model=path, lora=[lora]) as apart:
        expected = here.generate([5, 6, 7], **asked).token_ids
        assert apart.generate([5, 6, 7], **asked).token_ids == expected
        kill(apart)
        assert apart.generate([5, 6, 7], **asked).token_ids == expected
    encoder, reranker = tiny_models("bert"), tiny_models("reranker")
    with LLM(encoder) as here, LLM(encoder, isolation="process") as apart:
        assert np.allclose(apart.embed([[5, 6], [7]]), here.embed([[5, 6], [7]]), atol=1e-5)
        with pytest.raises(Unsupported, match="embeds"):
            apart.generate([5, 6])
    with LLM(reranker) as here, LLM(reranker, isolation="process") as apart:
        assert apart.rerank("a", ["b", "c"])[0].index == here.rerank("a", ["b", "c"])[0].index


def test_prefixes_are_saved_and_loaded_by_the_worker(tmp_path: Path) -> None:
    """The next worker finds the last worker's files; a wrong name is refused as before."""
    prompt = [5 + index % 900 for index in range(300)]
    with isolated(state_folder=tmp_path) as llm:
        expected = llm.generate(prompt, temperature=0, max_tokens=5)
        assert 290 < llm.save_prefix("one", prompt) <= 305
        kill(llm)
        assert llm.load_prefix("one")[:300] == prompt
        again = llm.generate(prompt, temperature=0, max_tokens=5)
        assert again.usage.cached_tokens > 290
        assert again.usage.cached_from == "host"
        assert len(again.token_ids) == len(expected.token_ids)
        llm.erase_prefix("one")
        with pytest.raises(StateError, match="one"):
            llm.load_prefix("one")
        with pytest.raises(InvalidParams, match="name"):
            llm.erase_prefix("../one")
    with pytest.raises(EngineStopped):
        llm.load_prefix("one")


def test_an_event_loop_uses_it_too() -> None:
    """AsyncLLM: streams, cancelled tasks, and the end."""

    async def run() -> None:
        async with AsyncLLM(isolation="process", num_slots=2, n_ctx=2048) as llm:
            expected = await llm.generate(STORY, temperature=0, max_tokens=20)
            with pytest.raises(InvalidParams, match="module:attr"):
                AsyncLLM(isolation="process", strategy=object())
            async with llm.stream(STORY, temperature=0, max_tokens=20) as stream:
                text = "".join([chunk.text async for chunk in stream])
            assert text == expected.text
            task = asyncio.create_task(llm.generate(STORY, max_tokens=None, ignore_eos=True))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await llm.embed("one")).shape == (llm.model.n_embd_out,)

    asyncio.run(run())
