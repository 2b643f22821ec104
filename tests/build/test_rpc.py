"""ggml's RPC backend of a small tree: compiled apart from llama.cpp, cached beside it, linked on request."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.build.conftest import find_cmake
from tests.build.test_llama_cpp import PROJECT, Checkout

FILES = {
    "ggml-rpc.cpp": "int received(); int lent() { return 30 + received(); }",
    "transport.cpp": "int received() { return (int) recv(0, nullptr, 12, 0); }",
}
MAIN = """
#if PACELINE_RPC
#include <sys/types.h>
int lent();
extern "C" ssize_t paceline_rpc_recv(int, void *, size_t size, int) { return (ssize_t) size; }
int main() { return lent(); }
#else
int main() { return 7; }
#endif
"""


@pytest.fixture
def checkout(tmp_path: Path, environment: dict[str, str]) -> Checkout:
    """Return a project that links a tree's RPC backend if PACELINE_RPC is ON in its environment."""
    made = Checkout(tmp_path, environment)
    for name, text in FILES.items():
        path = made.tree / "ggml/src/ggml-rpc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "main.cpp").write_text(MAIN)
    find = "paceline_find_llama_cpp()"
    project = PROJECT.replace(find, f'paceline_setting(PACELINE_RPC OFF "")\n{find}\ninclude(rpc)\npaceline_find_rpc()')
    project = "\n".join(line for line in project.splitlines() if not line.startswith("file(WRITE"))
    project = project.replace("${CMAKE_BINARY_DIR}/main.c", f"{tmp_path}/main.cpp")
    project = project.replace(
        "PRIVATE llama_cpp)",
        "PRIVATE ggml_rpc llama_cpp)\ntarget_compile_definitions(main PRIVATE PACELINE_RPC=${PACELINE_HAS_RPC})",
    )
    (made.folder / "project/CMakeLists.txt").write_text(project)
    return made


def test_it_is_left_out_unless_asked_for(checkout: Checkout) -> None:
    """Nothing of it is compiled then."""
    assert "RPC backend" not in checkout.configure()
    checkout.build()
    assert checkout.value() == 7
    assert not (checkout.cache / "rpc").exists()


def test_it_is_compiled_once_and_llama_cpp_is_not_compiled_again(checkout: Checkout) -> None:
    """Its sockets are ours; with and without it the entry of llama.cpp is the same."""
    checkout.configure("without")
    checkout.environment["PACELINE_RPC"] = "ON"
    first = checkout.configure("first")
    assert "compiling ggml's RPC backend" in first and "compiling llama.cpp" not in first
    second = checkout.configure("second")
    assert "compiling" not in second
    assert "the RPC backend of llama.cpp 1.2.3 (unknown) from the cache" in second
    checkout.build("second")
    assert checkout.value("second") == 42
    assert (
        len(list(checkout.cache.glob("llama.cpp/*/complete"))) == len(list(checkout.cache.glob("rpc/*/complete"))) == 1
    )


def test_an_edited_file_is_compiled_anew(checkout: Checkout) -> None:
    """As the rest of a user's tree."""
    checkout.environment["PACELINE_RPC"] = "ON"
    checkout.configure()
    checkout.build()
    (checkout.tree / "ggml/src/ggml-rpc/ggml-rpc.cpp").write_text("int received(); int lent() { return received(); }")
    checkout.build()
    assert checkout.value() == 12


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("PACELINE_RPC", "yes", "neither ON nor OFF"),
        ("CMAKE_ARGS", "-DGGML_RPC=ON", "GGML_RPC is on, but paceline builds the RPC backend itself"),
    ],
)
def test_what_would_build_it_otherwise_is_refused(checkout: Checkout, setting: str, value: str, words: str) -> None:
    """llama.cpp's own switch registers it in ggml, with nothing to link it."""
    command = [find_cmake(), "-S", f"{checkout.folder}/project", "-B", f"{checkout.folder}/build"]
    defines = value.split() if setting == "CMAKE_ARGS" else [f"-D{setting}={value}"]
    output = " ".join(checkout.run(*command, *defines).stdout.split())
    assert words in output and "paceline cannot be built" in output


def test_a_tree_without_it_is_a_plain_error(checkout: Checkout) -> None:
    """The error has the searched places."""
    checkout.environment["PACELINE_RPC"] = "ON"
    (checkout.tree / "ggml/src/ggml-rpc/transport.cpp").unlink()
    output = " ".join(checkout.configure().split())
    assert "ggml/src/ggml-rpc has no transport.cpp" in output and "paceline cannot be built" in output
