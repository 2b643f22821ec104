"""The memory of a model, from its header and by llama.cpp's plan, against loading."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.native.architecture_files import ArchitectureTool, build_architecture_tool, chosen
from tests.native.conftest import TinyModels

from paceline import LLM, estimate_memory
from paceline.demo import demo_model_path
from paceline.engine import dry_run, memory_needs
from paceline.engine.memory_fit import MemoryQuestion, MemoryReport
from paceline.engine.memory_needs import estimate_on_machine
from paceline.errors import (
    EngineError,
    InvalidParams,
    InvalidType,
    ModelLoadError,
    NotEnoughMemory,
    QueueFull,
    Unsupported,
)
from paceline.runtime import (
    Context,
    MemoryEstimate,
    Model,
    context_options,
    memory,
    memory_in_use,
    plan_memory,
    projector_facts,
)
from paceline.runtime.context_options import ContextOptions
from paceline.runtime.memory import mebibytes
from paceline.testing.models import KINDS, LlamaSpec, Qwen2VlSpec, Qwen25VisionSpec, write_model, write_split_model

GENERATING = [kind for kind in KINDS if kind not in ("bert", "reranker", "t5")]
SIZES: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 3, "n_outputs_max": 8, "n_threads": 1}
MIB = 1 << 20


def close(found: int | None, expected: int | None, share: float = 0.05) -> bool:
    """Whether two counts of bytes differ by at most this share."""
    assert found is not None and expected is not None
    return abs(found - expected) <= share * expected


def planned_here(question: MemoryQuestion) -> MemoryReport:
    """Return the result of a dry run's process, through its JSON."""
    again = msgspec.json.decode(json.dumps(dataclasses.asdict(question)), type=MemoryQuestion)
    return msgspec.json.decode(msgspec.json.encode(dry_run.answer(again)), type=MemoryReport)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`free(bytes)`: a machine with that much free memory, and dry runs in this process, which sees it."""

    def limit(count: int) -> None:
        monkeypatch.setattr(memory_needs, "available_memory", lambda: count)
        monkeypatch.setattr(memory, "available_memory", lambda: count)
        monkeypatch.setattr(memory_needs, "plan", planned_here)

    return limit


@pytest.mark.parametrize("kind", GENERATING)
def test_a_plan_is_what_loading_takes(tiny_models: TinyModels, kind: str) -> None:
    """Weights, cache and buffers, each within 5 %."""
    path = tiny_models(kind)
    with Model.load(path, no_alloc=True) as sketch:
        plan = plan_memory(sketch, **SIZES)
    with Model.load(path) as model, Context(model, **SIZES) as context:
        used = memory_in_use(context)
    assert close(plan.weights_bytes, used.weights_bytes)
    assert plan.cache_bytes == used.cache_bytes
    assert close(plan.compute_bytes, used.compute_bytes)
    assert (plan.n_ctx, plan.is_measured, plan.fits) == (1024, True, True)


@pytest.mark.parametrize("kind", GENERATING)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_ctx": 3000, "num_slots": 2},
        {"type_k": "f32", "type_v": "bf16", "flash_attn": "on"},
        {"swa_full": True},
        {"n_ubatch": 64, "num_slots": 3, "n_ctx": 8192},
    ],
    ids=str,
)
def test_the_header_is_enough_for_weights_and_cache(
    tiny_models: TinyModels, kind: str, options: dict[str, Any], free: Callable[[int], None]
) -> None:
    """Windows and states of recurrent layers included, for all slots and sequence ids of an engine."""
    free(64 << 30)
    path = tiny_models(kind)
    plan = estimate_memory(path, **options)
    header = estimate_memory(path, dry_run=False, **options)
    assert header.cache_bytes == plan.cache_bytes
    assert close(header.weights_bytes, plan.weights_bytes, 0.01)
    assert header.compute_bytes is None
    assert (header.n_ctx, header.num_slots) == (plan.n_ctx, plan.num_slots)


def test_a_split_set_has_the_weights_of_all_its_files(tmp_path: Path) -> None:
    """Named by its first part, or by all of them."""
    parts = write_split_model(tmp_path / "set.gguf", LlamaSpec(), parts=3)
    whole, listed = (estimate_memory(model, dry_run=False) for model in (parts[0], parts))
    assert (whole.weights_bytes, whole.cache_bytes) == (listed.weights_bytes, listed.cache_bytes)
    assert close(whole.weights_bytes, Model.load(parts[0]).size_bytes, 0.001)


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> ArchitectureTool:
    """Writes models of architectures."""
    return build_architecture_tool(tmp_path_factory.mktemp("tool"))


@pytest.mark.full
@pytest.mark.parametrize("name", chosen())
def test_the_header_of_an_architecture_has_its_cache(
    tool: ArchitectureTool, tmp_path: Path, name: str, free: Callable[[int], None]
) -> None:
    """To the byte, except for architectures that are known to keep more."""
    free(64 << 30)
    with tool.file(name, tmp_path) as path:
        header = memory_needs.ModelHeader([path])
        estimate = estimate_memory(path, dry_run=False, n_ctx=8192, num_slots=1)
        if header.keeps_nothing:
            assert estimate.cache_bytes == 0
            return
        if header.architecture == "t5":  # no engine runs it
            with pytest.raises(Unsupported, match="encoder-decoder"):
                estimate_memory(path, n_ctx=8192, num_slots=1)
            return
        plan = estimate_memory(path, n_ctx=8192, num_slots=1)
    assert close(estimate.weights_bytes, plan.weights_bytes, 0.01)
    if header.keeps_more:
        assert estimate.cache_bytes < plan.cache_bytes
    else:
        assert estimate.cache_bytes == plan.cache_bytes


def test_a_dry_run_is_a_process_of_its_own() -> None:
    """It equals a plan in this process; nothing is loaded here."""
    path = demo_model_path()
    estimate = estimate_memory(path, n_ctx=2048, num_slots=2)
    with LLM(path, n_ctx=2048, num_slots=2) as llm:
        context = llm._engine._backend._context  # type: ignore[attr-defined]
        used = memory_in_use(context)
    assert close(estimate.total_bytes, used.total_bytes)
    assert estimate.cache_bytes == used.cache_bytes


def test_a_dry_run_raises_what_a_load_raises(tmp_path: Path) -> None:
    """A bad file and a bad option, by their classes."""
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"bad\.gguf"):
        estimate_memory(bad)
    with pytest.raises(InvalidParams, match="n_ubatch"):
        estimate_memory(demo_model_path(), n_ubatch=10**9)
    with pytest.raises(TypeError, match="n_ctxx"):
        estimate_memory(demo_model_path(), n_ctxx=1)


def test_a_dry_run_that_dies_is_an_error_and_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its status and last words; an engine loads without a plan, with a warning."""
    monkeypatch.setattr(memory_needs.sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="status 1"):
        estimate_memory(demo_model_path())
    monkeypatch.setattr(memory_needs, "_surely_fits", lambda *_: False)
    with caplog.at_level(logging.WARNING, "paceline.engine"), LLM(demo_model_path(), num_slots=1) as llm:
        assert llm.generate("Once", max_tokens=2).text
    assert "memory is not planned" in caplog.text


