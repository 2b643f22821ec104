"""Compiles llama.cpp's own programs from the pinned source against the libraries of paceline's core."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline import _native


def source_folder() -> Path:
    """Return the tree of llama.cpp that the core was built from."""
    return Path(_native.build_info()["llama_cpp_source"])


def libmtmd_entry() -> Path:
    """Return the folder of libmtmd in the build's cache for the llama.cpp of the built core."""
    facts = _native.build_info()
    wanted = _key(Path(facts["cache_entry"]))
    found = Path(facts["cache_dir"]).glob("libmtmd/*/complete")
    folders = [
        item.parent for item in found if _key(item.parent).partition("\n")[2] == wanted
    ]  # behind a line of its own
    return folders[0] if folders else Path(facts["cache_dir"]) / "libmtmd/none"


def _key(entry: Path) -> str:
    text = (entry / "complete").read_text() if (entry / "complete").is_file() else ""
    return text.partition("--- key\n")[2].partition("\n--- files")[0]


def build_tool(
    program: Path, sources: Sequence[str | Path], flags: Sequence[str] = (), libraries: Sequence[Path] = ()
) -> Path:
    """Compile files of llama.cpp's tree and others; skip the test if compiler, sources or libraries are missing."""
    facts = _native.build_info()
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    entry = Path(facts["cache_entry"])
    files = [source_folder() / source for source in sources]  # of an absolute path, itself
    reasons = {
        "no C++ compiler": compiler is None,
        f"the tool is only built for the CPU backend, not {facts['backend']}": facts["backend"] != "cpu",
        f"the core was built with {facts['sanitizers']}": bool(facts["sanitizers"]),
        "llama.cpp's source is not on this machine": not all(file.is_file() for file in files),
        "llama.cpp's libraries are not on this machine": not (entry / "lib").is_dir()
        or not all(library.is_file() for library in libraries),
    }
    for reason, applies in reasons.items():
        if applies and os.environ.get("CI") and facts["backend"] == "cpu" and not facts["sanitizers"]:
            pytest.fail(f"{reason}, and where everything is checked it has to be")
        if applies:
            pytest.skip(reason)
    archives = [str(path) for path in (*libraries, *sorted((entry / "lib").glob("*.a")))]
    command = [str(compiler), "-std=c++17", "-O1", "-I", str(entry / "include"), *flags]
    command += [*map(str, files), "-o", str(program)]
    command += ["-Wl,--start-group", *archives, "-Wl,--end-group", "-pthread", "-ldl", "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=250)
    return program
