"""Engines with threads and processes on one folder: prefixes come back after a restart, a sleep, and a killed worker."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import signal
import threading
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.polling import wait_until
from tests.running_engine import LONG_S
from tests.unit.engine.test_sleeping_engine import SHORT_S, until_asleep
from tests.unit.engine.worker.test_worker_engine import engine, first_of, kill, read, start
from tests.unit.kv_cache.prefix_rig import KINDS, text

from paceline.config import EngineConfig
from paceline.engine import disk_cache
from paceline.engine.disk_blocks import ModelFolder, files_of
from paceline.engine.disk_cache import DiskCache, DiskOptions, DiskTier
from paceline.engine.worker import worker_engine
from paceline.errors import InvalidParams, InvalidType
from paceline.kv_cache import DiskLookup, Save
from paceline.observability.metrics import Metrics
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.streaming import Usage
from paceline.testing.fake_backend import FakeBackend, FakeState, limits_of
from paceline.testing.fake_engine_client import FakeEngineClient


def client(folder: Path, kind: Any = "attention", **options: Any) -> FakeEngineClient:
    config = EngineConfig(disk_cache=folder / "kv", **options)
    return FakeEngineClient(backend=FakeBackend(kind=kind), config=config)


def ask(one: FakeEngineClient, prompt: list[int], num_tokens: int = 4) -> tuple[list[int], Usage]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
    ids, usage = [], None
    for chunk in one.accept(one.prepare(prompt, params, RequestOptions())):
        ids += chunk.token_ids
        usage = chunk.usage
    assert usage is not None
    return ids, usage


def has_file(folder: Path) -> bool:
    return any(file.name is not None for file in files_of(folder / "kv"))


def has_all(folder: Path, num_tokens: int) -> bool:
    """Whether there are cells of so many tokens, and the states at the ends of a prompt and of its completion."""
    names = [file.name for file in files_of(folder / "kv") if file.name is not None]
    num_states = sum(name.is_state for name in names)
    return num_states > 1 and sum(name.num_tokens for name in names if not name.is_state) >= num_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_come_back_after_a_restart(tmp_path: Path, kind: str) -> None:
    prompt = text(900)
    one = client(tmp_path, kind)
    ids, usage = ask(one, prompt)
    assert usage.cached_tokens == 0
    one.close()
    again = client(tmp_path, kind)
    assert ask(again, prompt + text(30, 3))[1].cached_from == "disk"
    assert ask(again, prompt)[0] == ids
    again.close()


def test_an_idle_engine_writes_what_is_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_IDLE_S", SHORT_S)
    one = client(tmp_path)
    ask(one, text(900))
    wait_until(lambda: has_file(tmp_path))
    other = client(tmp_path)  # beside it, on the same folder
    wait_until(lambda: sum(file.name is not None for file in files_of(tmp_path / "kv")) >= 2)
    assert ask(other, text(900) + text(30, 3))[1].cached_from == "disk"
    assert ask(one, text(900) + text(30, 4))[1].cached_from in ("device", "host")
    other.close()
    one.close()


def test_a_new_worker_finds_what_a_killed_one_wrote(tmp_path: Path) -> None:
    prompt = text(900)
    with engine(backend_options={"kind": "hybrid"}, disk_cache=tmp_path / "kv") as one:
        ids, _, last = read(start(one, prompt, max_tokens=20, ignore_eos=True))
        wait_until(lambda: has_all(tmp_path, len(prompt) + 19))
        pid = one.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: one.worker_pid not in (None, pid))
        again, _, last = read(start(one, prompt, max_tokens=20, ignore_eos=True))
        assert again == ids
        assert last.usage is not None
        assert last.usage.cached_from == "disk"


def test_prefixes_survive_a_sleep(tmp_path: Path) -> None:
    prompt = text(900)
    with engine(sleep_idle_s=SHORT_S, disk_cache=tmp_path / "kv") as one:
        ids, _, _ = read(start(one, prompt, max_tokens=20, ignore_eos=True))
        until_asleep(one)
        again, _, last = read(start(one, prompt, max_tokens=20, ignore_eos=True))
        assert again == ids
        assert last.usage is not None
        assert last.usage.cached_from == "disk"


def test_an_engine_without_host_memory_has_no_disk_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that was named is not passed over in silence."""
    backend, config = FakeBackend(), EngineConfig(disk_cache=tmp_path / "kv")
    limits = dataclasses.replace(limits_of(backend, 8), host_bytes=0)
    assert disk_cache.open_disk_cache(config, limits, backend, b"", {}, Metrics()) is None  # type: ignore[arg-type]
    assert "disk_cache has no effect without host memory; raise host_cache_bytes" in caplog.text


