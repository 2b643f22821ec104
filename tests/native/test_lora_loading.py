"""LoRA adapters that are loaded and unloaded while an engine generates: real files, and files that llama.cpp would abort on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.native.conftest import TinyModels

from paceline import LLM
from paceline.errors import AdapterError, AdapterInUse, AdapterNotFound, InvalidParams
from paceline.runtime import Context, Model
from paceline.testing.models import KINDS, LlamaSpec, write_lora, write_model

pytestmark = pytest.mark.native

SMALL: dict[str, Any] = {"num_slots": 4, "n_ctx": 512, "n_threads": 1}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPT = "Hello, who is there in the old house by the river?"
LONG_S = 60.0


@pytest.fixture
def llm(tiny_models: TinyModels, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(tiny_models("llama"), **SMALL, **getattr(request, "param", {})) as made:
        yield made


isolations = pytest.mark.parametrize("llm", [{}, {"isolation": "process"}], indirect=True, ids=["thread", "process"])


def adapter(folder: Path, name: str = "lora", **options: Any) -> Path:
    return write_lora(folder / f"{name}.gguf", KINDS["llama"], **options)


def tokens(llm: LLM, **options: Any) -> list[int]:
    return llm.generate(PROMPT, **GREEDY, **options).token_ids


@isolations
def test_an_adapter_is_loaded_used_and_unloaded(llm: LLM, tmp_path: Path, tiny_models: TinyModels) -> None:
    """It gives the output of an engine that had it from its start; without it nothing changes."""
    path = adapter(tmp_path)
    with LLM(tiny_models("llama"), **SMALL, lora=[path]) as begun:
        expected = tokens(begun, lora={"lora": 1.0})
        assert [(adapter.name, adapter.path) for adapter in begun.loras()] == [("lora", str(path))]
    plain = tokens(llm)
    llm.load_lora("style", path)
    assert tokens(llm, lora={"style": 1.0}) == expected != plain
    assert tokens(llm) == plain
    llm.unload_lora("style")
    assert llm.loras() == ()
    with pytest.raises(InvalidParams, match="'style'"):
        tokens(llm, lora={"style": 1.0})
    assert tokens(llm) == plain


@isolations
def test_a_name_with_another_file_has_its_own_cache(llm: LLM, tmp_path: Path) -> None:
    """Nothing that the first file computed is used for the second, nor after it is loaded again."""
    first, second = adapter(tmp_path, "a"), adapter(tmp_path, "b", seed=9)
    llm.load_lora("x", first)
    of_first = tokens(llm, lora={"x": 1.0})
    again = llm.generate(PROMPT, **GREEDY, lora={"x": 1.0})
    assert again.token_ids == of_first
    assert again.usage.cached_tokens > 0
    llm.unload_lora("x")
    llm.load_lora("x", second)
    loaded = llm.generate(PROMPT, **GREEDY, lora={"x": 1.0})
    assert loaded.token_ids != of_first
    assert loaded.usage.cached_tokens == 0
    llm.load_lora("x", first, in_place=True)
    replaced = llm.generate(PROMPT, **GREEDY, lora={"x": 1.0})
    assert (replaced.token_ids, replaced.usage.cached_tokens) == (of_first, 0)


def test_an_adapter_that_a_stream_uses_stays_until_its_end(llm: LLM, tmp_path: Path) -> None:
    """Unloading fails in time, and succeeds when the stream is left."""
    llm.load_lora("x", adapter(tmp_path))
    paused: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "max_buffered_tokens": 1}
    with llm.stream(PROMPT, lora={"x": 1.0}, **paused) as stream:
        chunks = iter(stream)
        next(chunks)
        with pytest.raises(AdapterInUse):
            llm.unload_lora("x", timeout_s=0.01)
    llm.unload_lora("x", timeout_s=LONG_S)
    with pytest.raises(AdapterNotFound):
        llm.unload_lora("x")


def test_adapters_come_and_go_while_streams_run(llm: LLM, tmp_path: Path) -> None:
    """Sequences with and without adapters get the same as alone, however many adapters are loaded and freed meanwhile."""
    paths = [adapter(tmp_path, f"a{seed}", seed=seed) for seed in range(3)]
    llm.load_lora("fixed", paths[0])
    expected = {"none": tokens(llm), "fixed": tokens(llm, lora={"fixed": 1.0})}
    failures: list[BaseException] = []

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            for _ in range(12):
                work(*arguments)
        except BaseException as error:
            failures.append(error)

    def generate(name: str, lora: Mapping[str, float]) -> None:
        assert tokens(llm, lora=lora) == expected[name]

    def churn(name: str, path: Path) -> None:
        llm.load_lora(name, path)
        tokens(llm, lora={name: 1.0})
        llm.unload_lora(name, timeout_s=LONG_S)

    works = [
        (generate, "none", {}),
        (generate, "fixed", {"fixed": 1.0}),
        (churn, "b", paths[1]),
        (churn, "c", paths[2]),
    ]
    threads = [threading.Thread(target=guarded, args=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not failures
    assert [adapter.name for adapter in llm.loras()] == ["fixed"]


@isolations
def test_files_that_are_no_adapter_for_the_model_are_refused(llm: LLM, tmp_path: Path) -> None:
    """Another architecture, other sizes, a tensor that the model lacks, half of a pair, a model, garbage, a missing file."""
    plain = tokens(llm)
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + b"\xff" * 200)
    wrong = [
        tmp_path / "missing.gguf",
        tmp_path,
        garbage,
        write_model(tmp_path / "model.gguf", KINDS["llama"]),
        write_lora(tmp_path / "qwen2.gguf", KINDS["qwen2"]),
        write_lora(tmp_path / "small.gguf", LlamaSpec(n_embd=32, n_head=2, n_head_kv=1)),
        write_lora(tmp_path / "deep.gguf", LlamaSpec(n_layer=7)),
        adapter(tmp_path, "kind", metadata={"adapter.type": "alora"}),
        adapter(tmp_path, "general", metadata={"general.type": "model"}),
        adapter(tmp_path, "number", metadata={"adapter.type": 3}),
    ]
    for path in wrong:
        with pytest.raises(AdapterError, match=path.name):
            llm.load_lora("x", path)
    assert llm.loras() == ()
    assert tokens(llm) == plain


def test_an_adapter_for_every_matrix_fits_a_context_that_was_made_before(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """llama.cpp's graph has nodes for the current adapters, not for the adapters at the context's creation."""
    every = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down", "output", "token_embd")
    with Model.load(tiny_models("llama")) as model, Context(model, n_ctx=256, n_threads=1) as context:
        context.decode([1, 2, 3])
        targets = tuple(name for name in every if name not in ("output", "token_embd"))
        paths = [adapter(tmp_path, f"a{seed}", seed=seed, targets=targets) for seed in range(12)]
        context.set_adapters({model.load_adapter(path): 0.1 for path in paths})
        context.clear()
        context.decode([1, 2, 3])
        assert len(context.adapters) == 12
