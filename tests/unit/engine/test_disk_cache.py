"""Prefixes on a disk: another engine finds them, damaged files cost their tokens, and the least recently used files leave."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.disk_world import DiskRig
from tests.sweeps import sampled
from tests.unit.kv_cache.prefix_rig import KINDS, slow_saves, text

from paceline.engine import disk_blocks
from paceline.engine.disk_blocks import (
    BlockName,
    EvictedBlocks,
    FoundBlock,
    FoundFile,
    ModelFolder,
    about,
    evict,
    files_of,
    remove,
)
from paceline.kv_cache import DiskLookup, MediaItem, pack_tokens
from paceline.scheduling.telemetry import waiting_sequences


def rig(folder: Path, kind: str = "attention", **options: Any) -> DiskRig:
    """An engine as after a restart: its memory is empty, the folder may not be."""
    return DiskRig(folder / "kv", kind=kind, **options)


def written(folder: Path, *prompts: list[int], kind: str = "attention", **options: Any) -> DiskRig:
    """An engine that has computed these prompts and written them. options: of the requests."""
    made = rig(folder, kind)
    for prompt in prompts:
        made.ask(prompt, **options)
        made.settle()
    return made


def counted(made: DiskRig, name: str, label: str) -> float:
    return made.store.tier.metrics.snapshot().number(f"paceline_disk_cache_{name}_total", label)


def blocks(folder: Path) -> list[FoundFile]:
    return sorted(files_of(folder / "kv"), key=lambda file: str(file.path))


@pytest.mark.parametrize("kind", KINDS)
def test_another_engine_starts_from_the_disk(tmp_path: Path, kind: str) -> None:
    written(tmp_path, text(1500), kind=kind)
    second = rig(tmp_path, kind)
    outcome = second.ask(text(1500) + text(40, 5), 6)
    assert outcome.terminal is not None and outcome.terminal.usage is not None
    assert outcome.terminal.usage.cached_from == "disk"
    assert second.computed(outcome) <= 40 + 6 + 1
    second.check_output_as_alone(outcome)
    again = second.ask(text(1500) + text(40, 6), 3)  # in host memory by now
    assert again.terminal is not None and again.terminal.usage is not None
    assert again.terminal.usage.cached_from in ("host", "device")
    second.check_output_as_alone(again)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_engine_that_ends_writes_what_it_has_just_computed(tmp_path: Path, kind: str, is_stopped: bool) -> None:
    """Right after the last token, or when its request is ended before that."""
    first = rig(tmp_path, kind)
    outcome = first.begin(text(900), 40)
    while outcome.terminal is None:
        first.tick()
        if is_stopped and first.computed(outcome) >= 920:
            first.engine.scheduler.stop()
    first.engine.save_prefixes()
    second = rig(tmp_path, kind)
    again = second.ask(text(900) + text(20, 3))
    assert second.shared(again)[0][1] == "disk"
    second.check_output_as_alone(again)


def test_the_most_recently_used_prefix_is_written_first(tmp_path: Path) -> None:
    """The end of an engine may leave no time for all."""
    made, order = rig(tmp_path, num_cells=20_000), list[bytes]()
    put = made.store.put

    def noted(save: Any, data: Any) -> None:
        order.append(save.tokens[:16])
        put(save, data)

    made.store.put = noted  # type: ignore[method-assign]
    prompts = [text(80, seed) for seed in (1, 2, 3)]  # so few that none leaves the device before
    for outcome in [made.begin(prompt) for prompt in prompts]:
        while outcome.terminal is None:
            made.tick()
    assert not order
    made.engine.save_prefixes()
    assert list(dict.fromkeys(order)) == [pack_tokens(prompt[:4]) for prompt in reversed(prompts)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_branches_off_starts_from_what_it_shares(tmp_path: Path, kind: str) -> None:
    shared, branch = text(700), text(300, 2)
    written(tmp_path, shared + text(500, 1), shared + branch, shared + branch + text(100, 3), kind=kind)
    second = rig(tmp_path, kind)
    fork = second.ask(shared + text(300, 4), 5)
    longer = second.ask(shared + branch + text(100, 3) + text(50, 7), 5)
    second.check_output_as_alone(fork, longer)
    if kind in ("attention", "hybrid", "sliding_window"):
        assert second.computed(fork) <= 300 + 5 + 64  # places of states may be a little before the branch
    assert second.computed(longer) <= 50 + 5 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_requests_in_a_namespace_of_their_own_find_nothing_of_others(tmp_path: Path, kind: str) -> None:
    written(tmp_path, text(600), kind=kind, tenant="one")
    for options in ({"tenant": "two"}, {"tenant": "one", "cache_salt": "x"}, {}):
        second = rig(tmp_path, kind)
        assert second.shared(second.ask(text(600), **options)) == []
    other_model = rig(tmp_path, kind, of_store={"model": b"n" * 16})
    assert other_model.shared(other_model.ask(text(600), tenant="one")) == []
    same = rig(tmp_path, kind)
    assert same.shared(same.ask(text(600), tenant="one")) == [(599, "disk")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_shares_nothing_leaves_the_disk_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    first = rig(tmp_path, kind)
    calls: list[str] = []
    for name in ("put", "look_up", "note_use", "note_unsaved"):
        monkeypatch.setattr(first.store, name, lambda *_, name=name: calls.append(name))
    outcome = first.ask(text(600), 4, n=2, cache_prompt=False)
    assert first.shared(outcome, 1)  # its choices share its prompt
    first.settle()
    assert calls == []


def test_adapters_share_by_content_and_scale(tmp_path: Path) -> None:
    first = rig(tmp_path, adapters=["a", "b"])
    first.ask(text(600), lora=(("a", 1.0),))
    first.settle()
    second = rig(tmp_path, adapters=["a", "b"])
    for lora in ((("b", 1.0),), (("a", 0.5),), ()):
        assert second.shared(second.ask(text(600), lora=lora)) == []
    outcome = second.ask(text(600), 4, lora=(("a", 1.0),))
    assert second.shared(outcome) == [(599, "disk")]


@pytest.mark.parametrize("kind", ["attention", "sliding_window"])
def test_images_are_found_by_their_contents(tmp_path: Path, kind: str) -> None:
    def media(content: bytes) -> list[MediaItem]:
        return [MediaItem(50, 30, 6, content)]

    written(tmp_path, text(600), kind=kind, media=media(b"a picture"))
    second = rig(tmp_path, kind)
    other = second.ask(text(600), media=media(b"another"))
    assert sum(count for count, _ in second.shared(other)) <= 50
    second = rig(tmp_path, kind)
    assert second.shared(second.ask(text(600), media=media(b"a picture"))) == [(599, "disk")]


@pytest.mark.parametrize("num_idle", [0, 1500])
def test_a_long_prefix_is_saved_in_several_ticks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_idle: int
) -> None:
    """Whether or not idle prefixes leave the device meanwhile."""
    first = rig(tmp_path)
    monkeypatch.setattr(first.scheduler.kv_cache, "_idle_limit", lambda: num_idle)
    counts = slow_saves(first, monkeypatch)
    first.ask(text(1500))
    first.engine.save_prefixes()
    assert sum(count > 0 for count in counts) > 2
    second = rig(tmp_path)
    assert second.shared(second.ask(text(1500))) == [(1499, "disk")]


def test_folders_and_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path, text(600))
    finally:
        os.umask(before)
    found = blocks(tmp_path)
    assert found
    for file in found:
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
        for folder in (file.path.parent, file.path.parent.parent, file.path.parent.parent.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    for _ in range(2):
        written(tmp_path, text(900))
    before = {file.path: file.path.stat().st_ino for file in blocks(tmp_path)}
    third = rig(tmp_path, limits={"host_bytes": 4_000})  # too small to keep what it reads, and so computed again
    third.ask(text(900))
    third.settle()
    assert {path: path.stat().st_ino for path in before} == before


@pytest.mark.parametrize(
    ("kind", "damage"), sampled(product(KINDS, ["flip", "cut", "empty", "longer", "swap", "gone"]), every=4)
)
def test_a_damaged_file_costs_its_tokens(tmp_path: Path, kind: str, damage: str) -> None:
    chance = random.Random(f"{kind} {damage}")
    for _ in range(12):
        written(tmp_path, text(1200), kind=kind)
        paths = [file.path for file in blocks(tmp_path)]
        path = chance.choice(paths)
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif damage == "cut":
            del data[chance.randrange(len(data)) :]
        elif damage == "empty":
            data.clear()
        elif damage == "longer":
            data += b"x"
        elif damage == "swap":
            data[:] = chance.choice(paths).read_bytes()
        path.write_bytes(data)
        if damage == "gone":
            path.unlink()
        second = rig(tmp_path, kind)
        outcome = second.ask(text(1200) + text(20, 3), 5)
        second.check_output_as_alone(outcome)
        second.settle()
        third = rig(tmp_path, kind)  # what was computed again is there again
        third.check_output_as_alone(third.ask(text(1200) + text(20, 3), 5))


def test_a_damaged_file_is_deleted_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path, text(600))
    path = blocks(tmp_path)[0].path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    second = rig(tmp_path)
    second.ask(text(600))
    assert "its checksum does not match" in caplog.text
    assert counted(second, "blocks", "damaged") == 1
    assert path.read_bytes() != data  # computed and written again


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nothing")])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: Any) -> None:
    written(tmp_path, text(1200))
    for file in blocks(tmp_path):
        file.path.unlink()
        make(file.path)
    second = rig(tmp_path)
    outcome = second.ask(text(1200) + text(20, 3), 5)
    assert second.shared(outcome) == []
    second.settle()
    second.check_output_as_alone(outcome)


def test_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    written(tmp_path, text(600))
    shard = blocks(tmp_path)[0].path.parent
    foreign = [shard / "notes.txt", shard / "xx-1-2-yy.cells", shard / ".hidden", tmp_path / "kv" / "README"]
    for path in foreign:
        path.write_text("mine")
    assert rig(tmp_path).ask(text(600)).terminal is not None
    evict(tmp_path / "kv", 0)
    assert all(path.read_text() == "mine" for path in foreign)
    assert not blocks(tmp_path)


def test_least_recently_used_files_leave_and_paths_have_no_gaps(tmp_path: Path) -> None:
    first = written(tmp_path, *[text(1100, seed) for seed in range(6)])
    for seed in (0, 1):
        first.store.tier._touched.clear()
        first.ask(text(1100, seed))
    num_bytes = sum(file.num_bytes for file in blocks(tmp_path))
    evicted = evict(tmp_path / "kv", num_bytes // 2)
    assert evicted.num_bytes_left == sum(file.num_bytes for file in blocks(tmp_path)) <= num_bytes // 2
    assert evicted.num_bytes == num_bytes - evicted.num_bytes_left
    assert evicted.num_blocks
    second = rig(tmp_path)
    for seed in (0, 1):
        assert second.shared(second.ask(text(1100, seed))) == [(1099, "disk")]
    assert second.shared(second.ask(text(1100, 2))) == []
    for file in blocks(tmp_path):  # each begins a path, or where another ends
        assert file.name is not None
        is_first = file.name.start_hash == second.store.folder.hasher(((), "", "")).digest()
        assert is_first or any(
            other.name is not None and other.name.end_hash == file.name.start_hash for other in blocks(tmp_path)
        )


def test_the_limit_holds_while_it_writes(tmp_path: Path) -> None:
    first = rig(tmp_path, of_store={"max_bytes": 100_000})
    for seed in range(12):
        first.ask(text(1100, seed))
        first.settle()
        assert sum(file.num_bytes for file in blocks(tmp_path)) <= 100_000
    assert blocks(tmp_path)
    for name in ("blocks", "tokens", "block_bytes"):
        assert 0 < counted(first, name, "evicted") < counted(first, name, "written")
    left = counted(first, "block_bytes", "written") - counted(first, "block_bytes", "evicted")
    assert left == sum(file.num_bytes for file in blocks(tmp_path))


def test_the_limit_holds_for_all_processes_together(tmp_path: Path) -> None:
    """None of them knows what the others write until it looks."""
    made = [rig(tmp_path, of_store={"max_bytes": 100_000}) for _ in range(4)]
    for seed in range(24):
        made[seed % 4].ask(text(1100, seed))
        made[seed % 4].settle()
        assert sum(file.num_bytes for file in files_of(tmp_path / "kv")) <= 100_000 + 4 * 100_000 // 32 + 20_000


def test_two_processes_may_evict_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, text(2000))
    listing = disk_blocks.files_of

    def raced(root: Path) -> Any:
        found = list(listing(root))
        for file in found[::2]:
            file.path.unlink()  # by the other one
        return iter(found)

    monkeypatch.setattr(disk_blocks, "files_of", raced)
    num_blocks = len(blocks(tmp_path))
    evicted = evict(tmp_path / "kv", 0)
    assert evicted.num_bytes_left == 0
    assert evicted.num_blocks == num_blocks // 2  # the other process counts the rest
    assert not blocks(tmp_path)


def test_several_processes_that_evict_at_once_delete_each_file_once_and_no_more_than_one_would(tmp_path: Path) -> None:
    written(tmp_path, *[text(1100, seed) for seed in range(8)])
    before = blocks(tmp_path)
    limit = sum(file.num_bytes for file in before) // 2
    at_once = threading.Barrier(4)

    def take_part(_: int) -> EvictedBlocks:
        at_once.wait()
        return evict(tmp_path / "kv", limit)

    with ThreadPoolExecutor(4) as pool:
        evicted = list(pool.map(take_part, range(4)))
    left = blocks(tmp_path)
    assert sum(each.num_blocks for each in evicted) == len(before) - len(left)
    assert 0.9 * limit - max(file.num_bytes for file in before) < sum(file.num_bytes for file in left) <= limit


def test_a_file_that_cannot_be_deleted_stays_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others leave in its place."""
    written(tmp_path, *[text(1100, seed) for seed in range(4)])
    oldest, *others = sorted(blocks(tmp_path), key=lambda file: file.used_ns)
    keep(monkeypatch, oldest.path)
    limit = oldest.num_bytes + others[-1].num_bytes
    evicted = evict(tmp_path / "kv", limit)
    assert oldest.path.exists()
    assert evicted.num_bytes_left == sum(file.num_bytes for file in blocks(tmp_path)) <= limit
    assert evicted.num_blocks == 1 + len(others) - len(blocks(tmp_path))