def test_the_folder_and_its_size_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline.engine"):
        client(tmp_path, disk_cache_bytes=64 << 20).close()
    assert f"disk cache: prefixes are kept in {tmp_path / 'kv'}, at most 64 MiB of all models" in caplog.text


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(
        InvalidParams, match="disk_cache: the folder cannot be made or read: .*/kv.*; give another folder"
    ):
        client(tmp_path)


def test_a_folder_that_nobody_named_is_only_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "paceline").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one = FakeEngineClient(config=EngineConfig(disk_cache="auto"))
    assert ask(one, text(100))[0]
    one.close()
    assert "disk_cache: the folder cannot be made or read" in caplog.text


def store_of(folder: Path, metrics: Metrics | None = None) -> DiskCache:
    """A store that keeps at most a thousand bytes, and whose threads do not run."""
    options = DiskOptions(max_bytes=1000, max_pending=1000, has_cells=True, has_states=False)
    model = ModelFolder(folder / "kv", b"m" * 16)
    return DiskCache(DiskTier(model, options, lambda _: b"", FakeState.of, metrics or Metrics()), options)


def test_little_waits_for_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    """As if both threads hung in a call: there is a bound for searches, for uses and for bytes to write."""
    hung = store_of(tmp_path)
    lookup = DiskLookup(namespace=(), tokens=b"", num_known=0, num_cells=0, token_s=0.0, max_bytes=1, due_s=0.0)
    assert [hung.look_up(lookup) for _ in range(70)].count(True) == 64
    for number in range(100):
        hung.note_use((), b"%d" % number)
        hung.put(Save(0, number, number + 1, (), b""), FakeState(number, (1,) * 10))
    assert len(hung._used) == 64
    assert hung._num_pending <= 1000
    hung.close()


def test_uses_are_marked_while_ranges_wait_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the uses of a writer that is never idle would take more and more memory."""
    marked: list[bytes] = []
    monkeypatch.setattr(DiskTier, "write", lambda *_: None)
    monkeypatch.setattr(DiskTier, "touch", lambda _, namespace, tokens: marked.append(tokens))
    store, given = store_of(tmp_path), [b"%d" % number for number in range(100)]
    for number, tokens in enumerate(given):
        store.put(Save(0, number, number + 1, (), tokens), FakeState(number, (1,)))
    for _ in given:
        store._turn()
        assert len(store._used) <= 64
    assert marked == given[:64]


def test_a_range_that_is_nearly_as_large_as_the_limit_is_not_written(tmp_path: Path) -> None:
    """All other files would have to leave for it."""
    metrics = Metrics()
    store = store_of(tmp_path, metrics)
    for number, num_cells in enumerate((60, 120)):  # of 480 and 960 bytes
        store.put(Save(0, number, number + num_cells, ((), "", ""), b"1234"), FakeState(number, (1,) * num_cells))
        store._turn()
    snapshot = metrics.snapshot()
    assert snapshot.number("paceline_disk_cache_blocks_total", "written") == 1
    assert snapshot.number("paceline_disk_cache_tokens_total", "lost") == 120
    assert snapshot.number("paceline_disk_cache_blocks_total", "evicted") == 0


LOOKUP = DiskLookup(namespace=(), tokens=b"", num_known=0, num_cells=0, token_s=0.0, max_bytes=1, due_s=0.0)


def test_a_reader_waits_until_the_engine_has_taken_a_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else sixty ranges of up to half of host memory each would wait for one long tick."""
    asked: list[Future[Any]] = []
    monkeypatch.setattr(DiskTier, "find", lambda *_: ["a file"])
    monkeypatch.setattr(DiskTier, "read", lambda *_: ["a range"])
    store = store_of(tmp_path)
    store.start(lambda _: (asked.append(Future()), asked[-1])[1], lambda: 1)
    for _ in range(9):
        assert store.look_up(LOOKUP)
    for number in range(1, 10):
        wait_until(lambda number=number: len(asked) == number)
        asked[-1].set_result(None)
    store.look_up(LOOKUP)
    wait_until(lambda: len(asked) == 10)
    store.close()  # although the engine does not take the last one
    assert not any(thread.is_alive() for thread in store._threads)


