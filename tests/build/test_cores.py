"""The cores of a wheel: ggml's kernels of a small tree, compiled for each kind of processor."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from tests.build.conftest import ScriptRunner
from tests.build.test_llama_cpp import PROJECT, TREE, Checkout

KERNEL = """
int kernel(void) {
#if defined(__AVX512VNNI__)
    return 4;
#elif defined(__AVX2__)
    return 3;
#else
    return KERNEL_OF_ANY;
#endif
}
"""
CHOOSE = """
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${processor})
paceline_choose_cores(cores "${wanted}" ${backend})
message(STATUS "cores: ${cores}")
foreach(core IN LISTS cores)
    paceline_core_options(options ${core})
    message(STATUS "${core}: ${options}")
endforeach()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernel of this test is for x86-64")
def test_kernels_are_compiled_for_each_core(tmp_path: Path, environment: dict[str, str]) -> None:
    """Each core links ggml's kernels with its own options and the definitions of ggml's own target."""
    checkout = Checkout(tmp_path, environment | {"PACELINE_CORES": "ON"})
    (checkout.tree / "src/kernel.c").write_text(KERNEL)
    kernels = 'target_sources(ggml-cpu PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/src/kernel.c")'
    options = (
        "target_compile_definitions(ggml-cpu PRIVATE KERNEL_OF_ANY=2)\ntarget_compile_options(ggml-cpu PRIVATE -mavx2)"
    )
    (checkout.tree / "CMakeLists.txt").write_text(f"{TREE}\n{kernels}\n{options}\n")
    before = PROJECT.split("file(WRITE")[0]
    programs = (
        'file(WRITE "${CMAKE_BINARY_DIR}/main.c" "int kernel(void); int main(void) { return kernel(); }")\n'
        "foreach(core IN LISTS PACELINE_BUILT_CORES)\n"
        '    add_executable(main_${core} "${CMAKE_BINARY_DIR}/main.c")\n'
        "    target_link_libraries(main_${core} PRIVATE llama_cpp_${core})\n"
        "endforeach()\n"
    )
    (checkout.folder / "project/CMakeLists.txt").write_text(before + programs)
    checkout.configure()
    checkout.build()
    found = {core: checkout.run(f"{checkout.folder}/build/main_{core}").returncode for core in ("v2", "v3", "v4")}
    assert found == {"v2": 2, "v3": 3, "v4": 4}


def test_arm_has_cores_of_its_own(run: ScriptRunner) -> None:
    """The best core comes first, and any processor runs the last."""
    output = run(CHOOSE, wanted="ON", processor="aarch64", backend="cpu").stdout
    assert "cores: i8mm;dotprod;armv8" in output
    assert "dotprod: -mcpu=generic+dotprod\n" in output


def test_without_the_setting_there_is_one_core(run: ScriptRunner) -> None:
    """A build from source is for its own machine."""
    assert "cores: \n" in run(CHOOSE, wanted="OFF", processor="x86_64", backend="cpu").stdout


@pytest.mark.parametrize(
    ("wanted", "processor", "backend", "problem"),
    [
        ("yes", "x86_64", "cpu", '"yes" is neither ON nor OFF'),
        ("ON", "x86_64", "cuda", "the backend is cuda"),
        ("ON", "riscv64", "cpu", "no list of cores for Linux riscv64"),
    ],
)
def test_cores_that_cannot_be_built_are_refused(
    run: ScriptRunner, wanted: str, processor: str, backend: str, problem: str
) -> None:
    """The error names the setting and the way out."""
    output = " ".join(run(CHOOSE, fails=True, wanted=wanted, processor=processor, backend=backend).stdout.split())
    assert problem in output
    assert "What to do:" in output


def test_cores_and_kernels_for_this_machine_are_refused(run: ScriptRunner) -> None:
    """GGML_NATIVE=ON would have no effect."""
    script = f"set(GGML_NATIVE ON)\n{CHOOSE}"
    output = " ".join(run(script, fails=True, wanted="ON", processor="x86_64", backend="cpu").stdout.split())
    assert "PACELINE_CORES and GGML_NATIVE are both ON" in output