def test_the_limit_holds_if_no_file_can_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, text(1100))
    before = blocks(tmp_path)
    keep(monkeypatch, *[file.path for file in before])
    second = rig(tmp_path, of_store={"max_bytes": sum(file.num_bytes for file in before)})
    second.check_output_as_alone(second.ask(text(1100, 1), 4))
    second.settle()
    assert blocks(tmp_path) == before


def keep(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Have the system refuse to delete these files, as in a folder with a sticky bit if another user owns them."""
    unlink = Path.unlink

    def deny(path: Path, **options: Any) -> None:
        if path in paths:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", deny)


def test_what_a_killed_writer_left_is_ignored_and_later_deleted(tmp_path: Path) -> None:
    written(tmp_path, text(600))
    left = blocks(tmp_path)[0].path.parent / ".77.88.part"
    left.write_bytes(b"half")
    evict(tmp_path / "kv", 1 << 30)
    assert left.exists()
    os.utime(left, (0, 0))
    evict(tmp_path / "kv", 1 << 30)
    assert not left.exists()
    assert rig(tmp_path).ask(text(600)).terminal is not None


def test_a_part_of_the_facts_about_a_model_is_deleted_as_well(tmp_path: Path) -> None:
    """Else the folder of the model would stay for ever."""
    written(tmp_path, text(600))
    model = blocks(tmp_path)[0].path.parents[1]
    left = model / ".77.88.part"
    left.write_bytes(b"half")
    remove(tmp_path / "kv", [model.name])
    assert not model.exists()


def test_a_folder_that_is_deleted_in_the_middle_of_a_write_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `paceline cache rm` beside a server."""
    write, removals = disk_blocks._write_whole, iter([True])

    def write_after_removal(target: Path, parts: Any) -> int:
        if next(removals, False):
            shutil.rmtree(tmp_path / "kv")
        return write(target, parts)

    monkeypatch.setattr(disk_blocks, "_write_whole", write_after_removal)
    written(tmp_path, text(600))
    assert sum(file.name.num_cells for file in blocks(tmp_path) if file.name is not None) == 600


@pytest.mark.parametrize(("number", "is_deleted"), [(errno.EACCES, False), (errno.EIO, True)])
def test_files_that_cannot_be_read_are_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, is_deleted: bool
) -> None:
    """A file that the disk cannot give back would be in the way of another one with its cells."""
    written(tmp_path, text(600))
    second = rig(tmp_path)

    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(ModelFolder, "read", fail)
        outcome = second.ask(text(600) + text(20, 3))
        second.check_output_as_alone(outcome, second.ask(text(600, 1)))
    assert caplog.text.count("files of the disk cache cannot be read, and their tokens are computed") == 1
    assert (counted(second, "blocks", "damaged") > 0) is is_deleted


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_folder_that_is_deleted_is_made_again(tmp_path: Path, is_whole: bool) -> None:
    first = written(tmp_path, text(600))
    if is_whole:
        shutil.rmtree(tmp_path / "kv")
    else:
        remove(tmp_path / "kv", [file.model for file in blocks(tmp_path)])
    assert not blocks(tmp_path)
    first.check_output_as_alone(first.ask(text(600, 1), 3))
    first.settle()
    assert blocks(tmp_path)


