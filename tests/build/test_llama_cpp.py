"""A small tree in the shape of llama.cpp, through the whole of the build: compiled once, cached, linked."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.build.archive import vendored, write_archive
from tests.build.conftest import ROOT, environment_of, find_cmake

LIBRARIES = ["llama-common", "llama-common-base", "llama", "ggml", "ggml-cpu", "ggml-base", "cpp-httplib"]
HEADERS = ["include/llama.h", "ggml/include/ggml.h", "src/llama-ext.h", "common/common.h", "vendor/nlohmann/json.hpp"]
LLAMA = ["models/bear", "llama", "llama-kv-cache", "llama-model"]  # one of each batch of the pinned source
COMMON = ["parsers/fox", "chat", "jinja/lexer"]
TREE = "\n".join(
    [
        "project(llama.cpp C CXX)",
        "set(LLAMA_VERSION_MAJOR 1)\nset(LLAMA_VERSION_MINOR 2)\nset(LLAMA_VERSION_PATCH 3)",
        'file(WRITE "${CMAKE_BINARY_DIR}/base.c"',
        '    "int value(void) { return ${GGML_VALUE}; } const char * base(void) { return __FILE__; }")',
        *(f'add_library({name} STATIC "${{CMAKE_BINARY_DIR}}/base.c" src/place.c)' for name in LIBRARIES),
        "target_link_libraries(ggml-base PRIVATE m)",
        "target_link_libraries(llama-common PRIVATE cpp-httplib)",
        'target_sources(llama-common PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/common/arg.cpp")',
        *(f'target_sources(llama PRIVATE "${{CMAKE_CURRENT_SOURCE_DIR}}/src/{name}.cpp")' for name in LLAMA),
        *(f'target_sources(llama-common PRIVATE "${{CMAKE_CURRENT_SOURCE_DIR}}/common/{name}.cpp")' for name in COMMON),
        "target_link_libraries(llama PRIVATE m)",
    ]
)
PROJECT = f"""
cmake_minimum_required(VERSION 3.25)
project(fake LANGUAGES NONE)
list(APPEND CMAKE_MODULE_PATH "{ROOT}/cmake")
include(settings)
include(toolchain)
include(llama_cpp)
paceline_setting(PACELINE_BACKEND cpu "")
paceline_setting(PACELINE_LLAMA_CPP_SOURCE "" "")
paceline_setting(PACELINE_CACHE_DIR "" "")
paceline_setting(PACELINE_CORES OFF "")
paceline_note_cmake_args()
set(CMAKE_BUILD_TYPE Release)
paceline_use_ccache()
paceline_enable_languages()
find_package(Python REQUIRED COMPONENTS Interpreter)
paceline_find_llama_cpp()
file(WRITE "${{CMAKE_BINARY_DIR}}/main.c" "int value(void); int main(void) {{ return value(); }}")
add_executable(main "${{CMAKE_BINARY_DIR}}/main.c")
target_link_libraries(main PRIVATE llama_cpp)
"""


class Checkout:
    """A project that links llama.cpp as paceline does, and the tree that it takes it from."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.tree, self.cache = folder, folder / "tree", folder / "cache"
        settings = {"PACELINE_LLAMA_CPP_SOURCE": str(self.tree), "PACELINE_CACHE_DIR": str(self.cache)}
        self.environment = environment | settings
        for name in ["ggml/CMakeLists.txt", "common/CMakeLists.txt", "vendor/sheredom/subprocess.h", *HEADERS]:
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / name).touch()
        (self.tree / "CMakeLists.txt").write_text(TREE)
        for path in [*(f"src/{name}.cpp" for name in LLAMA), *(f"common/{name}.cpp" for name in COMMON)]:
            (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / path).write_text(f"int {Path(path).stem.replace('-', '_')}() {{ return 7; }}")
        (self.tree / "common/arg.cpp").write_text("int command_line() { return 8; }")
        (self.tree / "src/place.c").write_text("const char * place(void) { return __FILE__; }")
        (folder / "project").mkdir()
        (folder / "project/CMakeLists.txt").write_text(PROJECT)

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment | env
        out = subprocess.STDOUT
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=out, text=True, check=False)

    def configure(self, build: str = "build", value: str = "42") -> str:
        # That the compilers work is taken for granted, which saves seconds.
        args = [f"-DGGML_VALUE={value}", "-DCMAKE_C_COMPILER_WORKS=1", "-DCMAKE_CXX_COMPILER_WORKS=1"]
        command = [find_cmake(), "-S", f"{self.folder}/project", "-B", f"{self.folder}/{build}", *args]
        return self.run(*command, CMAKE_ARGS=" ".join(args)).stdout

    def build(self, build: str = "build") -> str:
        done = self.run(find_cmake(), "--build", f"{self.folder}/{build}")
        assert done.returncode == 0, done.stdout
        return done.stdout

    def value(self, build: str = "build") -> int:
        return self.run(f"{self.folder}/{build}/main").returncode


@pytest.fixture
def checkout(tmp_path: Path, environment: dict[str, str]) -> Checkout:
    return Checkout(tmp_path, environment)


@dataclass
class TwoBuilds:
    """The output of two build folders of the same project, and every command line that went through ccache."""

    first: str
    second: str
    value: int
    compiled: str
    libraries: list[bytes]


@pytest.fixture(scope="module")
def two_builds(tmp_path_factory: pytest.TempPathFactory) -> TwoBuilds:
    """Configure two build folders in a row, with a ccache on the PATH, and build the second."""
    folder = tmp_path_factory.mktemp("two-builds")
    (folder / "bin").mkdir()
    ccache, log = folder / "bin/ccache", folder / "ccache.log"
    ccache.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec "$@"\n')
    ccache.chmod(0o755)
    environment = environment_of(folder)
    checkout = Checkout(folder, environment | {"PATH": f"{ccache.parent}{os.pathsep}{environment['PATH']}"})
    first, second = checkout.configure("first"), checkout.configure("second")
    checkout.build("second")
    libraries = [path.read_bytes() for path in checkout.cache.glob("llama.cpp/*/lib/*.a")]
    return TwoBuilds(first, second, checkout.value("second"), log.read_text(), libraries)


