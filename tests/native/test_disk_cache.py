"""The disk cache of real contexts: cells and states of every kind of memory come back, and every text is as without it."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.exact import EXACT, assert_same_but_for_near_ties
from tests.native.conftest import TinyModels
from tests.pictures import picture
from tests.polling import wait_until
from tests.sweeps import sampled

import paceline
from paceline.engine.disk_blocks import files_of
from paceline.testing.models import KINDS as SPECS
from paceline.testing.models import LlavaVisionSpec, write_lora

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk has time to answer, though such a model computes a prompt in less."""
    monkeypatch.setattr("paceline.kv_cache.disk_lookups._LEAST_WAIT_S", 60.0)


OPTIONS: dict[str, Any] = {**EXACT, "num_slots": 2, "n_ctx": 2048}
KINDS = ["llama", "gemma3", "mamba", "falcon-h1", "lfm2"]
NUM_TOKENS = 8


def part(length: int, seed: int) -> list[int]:
    return [(7 * number * number + 31 * seed + number) % 250 + 1 for number in range(length)]


PROMPT = part(300, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_engine_starts_from_the_disk(kind: str, tiny_models: TinyModels, tmp_path: Path) -> None:
    model = paceline.Model.load(tiny_models(kind))
    with paceline.LLM(model, disk_cache=tmp_path, **OPTIONS) as llm:
        before = llm.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0)
        assert before.usage.cached_tokens == 0
    with paceline.LLM(model, disk_cache=tmp_path, **OPTIONS) as llm:
        after = llm.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0)
        assert (after.usage.cached_tokens, after.usage.cached_from) == (len(PROMPT) - 1, "disk")
        assert after.token_ids == before.token_ids


@pytest.mark.parametrize("options", [{"type_k": "f16", "type_v": "f16"}, {"flash_attn": "on"}])
def test_other_cells_are_not_read(options: dict[str, Any], tiny_models: TinyModels, tmp_path: Path) -> None:
    """Of another cache type or layout."""
    model = paceline.Model.load(tiny_models("llama"))
    with paceline.LLM(model, disk_cache=tmp_path, **OPTIONS) as llm:
        llm.generate(PROMPT, max_tokens=1)
    with paceline.LLM(model, disk_cache=tmp_path, **{**OPTIONS, **options}) as llm:
        assert llm.generate(PROMPT, max_tokens=1).usage.cached_tokens == 0


def test_a_model_that_was_trained_further_reads_nothing_of_before(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Under the same name, and with the same bytes where its fingerprint takes samples."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_models("llama").read_bytes())
    os.utime(path, ns=(10**18, 10**18))
    for written_ns, num_cached in ((10**18, 0), (10**18, len(PROMPT) - 1), (2 * 10**18, 0)):
        os.utime(path, ns=(written_ns, written_ns))
        with paceline.LLM(path, disk_cache=tmp_path / "kv", **OPTIONS) as llm:
            assert llm.generate(PROMPT, max_tokens=1).usage.cached_tokens == num_cached


def test_a_projector_that_was_trained_further_reads_nothing_of_before(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Under the same name, and with the same bytes where its fingerprint takes samples."""
    path, projector = tmp_path / "model.gguf", tmp_path / "mmproj-model.gguf"
    path.write_bytes(tiny_models("llama").read_bytes())
    projector.write_bytes(tiny_models(LlavaVisionSpec()).read_bytes())
    prompt = ["hello", paceline.Image(picture(5, 100, 60)), "what is it?"]
    sources = []
    for written_ns in (10**18, 10**18, 2 * 10**18):
        os.utime(projector, ns=(written_ns, written_ns))
        with paceline.LLM(path, disk_cache=tmp_path / "kv", **OPTIONS) as llm:
            sources.append(llm.generate(prompt, max_tokens=1).usage.cached_from)
    assert sources == [None, "disk", None]


def test_adapters_are_known_by_their_contents(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Under any name; another scale is another adapter."""
    path = tiny_models("llama")
    write_lora(tmp_path / "a.gguf", SPECS["llama"], seed=1)
    with paceline.LLM(path, lora={"one": tmp_path / "a.gguf"}, disk_cache=tmp_path / "kv", **OPTIONS) as llm:
        before = llm.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0, lora={"one": 1.0})
    with paceline.LLM(path, lora={"two": tmp_path / "a.gguf"}, disk_cache=tmp_path / "kv", **OPTIONS) as llm:
        for lora in ({}, {"two": 0.5}):
            assert llm.generate(PROMPT, max_tokens=1, lora=lora).usage.cached_tokens == 0
        after = llm.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0, lora={"two": 1.0})
        assert after.usage.cached_from == "disk"
        assert after.token_ids == before.token_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", sampled(range(3), every=3))
def test_texts_are_as_without_a_disk(kind: str, seed: int, tiny_models: TinyModels, tmp_path: Path) -> None:
    """For random prompts that branch, with restarts and damaged files between them."""
    chance, model = random.Random(f"{kind} {seed}"), paceline.Model.load(tiny_models(kind))
    prompts = [
        [*part(chance.choice([60, 200]), chance.randrange(2)), *part(chance.choice([10, 90]), chance.randrange(3))]
        for _ in range(6)
    ]
    wanted: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    with paceline.LLM(model, cache_prompt=False, **OPTIONS) as llm:
        expected = [llm.generate(prompt, **wanted).token_ids for prompt in prompts]
    sources = set()
    for _ in range(4):
        with paceline.LLM(model, disk_cache=tmp_path, **OPTIONS) as llm:
            for _ in range(5):
                index = chance.randrange(len(prompts))
                completion = llm.generate(prompts[index], **wanted)
                assert_same_but_for_near_ties(llm, prompts[index], expected[index], completion.token_ids)
                sources.add(completion.usage.cached_from)
        for file in files_of(tmp_path):
            if not chance.randrange(8):
                data = bytearray(file.path.read_bytes())
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                file.path.write_bytes(data)
    assert "disk" in sources


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_a_killed_worker_leaves_nothing_wrong(kind: str, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Killed while it may write; the next one reads what is whole."""
    path, wanted = tiny_models(kind), {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    prompts = [[*PROMPT, *part(100, seed)] for seed in range(3)]
    with paceline.LLM(path, cache_prompt=False, **OPTIONS) as llm:
        expected = [llm.generate(prompt, **wanted).token_ids for prompt in prompts]
    with paceline.LLM(path, disk_cache=tmp_path, isolation="process", **OPTIONS) as llm:
        for number in range(8):
            pid, ids = llm.engine.heartbeat().worker_pid, list[int]()
            for chunk in llm.stream(prompts[number % 3], **wanted):
                ids += chunk.token_ids
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    pid = None
            assert_same_but_for_near_ties(llm, prompts[number % 3], expected[number % 3], ids)
        wait_until(lambda: any(file.name is not None for file in files_of(tmp_path)))