def test_a_folder_that_is_deleted_before_its_files_are_read_costs_their_tokens(tmp_path: Path) -> None:
    written(tmp_path, text(1500))
    second = rig(tmp_path)
    find = second.store.tier.find

    def find_and_lose(lookup: DiskLookup) -> list[FoundBlock]:
        found = find(lookup)
        assert found
        shutil.rmtree(tmp_path / "kv")
        return found

    second.store.tier.find = find_and_lose  # type: ignore[method-assign]
    outcome = second.ask(text(1500), 4)
    assert second.shared(outcome) == []
    second.check_output_as_alone(outcome)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Files are not marked as used, and a damaged one cannot be deleted."""
    written(tmp_path, text(1500), kind=kind)
    before = blocks(tmp_path)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", fail)
    for name in ("unlink", "mkdir", "replace"):
        monkeypatch.setattr(Path, name, fail)
    monkeypatch.setattr(disk_blocks, "_write_whole", fail)
    second = rig(tmp_path, kind)
    outcome = second.ask(text(1500) + text(40, 5), 4)
    assert [source for _, source in second.shared(outcome)] == ["disk"]
    second.settle()
    second.check_output_as_alone(outcome)
    data = bytearray(before[0].path.read_bytes())
    data[-1] ^= 1
    before[0].path.write_bytes(data)
    third = rig(tmp_path, kind)
    third.check_output_as_alone(third.ask(text(1500), 4), third.ask(text(1500), 4))
    assert [file.path for file in blocks(tmp_path)] == [file.path for file in before]


@pytest.mark.parametrize("jump_s", [-(10**8), 10**8])
def test_a_clock_that_jumps_costs_at_most_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    """The clock is wrong while an engine writes, and right again for the next one."""
    with monkeypatch.context() as wrong:
        now_ns = time.time_ns
        wrong.setattr(time, "time_ns", lambda: now_ns() + jump_s * 10**9)
        first = written(tmp_path, text(1100), text(1100, 1))
        first.check_output_as_alone(first.ask(text(1100) + text(40, 5), 4))
    second = rig(tmp_path, of_store={"max_bytes": sum(file.num_bytes for file in blocks(tmp_path)) + 1000})
    for seed in (2, 3, 0, 1):  # some leave for others, in whatever order
        second.check_output_as_alone(second.ask(text(1100, seed), 4))
        second.settle()
    assert sum(file.num_bytes for file in blocks(tmp_path)) <= second.store.options.max_bytes


def test_a_file_that_another_process_takes_for_left_behind_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock jumps in the middle of the write. The range can be written later."""
    fsync = os.fsync

    def sweep(handle: int) -> None:
        fsync(handle)
        now_ns = time.time_ns
        with monkeypatch.context() as wrong:
            wrong.setattr(time, "time_ns", lambda: now_ns() + 10**18)
            evict(tmp_path / "kv", 1 << 40)

    with monkeypatch.context() as swept:
        swept.setattr(os, "fsync", sweep)
        first = written(tmp_path, text(600))
        first.check_output_as_alone(first.ask(text(600), 4))
        assert not blocks(tmp_path)
    written(tmp_path, text(600))
    assert blocks(tmp_path)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_an_engine_goes_on_if_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_blocks, "_write_whole", fail)
    first = rig(tmp_path, kind)
    first.check_output_as_alone(first.ask(text(600), 4))
    first.settle()
    assert not blocks(tmp_path)


