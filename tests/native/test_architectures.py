"""Every architecture that can be made: computed in every way in which an engine reuses memory, and alone, to compare.

Some of them are tried each time; all with `PACELINE_ARCHITECTURES=all pytest -m full tests/native/test_architectures.py`.
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
    OURS,
    ArchitectureTool,
    build_architecture_tool,
    chosen,
    documented_classes,
    known_architectures,
)

from paceline import LLM

pytestmark = [pytest.mark.native, pytest.mark.full]

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
ENCODERS = ("bert-tiny", "modern-bert-tiny")
ENCODER_DECODERS = ("t5-tiny",)
OTHERS = DIFFUSION + ENCODERS + ENCODER_DECODERS
ONE_SEQUENCE = ("plamo2-dense",)
ONE_TEXT = ("phi2-dense",)  # whose random weights give the same tokens after any prompt
WITHOUT_EMBEDDINGS = ("deepseek4-moe", "qwen4exp-moe")
SLOW = ("deepseek4-moe",)  # one request is done before the next has been computed
WAYS = ("together", "cached", "shared", "forked", "choices", "preempted", "saved")


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> ArchitectureTool:
    return build_architecture_tool(tmp_path_factory.mktemp("architectures"))


def tried(path: Path, **options: Any) -> dict[str, Any]:
    """Return the findings of a process of its own about a file; it has to end well."""
    command = [sys.executable, "-m", "tests.native.architecture_probe", str(path), json.dumps(options)]
    env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_way(found: dict[str, Any], way: str, tolerance: float) -> None:
    """The tokens equal those computed alone, and are as likely."""
    assert "refused" not in found[way], (way, found[way])
    assert found[way]["same"], way
    assert found[way]["off"] <= tolerance, way


def check_embedded(found: dict[str, Any]) -> None:
    """Vectors of three texts are the same one by one and together, and differ from each other."""
    assert "refused" not in found["embedded"], found["embedded"]
    assert found["embedded"]["off"] <= 1e-4
    assert found["embedded"]["distinct"] > 0.01


def check_class(found: dict[str, Any]) -> str:
    """Return the architecture's class in docs/models.md; it equals the runtime's report."""
    (documented,) = [name for name, ones in documented_classes().items() if found["architecture"] in ones]
    memory = str(found["memory"]).replace("_", " ")
    is_whole = memory in ("sliding window", "hybrid") and not found["has_state_apart"]
    assert documented == ("saved whole" if is_whole else memory)
    return documented


@pytest.mark.parametrize("name", [name for name in chosen() if name not in OTHERS])
def test_an_architecture_computes_the_same_in_every_way(tool: ArchitectureTool, tmp_path: Path, name: str) -> None:
    """Batched, cached, shared while running, forked, in choices, preempted, from a file: all as alone and computed.

    Log-probabilities may be off by a fiftieth of the change by a prompt's first tokens; less than a thousandth is usual.
    """
    with tool.file(name, tmp_path) as path:
        found = tried(path, num_slots=1 if name in ONE_SEQUENCE else 4)
    assert "refused" not in found, found["refused"]
    assert found["generated"] == [24] * 4
    assert (found["texts"] > 1) == (name not in ONE_TEXT)
    for way in WAYS:
        check_way(found, way, max(1e-4, 0.02 * found["depends"]))
    assert found["default"]["off"] <= max(3e-3, 0.05 * found["depends"])  # rounds to half precision
    assert found["cached"]["cached"][-2:] == [39, 149]
    assert found["saved"]["cached"] == [99]
    kind = check_class(found)
    if name not in ONE_SEQUENCE:
        assert found["shared"]["cached"] == [0, *[100] * 5]
        assert found["shared"]["from"][1:4] == ["running"] * 3
        assert min(found["forked"]["cached"]) >= 99
        assert found["preempted"]["count"] > 0 or kind == "recurrent" or name in SLOW
    if name in WITHOUT_EMBEDDINGS:
        assert "cannot read embeddings" in found["embedded"]["refused"]
    else:
        check_embedded(found)


@pytest.mark.parametrize("name", [name for name in chosen() if name in DIFFUSION])
def test_a_diffusion_model_is_refused_as_what_it_is(tool: ArchitectureTool, tmp_path: Path, name: str) -> None:
    """It embeds; a request to generate raises `Unsupported`, which calls the model a diffusion model and no encoder."""
    with tool.file(name, tmp_path) as path:
        found = tried(path)
    assert check_class(found) == "none"
    check_embedded(found)
    assert found["refused"].startswith("Unsupported: this model cannot generate; it is a diffusion model")
    assert "encoder" not in found["refused"]


@pytest.mark.parametrize("name", [name for name in chosen() if name in ENCODERS])
def test_an_encoder_does_not_generate(tool: ArchitectureTool, tmp_path: Path, name: str) -> None:
    """It embeds; a request to generate raises `Unsupported` with the purpose of the model."""
    with tool.file(name, tmp_path) as path:
        found = tried(path)
    assert check_class(found) == "none"
    check_embedded(found)
    assert found["refused"].startswith("Unsupported: this model cannot generate; it embeds texts")


@pytest.mark.parametrize("name", [name for name in chosen() if name in ENCODER_DECODERS])
def test_an_encoder_decoder_model_is_left_to_a_context(tool: ArchitectureTool, tmp_path: Path, name: str) -> None:
    """An engine raises `Unsupported` and names the way to use it."""
    with tool.file(name, tmp_path) as path:
        found = tried(path)
    assert found["refused"].startswith("Unsupported: an encoder-decoder model keeps one text a context")
    assert "Context.generate" in found["refused"]


def test_an_architecture_that_aborts_with_several_sequences_needs_one_slot(
    tool: ArchitectureTool, tmp_path: Path
) -> None:
    """More slots are refused with the way out."""
    with tool.file("plamo2-dense", tmp_path) as path:
        assert tried(path, num_slots=4)["refused"].startswith("InvalidParams: num_slots must be 1 for a model of")


def test_a_pass_with_two_sequences_is_refused_where_it_would_abort(tool: ArchitectureTool, tmp_path: Path) -> None:
    """A context of PLaMo 2 refuses the pass by the architecture's name, and goes on with one sequence at a time."""
    with tool.file("plamo2-dense", tmp_path) as path:
        first, *others = run_apart(PASSES, path)
    assert first.startswith(
        "Unsupported: seq_ids[2] is 1 after 0: llama.cpp computes plamo2 right for one sequence a pass"
    )
    assert others == ["None", "None"]


