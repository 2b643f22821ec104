"""The choice of backend by the request, the machine's toolkits, and missing parts."""

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
NO_DRIVER = "exit 9"
ONE_GPU = "echo 'GPU 0: NVIDIA X1000 (UUID: GPU-1)'"
ONE_AMD_GPU = "echo gfx000; echo gfx90a"
VULKAN_SUMMARY = """printf 'GPU0:\\n\\tvendorID           = 0x8086\\n\\tdeviceType         = PHYSICAL_DEVICE_TYPE_%s\\n'
printf '\\tdeviceName         = Model B580\\n'"""


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """Return the folder for this machine's ROCm and its Vulkan SDK; it is empty."""
    folder = tmp_path / "toolkit"
    folder.mkdir()
    return folder


@pytest.fixture
def machine(bin_dir: Path, program: Program, toolkit: Path) -> dict[str, str]:
    """Return a machine with only the programs of the test; its Python finds no driver library."""
    folders = {"ROCM_PATH": str(toolkit), "VULKAN_SDK": str(toolkit)}
    return {"PATH": str(bin_dir), "python": str(program("python", "exit 1")), **folders}


@pytest.fixture
def choose(run: ScriptRunner, machine: dict[str, str]) -> Callable[..., str]:
    """Chooses a backend on that machine and returns the output, its line breaks made blanks."""

    def run_choice(asked: str, *, before: str = LINUX, fails: bool = False, **variables: str) -> str:
        variables = {"asked": asked, "Python_EXECUTABLE": machine["python"]} | variables
        env = {name: value for name, value in machine.items() if name != "python"}
        return " ".join(run(before + CHOOSE, fails=fails, env=env, **variables).stdout.split())

    return run_choice


@pytest.fixture
def rocm(toolkit: Path) -> Callable[..., None]:
    """Put the libraries of ROCm that llama.cpp links into the toolkit."""

    def install(*libraries: str) -> None:
        for name in libraries:
            config = toolkit / f"lib/cmake/{name}/{name}-config.cmake"
            config.parent.mkdir(parents=True)
            config.touch()

    return install


@pytest.fixture
def vulkan_headers(toolkit: Path) -> None:
    """Put the headers that llama.cpp needs for Vulkan into the toolkit."""
    for name in ("include/vulkan/vulkan.h", "share/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake"):
        (toolkit / name).parent.mkdir(parents=True)
        (toolkit / name).touch()


def test_an_unknown_backend_is_refused_with_the_known_names(choose: Callable[..., str]) -> None:
    """A name that is no backend is refused, with the names that are."""
    output = choose("cudda", fails=True)
    assert '"cudda"' in output
    assert "auto, cpu, cuda, metal, vulkan, hip" in output


def test_auto_is_the_cpu_without_a_cuda_compiler(choose: Callable[..., str]) -> None:
    """Without nvcc, auto is the CPU."""
    assert "chosen: cpu because no nvcc found" in choose("auto", before=LINUX + WITHOUT_NVCC)


def test_auto_is_the_cpu_where_no_driver_responds(choose: Callable[..., str], program: Program) -> None:
    """A compiler for GPUs is no GPU: with nvcc alone auto is the CPU."""
    program("nvcc")
    assert "chosen: cpu because nvcc found, but no NVIDIA driver responds" in choose("auto")


@pytest.mark.parametrize("output", [NO_DRIVER, "echo 'No devices were found'", ""])
def test_auto_is_the_cpu_where_the_driver_has_no_gpu(choose: Callable[..., str], program: Program, output: str) -> None:
    """A driver tool that fails or lists nothing counts as no GPU."""
    program("nvcc")
    program("nvidia-smi", output)
    assert "chosen: cpu" in choose("auto")


def test_auto_is_cuda_with_compiler_and_gpu(choose: Callable[..., str], program: Program) -> None:
    """With nvcc and a driver that lists a GPU, auto is CUDA and reports the GPU."""
    program("nvcc")
    program("nvidia-smi", ONE_GPU)
    assert "chosen: cuda because nvcc found, and the driver reports NVIDIA X1000" in choose("auto")