def test_a_disk_that_is_full_from_the_start_costs_a_part_of_the_files(tmp_path: Path) -> None:
    written(tmp_path, *[text(1100, seed) for seed in range(6)])
    num_bytes = sum(file.num_bytes for file in blocks(tmp_path))
    second = rig(tmp_path)
    second.store.tier.make_room()  # before it has written anything
    assert num_bytes // 2 < sum(file.num_bytes for file in blocks(tmp_path)) <= num_bytes * 9 // 10


def test_a_sequence_waits_for_the_disk_and_others_do_not(tmp_path: Path) -> None:
    written(tmp_path, text(1500))
    second = rig(tmp_path)
    slow = second.begin(text(1500), 2)
    second.tick()
    fast = second.begin(text(30, 9), 2)
    assert [waiting.reads_disk for waiting in waiting_sequences(slow.request.sequences, second.clock.now())] == [True]
    second.tick(8)
    assert fast.terminal is not None
    assert not slow.is_started
    second.run()
    assert second.shared(slow) == [(1499, "disk")]


def test_a_disk_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    written(tmp_path, text(1500))
    second = rig(tmp_path)
    slow = second.begin(text(1500), 2)
    second.tick()
    due_s = second.scheduler.next_deadline_s()
    assert second.clock.now() < due_s < 60
    assert not slow.is_started
    second.clock.advance(due_s - second.clock.now() + 0.001)
    super(DiskRig, second).run()
    assert slow.terminal is not None
    assert second.shared(slow) == []
    second.deliver()  # after all
    second.run()
    second.check_output_as_alone(slow, second.ask(text(1500) + text(20, 3), 2))


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    written(tmp_path, text(1500))
    second = rig(tmp_path)
    outcome = second.begin(text(1500), 2)
    second.tick()
    second.cancel(outcome)
    second.run()
    second.check_done()


