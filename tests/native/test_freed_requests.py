"""An engine frees the requests of its callers by reference counting, in a thread and beside a worker process."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from paceline import LLM, GrammarError, PromptTooLong
from paceline.request import RequestOptions
from paceline.sequence import Request, Sequence

pytestmark = pytest.mark.native

PROMPT = "Once upon a time"


@pytest.fixture(params=["thread", "process"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """An engine that has served a request, while the collector is off."""
    isolation: Literal["thread", "process"] = request.param
    with LLM(isolation=isolation, n_ctx=2048, num_slots=2, n_threads=1) as llm:
        llm.generate(PROMPT, max_tokens=2)
        gc.collect()
        gc.disable()
        yield llm
        gc.enable()


def existing() -> list[int]:
    return [id(obj) for obj in gc.get_objects() if type(obj) in (Request, Sequence)]


def complete(llm: LLM) -> None:
    llm.generate(PROMPT, max_tokens=4, n=3, temperature=1, stop=["xyz"], logprobs=2)


def read_a_stream(llm: LLM) -> None:
    assert [*llm.stream(PROMPT, max_tokens=5)]


def read_a_chat(llm: LLM) -> None:
    assert [*llm.stream_chat([{"role": "user", "content": "Hi"}], max_tokens=5)]


def cancel_a_stream(llm: LLM) -> None:
    with llm.stream(PROMPT, ignore_eos=True, max_tokens=1500) as stream:
        next(iter(stream))


def drop_a_stream(llm: LLM) -> None:
    next(iter(llm.stream(PROMPT, ignore_eos=True, max_tokens=1500)))


def pass_a_deadline(llm: LLM) -> None:
    llm.generate(PROMPT, ignore_eos=True, max_tokens=1500, timeout_s=0.05)


def be_refused(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        llm.generate("Once " * 3000)
    with pytest.raises(GrammarError):
        llm.generate(PROMPT, grammar="root ::= x")


def prepare_alone(llm: LLM) -> None:
    llm.engine.prepare(PROMPT, llm.engine.sampling_defaults, RequestOptions())


def survive_a_death(llm: LLM) -> None:
    worker = getattr(llm.engine, "worker_pid", None)
    chunks = iter(llm.stream(PROMPT, ignore_eos=True, max_tokens=300))
    next(chunks)
    if worker is not None:
        os.kill(worker, signal.SIGKILL)
    assert [*chunks][-1].finish_reason == "length"


@pytest.mark.parametrize(
    "use",
    [
        complete, read_a_stream, read_a_chat, cancel_a_stream, drop_a_stream, pass_a_deadline, be_refused, prepare_alone,
        survive_a_death,
    ],
)  # fmt: skip
def test_requests_are_freed_without_the_collector(llm: LLM, use: Callable[[LLM], None]) -> None:
    """However a request ends, it and its sequences are gone when its caller has dropped it and the engine is done."""
    earlier = set(existing())
    use(llm)
    deadline = time.monotonic() + 30
    while left := set(existing()) - earlier:
        assert time.monotonic() < deadline, f"{len(left)} requests and sequences are left"
        time.sleep(0.01)  # the engine's thread lets go of what ended in its last tick
