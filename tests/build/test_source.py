"""The source of llama.cpp: a tree of the user's, or the pinned archive, verified and unpacked once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.build.archive import BACKEND, vendored, write_archive
from tests.build.conftest import ScriptRunner

FIND = """
paceline_find_source(LLAMA_CPP "${user_tree}" "${cache}")
message(STATUS "tree=${LLAMA_CPP_TREE} version=${LLAMA_CPP_VERSION} commit=${LLAMA_CPP_COMMIT} id=[${LLAMA_CPP_ID}]")
"""
TREE = {
    "CMakeLists.txt": "set(LLAMA_VERSION_MAJOR 1)\nset(LLAMA_VERSION_MINOR 2)\nset(LLAMA_VERSION_PATCH 34)\n",
    "include/llama.h": "// llama",
    "ggml/CMakeLists.txt": "",
    "common/CMakeLists.txt": "",
    "src/llama.cpp": "int x;",
}


def write_tree(folder: Path, files: dict[str, str] = TREE) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


# ---- a tree of the user's


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "tree")


@pytest.fixture
def find(run: ScriptRunner, tmp_path: Path) -> Callable[..., str]:
    """Find the source and return the output."""

    def run_find(user_tree: Path | str, *, fails: bool = False) -> str:
        return run(FIND, fails=fails, user_tree=str(user_tree), cache=str(tmp_path / "cache")).stdout

    return run_find


def test_a_tree_of_the_users_is_taken_as_it_is(find: Callable[..., str], tree: Path) -> None:
    """A llama.cpp tree is used in place, with the version it states."""
    assert f"tree={tree} version=1.2.34 commit=unknown" in find(tree)


def test_an_untouched_tree_keeps_its_identity(find: Callable[..., str], tree: Path) -> None:
    """Two looks at the same tree give the same identity."""
    assert find(tree) == find(tree)


def edit(tree: Path) -> None:
    (tree / "src/llama.cpp").write_text("int y;")


def add(tree: Path) -> None:
    (tree / "ggml/new.c").write_text("")


def remove(tree: Path) -> None:
    (tree / "src/llama.cpp").unlink()


@pytest.mark.parametrize("change", [edit, add, remove])
def test_a_changed_tree_has_another_identity(
    find: Callable[..., str], tree: Path, change: Callable[[Path], None]
) -> None:
    """A file that was edited (at the same length), added or removed changes the identity."""
    before = find(tree)
    change(tree)
    assert find(tree) != before


@pytest.mark.parametrize(("name", "words"), [("relative/tree", "a relative path"), ("/no/such/folder", "no folder")])
def test_a_path_that_is_no_folder_is_refused(find: Callable[..., str], name: str, words: str) -> None:
    """A relative path and a missing folder are refused by name."""
    output = find(name, fails=True)
    assert f'PACELINE_LLAMA_CPP_SOURCE is "{name}"' in output
    assert words in output


@pytest.mark.parametrize("missing", ["CMakeLists.txt", "include/llama.h", "ggml/CMakeLists.txt"])
def test_a_folder_that_is_not_llama_cpp_is_refused(find: Callable[..., str], tree: Path, missing: str) -> None:
    """A folder without a landmark of llama.cpp is refused."""
    (tree / missing).unlink()
    assert "is not a llama.cpp source tree" in " ".join(find(tree, fails=True).split())


def test_a_folder_above_the_tree_gets_a_hint(find: Callable[..., str], tmp_path: Path) -> None:
    """For a checkout that holds llama.cpp in vendor/ the error names the right folder."""
    write_tree(tmp_path / "outer/vendor/llama.cpp")
    assert f"did you mean {tmp_path}/outer/vendor/llama.cpp?" in find(tmp_path / "outer", fails=True)


# ---- the pinned archive


class Index:
    """A folder of archives that pip may take from, and nothing else."""

    def __init__(self, folder: Path, run: ScriptRunner) -> None:
        self.folder = folder / "index"
        self.cache = folder / "cache"
        self.run = run
        self.folder.mkdir()

    def fetch(self, sha256: str, *, then: str = "", fails: bool = False, **variables: str) -> str:
        pin = f'set(PACELINE_PINNED_VERSION 9.9)\nset(PACELINE_PINNED_SHA256 "{sha256}")\n'
        env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.folder), "PIP_CONFIG_FILE": "/dev/null"}
        variables = {"user_tree": "", "cache": str(self.cache)} | variables
        return self.run(pin + FIND + then, fails=fails, env=env, **variables).stdout

    def require_whole(self, sha256: str, **variables: str) -> str:
        return self.fetch(sha256, then='paceline_require_whole_source("" "${cache}")', **variables)

    def entry(self, sha256: str) -> Path:
        return self.cache / f"sources/llama.cpp-9.9-{sha256[:12]}"


@pytest.fixture
def index(tmp_path: Path, run: ScriptRunner) -> Index:
    return Index(tmp_path, run)


def test_the_pinned_source_is_fetched_once(index: Index) -> None:
    """The archive is fetched, verified and unpacked; the next build needs neither pip nor the archive."""
    sha256 = write_archive(index.folder, vendored(TREE) | {"other/large": "not wanted"})
    output = index.fetch(sha256)
    assert f"tree={index.entry(sha256)} version=1.2.34" in output
    assert (index.entry(sha256) / "src/llama.cpp").read_text() == "int x;"
    assert not (index.entry(sha256) / "other").exists()
    assert [path.name for path in (index.cache / "sources").glob("*.partial")] == []
    again = index.fetch(sha256, Python_EXECUTABLE="/bin/false")
    assert "the source of llama.cpp from the cache" in again


def test_an_archive_with_another_checksum_is_refused_unopened(index: Index, tmp_path: Path) -> None:
    """An archive with another hash is refused with both hashes, and nothing of it has run."""
    trap = tmp_path / "trap"
    got = write_archive(index.folder, vendored(TREE) | {"fake.py": f"open({str(trap)!r}, 'w')\n{BACKEND}"})
    expected = "0" * 64
    output = index.fetch(expected, fails=True)
    assert "the checksum of llama-cpp-python 9.9 differs" in output
    assert f"expected {expected}" in output
    assert f"got      {got}" in output
    assert not trap.exists()
    assert not index.entry(expected).exists()
    assert f"tree={index.entry(got)}" in index.fetch(got)


def test_an_unreachable_source_names_the_way_out(index: Index) -> None:
    """Without the archive anywhere the message names PACELINE_LLAMA_CPP_SOURCE and shows pip's output."""
    output = index.fetch("0" * 64, fails=True)
    assert "cannot be downloaded" in output
    assert "PACELINE_LLAMA_CPP_SOURCE" in output
    assert "No matching distribution found" in output


