"""Processes of workers that are started ahead: who takes them, and when they are of no use."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.possessions import is_gone

from paceline.engine.spare_workers import SPARE_WORKERS, SpareWorkers, module_path
from paceline.errors import EngineError
from paceline.testing.fake_engine_client import fake_worker_engine

LONG_S = 60.0  # no wait of a test that passes takes so long


@pytest.fixture
def spares() -> Iterator[SpareWorkers]:
    """The spare workers of this process, none at first."""
    SPARE_WORKERS.end()
    yield SPARE_WORKERS
    SPARE_WORKERS.end()


def launched_pid(spares: SpareWorkers) -> int:
    spares.launch()
    assert spares.pid is not None
    return spares.pid


def num_descriptors() -> int:
    gc.collect()  # those of engines are freed with them
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_gone(pid: int) -> None:
    """Wait for the end of a process that is no child of this one."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([watched], [], [], LONG_S)[0]
    os.close(watched)


def test_an_engine_takes_the_worker_that_waits(spares: SpareWorkers) -> None:
    """It loads there; the next engine starts a worker of its own."""
    waiting = launched_pid(spares)
    first = fake_worker_engine()
    second = fake_worker_engine()
    try:
        assert first.worker_pid == waiting != second.worker_pid
        assert spares.pid is None
    finally:
        first.close()
        second.close()
    assert is_gone(waiting)


def test_one_waits_at_most(spares: SpareWorkers) -> None:
    """A second one would take memory for nothing."""
    before = launched_pid(spares)
    spares.launch()
    assert spares.pid == before


def test_a_worker_of_other_surroundings_is_not_taken(spares: SpareWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would see another environment than a new one; it is ended."""
    waiting = launched_pid(spares)
    monkeypatch.setenv("GGML_SOMETHING", "1")
    launched = spares.take(module_path())
    try:
        assert launched.process.pid != waiting
        assert is_gone(waiting)
    finally:
        launched.end()


def test_a_worker_of_another_folder_is_not_taken(
    spares: SpareWorkers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Relative paths of options would mean other files."""
    waiting = launched_pid(spares)
    monkeypatch.chdir(tmp_path)
    launched = spares.take(module_path())
    try:
        assert launched.process.pid != waiting
    finally:
        launched.end()


@pytest.mark.parametrize("is_anew", [False, True])
def test_a_worker_of_a_deleted_folder_is_taken_unless_the_folder_was_made_anew(
    spares: SpareWorkers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_anew: bool
) -> None:
    """Both processes are still in the deleted folder; in a new folder relative paths mean other files."""
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    waiting = launched_pid(spares)
    folder.rmdir()
    if is_anew:
        folder.mkdir()
        monkeypatch.chdir(folder)
    launched = spares.take(module_path())
    try:
        assert (launched.process.pid == waiting) is not is_anew
    finally:
        launched.end()


def test_a_worker_whose_folder_cannot_be_compared_is_ended(
    spares: SpareWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network's file system that is gone."""
    waiting = launched_pid(spares)
    path = module_path()

    def failing(_: Path) -> None:
        raise OSError(116, "stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", failing)
        launched = spares.take(path)
    try:
        assert launched.process.pid != waiting
        assert is_gone(waiting)
    finally:
        launched.end()


@pytest.mark.parametrize("part", ["BlackBox", "LastWords", "Link", "messages.encode"])
def test_a_worker_that_cannot_be_connected_is_ended(
    spares: SpareWorkers, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """No process and no descriptor is left of it; the engine says why it does not start."""
    open_before = num_descriptors()
    waiting = launched_pid(spares)

    def failing(*_: object) -> None:
        raise OSError(12, "out of memory")

    monkeypatch.setattr(f"paceline.engine.worker.worker_process.{part}", failing)
    with pytest.raises(EngineError, match="out of memory"):
        fake_worker_engine()
    assert is_gone(waiting)
    assert num_descriptors() <= open_before


def test_a_worker_that_died_meanwhile_is_replaced(spares: SpareWorkers) -> None:
    """As by the kernel, if memory is short."""
    waiting = launched_pid(spares)
    os.kill(waiting, signal.SIGKILL)
    os.waitid(os.P_PID, waiting, os.WEXITED | os.WNOWAIT)
    engine = fake_worker_engine()
    try:
        assert engine.worker_pid not in (None, waiting)
    finally:
        engine.close()


def test_a_worker_that_waits_ends_with_its_process() -> None:
    """Whether that ends in order or is killed."""
    for end in ("pass", "os._exit(3)", "os.kill(os.getpid(), 9)"):
        code = (
            "import os; from paceline.engine.spare_workers import SPARE_WORKERS as spares; spares.launch(); "
            f"print(spares.pid, flush=True); {end}"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=LONG_S)
        assert done.stderr == ""
        wait_gone(int(done.stdout))


def test_launching_one_imports_little() -> None:
    """The point of it: everything else is imported beside it."""
    code = (
        "import sys, paceline.engine.spare_workers; "
        "heavy = ('numpy', 'msgspec', 'asyncio', 'paceline._native', 'paceline.engine.worker', 'paceline.kv_cache'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LONG_S)
    assert done.stdout.strip() == "[]"