def test_searches_that_wait_are_left_out_when_an_engine_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, reads = threading.Event(), list[None]()

    def read_slowly(*_: Any) -> list[Any]:
        reads.append(None)
        may_read.wait(LONG_S)
        return []

    monkeypatch.setattr(DiskTier, "find", lambda *_: ["a file"])
    monkeypatch.setattr(DiskTier, "read", read_slowly)
    store = store_of(tmp_path)
    store.start(lambda _: Future(), lambda: 1)
    for _ in range(40):
        store.look_up(LOOKUP)
    closing_it = threading.Thread(target=store.close)
    closing_it.start()
    wait_until(lambda: store._is_closed)
    may_read.set()
    closing_it.join(LONG_S)
    assert len(reads) == 1
    assert not any(thread.is_alive() for thread in store._threads)


def test_a_file_that_is_there_already_is_no_success_of_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, also if some of the ranges need no file."""

    def write(*_: Any) -> int:
        if next(numbers) % 2:
            return 0
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    numbers = iter(range(8))
    monkeypatch.setattr(DiskTier, "write", write)
    monkeypatch.setattr(disk_cache, "_RETRY_S", 0.0)
    store = store_of(tmp_path)
    for number in range(8):
        store.put(Save(0, number, number + 1, ((), "", ""), b"1234"), FakeState(number, (1,)))
        store._turn()
    assert caplog.text.count("the disk cache cannot be written") == 1


def test_an_engine_that_generates_is_not_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it has saved and looked up nothing for a while."""
    monkeypatch.setattr(disk_cache, "_IDLE_S", 0.0)
    saved, told = list[None](), list[Any]()
    store = store_of(tmp_path)
    store._ask = lambda ask: (told.append(ask.begin), Future())[1]
    for is_idle in (False, True):
        kv_cache = SimpleNamespace(save_idle=lambda: saved.append(None))
        engine_now: Any = SimpleNamespace(is_idle=is_idle, scheduler=SimpleNamespace(kv_cache=kv_cache))
        if not is_idle:
            store.note_unsaved()
        store._turn()
        told.pop()(engine_now)
    assert saved == [None]
    assert not store._is_unsaved


def test_a_late_search_that_finds_nothing_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_find, ended, metrics = threading.Event(), threading.Event(), Metrics()

    def find(_: DiskTier, lookup: DiskLookup) -> list[Any]:
        may_find.wait()
        return []

    monkeypatch.setattr(DiskTier, "_find", find)
    store = store_of(tmp_path, metrics)
    store.start(lambda _: (ended.set(), Future())[1], lambda: 1)
    assert store.look_up(LOOKUP)
    may_find.set()
    assert ended.wait(LONG_S)
    assert metrics.snapshot().number("paceline_disk_cache_lookups_total", label="miss") == 1
    store.close()


def test_a_full_disk_costs_files_once_whatever_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "full")

    rooms: list[None] = []
    monkeypatch.setattr(DiskTier, "write", fail)
    monkeypatch.setattr(DiskTier, "make_room", lambda _: rooms.append(None))
    store = store_of(tmp_path)
    for number in range(5):
        store.put(Save(0, number, number + 1, ((), "", ""), b"1234"), FakeState(number, (1,)))
    assert len(store._unwritten) == 5
    assert all(store._turn() for _ in range(5))
    assert rooms == [None]
    store.put(Save(0, 5, 6, ((), "", ""), b"1234"), FakeState(5, (1,)))  # nothing is taken meanwhile
    assert not store._unwritten


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_within_a_write_leaves_no_file_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """A part of a file fits. There is one warning, and requests are answered."""
    written: list[int] = []

    def write_some(handle: int, data: bytes) -> int:
        if threading.current_thread().name != "paceline-disk-writer":
            return write(handle, data)
        written.append(handle)
        if len(written) % 2:
            return write(handle, bytes(data)[:10])
        raise OSError(number, os.strerror(number))

    write = os.write
    monkeypatch.setattr(disk_cache, "_RETRY_S", 0.0)
    monkeypatch.setattr(disk_cache, "_IDLE_S", SHORT_S)
    with closing(client(tmp_path)) as one:
        with monkeypatch.context() as full:
            full.setattr(os, "write", write_some)
            ids, _ = ask(one, text(900))
            wait_until(lambda: one.stats().number("paceline_disk_cache_blocks_total", "lost") >= 1)
            assert list(files_of(tmp_path / "kv")) == []
        assert ask(one, text(900))[0] == ids
        ask(one, text(900, 1))
    assert len(written) >= 2
    assert has_file(tmp_path)
    assert caplog.text.count("the disk cache cannot be written, and is tried again later") == 1
    with closing(client(tmp_path)) as later:
        assert ask(later, text(900, 1) + text(20, 2))[1].cached_from == "disk"


