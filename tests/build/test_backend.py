"""The choice of backend: what was asked for, what the machine has, and what is missing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.build.conftest import ScriptRunner

Program = Callable[..., Path]

CHOOSE = """
paceline_choose_backend(backend reason "${asked}")
message(STATUS "chosen: ${backend} because ${reason}")
"""
LINUX = "set(CMAKE_HOST_SYSTEM_NAME Linux)\n"
WITHOUT_NVCC = """
function(paceline_find_nvcc result)
    set(${result} "" PARENT_SCOPE)
endfunction()
"""
NO_ANSWER = "exit 9"
ONE_GPU = "echo 'GPU 0: NVIDIA X1000 (UUID: GPU-1)'"


@pytest.fixture
def machine(bin_dir: Path, program: Program) -> dict[str, str]:
    """A machine whose only programs are those of the test; its Python finds no driver library."""
    return {"PATH": str(bin_dir), "python": str(program("python", "exit 1"))}


@pytest.fixture
def choose(run: ScriptRunner, machine: dict[str, str]) -> Callable[..., str]:
    """Chooses a backend on that machine and answers the output."""

    def run_choice(asked: str, *, before: str = LINUX, fails: bool = False, **variables: str) -> str:
        variables = {"asked": asked, "Python_EXECUTABLE": machine["python"]} | variables
        return run(before + CHOOSE, fails=fails, env={"PATH": machine["PATH"]}, **variables).stdout

    return run_choice


def test_an_unknown_backend_is_refused_with_the_known_ones(choose: Callable[..., str]) -> None:
    """A name that is no backend is refused, with the names that are."""
    output = choose("cudda", fails=True)
    assert '"cudda"' in output
    assert "auto, cpu, cuda, metal, vulkan, hip" in output


def test_auto_is_the_cpu_without_a_cuda_compiler(choose: Callable[..., str]) -> None:
    """Without nvcc, auto is the CPU."""
    assert "chosen: cpu because no nvcc found" in choose("auto", before=LINUX + WITHOUT_NVCC)


def test_auto_is_the_cpu_where_no_driver_answers(choose: Callable[..., str], program: Program) -> None:
    """A compiler for GPUs is no GPU: with nvcc alone auto is the CPU."""
    program("nvcc")
    assert "chosen: cpu because nvcc found, but no NVIDIA driver answers" in choose("auto")


@pytest.mark.parametrize("answer", [NO_ANSWER, "echo 'No devices were found'", ""])
def test_auto_is_the_cpu_where_the_driver_has_no_gpu(choose: Callable[..., str], program: Program, answer: str) -> None:
    """A driver tool that fails or lists nothing counts as no GPU."""
    program("nvcc")
    program("nvidia-smi", answer)
    assert "chosen: cpu" in choose("auto")


def test_auto_is_cuda_with_compiler_and_gpu(choose: Callable[..., str], program: Program) -> None:
    """With nvcc and a driver that lists a GPU, auto is CUDA and says which GPU."""
    program("nvcc")
    program("nvidia-smi", ONE_GPU)
    assert "chosen: cuda because nvcc found, and the driver answers with NVIDIA X1000" in choose("auto")


def test_auto_is_the_cpu_with_a_gpu_but_no_compiler(choose: Callable[..., str], program: Program) -> None:
    """A GPU that nothing can be compiled for does not count."""
    program("nvidia-smi", ONE_GPU)
    assert "chosen: cpu" in choose("auto", before=LINUX + WITHOUT_NVCC)


def test_the_driver_library_answers_where_its_tool_is_missing(choose: Callable[..., str], program: Program) -> None:
    """Without nvidia-smi the driver's library is asked."""
    program("nvcc")
    program("python", "echo 2")
    assert "the driver counts 2 GPU(s)" in choose("auto")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_driver_library_is_really_called(run: ScriptRunner, tmp_path: Path, machine: dict[str, str]) -> None:
    """The question to the driver's library works on a library with the driver's functions."""
    source = tmp_path / "cuda.c"
    source.write_text("int cuInit(unsigned f) { return f; }\nint cuDeviceGetCount(int *n) { *n = 3; return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    text = 'paceline_find_nvidia_gpu(gpu)\nmessage(STATUS "gpu: ${gpu}")'
    done = run(text, env={"PATH": machine["PATH"], "LD_LIBRARY_PATH": str(tmp_path)})
    assert "gpu: the driver counts 3 GPU(s)" in done.stdout


def test_auto_is_metal_on_macos(choose: Callable[..., str]) -> None:
    """On macOS auto is Metal."""
    assert "chosen: metal because macOS" in choose("auto", before="set(CMAKE_HOST_SYSTEM_NAME Darwin)\n")


def test_what_was_asked_for_is_taken(choose: Callable[..., str], program: Program) -> None:
    """A backend that was named is taken, whatever the machine has."""
    program("nvcc")
    program("nvidia-smi", ONE_GPU)
    assert "chosen: cpu because PACELINE_BACKEND" in choose("cpu")
    program("nvidia-smi", NO_ANSWER)
    assert "chosen: cuda because PACELINE_BACKEND" in choose("cuda")


def test_cuda_without_its_compiler_is_refused(choose: Callable[..., str]) -> None:
    """CUDA that was asked for needs nvcc, and says so."""
    output = choose("cuda", before=LINUX + WITHOUT_NVCC, fails=True)
    assert "the cuda backend needs nvcc" in output
    assert "PACELINE_BACKEND=cpu" in output


@pytest.mark.parametrize(("backend", "tool"), [("vulkan", "glslc"), ("hip", "hipcc")])
def test_other_backends_name_the_tool_they_need(choose: Callable[..., str], backend: str, tool: str) -> None:
    """Vulkan and HIP that were asked for name the compiler that is missing."""
    if shutil.which(tool):
        pytest.skip(f"{tool} is installed here")
    assert tool in choose(backend, fails=True)


def test_metal_elsewhere_than_on_macos_is_refused(choose: Callable[..., str]) -> None:
    """Metal that was asked for on another system is refused."""
    assert "metal backend exists on macOS only" in choose("metal", fails=True)


def test_an_option_of_llama_cpp_counts_as_asking(choose: Callable[..., str], program: Program) -> None:
    """GGML_CUDA=ON in CMAKE_ARGS chooses CUDA as PACELINE_BACKEND=cuda does."""
    program("nvcc")
    assert "chosen: cuda because GGML_ option" in choose("auto", GGML_CUDA="on")


def test_two_wishes_that_differ_are_refused(choose: Callable[..., str], program: Program) -> None:
    """PACELINE_BACKEND=cpu together with GGML_CUDA=ON is refused, not guessed at."""
    program("nvcc")
    assert "PACELINE_BACKEND is cpu, but GGML_CUDA is on" in choose("cpu", fails=True, GGML_CUDA="ON")


def test_nvcc_is_found_by_the_variables_of_the_toolkit(run: ScriptRunner, tmp_path: Path, program: Program) -> None:
    """CUDA_HOME and CUDACXX lead to nvcc where the PATH does not."""
    nvcc = program("nvcc")
    toolkit = tmp_path / "toolkit/bin"
    toolkit.mkdir(parents=True)
    nvcc.rename(toolkit / "nvcc")
    text = 'paceline_find_nvcc(nvcc)\nmessage(STATUS "nvcc: ${nvcc}")'
    assert f"nvcc: {toolkit}/nvcc" in run(text, env={"PATH": "", "CUDA_HOME": str(toolkit.parent)}).stdout
    assert "nvcc: /elsewhere/nvcc" in run(text, env={"CUDACXX": "/elsewhere/nvcc"}).stdout
