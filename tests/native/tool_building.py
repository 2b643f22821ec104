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


def build_tool(program: Path, source: str, flags: Sequence[str] = ()) -> Path:
    """Compile `source`, a file of llama.cpp's tree; skip the test where compiler, source or libraries are not at hand."""
    facts = _native.build_info()
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    entry = Path(facts["cache_entry"])
    reasons = {
        "no C++ compiler": compiler is None,
        f"the tool is only built for the CPU backend, not {facts['backend']}": facts["backend"] != "cpu",
        f"the core was built with {facts['sanitizers']}": bool(facts["sanitizers"]),
        "llama.cpp's source is not on this machine": not (source_folder() / source).is_file(),
        "llama.cpp's libraries are not on this machine": not (entry / "lib").is_dir(),
    }
    for reason, applies in reasons.items():
        if applies and os.environ.get("CI") and facts["backend"] == "cpu" and not facts["sanitizers"]:
            pytest.fail(f"{reason}, and where everything is checked it has to be")
        if applies:
            pytest.skip(reason)
    libraries = [str(path) for path in sorted((entry / "lib").glob("*.a"))]
    command = [str(compiler), "-std=c++17", "-O1", "-I", str(entry / "include"), *flags]
    command += [str(source_folder() / source), "-o", str(program)]
    command += ["-Wl,--start-group", *libraries, "-Wl,--end-group", "-pthread", "-ldl", "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=250)
    return program
