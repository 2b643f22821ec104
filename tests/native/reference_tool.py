"""llama.cpp's own `examples/simple`, compiled from the same source against the same libraries as paceline's core."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.native.tool_building import build_tool

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
    """Writes greedily from a prompt of a model with the `numbered` vocabulary: its text has its token ids."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def generate(self, model: Path, prompt: Sequence[int], count: int) -> list[int]:
        """Return the tokens after the prompt; the prompt itself is checked to have been read as it was meant."""
        text = "".join(f"<{token}>" for token in prompt)
        command = [str(self._program), "-m", str(model), "-ngl", "0", "-n", str(count), text]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        assert re.fullmatch(r"(<\d+>)+", run.stdout.strip()), run.stdout
        tokens = [int(number) for number in re.findall(r"\d+", run.stdout)]
        assert tokens[: len(prompt)] == list(prompt)
        return tokens[len(prompt) :]


def build_reference_tool(folder: Path) -> ReferenceTool:
    """Compile the tool in `folder`; skips the test if a compiler, the source or the libraries are missing."""
    shim = folder / "one_thread.h"
    shim.write_text(_ONE_THREAD)
    return ReferenceTool(build_tool(folder / "simple", ["examples/simple/simple.cpp"], ["-include", str(shim)]))
