"""LFM2 with a sliding window: recurrent layers, and attention that sees the last tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.exact import EXACT
from tests.native.aborting import check_aborted_passes
from tests.native.test_prefix_memory import ASK, OPTIONS, assert_same, check_cuts, ids, uncached

from paceline import LLM
from paceline.runtime import Context, MemoryClass, Model
from paceline.testing.models import Lfm2Spec, write_model
from paceline.testing.models.gguf_parts import Value

pytestmark = pytest.mark.native


@dataclass(frozen=True, kw_only=True)
class WindowedLfm2Spec(Lfm2Spec):
    """LFM2 with a window in its layers of attention."""

    n_swa: int = 32

    def metadata(self) -> dict[str, Value]:
        return super().metadata() | self.prefixed({"attention.sliding_window": self.n_swa})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lfm2") / "windowed.gguf", WindowedLfm2Spec())


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model.load(path) as found:
        assert (found.memory_class, found.n_swa) == (MemoryClass.HYBRID, 32)
        yield found


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(512, 512), (512, 64), (64, 64), (8, 8)])
def test_passes_of_any_size_go_on_far_beyond_the_window(model: Model, n_batch: int, n_ubatch: int) -> None:
    """Cells that the windows have left are used again, whatever is kept for a pass that fails: logits as token by token."""
    prompts = [ids(1100, seed) for seed in (1, 2)]
    with Context(model, n_ctx=4096, n_seq_max=2, n_batch=n_batch, n_ubatch=n_ubatch, **EXACT) as context:
        for start in range(0, 1100, n_batch // 2):
            parts = [prompt[start : start + n_batch // 2] for prompt in prompts]
            seq_ids = np.repeat(np.arange(2, dtype=np.int32), len(parts[0]))
            context.decode([*parts[0], *parts[1]], seq_ids=seq_ids)
        found = context.logits(2 * len(parts[0]) - 1)
        context.clear()
        for start in range(0, 1100, 4):
            context.decode(prompts[1][start : start + 4])
        assert np.allclose(found, context.logits(3), atol=5e-4)


@pytest.mark.parametrize("n_ubatch", [1024, 32])
def test_an_aborted_pass_leaves_window_and_recurrent_state_where_they_were(model: Model, n_ubatch: int) -> None:
    """Of one piece and of many: the sequence goes on with the logits it would have had."""
    with Context(model, n_ctx=2048, n_batch=1024, n_ubatch=n_ubatch, n_threads=1) as context:
        check_aborted_passes(context, ids(200, 1), ids(900, 2))


def test_forks_of_one_that_runs_leave_room_for_all(path: Path) -> None:
    """Many in sequence, while it generates: nothing is preempted, and each is as if computed."""
    prompt = ids(100)
    with LLM(path, **{**OPTIONS, "num_slots": 4, "n_ctx": 4096, "n_ubatch": 32}) as llm:
        stream = llm.stream(prompt, **{**ASK, "max_tokens": 700}, max_buffered_tokens=1000)
        forks = [llm.generate([*prompt, *ids(20, seed)], **ASK, n=2) for seed in range(1, 9)]
        both = llm.generate(ids(700, 20), **{**ASK, "max_tokens": 300}, n=3)  # copies of all cells that there are
        assert sum(len(chunk.token_ids) for chunk in stream) == 700
        assert llm.stats().number("paceline_preemptions_total") == 0
    for seed, fork in enumerate(forks, 1):
        assert fork.usage.cached_tokens in (99, 100)
        for choice in fork.choices:
            assert choice.token_ids == uncached(path, [*prompt, *ids(20, seed)]).token_ids
    assert len({choice.token_ids for choice in both.choices}) == 1


def test_checkpoints_and_cut_ranges_are_as_if_computed(path: Path, model: Model) -> None:
    """A prompt that goes another way, and parts of a saved range."""
    prompt = ids(150)
    others = [[*prompt[:130], *ids(30, seed)] for seed in (5, 6, 7)]
    with LLM(path, **OPTIONS) as llm:
        for other in [prompt, *others]:
            assert_same(llm.generate(other, **ASK), uncached(path, other))
    with Context(model, n_ctx=1024, n_seq_max=4, **EXACT) as context:
        check_cuts(context)
