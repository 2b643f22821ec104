"""llama.cpp's own `examples/simple`, compiled from the same source against the same libraries as paceline's core."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline import _native

# The tool has no option for threads, and several of them spin against each other on a busy machine.
_ONE_THREAD = """
#include "llama.h"
static llama_context_params one_thread() {
    llama_context_params params = llama_context_default_params();
    params.n_threads = params.n_threads_batch = 1;
    return params;
}
#define llama_context_default_params one_thread
"""


class ReferenceTool:
    """Writes greedily from a prompt of a model with the `numbered` vocabulary, whose text says its token ids."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def generate(self, model: Path, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens after the prompt; the prompt itself is checked to have been read as it was meant."""
        text = "".join(f"<{token}>" for token in prompt)
        command = [str(self._program), "-m", str(model), "-ngl", "0", "-n", str(count), text]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        assert re.fullmatch(r"(<\d+>)+", run.stdout.strip()), run.stdout
        tokens = [int(number) for number in re.findall(r"\d+", run.stdout)]
        assert tokens[: len(prompt)] == list(prompt)
        return tokens[len(prompt) :]


def build_reference_tool(folder: Path) -> ReferenceTool:
    """Compile the tool in `folder`; skips the test where a compiler, the source or the libraries are not at hand."""
    facts = _native.build_info()
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    source, entry = Path(facts["llama_cpp_source"]), Path(facts["cache_entry"])
    reasons = {
        "no C++ compiler": compiler is None,
        f"the tool is only built for the CPU backend, not {facts['backend']}": facts["backend"] != "cpu",
        f"the core was built with {facts['sanitizers']}": bool(facts["sanitizers"]),
        "llama.cpp's source is not on this machine": not (source / "examples/simple/simple.cpp").is_file(),
        "llama.cpp's libraries are not on this machine": not (entry / "lib").is_dir(),
    }
    for reason, applies in reasons.items():
        if applies and os.environ.get("CI") and facts["backend"] == "cpu" and not facts["sanitizers"]:
            pytest.fail(f"{reason}, and where everything is checked it has to be")
        if applies:
            pytest.skip(reason)
    shim = folder / "one_thread.h"
    shim.write_text(_ONE_THREAD)
    program = folder / "simple"
    libraries = [str(path) for path in sorted((entry / "lib").glob("*.a"))]
    command = [str(compiler), "-std=c++17", "-O1", "-I", str(entry / "include"), "-include", str(shim)]
    command += [str(source / "examples/simple/simple.cpp"), "-o", str(program)]
    command += ["-Wl,--start-group", *libraries, "-Wl,--end-group", "-pthread", "-ldl", "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    return ReferenceTool(program)
