"""Prefixes as files: saved by one engine, found by the next, and nothing else gets in or out."""

from __future__ import annotations

import asyncio
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.exact import EXACT
from tests.native.conftest import TinyModels

import paceline
from paceline.engine.saved_prefixes import StateFiles
from paceline.errors import EngineStopped, InvalidParams, InvalidType, StateError, Unsupported
from paceline.runtime import CellState
from paceline.runtime.sequence_state import SequenceState
from paceline.testing.models import KINDS, write_lora

pytestmark = pytest.mark.native

OPTIONS: dict[str, Any] = {**EXACT, "num_slots": 2, "n_ctx": 2048}
PROMPT = [(7 * number) % 250 + 1 for number in range(80)]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "falcon-h1"])
def test_the_next_engine_finds_what_the_last_one_saved(kind: str, tiny_models: TinyModels, tmp_path: Path) -> None:
    """All but the last token come from the file, and the completion is the same."""
    model = paceline.Model.load(tiny_models(kind))
    with paceline.LLM(model, state_folder=tmp_path, **OPTIONS) as llm:
        before = llm.generate(PROMPT, max_tokens=12, temperature=0)
        num_saved = llm.save_prefix("a-name.1", PROMPT)
        assert num_saved in (len(PROMPT) - 1, len(PROMPT))  # of whole states the one before the last token
    with paceline.LLM(model, state_folder=tmp_path, **OPTIONS) as llm:
        assert llm.load_prefix("a-name.1")[:num_saved] == PROMPT[:num_saved]
        after = llm.generate(PROMPT, max_tokens=12, temperature=0)
        assert (after.usage.cached_tokens, after.usage.cached_from) == (len(PROMPT) - 1, "host")
        assert after.token_ids == before.token_ids


@pytest.mark.parametrize("kind", ["gemma3", "falcon-h1", "lfm2"])
def test_a_conversation_that_parts_within_a_saved_block_is_saved_whole(
    kind: str, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Two prefixes that share a block go to files whole; the next engine finds both."""
    model = paceline.Model.load(tiny_models(kind))
    prompts = [[*PROMPT, *PROMPT[:50]], [*PROMPT[:70], *PROMPT[20:60]]]  # behind the windows of the models
    with paceline.LLM(model, state_folder=tmp_path, **OPTIONS) as llm:
        before = [llm.generate(prompt, max_tokens=12, temperature=0) for prompt in prompts]
        num_saved = [llm.save_prefix(f"conversation-{index}", prompts[index]) for index in (1, 0)]
        assert num_saved == [len(prompts[1]) - 1, len(prompts[0]) - 1]
    for index, prompt in enumerate(prompts):
        with paceline.LLM(model, state_folder=tmp_path, **OPTIONS) as llm:
            llm.load_prefix(f"conversation-{index}")
            after = llm.generate(prompt, max_tokens=12, temperature=0)
            assert (after.usage.cached_tokens, after.usage.cached_from) == (len(prompt) - 1, "host")
            assert after.token_ids == before[index].token_ids


def test_a_saved_prefix_belongs_to_its_tenant_and_salt(tmp_path: Path) -> None:
    """It is found by requests that it was loaded for, and by no others."""
    with paceline.LLM(state_folder=tmp_path, num_slots=2) as llm:
        llm.generate(PROMPT, max_tokens=1, tenant="one")
        with pytest.raises(StateError, match="nothing of this prompt"):
            llm.save_prefix("mine", PROMPT)
        llm.save_prefix("mine", PROMPT, tenant="one")
        llm.load_prefix("mine", cache_salt="grain")
        assert llm.generate(PROMPT, max_tokens=1).usage.cached_tokens == 0
        assert llm.generate(PROMPT, max_tokens=1, cache_salt="grain").usage.cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_saved_prefix_belongs_to_its_adapters_and_their_scales(
    isolation: Any, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Whatever the adapter is called: another one under its name, another scale or none is refused, and loads nothing."""
    base = tiny_models("llama")
    first, second = (write_lora(tmp_path / f"{seed}.gguf", KINDS["llama"], seed=seed) for seed in (1, 2))
    options = {**OPTIONS, "isolation": isolation, "state_folder": tmp_path}
    with paceline.LLM(base, lora={"a": first, "b": second}, **options) as llm:
        before = llm.generate(PROMPT, max_tokens=12, temperature=0, lora={"a": 1.0}).token_ids
        with pytest.raises(StateError, match="nothing of this prompt"):
            llm.save_prefix("of-a", PROMPT)
        with pytest.raises(InvalidParams, match="no adapter 'c'"):
            llm.save_prefix("of-a", PROMPT, lora={"c": 1.0})
        num_saved = llm.save_prefix("of-a", PROMPT, lora={"a": 1.0})
        llm.generate(PROMPT, max_tokens=1)
        llm.save_prefix("of-none", PROMPT)
    with paceline.LLM(base, lora={"a": second}, **options) as llm:
        llm.load_lora("x", first)
        plain = llm.generate(PROMPT, max_tokens=12, temperature=0).token_ids
        wrong: list[tuple[str, dict[str, float]]] = [
            ("of-a", {}),
            ("of-a", {"a": 1.0}),
            ("of-a", {"x": 0.5}),
            ("of-a", {"x": 1.0, "a": 1.0}),
            ("of-none", {"x": 1.0}),
        ]
        for name, lora in wrong:
            with pytest.raises(
                StateError, match=f"'{name}' was computed with .*LoRA adapter.* to be loaded for .*; load"
            ):
                llm.load_prefix(name, lora=lora, cache_salt="new")
            later = llm.generate(PROMPT, max_tokens=1, lora=lora, cache_salt="new")
            assert later.usage.cached_tokens == 0
        assert llm.load_prefix("of-a", lora={"x": 1.0})[:num_saved] == PROMPT[:num_saved]
        after = llm.generate(PROMPT, max_tokens=12, temperature=0, lora={"x": 1.0})
        assert (after.token_ids, after.usage.cached_tokens) == (before, len(PROMPT) - 1)
        assert llm.generate(PROMPT, max_tokens=12, temperature=0).token_ids == plain != before


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "../up", "a/b", "a\\b", "a\0b", "ü", "x" * 129, " a"])
def test_a_name_is_no_path(name: str, tmp_path: Path) -> None:
    """Names that could leave the folder, or hide in it, are refused; the engine goes on."""
    with paceline.LLM(state_folder=tmp_path, num_slots=1) as llm:
        for call in (
            lambda: llm.save_prefix(name, PROMPT),
            lambda: llm.load_prefix(name),
            lambda: llm.erase_prefix(name),
        ):
            with pytest.raises(InvalidParams, match="name"):
                call()
        assert llm.generate("A fox", max_tokens=2).token_ids
    assert list(tmp_path.iterdir()) == []


