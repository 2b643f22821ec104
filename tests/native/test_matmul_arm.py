"""The matrix products for ARM: compiled by a cross compiler, and run as programs of emulated processors."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.native.tool_building import source_folder

pytestmark = [pytest.mark.native, pytest.mark.full]
COMPILER, EMULATOR = "aarch64-linux-gnu", "qemu-aarch64-static"
NEEDED = {f"{COMPILER}-gcc": "gcc-aarch64-linux-gnu", f"{COMPILER}-g++": "g++-aarch64-linux-gnu"}
NEEDED |= {EMULATOR: "qemu-user-static", "cmake": "cmake", "ninja": "ninja-build"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled check; skip if a tool or llama.cpp's source is missing."""
    missing = {command: package for command, package in NEEDED.items() if shutil.which(command) is None}
    if missing:
        pytest.skip(f"{', '.join(missing)} not found; Debian has them in {', '.join(missing.values())}")
    if not (source_folder() / "ggml/src/ggml.c").is_file():
        pytest.skip("llama.cpp's source is not on this machine")
    build = tmp_path_factory.mktemp("matmul_arm")
    system = {"SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": "aarch64", "C_FLAGS": "-O1", "CXX_FLAGS": "-O1"}
    system |= {"C_COMPILER": f"{COMPILER}-gcc", "CXX_COMPILER": f"{COMPILER}-g++"}
    flags = [f"-DCMAKE_{name}={value}" for name, value in system.items()]
    flags.append(f"-DLLAMA_CPP_TREE={source_folder()}")
    source = Path(__file__).with_name("matmul_arm")
    for command in (
        ["cmake", "-S", source, "-B", build, "-G", "Ninja", "--no-warn-unused-cli", *flags],
        ["cmake", "--build", build],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "check"


@pytest.mark.parametrize(
    ("processor", "kernels"),
    [("max", ["neon_i8mm", "neon_dotprod"]), ("cortex-a76", ["neon_dotprod"]), ("cortex-a57", [])],
)
def test_each_processor_runs_its_kernels_and_they_are_exact(program: Path, processor: str, kernels: list[str]) -> None:
    """Every type, 1 to 9 rows, random shapes: the sums in double precision, by the kernels that the processor has."""
    command = [EMULATOR, "-cpu", processor, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout.split()) == (0, kernels), done.stdout + done.stderr
