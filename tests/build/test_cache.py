"""The cache of built libraries: an entry is whole and the right one, or it is built."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from tests.build.conftest import ScriptRunner

BUILD = """
function(builder aside)
    file(APPEND "${log}" "built\\n")
    file(WRITE "${aside}/entry/lib/libone.a" "one ${key}")
    file(WRITE "${aside}/entry/include/one.h" "two")
endfunction()
paceline_cache_entry("${entry}" KEY "${key}" BUILDER builder WHAT "the thing")
"""


class Cache:
    """One entry of a cache, and how often it was built."""

    def __init__(self, folder: Path) -> None:
        self.entry = folder / "cache" / "thing-1"
        self.log = folder / "log"
        self.marker = self.entry / "complete"
        self.partial = Path(f"{self.entry}.partial")
        self.lock = Path(f"{self.entry}.lock")

    @property
    def variables(self) -> dict[str, str]:
        return {"entry": str(self.entry), "log": str(self.log), "key": "version 1\nflags -O2"}

    @property
    def num_builds(self) -> int:
        return self.log.read_text().count("built") if self.log.exists() else 0


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock as another build would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def test_a_missing_entry_is_built_and_sealed(run: ScriptRunner, cache: Cache) -> None:
    """A missing entry is built, carries its key, and leaves no scratch folder."""
    run(BUILD, **cache.variables)
    assert (cache.entry / "lib/libone.a").read_text() == "one version 1\nflags -O2"
    assert "version 1\nflags -O2" in cache.marker.read_text()
    assert not cache.partial.exists()


def test_a_whole_entry_is_used_again(run: ScriptRunner, cache: Cache) -> None:
    """A whole entry is not built twice."""
    run(BUILD, **cache.variables)
    done = run(BUILD, **cache.variables)
    assert cache.num_builds == 1
    assert "from the cache" in done.stdout


def test_an_entry_for_another_key_is_built_anew(run: ScriptRunner, cache: Cache) -> None:
    """A build for another key is never used, even under the same name."""
    run(BUILD, **cache.variables)
    run(BUILD, **(cache.variables | {"key": "version 2"}))
    assert cache.num_builds == 2
    assert (cache.entry / "lib/libone.a").read_text() == "one version 2"


def truncate_marker(cache: Cache) -> None:
    cache.marker.write_text(cache.marker.read_text()[:-5])


def cut_list_of_files(cache: Cache) -> None:
    head, _, _ = cache.marker.read_text().partition("--- files\n")
    cache.marker.write_text(head + "--- files\n--- end\n")


def overwrite_marker(cache: Cache) -> None:
    cache.marker.write_bytes(b"\x00\xff;[]]=]\n")


def empty_marker(cache: Cache) -> None:
    cache.marker.write_text("")


def remove_marker(cache: Cache) -> None:
    cache.marker.unlink()


def change_file(cache: Cache) -> None:
    (cache.entry / "lib/libone.a").write_text("one version 1\nflags -O3")


def remove_file(cache: Cache) -> None:
    (cache.entry / "include/one.h").unlink()


def add_file(cache: Cache) -> None:
    (cache.entry / "include/two.h").write_text("")


@pytest.mark.parametrize(
    "damage",
    [
        truncate_marker, cut_list_of_files, overwrite_marker, empty_marker, remove_marker, change_file, remove_file,
        add_file,
    ],
)  # fmt: skip
def test_a_damaged_entry_is_built_anew(run: ScriptRunner, cache: Cache, damage: Callable[[Cache], None]) -> None:
    """An entry with a changed marker, changed files or another file is built anew, and is then whole."""
    run(BUILD, **cache.variables)
    damage(cache)
    run(BUILD, **cache.variables)
    run(BUILD, **cache.variables)
    assert cache.num_builds == 2
    assert (cache.entry / "lib/libone.a").read_text() == "one version 1\nflags -O2"
    assert (cache.entry / "include/one.h").read_text() == "two"
    assert not (cache.entry / "include/two.h").exists()


def test_the_damaged_file_is_named(run: ScriptRunner, cache: Cache) -> None:
    """Who wonders why something is built again reads which file it is for."""
    run(BUILD, **cache.variables)
    remove_file(cache)
    assert "the entry is damaged: include/one.h" in run(BUILD, **cache.variables).stdout


def test_what_desktops_leave_in_every_folder_does_not_count(run: ScriptRunner, cache: Cache) -> None:
    """A file of a file manager in the entry is no reason to compile for minutes."""
    run(BUILD, **cache.variables)
    (cache.entry / "lib/.DS_Store").write_text("")
    run(BUILD, **cache.variables)
    assert cache.num_builds == 1


def test_a_foreign_folder_under_the_name_is_replaced(run: ScriptRunner, cache: Cache) -> None:
    """A folder of that name without a seal is replaced, files and all."""
    (cache.entry / "lib").mkdir(parents=True)
    (cache.entry / "lib/libforeign.a").write_text("foreign")
    run(BUILD, **cache.variables)
    assert not (cache.entry / "lib/libforeign.a").exists()
    assert (cache.entry / "lib/libone.a").exists()


def test_a_killed_build_leaves_no_entry_and_no_lock(run: ScriptRunner, cache: Cache) -> None:
    """A build that is killed half-way leaves nothing under the name, and the next build starts from a clean folder."""
    kill = """