def test_auto_is_the_cpu_with_a_gpu_but_no_compiler(choose: Callable[..., str], program: Program) -> None:
    """A GPU that nothing can be compiled for does not count."""
    program("nvidia-smi", ONE_GPU)
    assert "chosen: cpu" in choose("auto", before=LINUX + WITHOUT_NVCC)


def test_the_driver_library_responds_where_its_tool_is_missing(choose: Callable[..., str], program: Program) -> None:
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


def test_auto_without_any_toolkit_names_what_each_backend_lacks(choose: Callable[..., str]) -> None:
    """The CPU's reason has one part for each of CUDA, HIP and Vulkan."""
    expected = "chosen: cpu because no nvcc found, no hipcc found, no glslc found"
    assert expected in choose("auto", before=LINUX + WITHOUT_NVCC)


def test_auto_is_hip_with_compiler_libraries_and_gpu(
    choose: Callable[..., str], program: Program, rocm: Callable[..., None]
) -> None:
    """With hipcc, hipBLAS, rocBLAS and a GPU that ROCm lists, auto is HIP and reports the architecture."""
    program("hipcc")
    program("rocm_agent_enumerator", ONE_AMD_GPU)
    rocm("hipblas", "rocblas")
    output = choose("auto", before=LINUX + WITHOUT_NVCC)
    assert "chosen: hip because hipcc found, and rocm_agent_enumerator lists gfx90a" in output


@pytest.mark.parametrize("output", [NO_DRIVER, "echo gfx000", ""])
def test_auto_is_not_hip_where_rocm_lists_no_gpu(
    choose: Callable[..., str], program: Program, rocm: Callable[..., None], output: str
) -> None:
    """gfx000 is the CPU; a tool that fails or lists nothing else counts as no GPU."""
    program("hipcc")
    program("rocm_agent_enumerator", output)
    rocm("hipblas", "rocblas")
    output = choose("auto", before=LINUX + WITHOUT_NVCC)
    assert "chosen: cpu because" in output
    assert "hipcc found, but rocm_agent_enumerator lists no GPU" in output


def test_auto_is_not_hip_without_the_libraries_that_it_links(
    choose: Callable[..., str], program: Program, rocm: Callable[..., None]
) -> None:
    """ROCm without rocBLAS cannot compile the backend: auto is the CPU, and names the missing part."""
    program("hipcc")
    program("rocm_agent_enumerator", ONE_AMD_GPU)
    rocm("hipblas")
    output = choose("auto", before=LINUX + WITHOUT_NVCC)
    assert "chosen: cpu because" in output
    assert "hipcc and gfx90a found, but not rocblas" in output


@pytest.mark.usefixtures("vulkan_headers")
def test_auto_is_vulkan_with_the_sdk_and_a_discrete_gpu(choose: Callable[..., str], program: Program) -> None:
    """With glslc, the headers and a discrete GPU that the loader lists, auto is Vulkan and reports the GPU."""
    program("glslc")
    program("vulkaninfo", VULKAN_SUMMARY.replace("%s", "DISCRETE_GPU"))
    output = choose("auto", before=LINUX + WITHOUT_NVCC)
    assert "chosen: vulkan because glslc found, and vulkaninfo lists Model B580" in output


@pytest.mark.usefixtures("vulkan_headers")
@pytest.mark.parametrize("kind", ["CPU", "INTEGRATED_GPU", "VIRTUAL_GPU"])
def test_auto_is_not_vulkan_on_other_devices(choose: Callable[..., str], program: Program, kind: str) -> None:
    """A software renderer and an integrated GPU are used only with an explicit PACELINE_BACKEND=vulkan."""
    program("glslc")
    program("vulkaninfo", VULKAN_SUMMARY.replace("%s", kind))
    output = choose("auto", before=LINUX + WITHOUT_NVCC)
    assert "chosen: cpu because" in output
    assert "glslc found, but vulkaninfo lists no discrete GPU" in output


