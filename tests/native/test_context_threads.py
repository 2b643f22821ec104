"""`Context`: aborted passes, calls from several threads, the threads that compute."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from tests.native.aborting import check_aborted_passes
from tests.native.conftest import TinyModels
from tests.native.contexts import goes_on

from paceline.errors import Closed, NoKvSlot
from paceline.runtime import Context, Model

pytestmark = pytest.mark.native


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "falcon-h1", "lfm2"])
def test_an_aborted_pass_leaves_every_row_where_it_was(tiny_models: TinyModels, kind: str) -> None:
    """Whenever the abort comes, the sequence goes on with exactly the logits it would have had."""
    rng = np.random.default_rng(3)
    start, more = rng.integers(0, 250, 64).tolist(), rng.integers(0, 250, 900).tolist()
    with (
        Model.load(tiny_models(kind)) as model,
        Context(model, n_ctx=1024, n_batch=1024, n_ubatch=32, n_threads=1) as context,
    ):
        check_aborted_passes(context, start, more)


def test_an_abort_with_nothing_running_does_nothing(context: Context) -> None:
    """The next pass is not hit by an earlier abort, and computes the same."""
    context.decode([1, 2])
    expected = context.logits(1)
    context.clear()
    context.abort()
    context.decode([1, 2])
    assert context.positions(0) == (0, 1)
    assert np.array_equal(context.logits(1), expected)


# ---- threads


def test_calls_from_two_threads_take_turns(llama: Model) -> None:
    """Two threads on one context both get right results."""
    with Context(llama, n_ctx=512, n_seq_max=2, n_threads=1) as context:
        context.decode([1, 2, 3])
        expected = context.logits(2)
        context.clear()
        errors: list[BaseException] = []

        def work(seq_id: int) -> None:
            try:
                for _ in range(20):
                    context.decode([1, 2, 3], seq_ids=seq_id)
                    context.remove(seq_id)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seq_id,)) for seq_id in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        context.decode([1, 2, 3])
        assert np.allclose(context.logits(2), expected, atol=1e-5)


def test_the_number_of_threads_changes_nothing(llama: Model) -> None:
    """More threads compute the same."""
    with Context(llama, n_ctx=256, n_threads=1) as context:
        context.decode([1, 2, 3])
        expected = context.logits(2)
        context.set_threads(2, 3)
        assert (context.n_threads, context.n_threads_batch) == (2, 3)
        context.clear()
        context.decode([1, 2, 3])
        assert np.allclose(context.logits(2), expected, atol=1e-5)


def num_threads() -> int:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("the system does not list the threads of a process")
    return len(list(tasks.iterdir()))


@pytest.mark.parametrize("num_passes", [0, 1])
def test_replaced_threads_end(context: Context, num_passes: int) -> None:
    """After each change the earlier threads end with the next pass, or at once if they have computed nothing."""
    context.set_threads(2, 3)
    context.decode([1, 2])
    before = num_threads()
    for round_ in range(50):
        context.set_threads(2, 3)
        for _ in range(num_passes):
            context.clear()
            context.decode([1] * (1 + round_ % 2))  # with the threads for one token, and with those for more
    context.decode([1])
    assert num_threads() <= before


def test_threads_replaced_after_a_refused_pass_end(context: Context) -> None:
    """A pass that found no cells ends none that may still be needed, and the next one ends all."""
    context.set_threads(2)
    for _ in range(4):
        context.decode([1] * 128)
    before = num_threads()
    for _ in range(10):
        context.set_threads(2)
        with pytest.raises(NoKvSlot):
            context.decode([1], seq_ids=1)
    context.remove(0, 500)
    goes_on(context, 1)
    assert num_threads() <= before


def test_a_closed_context_raises_closed(llama: Model) -> None:
    """Every use after close raises Closed; closing twice is fine."""
    context = Context(llama, n_ctx=256)
    context.close()
    context.close()
    for use in (lambda: context.decode([1]), lambda: context.n_ctx, lambda: context.positions(0), context.abort):
        with pytest.raises(Closed):
            use()


def test_closing_during_a_pass_lets_it_finish(llama: Model) -> None:
    """The memory is freed when the running call returns, not under it."""
    context = Context(llama, n_ctx=1024, n_batch=1024, n_threads=1)
    started = threading.Event()
    results: list[object] = []

    def work() -> None:
        native = context.native
        ids = np.ones(1000, dtype=np.int32)
        started.set()
        native.decode(
            ids, np.arange(1000, dtype=np.int32), np.zeros(1000, dtype=np.int32), np.ones(1000, dtype=np.uint8) * 0
        )
        results.append("finished")

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(30)
    context.close()
    thread.join()
    assert results == ["finished"]