def test_a_tick_waits_once_for_a_disk_that_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return self.is_set()

    store = store_of(tmp_path)  # whose reader answers nothing
    monkeypatch.setattr(disk_cache, "threading", SimpleNamespace(Event=Event))
    lookup = DiskLookup(namespace=(), tokens=b"", num_known=0, num_cells=0, token_s=0.0, max_bytes=1, due_s=0.0)
    assert all(store.look_up(lookup) for _ in range(10))
    assert len(waits) == 1


def test_metrics_count_the_blocks_that_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a worker; the sizes of files are more than the cells in them, by their heads and token ids."""
    monkeypatch.setattr(worker_engine, "_STATS_S", 60.0)
    with engine(disk_cache=tmp_path / "kv", sleep_idle_s=SHORT_S) as one:

        def number(name: str, label: str | None = None) -> float:
            return one.stats().number(f"paceline_disk_cache_{name}", label)

        read(start(one, text(900), max_tokens=20, ignore_eos=True))
        until_asleep(one)
        found = [file for file in files_of(tmp_path / "kv") if file.name is not None]
        assert number("lookups_total", "miss") == 1
        assert number("blocks_total", "written") == len(found)
        assert number("tokens_total", "written") == 919
        assert number("block_bytes_total", "written") == sum(file.num_bytes for file in found)
        assert number("write_seconds_total") > 0
        read(start(one, text(900), max_tokens=20, ignore_eos=True))
        assert number("lookups_total", "hit") == 1
        assert number("blocks_total", "read") >= 1
        assert number("tokens_total", "read") >= 899
        assert 0 < number("block_bytes_total", "read") == number("block_bytes_total", "written")
        assert number("read_seconds_total") > 0
        assert number("bytes") == sum(file.num_bytes for file in found)


def test_ranges_that_are_not_written_are_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the end of an engine with a disk that hangs, and when too much waits."""
    metrics = Metrics()
    store = store_of(tmp_path, metrics)
    for number in range(3):
        store.put(Save(0, number, number + 60, (), b""), FakeState(number, (1,) * 60))  # two of 480 bytes are let in
    lost = {"label": "lost"}
    assert metrics.snapshot().number("paceline_disk_cache_tokens_total", **lost) == 60
    store.close()
    assert metrics.snapshot().number("paceline_disk_cache_tokens_total", **lost) == 180
    assert metrics.snapshot().number("paceline_disk_cache_block_bytes_total", **lost) == 1440
    assert "prefixes were not written to the disk cache" in caplog.text


def test_an_engine_that_ends_loses_nothing_while_the_disk_keeps_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = client(tmp_path)
    ask(one, text(900))
    one.close()
    assert one.stats().number("paceline_disk_cache_blocks_total", "lost") == 0
    assert not caplog.records


@pytest.mark.parametrize("options", [{"disk_cache_bytes": 0}, {"disk_cache_bytes": -1}])
def test_wrong_sizes_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams, match="disk_cache_bytes"):
        EngineConfig(**options)


@pytest.mark.parametrize("options", [{"disk_cache": 3}, {"disk_cache_bytes": "x"}])
def test_wrong_types_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidType, match="disk_cache"):
        EngineConfig(**options)


def test_auto_is_a_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.disk_folder("auto") == tmp_path / "paceline" / "kv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_cache.disk_folder("auto") == tmp_path / ".cache" / "paceline" / "kv"
    assert disk_cache.disk_folder("~/kv") == tmp_path / "kv"


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_texts_are_right_whenever_a_worker_is_killed(tmp_path: Path, kind: str) -> None:
    prompts = [text(900), text(900) + text(200, 1), text(900) + text(200, 2)]
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    with engine(backend_options={"kind": kind}) as calm:
        expected = [read(start(calm, prompt, **options))[0] for prompt in prompts]
    with engine(backend_options={"kind": kind}, disk_cache=tmp_path / "kv") as one:
        for number in range(9):
            channel = start(one, prompts[number % 3], **options)
            first = first_of(channel)
            kill(one)
            assert read(channel, first)[0] == expected[number % 3]
        for prompt, ids in zip(prompts, expected, strict=True):
            assert read(start(one, prompt, **options))[0] == ids