def test_auto_is_not_vulkan_without_the_headers(choose: Callable[..., str], program: Program) -> None:
    """A shader compiler and a GPU alone do not compile the backend."""
    program("glslc")
    program("vulkaninfo", VULKAN_SUMMARY.replace("%s", "DISCRETE_GPU"))
    assert "Model B580 found, but not the headers of Vulkan and SPIR-V" in choose("auto", before=LINUX + WITHOUT_NVCC)


@pytest.mark.usefixtures("vulkan_headers")
def test_auto_prefers_cuda_to_hip_to_vulkan(
    choose: Callable[..., str], program: Program, rocm: Callable[..., None]
) -> None:
    """If several backends could be used, the vendor's own backend comes before Vulkan."""
    program("glslc")
    program("vulkaninfo", VULKAN_SUMMARY.replace("%s", "DISCRETE_GPU"))
    program("hipcc")
    program("rocm_agent_enumerator", ONE_AMD_GPU)
    rocm("hipblas", "rocblas")
    assert "chosen: hip" in choose("auto", before=LINUX + WITHOUT_NVCC)
    program("nvcc")
    program("nvidia-smi", ONE_GPU)
    assert "chosen: cuda" in choose("auto")


def test_the_cache_knows_the_toolkit_and_the_gpus_of_hip(
    run: ScriptRunner, machine: dict[str, str], program: Program
) -> None:
    """Another hipcc or another GPU is another entry, unless the architectures were given."""
    text = 'paceline_backend_fingerprint(text hip ON)\nmessage(STATUS "text: ${text}")'

    def fingerprint(version: str, gpu: str, **variables: str) -> str:
        program("hipcc", f"echo {version}")
        program("rocm_agent_enumerator", f"echo {gpu}")
        return run(text, env={"PATH": machine["PATH"], "ROCM_PATH": machine["ROCM_PATH"]}, **variables).stdout

    assert fingerprint("6.1", "gfx90a") == fingerprint("6.1", "gfx90a")
    assert len({fingerprint("6.1", "gfx90a"), fingerprint("6.2", "gfx90a"), fingerprint("6.1", "gfx1100")}) == 3
    given = {"CMAKE_HIP_ARCHITECTURES": "gfx90a"}
    assert fingerprint("6.1", "gfx90a", **given) == fingerprint("6.1", "gfx1100", **given)


def test_auto_is_metal_on_macos(choose: Callable[..., str]) -> None:
    """On macOS auto is Metal."""
    assert "chosen: metal because macOS" in choose("auto", before="set(CMAKE_HOST_SYSTEM_NAME Darwin)\n")


def test_what_was_asked_for_is_taken(choose: Callable[..., str], program: Program) -> None:
    """A backend that was named is taken, whatever the machine has."""
    program("nvcc")
    program("nvidia-smi", ONE_GPU)
    assert "chosen: cpu because PACELINE_BACKEND" in choose("cpu")
    program("nvidia-smi", NO_DRIVER)
    assert "chosen: cuda because PACELINE_BACKEND" in choose("cuda")


def test_cuda_without_its_compiler_is_refused(choose: Callable[..., str]) -> None:
    """CUDA that was asked for needs nvcc, and the error says so."""
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
    """CUDA_HOME and CUDACXX lead to nvcc if the PATH does not."""
    nvcc = program("nvcc")
    toolkit = tmp_path / "toolkit/bin"
    toolkit.mkdir(parents=True)
    nvcc.rename(toolkit / "nvcc")
    text = 'paceline_find_nvcc(nvcc)\nmessage(STATUS "nvcc: ${nvcc}")'
    assert f"nvcc: {toolkit}/nvcc" in run(text, env={"PATH": "", "CUDA_HOME": str(toolkit.parent)}).stdout
    assert "nvcc: /elsewhere/nvcc" in run(text, env={"CUDACXX": "/elsewhere/nvcc"}).stdout
