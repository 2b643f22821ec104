"""Python goes on while llama.cpp works."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.native.conftest import TinyModels

from paceline import _native
from paceline.params import SamplingParams
from paceline.runtime import Context, Model, Sampler
from paceline.testing.models import LlamaSpec

pytestmark = pytest.mark.native


def runs_beside(call: Callable[[], object]) -> bool:
    """Whether another thread runs Python in the middle of the call, which takes at least 30 ms; tried up to five times.

    A call that keeps the GIL lets another thread run at its ends only. On a busy machine a thread may get no turn although it
    could have one.
    """
    return any(ran_beside(call) for _ in range(5))


def ran_beside(call: Callable[[], object]) -> bool:
    """Try the same once."""
    running, over = threading.Event(), threading.Event()
    moments: list[float] = []

    def work() -> None:
        while not over.is_set():
            moments.append(time.perf_counter())
            running.set()
            time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    running.wait(30)
    begin = time.perf_counter()
    call()
    end = time.perf_counter()
    over.set()
    thread.join()
    assert end - begin > 0.03
    margin = 0.2 * (end - begin)
    return any(begin + margin < moment < end - margin for moment in moments)


@pytest.mark.skipif(not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="this Python has no GIL to keep")
def test_a_call_that_keeps_the_gil_would_be_noticed() -> None:
    """The check itself: a C function called with the GIL held stops every thread."""
    libc = ctypes.PyDLL(None)
    assert not all(ran_beside(lambda: libc.usleep(200_000)) for _ in range(5))


def test_another_thread_runs_during_a_load(llama_cpp_source: Path) -> None:
    """Loading a vocabulary of 150,000 tokens."""
    path = str(llama_cpp_source / "models" / "ggml-vocab-qwen2.gguf")
    assert runs_beside(lambda: _native.Model.load([path], vocab_only=True))


def test_another_thread_runs_during_a_pass(tiny_models: TinyModels) -> None:
    """One forward pass over 1,000 tokens."""
    spec = LlamaSpec(n_layer=6, n_embd=256, n_head=4, n_head_kv=2, n_ff=1024)
    ids, zeros = np.ones(1000, dtype=np.int32), np.zeros(1000, dtype=np.int32)
    with Model.load(tiny_models(spec)) as model:
        with Context(model, n_ctx=1024, n_batch=1024, n_ubatch=1024, n_threads=1) as context:
            native = context.native
            positions = np.arange(1000, dtype=np.int32)
            assert runs_beside(lambda: native.decode(ids, positions, zeros, zeros.astype(np.uint8)))


def test_another_thread_runs_while_a_text_is_encoded(llama_cpp_source: Path) -> None:
    """A megabyte of text."""
    with Model.load(llama_cpp_source / "models" / "ggml-vocab-qwen2.gguf", vocab_only=True) as model:
        vocab = _native.Vocab(model.native)
        text = b"the quick brown fox " * 50_000
        assert runs_beside(lambda: vocab.encode(text, False, False))


@pytest.mark.parametrize("name", ["seed", "choice", "num_generated", "state"])
def test_another_thread_runs_while_one_waits_for_a_sampler(llama_cpp_source: Path, name: str) -> None:
    """Reading a fact of a sampler that is busy in another thread."""
    with Model.load(llama_cpp_source / "models" / "ggml-vocab-llama-spm.gguf", vocab_only=True) as model:
        params = SamplingParams(repeat_penalty=1.1, penalty_last_n=-1)
        sampler = Sampler(params, model).native
        prompt = np.ones(20_000_000, dtype=np.int32)

        def read() -> None:
            busy = threading.Thread(target=sampler.accept_prompt, args=(prompt,))
            busy.start()
            while busy.is_alive():
                value = getattr(sampler, name)
                if callable(value):
                    value()

        assert runs_beside(read)
