"""A model's file that is replaced while an engine has it: no later worker goes on with another model."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.polling import wait_until

from paceline import LLM, ModelChanged
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import EngineDied
from paceline.runtime.gguf_file import LoadedFiles
from paceline.streaming import FinishReason
from paceline.testing.models import LlamaSpec, numbered, write_lora, write_model, write_split_model

SPEC = LlamaSpec(n_ctx_train=2048)
OTHER_VOCABULARY = LlamaSpec(n_ctx_train=2048, vocabulary=numbered(400))
LONG_S = 60.0


def engine_of(llm: LLM) -> WorkerEngine:
    assert isinstance(llm.engine, WorkerEngine)
    return llm.engine


def kill(llm: LLM) -> None:
    pid = engine_of(llm).worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def replace(path: Path, spec: Any = SPEC, seed: int = 1) -> None:
    """Put another model into the place of one, as a download does."""
    write_model(path.with_suffix(".new"), spec, seed=seed).replace(path)


def isolated(path: Any, **options: Any) -> LLM:
    return LLM(path, isolation="process", num_slots=2, n_ctx=512, n_threads=1, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A tiny model."""
    return write_model(tmp_path / "tiny.gguf", SPEC)


@pytest.mark.parametrize("spec", [SPEC, OTHER_VOCABULARY], ids=["same-vocabulary", "other-vocabulary"])
def test_a_request_in_flight_is_not_continued_on_another_model(path: Path, spec: LlamaSpec) -> None:
    """It ends with an error that names the file, and so does every later call."""
    with isolated(path) as llm, llm.stream("abc", max_tokens=400, ignore_eos=True, max_buffered_tokens=8) as stream:
        chunks = iter(stream)
        next(chunks)
        replace(path, spec)
        kill(llm)
        with pytest.raises(ModelChanged, match=r"tiny\.gguf was replaced"):
            list(chunks)
        with pytest.raises(ModelChanged, match=r"tiny\.gguf was replaced"):
            llm.generate("abc", max_tokens=2)
        assert isinstance(engine_of(llm).ended.result(LONG_S), ModelChanged)


@pytest.mark.parametrize("spec", [SPEC, OTHER_VOCABULARY], ids=["same-vocabulary", "other-vocabulary"])
def test_a_wake_does_not_load_another_model(path: Path, spec: LlamaSpec) -> None:
    """The request that wakes the engine ends with the error."""
    with isolated(path, sleep_idle_s=0.05) as llm:
        llm.generate("abc", max_tokens=2)
        wait_until(lambda: engine_of(llm).worker_pid is None)
        replace(path, spec)
        with pytest.raises(ModelChanged, match=r"tiny\.gguf was replaced"):
            llm.generate("abc", max_tokens=2)


def test_a_file_that_is_the_same_again_is_taken(path: Path) -> None:
    """By another inode and other times, as after a restored backup; the stream goes on with the same tokens."""
    options: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
    with isolated(path) as llm:
        expected = list(llm.generate("abc", **options).token_ids)
        with llm.stream("abc", max_buffered_tokens=8, **options) as stream:
            chunks = iter(stream)
            first = next(chunks)
            replace(path, seed=0)
            kill(llm)
            assert [*first.token_ids, *(token for chunk in chunks for token in chunk.token_ids)] == expected


def test_a_missing_file_is_waited_for(path: Path) -> None:
    """A worker cannot be started meanwhile; the request completes when the file is back."""
    with isolated(path) as llm, llm.stream("abc", max_tokens=100, ignore_eos=True, max_buffered_tokens=8) as stream:
        chunks = iter(stream)
        next(chunks)
        away = path.rename(path.with_suffix(".away"))
        kill(llm)
        wait_until(lambda: engine_of(llm).heartbeat().num_restarts >= 2)
        away.rename(path)
        *_, last = chunks
        assert last.finish_reason is FinishReason.LENGTH


def test_every_file_of_a_model_counts(tmp_path: Path, path: Path) -> None:
    """Parts of a split set, LoRA adapters from the beginning or loaded later, and draft models."""
    parts = write_split_model(tmp_path / "split.gguf", SPEC, parts=2)
    draft = write_model(tmp_path / "draft.gguf", SPEC)
    first, later = write_lora(tmp_path / "first.gguf", SPEC), write_lora(tmp_path / "later.gguf", SPEC)
    drafted = {"draft_model": draft, "speculation": "draft-model"}
    cases: list[tuple[Any, dict[str, Any], Path, Callable[[Path], object]]] = [
        (parts[0], {}, parts[1], lambda file: write_split_model(tmp_path / "split.gguf", SPEC, parts=2, seed=5)),
        (path, {"lora": [first]}, first, lambda file: write_lora(file, SPEC, seed=7)),
        (path, {}, later, lambda file: write_lora(file, SPEC, seed=7)),
        (path, drafted, draft, lambda file: write_model(file, SPEC, seed=7)),
    ]
    for model, options, file, change in cases:
        with isolated(model, **options) as llm:
            if file is later:
                llm.load_lora("later", later)
            llm.generate("abc", max_tokens=2)
            change(file)
            kill(llm)
            with pytest.raises(ModelChanged, match=file.name):
                llm.generate("abc", max_tokens=300, ignore_eos=True)


def test_a_model_that_crashes_without_a_change_is_not_blamed_on_its_file(path: Path) -> None:
    """The error of a death is the old one."""
    with (
        isolated(path, on_engine_death="fail") as llm,
        llm.stream("abc", max_tokens=400, ignore_eos=True, max_buffered_tokens=8) as stream,
    ):
        chunks = iter(stream)
        next(chunks)
        kill(llm)
        with pytest.raises(EngineDied):
            list(chunks)
        assert llm.generate("abc", max_tokens=2).token_ids


def test_a_file_that_changes_within_its_recording_is_replaced(tmp_path: Path) -> None:
    """Its content is not known then, so that any other one is another model's."""
    path, files = tmp_path / "a", LoadedFiles()
    path.write_bytes(b"one")
    files.record([path])
    path.write_bytes(b"two")
    files.read_contents()
    assert files.replaced([path]) == [path]


def test_files_are_compared_by_content_after_their_times_differ(tmp_path: Path) -> None:
    """Size, beginning, middle and end count; a file that is not recorded is another one, a missing file is not."""
    path, other, files = tmp_path / "a", tmp_path / "b", LoadedFiles()
    path.write_bytes(bytes(1000))
    files.record([path])
    files.read_contents()
    os.utime(path, (1, 1))
    assert files.replaced([path, tmp_path / "missing"]) == []
    other.write_bytes(bytes(1000))
    assert files.replaced([path, other]) == [other]
    for content in (bytes(1001), bytes(999) + b"1", b"1" + bytes(999)):
        path.write_bytes(content)
        assert files.replaced([path]) == [path]
    path.write_bytes(bytes(1000))
    assert files.replaced([path]) == []


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """It counts as a replaced file. To open it would block until a program writes to it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"content")
    files = LoadedFiles()
    files.record([path])
    files.read_contents()
    path.unlink()
    os.mkfifo(path)
    assert files.replaced([path]) == [path]