def damaged(whole: bytes) -> list[bytes]:
    return [b"", b"junk", whole[:4], whole[:60], whole[:-1], whole + b"x", whole[:200] + b"?" + whole[201:]]


def test_damaged_files_are_refused(tmp_path: Path, tiny_models: TinyModels) -> None:
    """A file that is cut, changed, none, or another model's is a `StateError`; nothing of it gets in."""
    with paceline.LLM(state_folder=tmp_path, num_slots=1) as llm:
        llm.generate(PROMPT, max_tokens=1)
        llm.save_prefix("good", PROMPT)
        whole = (tmp_path / "good").read_bytes()
        for content in damaged(whole):
            (tmp_path / "bad").write_bytes(content)
            with pytest.raises(StateError):
                llm.load_prefix("bad", cache_salt="bad")
        assert llm.generate(PROMPT, max_tokens=1, cache_salt="bad").usage.cached_tokens == 0
        llm.erase_prefix("bad")
        with pytest.raises(StateError, match="No such file"):
            llm.erase_prefix("bad")
    with paceline.LLM(paceline.Model.load(tiny_models("llama")), state_folder=tmp_path, **OPTIONS) as other:
        with pytest.raises(StateError, match="another model"):
            other.load_prefix("good")


@pytest.mark.parametrize("partial", [False, True])
def test_a_sound_file_of_nothing_is_refused_and_fails_no_request(tmp_path: Path, partial: bool) -> None:
    """A range without tokens has no place in memory; asked to take it in, the engine's thread would fail with all requests.

    So would a state behind no token.
    """
    with paceline.LLM(state_folder=tmp_path, num_slots=2) as llm:
        llm.generate(PROMPT, max_tokens=1)
        llm.save_prefix("good", PROMPT)
        fingerprint = (tmp_path / "good").read_bytes()[32:48]  # of the first frame
        frame = SequenceState(fingerprint, (), partial, -1, np.zeros(0, dtype=np.uint8)).to_bytes()
        (tmp_path / "empty").write_bytes(struct.pack("<4sIIIQ", b"PLPR", 2, 1, 0, len(frame)) + frame)
        stream = llm.stream(PROMPT, max_tokens=50, ignore_eos=True)
        with pytest.raises(StateError, match="gap"):
            llm.load_prefix("empty")
        assert sum(len(chunk.token_ids) for chunk in stream) == 50


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_without_room_in_host_memory_a_prefix_is_not_reported_as_loaded(isolation: Any, tmp_path: Path) -> None:
    """It names the option to raise; saving needs the same room."""
    with paceline.LLM(state_folder=tmp_path, num_slots=1) as llm:
        llm.generate(PROMPT, max_tokens=1)
        llm.save_prefix("good", PROMPT)
    with paceline.LLM(state_folder=tmp_path, num_slots=1, host_cache_bytes=0, isolation=isolation) as small:
        with pytest.raises(StateError, match="no room.*host_cache_bytes"):
            small.load_prefix("good")
        small.generate(PROMPT, max_tokens=1)
        with pytest.raises(StateError, match=r"nothing of this prompt.*host_cache_bytes"):
            small.save_prefix("more", PROMPT)