function(builder aside)
    file(WRITE "${aside}/entry/lib/libhalf.a" "half")
    execute_process(COMMAND sh -c "kill -9 $PPID")
endfunction()
paceline_cache_entry("${entry}" KEY "${key}" BUILDER builder WHAT "the thing")
"""
    run(kill, fails=True, **cache.variables)
    assert (cache.partial / "entry/lib/libhalf.a").exists()
    assert not cache.entry.exists()
    run(BUILD, **cache.variables)
    assert not (cache.entry / "lib/libhalf.a").exists()
    assert not cache.partial.exists()


def test_a_failed_build_leaves_nothing(run: ScriptRunner, cache: Cache) -> None:
    """A builder that gives up leaves no entry, and no scratch folder that fills the disk."""
    failing = """
function(builder aside)
    file(WRITE "${aside}/entry/lib/libhalf.a" "half")
    paceline_fail("no luck" "try again")
endfunction()
paceline_cache_entry("${entry}" KEY "${key}" BUILDER builder WHAT "the thing")
"""
    assert "no luck" in run(failing, fails=True, **cache.variables).stdout
    assert not cache.entry.exists()
    assert not cache.partial.exists()


def read_until(stream: IO[str], words: str) -> None:
    for line in stream:
        if words in line:
            return
    pytest.fail(f"the process ended before it said {words!r}")


def test_two_builds_of_one_entry_build_it_once(
    script: Callable[..., list[str]], environment: dict[str, str], cache: Cache
) -> None:
    """If two processes want the same entry, one builds it; the other waits and takes it."""
    command = script(BUILD, **cache.variables)
    with held(cache.lock):
        racers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for racer in racers:
            assert racer.stdout
            read_until(racer.stdout, "waiting for another process")
    outputs = [racer.communicate(timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert cache.num_builds == 1
    assert sum("just built by another process" in output for output in outputs) == 1


def test_a_lock_that_is_never_given_up_is_an_error(run: ScriptRunner, cache: Cache) -> None:
    """A lock that stays taken ends in a message that names it and the way out."""
    with held(cache.lock):
        done = run("set(PACELINE_LOCK_TIMEOUT_S 0)\n" + BUILD, fails=True, **cache.variables)
    assert str(cache.lock) in done.stdout
    assert "PACELINE_CACHE_DIR" in done.stdout


def test_what_ended_builds_left_is_swept(run: ScriptRunner, cache: Cache) -> None:
    """A scratch folder that no build works on goes away with the next build; one in use stays."""
    dead, alive = (cache.entry.parent / f"{name}.partial" for name in ("dead", "alive"))
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    with held(cache.entry.parent / "alive.lock"):
        run(BUILD, **cache.variables)
    assert not dead.exists()
    assert alive.exists()


def test_a_full_disk_is_noticed_before_the_build(run: ScriptRunner, cache: Cache) -> None:
    """A build that cannot fit is refused before it begins, with the free space and the way out."""
    text = BUILD.replace("WHAT", "SPACE_MB 900000000000 WHAT")
    done = run(text, fails=True, **cache.variables)
    assert "the disk is full" in done.stdout
    assert "900000000000 MiB" in done.stdout
    assert "PACELINE_CACHE_DIR" in done.stdout
    assert cache.num_builds == 0


def test_a_glance_sees_the_files_it_is_for(run: ScriptRunner, cache: Cache) -> None:
    """With GLANCE a change elsewhere goes unseen, and one in a file that is looked at does not."""
    text = BUILD.replace("WHAT", "GLANCE lib/libone.a WHAT")
    run(text, **cache.variables)
    (cache.entry / "include/one.h").write_text("changed")
    run(text, **cache.variables)
    assert cache.num_builds == 1
    (cache.entry / "lib/libone.a").write_text("changed")
    run(text, **cache.variables)
    assert cache.num_builds == 2
    assert (cache.entry / "include/one.h").read_text() == "two"


def test_after_a_glance_a_full_look_sees_the_rest(run: ScriptRunner, cache: Cache) -> None:
    """An entry that a quick check made or accepted is sealed as a whole all the same."""
    run(BUILD.replace("WHAT", "GLANCE lib/libone.a WHAT"), **cache.variables)
    run(BUILD, **cache.variables)
    assert cache.num_builds == 1
    change_file(cache)
    run(BUILD, **cache.variables)
    assert cache.num_builds == 2
