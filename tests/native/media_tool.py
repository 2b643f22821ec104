"""llama.cpp's own `llama-mtmd-cli`, compiled from the same source against the same libraries as paceline's core."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.native.tool_building import build_tool, libmtmd_entry, source_folder

_OWN = Path(__file__).with_name("media_tool.cpp")
_SOURCES = ("tools/mtmd/mtmd-cli.cpp", "tools/mtmd/mtmd-helper.cpp", _OWN)


class MediaTool:
    """Writes greedily about an image or audio, for a model with the `numbered` vocabulary: its text has its token ids."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def generate(
        self, model: Path, projector: Path, before: Sequence[int], media: Path, after: Sequence[int], count: int
    ) -> list[int]:
        """Return at most `count` tokens behind the prompt: tokens, the file, and tokens."""
        prompt = "".join(f"<{token}>" for token in before) + "<__media__>" + "".join(f"<{token}>" for token in after)
        command = [self._program, model, projector, media, str(count), prompt]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        assert re.fullmatch(r"(<\d+>)+", run.stdout.strip()), run.stdout
        return [int(number) for number in re.findall(r"\d+", run.stdout)]


def build_media_tool(folder: Path) -> MediaTool:
    """Compile the tool in `folder`; skips the test if a compiler, the source or the libraries are missing."""
    includes = [source_folder() / name for name in ("common", "vendor", "tools/mtmd")]
    flags = [part for include in includes for part in ("-I", str(include))]
    return MediaTool(build_tool(folder / "mtmd-cli", _SOURCES, flags, libraries=[libmtmd_entry() / "lib/libmtmd.a"]))
