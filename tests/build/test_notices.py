"""The licences in a wheel: collected from the sources of what is linked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.build.conftest import ROOT, ScriptRunner

COLLECT = f"""
include("{ROOT}/cmake/notices.cmake")
paceline_collect_notices("${{folder}}" "${{tree}}" "${{nanobind}}")
"""
SOURCES = {
    "tree/LICENSE": "MIT of llama.cpp\n",
    "tree/ggml/src/ggml-cpu/llamafile/sgemm.cpp": "// Copyright of sgemm\n//\n// as is\n\n// art\n\nint x;\n",
    "tree/ggml/src/ggml-cpu/ops.cpp": "int a;\n// YaRN algorithm based on a paper\n// MIT licensed. Copyright of YaRN\nint b;\n",
    "tree/licenses/LICENSE-jsonhpp": "MIT of JSON\n",
    "tree/vendor/miniaudio/miniaudio.h": "int a;\n/*\nThis software is available as a choice\nas is; [MIT-0].\n*/\n",
    "tree/vendor/stb/stb_image.h": "/* a */\n/*\n---\nThis software is available under 2 licenses\nas is.\n---\n*/\n",
    "packages/nanobind-3.1.0.dist-info/licenses/LICENSE": "BSD of nanobind\n",
    "packages/nanobind/ext/robin_map/include/tsl/robin_map.h": "/**\n * MIT License\n *\n * as is\n */\n#ifndef A\n",
}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def collect(run: ScriptRunner, sources: Path) -> Callable[..., str]:
    def collected(*, fails: bool = False) -> str:
        names = {"folder": "licenses", "tree": "tree", "nanobind": "packages/nanobind"}
        return run(COLLECT, fails=fails, **{name: str(sources / path) for name, path in names.items()}).stdout

    return collected


def test_each_project_has_its_licence(collect: Callable[..., str], sources: Path) -> None:
    """Files are copied, comments are cut out of headers. A second build finds the same."""
    for _ in range(2):
        collect()
        folder = sources / "licenses"
        found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
        assert found == {
            "llama.cpp/LICENSE": "MIT of llama.cpp\n",
            "llamafile/LICENSE": "// Copyright of sgemm\n//\n// as is\n",
            "miniaudio/LICENSE": "This software is available as a choice\nas is; [MIT-0].",
            "nanobind/LICENSE": "BSD of nanobind\n",
            "nlohmann-json/LICENSE-jsonhpp": "MIT of JSON\n",
            "robin-map/LICENSE": "MIT License\n *\n * as is\n",
            "stb/LICENSE": "This software is available under 2 licenses\nas is.\n---",
            "yarn/NOTICE": "// YaRN algorithm based on a paper\n// MIT licensed. Copyright of YaRN\n",
        }


def test_a_licence_that_has_moved_ends_the_build(collect: Callable[..., str], sources: Path) -> None:
    """The error names the file, and not another one's licence is taken."""
    (sources / "tree/vendor/stb/stb_image.h").write_text("int nothing;\n")
    assert "stb_image.h has no licence" in collect(fails=True)
