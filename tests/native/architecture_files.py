"""Random tiny files of nearly all architectures, as llama.cpp's own `test-llama-archs` writes them, and some of ours.

Here is also how docs/models.md has them in classes.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from tests.native.tool_building import build_tool, source_folder

from paceline.testing.models import KINDS, write_model

_SEED: Final = 1
_VARIABLE: Final = "PACELINE_ARCHITECTURES"

# Every file that the tool of the pinned source writes: the name of the architecture, and whether it has experts.
ALL: Final = tuple(
    """
    llama-dense llama-moe llama4-moe deci-dense falcon-dense grok-moe gpt2-dense gptneox-dense mpt-dense baichuan-dense
    starcoder-dense refact-dense refact-moe bloom-dense stablelm-dense qwen-dense qwen2-dense qwen2moe-moe qwen2vl-dense
    qwen3-dense qwen3moe-moe qwen3next-moe qwen3vl-dense qwen3vlmoe-moe qwen35-dense qwen35moe-moe qwen4exp-moe phi2-dense
    phi3-dense phimoe-moe plamo-dense plamo2-dense plamo3-dense codeshell-dense orion-dense internlm2-dense minicpm-dense
    minicpm-moe minicpm3-dense gemma-dense gemma2-dense gemma3-dense starcoder2-dense mamba-dense mamba2-dense maple-moe
    jamba-dense falcon-h1-dense xverse-dense command-r-dense cohere2-dense cohere2moe-moe dbrx-moe olmo-dense olmo2-dense
    olmoe-moe muse-glimmer-dense openelm-dense arctic-moe deepseek-moe deepseek2-moe deepseek32-moe deepseek4-moe
    chatglm-dense glm4-dense glm4moe-moe glm-dsa-moe jais-dense jais2-dense nemotron-dense nemotron_h-dense
    nemotron_h_moe-dense exaone-dense exaone4-dense exaone-moe-moe granite-dense granite-moe granitemoe-dense
    granitemoe-moe granitehybrid-dense granite_swa-dense bailingmoe-moe bailingmoe2-moe bailingmoe3-moe dots1-moe
    dots3note-moe arcee-dense afmoe-moe laguna-moe ernie4_5-moe ernie4_5-moe-moe hunyuan-moe-moe hunyuan-dense-dense
    hunyuan_vl-dense hy_v3-moe hy_v4-moe smollm3-dense gpt-oss-moe lfm2-dense lfm2moe-moe dream-dense smallthinker-moe
    llada-dense llada-moe-moe seed_oss-dense grovemoe-moe minimax-01-moe hrm_text-dense minimax-m2-moe minimax-m3-moe
    cogvlm-dense rnd1-moe pangu-embedded-dense mistral3-dense mistral3-moe mistral4-moe paddleocr-moe mimo2-moe
    spark2_5-dense maincoder-dense kimi-linear-moe kimi-k3-moe glm5-next-moe talkie-dense mellum-moe nanbeige-dense
    qwen3tts-dense pockettts-dense
    """.split()  # noqa: SIM905 - names read better as words than as literals
)
# Those that the tool cannot write, by paceline.testing.models.
OURS: Final = ("bert-tiny", "gemma4-tiny", "modern-bert-tiny", "rwkv6-tiny", "rwkv7-tiny", "t5-tiny")
# Some that were refused or aborted once, and one of each kind of memory.
SAMPLE: Final = (
    "bert-tiny",
    "bloom-dense",
    "cogvlm-dense",
    "dream-dense",
    "exaone4-dense",
    "gemma4-tiny",
    "gpt2-dense",
    "gpt-oss-moe",
    "jamba-dense",
    "lfm2-dense",
    "plamo2-dense",
    "qwen4exp-moe",
    "rwkv7-tiny",
    "t5-tiny",
)
_PAGE: Final = Path(__file__).parents[2] / "docs/models.md"
_CLASS_ROW: Final = re.compile(r"^\| ([a-z ]+) \| ((?:`[^`]+`(?:, )?)+) \|", re.MULTILINE)


def chosen() -> tuple[str, ...]:
    """Return the files to try: the sample, or those of PACELINE_ARCHITECTURES: "all", or names separated by commas."""
    wanted = os.environ.get(_VARIABLE, "")
    known = ALL + OURS
    names = known if wanted == "all" else tuple(wanted.split(",")) if wanted else SAMPLE
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise pytest.UsageError(f"{_VARIABLE}: there is no {', '.join(unknown)}; known are all, {', '.join(known)}")
    return names


def documented_classes() -> dict[str, list[str]]:
    """Return the classes of docs/models.md, each with its architectures."""
    return {name: re.findall("`([^`]+)`", row) for name, row in _CLASS_ROW.findall(_PAGE.read_text("utf-8"))}


class ArchitectureTool:
    """Writes models of an architecture; the same files each time on one machine."""

    def __init__(self, program: Path) -> None:
        self._program = program

    @contextmanager
    def file(self, name: str, folder: Path) -> Iterator[Path]:
        """Provide the file of that name within the block: all of them together have nearly a gigabyte."""
        if name in OURS:
            yield write_model(folder / f"{name}.gguf", KINDS[name.removesuffix("-tiny")], seed=_SEED)
            return
        found = self.write(name.rpartition("-")[0], folder)
        try:
            yield next(path for path in found if path.stem == name)
        finally:
            for path in found:
                path.unlink()

    def write(self, architecture: str, folder: Path) -> list[Path]:
        """All files that there are of one architecture: none, one, or one with experts and one without."""
        command = [str(self._program), "-a", architecture, "-s", str(_SEED), "-o", str(folder)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
        return sorted(folder.glob("*.gguf"))


def build_architecture_tool(folder: Path) -> ArchitectureTool:
    """Compile the tool in `folder`; skips the test if a compiler, the source or the libraries are missing."""
    source = source_folder()
    includes = [f"-I{source / part}" for part in ("common", "include", "ggml/include")]
    return ArchitectureTool(build_tool(folder / "test-llama-archs", ["tests/test-llama-archs.cpp"], includes))


def known_architectures() -> list[str]:
    """Return the names that llama.cpp knows, from its source."""
    table = (source_folder() / "src/llama-arch.cpp").read_text("utf-8")
    return re.findall(r'\{ LLM_ARCH_\w+,\s*"([^"(]+)"', table)