def test_a_context_of_a_diffusion_model_calls_it_one(tool: ArchitectureTool, tmp_path: Path) -> None:
    """`decode` raises `Unsupported` with the architecture and its kind, and no word of encoders."""
    with tool.file("dream-dense", tmp_path) as path:
        lines = run_apart(PASSES, path)
    assert all(line.startswith("Unsupported: the architecture dream is a diffusion model") for line in lines)
    assert not any("encoder" in line for line in lines)


def test_no_file_of_the_tool_is_left_out(tool: ArchitectureTool, tmp_path: Path) -> None:
    """Of the architectures that are not in the list the tool writes no file."""
    listed = {name.rpartition("-")[0] for name in ALL}
    assert not listed & {name.removesuffix("-tiny") for name in OURS}
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
    """A model with ALiBi and no table starts, and a context of it goes beyond its trained length."""
    with tool.file(name, tmp_path) as path:
        lines = run_apart(LOADED, path, 512, 400)
    assert lines == ["256 5", "512", "None", "None"]


def test_a_table_of_positions_is_named_where_n_ctx_is_beyond_it(
    tool: ArchitectureTool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The note says how many tokens a sequence can have, and why."""
    with tool.file("gpt2-dense", tmp_path) as path, caplog.at_level(logging.INFO, "paceline.engine"):
        LLM(path, n_threads=1, num_slots=2, n_ctx=1024).close()
    assert "a request has at most 256 tokens (the model's table of positions has no more)" in caplog.text