def test_a_model_without_weights_only_plans() -> None:
    """A context of it is refused."""
    with Model.load(demo_model_path(), no_alloc=True) as sketch, pytest.raises(Unsupported, match="no_alloc"):
        Context(sketch, n_ctx=256)


# ---- engines


def small_machine(free: Callable[[int], None], share: float, **options: Any) -> MemoryEstimate:
    """Limit the memory to a share of the demo model's need with these options, and return that."""
    estimate = estimate_memory(demo_model_path(), **options)
    free(int(estimate.devices[-1].needed_bytes * share))
    return estimate


def test_an_engine_chooses_a_context_that_fits(free: Callable[[int], None], caplog: pytest.LogCaptureFixture) -> None:
    """Less than the default, and said."""
    wanted = small_machine(free, 0.8)
    with caplog.at_level(logging.INFO, "paceline.engine"), LLM(demo_model_path()) as llm:
        assert 512 <= llm.limits.num_cells < wanted.n_ctx
        assert llm.generate("Once", max_tokens=2).text
    assert f"instead of {wanted.n_ctx}" in caplog.text
    assert "of weights" in caplog.text


def test_what_was_given_and_cannot_fit_is_refused_before_loading(
    free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the needed memory, the free memory, and the way out; fit=False leaves the check to the context."""
    small_machine(free, 0.5, n_ctx=16384)
    loaded: list[str] = []
    load = Model.load.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Model], path: Any, **options: Any) -> Model:
        if not options.get("no_alloc"):
            loaded.append(str(path))
        made: Model = load(cls, path, **options)
        return made

    monkeypatch.setattr(Model, "load", classmethod(counted))
    with pytest.raises(NotEnoughMemory, match=r"needs .* of host memory .* are free; n_ctx \d+ would fit"):
        LLM(demo_model_path(), n_ctx=16384)
    assert loaded == []
    with LLM(demo_model_path(), n_ctx=16384, fit=False) as llm:
        assert llm.limits.num_cells == 16384


def test_what_surely_fits_is_planned_neither_before_nor_by_its_context(
    free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan reads the header again; if memory may be short the context still makes its own."""
    limits: list[object] = []
    resolve = ContextOptions.resolve

    def noting(self: ContextOptions, model: Model, **options: Any) -> dict[str, Any]:
        found = resolve(self, model, **options)
        limits.append(found["max_host_bytes"])
        return found

    needed = estimate_memory(demo_model_path(), n_ctx=16384).devices[-1].needed_bytes
    monkeypatch.setattr(ContextOptions, "resolve", noting)
    monkeypatch.setattr(context_options, "available_memory", lambda: 2 * needed)  # the bound of a context is far above
    free(needed * 20)
    with LLM(demo_model_path(), n_ctx=16384), LLM(demo_model_path(), n_ctx=16384, fit=False):
        pass
    assert limits == [None, 2 * needed]


def test_what_cannot_fit_into_the_machine_is_known_whatever_is_free(
    free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All memory counts then; fit=False leaves that check out, too."""
    needed = estimate_memory(demo_model_path(), n_ctx=16384).devices[-1].needed_bytes
    free(needed // 4)
    monkeypatch.setattr(memory, "usable_memory", lambda: needed + needed // 8)
    estimate = estimate_on_machine(demo_model_path(), {"n_ctx": 16384}, dry_run=True)
    assert (estimate.devices[-1].needed_bytes, estimate.devices[-1].free_bytes) == (needed, needed // 4)
    monkeypatch.setattr(memory, "usable_memory", lambda: needed // 2)
    estimate_on_machine(demo_model_path(), {}, dry_run=False)
    with pytest.raises(NotEnoughMemory, match=r"needs .* of host memory .* are all that there is; n_ctx \d+ would fit"):
        estimate_on_machine(demo_model_path(), {"n_ctx": 16384}, dry_run=False)
    assert not estimate_on_machine(demo_model_path(), {"n_ctx": 16384, "fit": False}, dry_run=False).fits


def test_mapped_weights_that_exceed_the_memory_load_with_a_warning(
    free: Callable[[int], None], caplog: pytest.LogCaptureFixture, tiny_models: TinyModels
) -> None:
    """llama.cpp reads them again; only allocated memory must fit."""
    path = tiny_models(LlamaSpec(n_embd=256, n_layer=8))
    estimate = estimate_memory(path, n_ctx=256, num_slots=1)
    free(estimate.devices[-1].needed_bytes + estimate.weights_bytes // 2)
    with caplog.at_level(logging.WARNING, "paceline.engine"), LLM(path, n_ctx=256, num_slots=1):
        pass
    assert "the weights do not stay in memory" in caplog.text
    with pytest.raises(NotEnoughMemory, match="weights"):
        LLM(path, n_ctx=256, num_slots=1, load_mode="none")


def test_slots_of_a_recurrent_model_are_chosen(free: Callable[[int], None], tiny_models: TinyModels) -> None:
    """Each has a state; a number that was given stays, and is refused."""
    path = tiny_models("mamba")
    least, wanted = (estimate_memory(path, num_slots=slots).devices[-1].needed_bytes for slots in (1, 8))
    free((least + wanted) // 2)
    with LLM(path, max_queue=0, when_full="refuse") as llm:
        chosen = llm.limits.num_slots
        assert 1 <= chosen < 8
        assert llm._engine.config.num_slots == chosen  # what /props, /slots, /health and the server's limits show
        assert llm.stats().number("paceline_slots") == chosen
        streams = [llm.stream([1, 2, 3], max_tokens=10**6, ignore_eos=True) for _ in range(chosen)]
        with pytest.raises(QueueFull, match=f"{chosen} requests"):
            llm.stream([1, 2, 3])
        for stream in streams:
            stream.close()
    with pytest.raises(NotEnoughMemory):
        LLM(path, num_slots=8)


# ---- single tensors


def text(**options: Any) -> str:
    with LLM(demo_model_path(), num_slots=1, n_ctx=512, **options) as llm:
        return llm.generate("Once upon a time", temperature=0, max_tokens=20).text


def test_placed_tensors_change_no_text() -> None:
    """Every way to name host memory, on a build that may have no other."""
    plain = text()
    for options in ({"tensor_overrides": {r"ffn_(up|down)": "CPU"}}, {"n_cpu_ffn": 2}, {"cpu_moe": True}):
        assert text(**options) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_overrides": {"(": "CPU"}}, r"'\(' is no regular expression"),
        ({"tensor_overrides": {"a{2,1}": "CPU"}}, "is no regular expression"),
        ({"tensor_overrides": {"": "CPU"}}, "1 to 512 bytes"),
        ({"tensor_overrides": {"(" * 300 + ")" * 300: "CPU"}}, "1 to 512 bytes"),
        ({"tensor_overrides": {"a\0b": "CPU"}}, "tensor_overrides"),
        ({"tensor_overrides": {"ffn": "GPU7"}}, "there is no buffer type 'GPU7'; this build has .*CPU"),
        ({"tensor_overrides": "ffn=CPU"}, "must be a mapping"),
        ({"tensor_overrides": {"ffn": 1}}, "tensor_overrides"),
        ({"tensor_overrides": {f"a{number}": "CPU" for number in range(5000)}}, "5000 entries"),
        ({"n_cpu_moe": -1}, "n_cpu_moe"),
        ({"n_cpu_moe": 513}, "n_cpu_moe"),
        ({"n_cpu_ffn": 1.5}, "n_cpu_ffn"),
        ({"cpu_moe": 1}, "cpu_moe"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_placements_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    """Before llama.cpp sees them, naming the option."""
    with pytest.raises(InvalidParams, match=message):
        Model.load(demo_model_path(), **options)


def test_the_deepest_patterns_are_compiled() -> None:
    """As deep as their length allows: no crash."""
    pattern = "(" * 255 + "x" + ")" * 255
    assert Model.load(demo_model_path(), tensor_overrides={pattern: "CPU"}).n_layer > 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kv_overrides": 5}, InvalidType, "kv_overrides"),
        ({"n_ctx": "x"}, InvalidType, "n_ctx"),
        ({"n_ubatch": "x"}, InvalidType, "n_ubatch"),
        ({"n_batch": "x"}, InvalidType, "n_batch"),
        ({"kv_overrides": {"llama.block_count": -1}}, ModelLoadError, "block_count"),
        ({"kv_overrides": {"llama.block_count": 4_000_000_000}}, ModelLoadError, "block_count"),
    ],
)
def test_wrong_options_and_counts_are_named_by_an_estimate(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Of estimates and of loads, which estimate first; a damaged count of layers takes no memory of its own."""
    with pytest.raises(error, match=words):
        estimate_memory(demo_model_path(), dry_run=False, **options)
    with pytest.raises(error, match=words):
        LLM(demo_model_path(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"rope_freq_base": float("nan")},
        {"rope_freq_base": float("inf")},
        {"kv_overrides": {"general.name": "\ud800"}},
        {"n_ctx": float("nan")},
    ],
)
def test_values_that_json_does_not_have_are_refused_by_a_dry_run(options: dict[str, Any]) -> None:
    """The process of the dry run gets them as they are, and names the option."""
    with pytest.raises(InvalidParams, match=next(iter(options))):
        estimate_memory(demo_model_path(), dry_run=True, **options)


@pytest.mark.parametrize("is_dry", [False, True])
def test_a_projector_counts(tmp_path: Path, is_dry: bool) -> None:
    """The projector beside the model or a given projector, as it will be loaded; none if left out, damaged, or ambiguous."""
    model = write_model(tmp_path / "model.gguf", Qwen2VlSpec())

    def estimated(**options: Any) -> MemoryEstimate:
        return estimate_memory(model, dry_run=is_dry, num_slots=1, n_ctx=512, **options)

    alone = estimated()
    projector = write_model(tmp_path / "mmproj.gguf", Qwen25VisionSpec())
    added = projector_facts(projector).weights_bytes
    assert added > 50_000
    for options in ({}, {"mmproj": True}, {"mmproj": projector}, {"image_max_tokens": 100}):
        found = estimated(**options)
        assert found.weights_bytes == alone.weights_bytes + added
        assert found.is_measured is is_dry
        if is_dry:
            assert (found.compute_bytes or 0) > (alone.compute_bytes or 0)
    assert estimated(mmproj=False).total_bytes == alone.total_bytes
    (tmp_path / "mmproj-2.gguf").write_bytes(projector.read_bytes()[:-1000])
    assert estimated().total_bytes == alone.total_bytes
    assert estimated(mmproj=tmp_path / "mmproj-2.gguf").total_bytes == alone.total_bytes  # the load says what is wrong


# ---- the context that is chosen where n_ctx is left open

LONG = LlamaSpec(n_ctx_train=65536)


def cells_of(path: Path, **options: Any) -> int:
    """Return the cells of an engine, which an estimate and `paceline info` report as well."""
    with LLM(path, **options) as llm:
        cells = llm.limits.num_cells
        assert cells is not None
    if "fit" not in options:
        assert estimate_memory(path, dry_run=False, **options).n_ctx == cells
        assert memory_needs.memory_report(path, options).wanted.n_ctx == cells
    return cells


@pytest.mark.parametrize(("num_slots", "cells"), [(1, 65536), (8, 65536), (32, 131072)])
def test_one_request_gets_the_context_that_the_model_was_trained_for(
    free: Callable[[int], None], tiny_models: TinyModels, num_slots: int, cells: int
) -> None:
    """The slots share it; 4,096 cells a slot are the least, and never more than one sequence can use beyond these."""
    path = tiny_models(LONG)
    free(64 << 30)
    assert cells_of(path, num_slots=num_slots) == cells
    assert cells_of(path, num_slots=num_slots, n_ctx=1024) == 1024
    assert cells_of(path, num_slots=num_slots, fit=False) == 4096 * num_slots


def test_its_cells_take_at_most_a_quarter_of_the_free_memory(
    free: Callable[[int], None], tiny_models: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    """As many cells as fit into it, but 4,096 a slot at least; the log has cells, tokens and memory."""
    path, options = tiny_models(LONG), {"num_slots": 1, "n_batch": 4}  # whose buffers are small beside the cells
    cell_bytes = estimate_memory(path, n_ctx=1024, num_slots=1, dry_run=False).cache_bytes // 1024
    free(4 * 20_000 * cell_bytes)
    with caplog.at_level(logging.INFO, "paceline.engine"):
        assert cells_of(path, **options) == 20_000 // 256 * 256
    shown = f"KV cache: 19968 cells shared by 1 slots, 19968 tokens for one request, {mebibytes(19968 * cell_bytes)}"
    assert shown in caplog.text and "at most a quarter of the free memory" in caplog.text
    free(4 * 4000 * cell_bytes)
    assert cells_of(path, **options) == 4096


def test_a_longer_context_is_chosen_only_if_nothing_else_has_to_give_way_for_it(
    free: Callable[[int], None], tiny_models: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    """With a plan: the buffers of all cells do not fit, those of 4,096 do; weights stay packed, and memory is not short."""
    path = tiny_models(LONG)
    least = estimate_memory(path, n_ctx=4096, num_slots=1).devices[-1].needed_bytes
    free(2 * least)
    with caplog.at_level(logging.INFO, "paceline.engine"), LLM(path, num_slots=1) as llm:
        assert llm.limits.num_cells is not None and 4096 < llm.limits.num_cells < 65536
    assert "memory is short" not in caplog.text and "memory of CPU" in caplog.text


def test_its_memory_may_be_given(free: Callable[[int], None], tiny_models: TinyModels) -> None:
    """fit_cache_bytes is the bound then, whatever is free; 0 leaves 4,096 cells a slot."""
    path = tiny_models(LONG)
    cell_bytes = estimate_memory(path, n_ctx=1024, num_slots=1, dry_run=False).cache_bytes // 1024
    free(64 << 30)
    assert cells_of(path, num_slots=1, fit_cache_bytes=10_000 * cell_bytes) == 10_000 // 256 * 256
    assert cells_of(path, num_slots=2, fit_cache_bytes=0) == 8192
    assert cells_of(path, num_slots=1, fit_cache_bytes=1 << 40) == 65536
    with pytest.raises(InvalidParams, match="fit_cache_bytes must be an integer >= 0, not -1"):
        LLM(path, fit_cache_bytes=-1)


def test_a_longer_context_never_makes_a_load_wait_for_a_plan(
    free: Callable[[int], None], tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model loaded without a plan with 4,096 cells is loaded without a plan with all chosen cells."""
    path = tiny_models(LONG)
    least = estimate_memory(path, n_ctx=4096, num_slots=1, n_batch=4).total_bytes
    found: list[int | None] = []

    def refused(_: MemoryQuestion) -> MemoryReport:
        raise AssertionError("planned")

    for times in (6, 12, 96):
        free(times * least)
        monkeypatch.setattr(memory_needs, "plan", refused)
        with LLM(path, num_slots=1, n_batch=4) as llm:
            found.append(llm.limits.num_cells)
    assert found == sorted(set(found)) and found[-1] == 65536  # type: ignore[type-var]


def test_a_model_that_is_loaded_gets_it_too(free: Callable[[int], None], tiny_models: TinyModels) -> None:
    """By the files that it came from."""
    free(64 << 30)
    with Model.load(tiny_models(LONG)) as model, LLM(model, num_slots=1) as llm:
        assert (llm.limits.num_cells, llm.limits.max_positions) == (65536, 65536)


@pytest.mark.parametrize("kind", ["mamba", "falcon-h1", "gemma3", "bert"])
def test_other_memories_get_what_was_trained_and_no_more(
    free: Callable[[int], None], tiny_models: TinyModels, kind: str
) -> None:
    """States take no cells, windows a few, and a model without a context has none."""
    spec = dataclasses.replace(KINDS[kind], n_ctx_train=10_000)  # type: ignore[type-var]
    free(64 << 30)
    with LLM(tiny_models(spec), num_slots=1) as llm:
        if kind == "bert":
            assert llm.limits.num_cells is None and llm.embed("a text").shape == (llm.model.n_embd,)
            return
        assert llm.limits.max_positions == 10_000
        assert llm.limits.num_cells == (None if kind == "mamba" else 10_240)
        assert len(llm.generate([1] * 6000, max_tokens=2, ignore_eos=True).token_ids) == 2


def test_a_host_whose_free_memory_is_unknown_keeps_the_least(free: Any, tiny_models: TinyModels) -> None:
    """4,096 cells a slot."""
    free(None)
    assert cells_of(tiny_models(LONG), num_slots=1) == 4096