def test_sequences_that_begin_alike_read_their_beginning_once(tmp_path: Path) -> None:
    written(tmp_path, text(1500))
    second = rig(tmp_path)
    outcomes = [second.begin(text(1500) + text(30, seed), 2) for seed in range(1, 4)]
    second.tick()
    assert len(second.store.found) == 1
    sequences = [outcome.request.sequences[0] for outcome in outcomes]
    assert [waiting.reads_disk for waiting in waiting_sequences(sequences, second.clock.now())] == [True] * 3
    second.run()
    second.check_output_as_alone(*outcomes)
    assert sum(second.computed(outcome) for outcome in outcomes) <= 3 * 32


def test_tokens_of_host_memory_do_not_count_as_read(tmp_path: Path) -> None:
    """Of a file that goes on beyond the prompt, the tokens of the prompt count."""
    first = rig(tmp_path)
    first.ask(text(900))
    first.settle()
    written(tmp_path, text(900) + text(500, 3))
    outcome = first.ask(text(900) + text(80, 3) + text(60, 9))
    assert counted(first, "tokens", "read") >= 500
    ((num_shared, source),) = first.shared(outcome)
    assert num_shared == 980 and source != "disk"


def test_what_is_slower_to_read_is_computed(tmp_path: Path) -> None:
    written(tmp_path, text(1500))
    second = rig(tmp_path)
    second.ask(text(600, 4))  # it knows what a token costs
    second.store.tier._speed = 1.0  # byte a second
    outcome = second.ask(text(1500))
    assert second.shared(outcome) == []


def test_names_are_read_as_they_are_written() -> None:
    name = BlockName(b"a" * 16, 512, -7, b"b" * 16, is_state=False)
    assert BlockName.parse(str(name)) == name
    for text_ in (
        "",
        "x",
        str(name)[:-1],
        str(name).upper(),
        f"{str(name)[:-6]}.other",
        "-1-1-.cells",
        str(name).replace("00000200", "00000000"),  # no tokens: a path would go on from there for ever
        str(name) + "x",
    ):
        assert BlockName.parse(text_) is None


def test_facts_of_a_model_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert about(tmp_path, "m") == {}
    (tmp_path / "m" / "about.json").write_text("[")
    assert about(tmp_path, "m") == {}
