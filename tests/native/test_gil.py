"""Python goes on while llama.cpp works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.native.conftest import TinyModels

from paceline.runtime import Context, Model

pytestmark = pytest.mark.native


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """A thread that counts for as long as the block lasts; answers how far it has come."""
    running, over, count = threading.Event(), threading.Event(), [0]

    def work() -> None:
        running.set()
        while not over.is_set():
            count[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    running.wait(30)
    try:
        yield lambda: count[0]
    finally:
        over.set()
        thread.join()


def test_another_thread_makes_progress_during_a_load(llama_cpp_source: Path) -> None:
    """With the GIL held, the counter could move only in the few switches between calls."""
    path = llama_cpp_source / "models" / "ggml-vocab-qwen2.gguf"
    with counting() as count:
        before = count()
        Model.load(path, vocab_only=True).close()
        assert count() - before > 1000


def test_another_thread_makes_progress_during_a_pass(tiny_models: TinyModels) -> None:
    """The same for the forward passes of a context."""
    with Model.load(tiny_models("llama")) as model:
        with Context(model, n_ctx=1024, n_batch=1024, n_ubatch=1024, n_threads=1) as context, counting() as count:
            before = count()
            for _ in range(3):
                context.decode([1] * 1000)
                context.clear()
            assert count() - before > 1000