def test_a_python_without_pip_is_an_error_with_the_way_out(index: Index, program: Callable[[str, str], Path]) -> None:
    """If Python has no pip the message says so."""
    python = program("python", 'echo "$0: No module named pip" >&2; exit 1')
    output = index.fetch("0" * 64, fails=True, Python_EXECUTABLE=str(python))
    assert "has no pip" in output
    assert "PACELINE_LLAMA_CPP_SOURCE" in output


def test_an_archive_without_llama_cpp_is_refused(index: Index) -> None:
    """An archive that lacks vendor/llama.cpp becomes no entry."""
    files = vendored(TREE)
    del files["vendor/llama.cpp/include/llama.h"]
    sha256 = write_archive(index.folder, files)
    assert "holds no llama.cpp" in index.fetch(sha256, fails=True)
    assert not index.entry(sha256).exists()


def test_a_damaged_download_is_fetched_again(index: Index) -> None:
    """A source entry without its landmarks is fetched anew."""
    sha256 = write_archive(index.folder, vendored(TREE))
    index.fetch(sha256)
    (index.entry(sha256) / "include/llama.h").unlink()
    index.fetch(sha256)
    assert (index.entry(sha256) / "include/llama.h").exists()


@pytest.mark.parametrize("change", [edit, add, remove])
def test_a_changed_source_is_fetched_again_before_it_is_compiled(index: Index, change: Callable[[Path], None]) -> None:
    """A glance at the landmarks lets a changed file pass; the look before compiling sees it and has the source anew."""
    sha256 = write_archive(index.folder, vendored(TREE))
    index.fetch(sha256)
    tree = index.entry(sha256)
    change(tree)
    assert "is damaged" not in index.fetch(sha256)
    assert "is damaged" in index.require_whole(sha256)
    assert (tree / "src/llama.cpp").read_text() == "int x;"
    assert not (tree / "ggml/new.c").exists()
    assert "is damaged" not in index.require_whole(sha256, Python_EXECUTABLE="/bin/false")


def test_a_tree_of_the_users_may_be_edited_as_they_like(index: Index, run: ScriptRunner, tree: Path) -> None:
    """The look before compiling is at the pinned source alone."""
    edit(tree)
    run(f'paceline_require_whole_source("{tree}" "{index.cache}")')
    assert (tree / "src/llama.cpp").read_text() == "int y;"
    assert not index.cache.exists()
