"""Every architecture that llama.cpp's own tool writes files of: loaded, decoded, alone as together, again as first.

Some of them are tried each time; all with `PACELINE_ARCHITECTURES=all pytest tests/native/test_architectures.py`.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.native.apart import run_apart
from tests.native.architecture_files import (
    ALL,
    ArchitectureTool,
    build_architecture_tool,
    chosen,
    known_architectures,
)

from paceline import LLM

pytestmark = [pytest.mark.native, pytest.mark.slow]

PASSES = """
from paceline.runtime import Context
with Model.load(sys.argv[1]) as model, Context(model, n_ctx=256, n_seq_max=2, n_threads=1) as context:
    print(told(lambda: context.decode([1, 2, 3, 4], seq_ids=[0, 0, 1, 1])))
    print(told(lambda: context.decode([1, 2], seq_ids=0)))
    print(told(lambda: context.decode([3, 4], seq_ids=1)))
"""
LOADED = """
import logging
from paceline import LLM
from paceline.runtime import Context
logging.disable()  # llama.cpp warns of contexts beyond what models were trained for
path, n_ctx, num_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with LLM(path, n_threads=1, num_slots=2) as llm:
    print(llm.limits.max_positions, len(llm.generate([1, 2, 3], max_tokens=5, ignore_eos=True).token_ids))
with Model.load(path) as model, Context(model, n_ctx=n_ctx, n_threads=1) as context:
    print(context.max_positions)
    print(told(lambda: context.decode([5] * num_tokens)))
    context.clear()
    print(told(lambda: context.decode([5] * context.max_positions)))
"""
ROOT = Path(__file__).parents[2]
DIFFUSION = ("dream-dense", "llada-dense", "llada-moe-moe", "rnd1-moe")
ONE_SEQUENCE = ("plamo2-dense",)
ONE_TEXT = ("phi2-dense",)  # whose random weights give the same tokens after any prompt
WITHOUT_EMBEDDINGS = ("deepseek4-moe", "qwen4exp-moe")


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> ArchitectureTool:
    return build_architecture_tool(tmp_path_factory.mktemp("architectures"))


def tried(path: Path, **options: Any) -> dict[str, Any]:
    """Return what a process of its own found out about a file; it has to end well."""
    command = [sys.executable, "-m", "tests.native.architecture_probe", str(path), json.dumps(options)]
    env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_generated(found: dict[str, Any], *, depends_on_prompt: bool = True) -> None:
    """All ways of generating gave the same tokens, which depend on the prompt; repeated, most prompts came from memory."""
    assert "refused" not in found, found["refused"]
    alone = found["alone"]
    assert all(len(text) == 24 for text in alone)
    assert (len({tuple(text) for text in alone}) > 1) == depends_on_prompt
    assert found["together"] == alone
    assert found["first"] == alone
    assert found["again"] == alone
    assert sum(tokens > 0 for tokens in found["cached"]) >= 2


@pytest.mark.parametrize("name", [name for name in chosen() if name not in DIFFUSION + ONE_SEQUENCE])
def test_an_architecture_generates_alone_as_together_and_again_as_first(
    tool: ArchitectureTool, tmp_path: Path, name: str
) -> None:
    """Four prompts give the same tokens one by one, together, and repeated from the cache; embeddings end no process."""
    with tool.file(name, tmp_path) as path:
        found = tried(path, num_slots=4)
    check_generated(found, depends_on_prompt=name not in ONE_TEXT)
    assert ("cannot read embeddings" in found["embedded"]) == (name in WITHOUT_EMBEDDINGS)


@pytest.mark.parametrize("name", [name for name in chosen() if name in DIFFUSION])
def test_a_diffusion_model_is_refused_as_what_it_is(tool: ArchitectureTool, tmp_path: Path, name: str) -> None:
    """A request to generate raises `Unsupported`, which calls the model a diffusion model and no encoder."""
    with tool.file(name, tmp_path) as path:
        refused = tried(path)["refused"]
    assert refused.startswith("Unsupported: this model cannot generate; it is a diffusion model")
    assert "encoder" not in refused


@pytest.mark.parametrize("name", [name for name in chosen() if name in ONE_SEQUENCE])
def test_an_architecture_that_aborts_with_several_sequences_runs_with_one_slot(
    tool: ArchitectureTool, tmp_path: Path, name: str
) -> None:
    """More slots are refused with the way out, and with one slot it generates as all others do."""
    with tool.file(name, tmp_path) as path:
        assert tried(path, num_slots=4)["refused"].startswith("InvalidParams: num_slots must be 1 for a model of")
        check_generated(tried(path, num_slots=1))


def test_a_pass_with_two_sequences_is_refused_where_it_would_abort(tool: ArchitectureTool, tmp_path: Path) -> None:
    """A context of PLaMo 2 refuses the pass by the architecture's name, and goes on with one sequence at a time."""
    with tool.file("plamo2-dense", tmp_path) as path:
        first, *others = run_apart(PASSES, path)
    assert first.startswith(
        "Unsupported: seq_ids[2] is 1 after 0: llama.cpp computes plamo2 right for one sequence a pass"
    )
    assert others == ["None", "None"]


def test_a_context_of_a_diffusion_model_calls_it_one(tool: ArchitectureTool, tmp_path: Path) -> None:
    """`decode` raises `Unsupported` with the architecture and what it is, and no word of encoders."""
    with tool.file("dream-dense", tmp_path) as path:
        lines = run_apart(PASSES, path)
    assert all(line.startswith("Unsupported: the architecture dream is a diffusion model") for line in lines)
    assert not any("encoder" in line for line in lines)


def test_no_file_of_the_tool_is_left_out(tool: ArchitectureTool, tmp_path: Path) -> None:
    """Of the architectures that are not in the list the tool writes no file."""
    listed = {name.rpartition("-")[0] for name in ALL}
    others = [name for name in known_architectures() if name not in listed]
    assert [path.name for name in others for path in tool.write(name, tmp_path)] == []


@pytest.mark.parametrize("name", ["gpt2-dense", "mpt-dense", "starcoder-dense"])
def test_positions_end_with_a_learned_table(tool: ArchitectureTool, tmp_path: Path, name: str) -> None:
    """A model with a table of 256 positions starts, generates, refuses position 256 and goes on after that."""
    with tool.file(name, tmp_path) as path:
        lines = run_apart(LOADED, path, 512, 257)
    assert lines[:2] == ["256 5", "256"]
    assert lines[2].startswith("PromptTooLong: token_ids: 257 tokens do not fit") and "256" in lines[2]
    assert lines[3] == "None"


@pytest.mark.parametrize("name", ["bloom-dense", "jais-dense", "refact-dense", "refact-moe"])
def test_positions_without_a_table_end_with_the_context(tool: ArchitectureTool, tmp_path: Path, name: str) -> None:
    """A model with ALiBi and no table starts, and a context of it goes beyond what it was trained for."""
    with tool.file(name, tmp_path) as path:
        lines = run_apart(LOADED, path, 512, 400)
    assert lines == ["256 5", "512", "None", "None"]


def test_a_table_of_positions_is_named_where_n_ctx_is_beyond_it(
    tool: ArchitectureTool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The note says how many tokens a sequence can have, and why."""
    with tool.file("gpt2-dense", tmp_path) as path, caplog.at_level(logging.INFO, "paceline.engine"):
        LLM(path, n_threads=1, num_slots=2, n_ctx=1024).close()
    assert (
        "n_ctx=1024 is more than one sequence can use: it can have 256 tokens, since the model's table of positions has no "
        "more rows"
    ) in caplog.text
