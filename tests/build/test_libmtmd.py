"""libmtmd of a small tree: compiled apart from llama.cpp, cached beside it, and linked."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.build.test_llama_cpp import PROJECT, Checkout

FILES = {
    "mtmd.h": 'extern "C" int pictures(void);',
    "mtmd.cpp": '#include "mtmd.h"\nint graph(void);\nextern "C" int pictures(void) { return 40 + graph(); }',
    "mtmd-audio.cpp": "const char * place(void); const char * sound(void) { return __FILE__; }",
    "mtmd-image.cpp": "int image(void) { return 1; }",
    "clip.cpp": "int clip(void) { return 1; }",
    "mtmd-cli.cpp": "this does not compile",
    "mtmd-helper.cpp": "neither does this",
    "models/bear.cpp": "int graph(void) { return 3; }",
}


@pytest.fixture
def checkout(tmp_path: Path, environment: dict[str, str]) -> Checkout:
    """Return a project that links a tree's libmtmd."""
    made = Checkout(tmp_path, environment)
    for name, text in FILES.items():
        path = made.tree / "tools/mtmd" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    find, main = "paceline_find_llama_cpp()", "int main(void) { return "
    project = PROJECT.replace(find, f"{find}\ninclude(libmtmd)\npaceline_find_libmtmd()")
    project = project.replace(f"int value(void); {main}value", f"int pictures(void); {main}pictures")
    project = project.replace("PRIVATE llama_cpp)", "PRIVATE libmtmd)")
    (made.folder / "project/CMakeLists.txt").write_text(project)
    return made


def test_it_is_compiled_once_without_what_reads_files(checkout: Checkout) -> None:
    """Neither command lines nor helpers; a second build folder takes it from the cache."""
    assert "compiling libmtmd" in checkout.configure("first")
    second = checkout.configure("second")
    assert "compiling" not in second
    assert "libmtmd of llama.cpp 1.2.3 (unknown) from the cache" in second
    checkout.build("second")
    assert checkout.value("second") == 43
    (library,) = checkout.cache.glob("libmtmd/*/lib/libmtmd.a")
    assert b"tools/mtmd/mtmd-audio.cpp" in library.read_bytes()
    assert str(checkout.folder).encode() not in library.read_bytes()


def test_an_edited_file_is_compiled_anew(checkout: Checkout) -> None:
    """As the rest of a user's tree."""
    checkout.configure()
    checkout.build()
    (checkout.tree / "tools/mtmd/models/bear.cpp").write_text("int graph(void) { return 4; }")
    checkout.build()
    assert checkout.value() == 44


def test_a_tree_without_it_is_a_plain_error(checkout: Checkout) -> None:
    """The error has the searched places."""
    (checkout.tree / "tools/mtmd/models/bear.cpp").unlink()
    output = " ".join(checkout.configure().split())
    assert "tools/mtmd/models has no sources" in output
    assert "paceline cannot be built" in output