def test_two_threads_may_save_under_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes to a temporary file of its own, so the file is whole whichever is last."""
    both = threading.Barrier(2)
    write = Path.write_bytes

    def write_together(path: Path, data: bytes) -> int:
        both.wait(60)
        written = write(path, data)
        both.wait(60)
        return written

    files = StateFiles(tmp_path, b"f" * 16)
    monkeypatch.setattr(Path, "write_bytes", write_together)
    ranges = [CellState(0, 3, np.arange(1000, dtype=np.uint8))]
    with ThreadPoolExecutor(2) as threads:
        saving = [threads.submit(files.write, "name", [index] * 3, ranges) for index in range(2)]
        sizes = {save.result() for save in saving}
    assert sizes == {(tmp_path / "name").stat().st_size}
    assert files.read("name")[0] in ([0, 0, 0], [1, 1, 1])
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_saving_is_off_without_a_folder_and_after_the_end(tmp_path: Path) -> None:
    """Refusals say why; a call to an engine that was closed does not hang."""
    with paceline.LLM(num_slots=1) as llm, pytest.raises(Unsupported, match="state_folder"):
        llm.save_prefix("name", PROMPT)
    for call in (
        lambda: llm.save_prefix("name", PROMPT),
        lambda: llm.load_prefix("name"),
        lambda: llm.erase_prefix("name"),
    ):
        with pytest.raises(EngineStopped):
            call()
    with pytest.raises(InvalidParams, match="is none"):
        paceline.LLM(state_folder=tmp_path / "not-there")
    with pytest.raises(InvalidType, match="state_folder"):
        paceline.LLM(state_folder=7)
    with paceline.LLM(state_folder=tmp_path, num_slots=1) as other, pytest.raises(InvalidType, match="priority"):
        other.save_prefix("name", PROMPT, priority=3)


def test_a_running_prompt_can_be_saved(tmp_path: Path) -> None:
    """From an event loop as well, while its sequence goes on."""

    async def save() -> tuple[int, list[int]]:
        async with paceline.AsyncLLM(state_folder=tmp_path, num_slots=2) as llm:
            async with llm.stream(PROMPT, max_tokens=200, ignore_eos=True) as stream:
                await stream.get()
                num_saved = await llm.save_prefix("running", PROMPT)
                loaded = await llm.load_prefix("running", cache_salt="other")
                await llm.erase_prefix("running")
            return num_saved, loaded

    num_saved, loaded = asyncio.run(save())
    assert (num_saved, loaded) == (len(PROMPT), PROMPT)
    assert list(tmp_path.iterdir()) == []


def test_paths_that_part_in_a_saved_range_are_saved_whole_or_as_far_as_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any splits in memory: the file holds its stated tokens, from the first on, and can be loaded."""
    for name in ("_IDLE_COST", "_MIN_IDLE_CELLS"):  # nothing idle stays on the device
        monkeypatch.setattr(f"paceline.kv_cache.cache.{name}", 0)
    with paceline.LLM(state_folder=tmp_path, num_slots=1, n_ctx=1024) as llm:
        prompts = [[*PROMPT, *range(300, 340)], [*PROMPT, *range(400, 440)], [*PROMPT[:40], *range(500, 540)]]
        for _ in range(2):
            for prompt in prompts:
                llm.generate(prompt, max_tokens=20, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            try:
                num_saved = llm.save_prefix(f"path-{number}", prompt)
            except StateError:
                continue
            assert llm.load_prefix(f"path-{number}", cache_salt="other") == prompt[:num_saved]


def test_an_engine_without_a_prompt_cache_shares_nothing() -> None:
    """cache_prompt=False of the engine holds for every request."""
    with paceline.LLM(cache_prompt=False, num_slots=2) as llm:
        usages = [llm.generate(PROMPT, max_tokens=1).usage for _ in range(3)]
        assert [usage.cached_tokens for usage in usages] == [0, 0, 0]
        assert llm.limits.host_bytes == 0