def test_a_second_checkout_takes_what_the_first_has_built(two_builds: TwoBuilds) -> None:
    """The libraries are compiled once; another build folder links the same libraries, with their options."""
    assert "compiling llama.cpp" in two_builds.first
    assert "compiling llama.cpp" not in two_builds.second
    assert "llama.cpp 1.2.3 (unknown, cpu) from the cache" in two_builds.second
    assert two_builds.value == 42


def test_ccache_is_used_where_it_is_installed(two_builds: TwoBuilds) -> None:
    """Both llama.cpp's files and ours are compiled through a ccache on the PATH."""
    assert "base.c" in two_builds.compiled
    assert "main.c" in two_builds.compiled


def test_libraries_name_no_folder_of_their_builder(
    two_builds: TwoBuilds, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """If a file contains its own name, it is the name in the tree."""
    assert len(two_builds.libraries) == len(LIBRARIES)
    for library in two_builds.libraries:
        assert b"src/place.c" in library
        assert str(tmp_path_factory.getbasetemp()).encode() not in library


def test_an_edited_tree_is_built_anew(checkout: Checkout) -> None:
    """A plain rebuild notices an edit of the user's tree, and links the result."""
    checkout.configure()
    checkout.build()
    (checkout.tree / "CMakeLists.txt").write_text(TREE.replace("${GGML_VALUE}", "${GGML_VALUE} + 1"))
    checkout.build()
    assert checkout.value() == 43


def pin(checkout: Checkout) -> None:
    """Make a source distribution of the tree, which the checkout then takes for the pinned one."""
    files = {str(path.relative_to(checkout.tree)): path.read_text() for path in checkout.tree.rglob("*.*")}
    sha256 = write_archive(checkout.folder / "index", vendored(files))
    pinned = f'set(PACELINE_PINNED_VERSION 9.9)\nset(PACELINE_PINNED_SHA256 "{sha256}")\n'
    before = "paceline_setting(PACELINE_BACKEND"
    (checkout.folder / "project/CMakeLists.txt").write_text(PROJECT.replace(before, pinned + before))
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{checkout.folder}/index", "PIP_CONFIG_FILE": "/dev/null"}
    checkout.environment |= index | {"PACELINE_LLAMA_CPP_SOURCE": ""}


def symbols(checkout: Checkout, library: str) -> str:
    (path,) = checkout.cache.glob(f"llama.cpp/*/lib/lib{library}.a")
    return checkout.run("nm", str(path)).stdout


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, to look into libraries")
def test_of_the_pinned_source_only_what_is_needed_is_compiled(checkout: Checkout) -> None:
    """Command lines and the HTTP library are left out, architectures are not."""
    pin(checkout)
    checkout.configure()
    checkout.build()
    assert all(name in symbols(checkout, "llama") for name in ("bear", "llama_kv_cache", "llama_model"))
    assert all(name in symbols(checkout, "llama-common") for name in ("place", "fox", "chat", "lexer"))
    assert "command_line" not in symbols(checkout, "llama-common")
    assert list(checkout.cache.glob("llama.cpp/*/lib/libcpp-httplib.a")) == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, to look into libraries")
def test_a_tree_of_the_users_is_compiled_whole(checkout: Checkout) -> None:
    """The removable parts were found for the pinned source alone."""
    checkout.configure()
    assert "bear" in symbols(checkout, "llama")
    assert "command_line" in symbols(checkout, "llama-common")


def test_a_changed_pinned_source_is_never_compiled(checkout: Checkout) -> None:
    """The source is looked at before it is compiled, and not touched if the libraries exist."""
    pin(checkout)
    assert "fetching" in checkout.configure("first")
    (place,) = checkout.cache.glob("sources/*/src/place.c")
    place.write_text("this does not compile")
    assert "fetching" not in checkout.configure("second")
    output = checkout.configure("third", value="43")
    assert "is damaged: src/place.c" in output
    checkout.build("third")
    assert checkout.value("third") == 43


def test_a_tree_that_does_not_compile_shows_the_compilers_words(checkout: Checkout) -> None:
    """A compiler error ends in our message with the compiler's own in it, and leaves no entry."""
    output = checkout.configure(value="nonsense")
    assert "llama.cpp does not compile" in output
    assert "nonsense" in output.partition("paceline cannot be built")[2]
    assert "CMAKE_ARGS" in output
    assert [path.name for path in (checkout.cache / "llama.cpp").iterdir() if (path / "complete").exists()] == []


@pytest.fixture
def configure_paceline(tmp_path: Path, environment: dict[str, str]) -> Callable[..., str]:
    """Configure the real project with an environment in which it must fail early."""

    def configure(**env: str) -> str:
        command = [find_cmake(), "-S", str(ROOT), "-B", str(tmp_path / "build")]
        out = subprocess.STDOUT
        done = subprocess.run(
            command, env=environment | env, stdout=subprocess.PIPE, stderr=out, text=True, check=False
        )
        assert done.returncode != 0
        return done.stdout

    return configure


def test_a_missing_compiler_is_a_plain_error(configure_paceline: Callable[..., str]) -> None:
    """Without a compiler the build says which is missing and how to get one."""
    output = " ".join(configure_paceline(CC="/no/such/cc", CXX="/no/such/c++").split())
    assert "paceline cannot be built: no C compiler was found" in output
    assert "apt install g++" in output
