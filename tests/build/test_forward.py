"""The options forwarded to llama.cpp's build, and the conditions for two builds to share a cache entry."""

from __future__ import annotations

import pytest
from tests.build.conftest import ScriptRunner

FORWARD = """
paceline_note_cmake_args()
paceline_refuse_shared_libraries()
paceline_set_llama_cpp_defaults(cpu)
paceline_forwarded_cache(text)
message("${text}")
"""
KEY = (
    FORWARD
    + """
file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}")
if(NOT CMAKE_C_COMPILER)
    set(CMAKE_C_COMPILER cc)
endif()
paceline_library_key(key "source 1" cpu "${text}")
string(SHA256 hash "${key}")
message("hash: ${hash}")
"""
)


def forwarded(run: ScriptRunner, args: str = "", **variables: str) -> dict[str, str]:
    """Return the variables of the initial cache file, by name."""
    lines = run(FORWARD, env={"CMAKE_ARGS": args}, **variables).stdout.splitlines()
    pairs = [line.removeprefix("set(").split(" ", 1) for line in lines if line.startswith("set(")]
    return {name: value.removeprefix("[==[").partition("]==]")[0] for name, value in pairs}


def test_our_defaults_are_forwarded(run: ScriptRunner) -> None:
    """One backend is on, OpenMP, NCCL and OpenSSL are off, native code is on."""
    options = forwarded(run)
    assert [options[f"GGML_{name}"] for name in ("CUDA", "METAL", "VULKAN", "HIP")] == ["OFF"] * 4
    assert [options[name] for name in ("GGML_OPENMP", "GGML_CUDA_NCCL", "LLAMA_OPENSSL")] == ["OFF"] * 3
    assert options["GGML_NATIVE"] == "ON"


def test_a_dated_build_is_not_native(run: ScriptRunner) -> None:
    """With SOURCE_DATE_EPOCH, which asks for builds that can be repeated elsewhere, native code is off."""
    output = run(FORWARD, env={"SOURCE_DATE_EPOCH": "0"}).stdout
    assert "set(GGML_NATIVE [==[OFF]==]" in output


def test_definitions_override_our_defaults(run: ScriptRunner) -> None:
    """Every default yields to -D."""
    options = forwarded(run, GGML_OPENMP="ON", GGML_NATIVE="OFF", GGML_BLAS="ON", LLAMA_OPENSSL="ON")
    assert [options[name] for name in ("GGML_OPENMP", "GGML_NATIVE", "GGML_BLAS", "LLAMA_OPENSSL")] == [
        "ON",
        "OFF",
        "ON",
        "ON",
    ]


def test_every_definition_in_cmake_args_is_forwarded(run: ScriptRunner) -> None:
    """A variable of any name that CMAKE_ARGS defines reaches llama.cpp, with spaces and lists whole."""
    options = forwarded(
        run, args='-DBLA_VENDOR=OpenBLAS -DMY_LIST:STRING="a;b c" --debug', BLA_VENDOR="OpenBLAS", MY_LIST="a;b c"
    )
    assert options["BLA_VENDOR"] == "OpenBLAS"
    assert options["MY_LIST"] == "a;b c"


def test_settings_of_our_own_are_not_forwarded(run: ScriptRunner) -> None:
    """Our own settings and install paths stay here."""
    options = forwarded(
        run, args="-DPACELINE_BACKEND=cpu -DCMAKE_INSTALL_PREFIX=/x", PACELINE_BACKEND="cpu", CMAKE_INSTALL_PREFIX="/x"
    )
    assert not {"PACELINE_BACKEND", "CMAKE_INSTALL_PREFIX"} & options.keys()


def test_flags_and_sanitizers_are_forwarded(run: ScriptRunner) -> None:
    """The compiler's flags and the sanitizers go to both languages, with the flags of the build type."""
    options = forwarded(
        run,
        CMAKE_C_FLAGS="-g",
        CMAKE_BUILD_TYPE="Debug",
        CMAKE_CXX_FLAGS_DEBUG="-O1",
        PACELINE_SANITIZE_FLAGS="-fsanitize=address",
    )
    assert options["CMAKE_C_FLAGS"] == "-g -ffunction-sections -fdata-sections -fsanitize=address"
    assert options["CMAKE_CXX_FLAGS"] == "-ffunction-sections -fdata-sections -fsanitize=address"
    assert options["CMAKE_CXX_FLAGS_DEBUG"] == "-O1"


@pytest.mark.parametrize("name", ["BUILD_SHARED_LIBS", "GGML_BACKEND_DL", "GGML_CPU_ALL_VARIANTS"])
def test_shared_libraries_are_refused(run: ScriptRunner, name: str) -> None:
    """Options that ask for shared libraries are refused by name."""
    assert f"{name} is on" in run(FORWARD, fails=True, **{name: "ON"}).stdout


COMPILERS = ("CMAKE_C_COMPILER", "CMAKE_CXX_COMPILER")


def hash_of(run: ScriptRunner, env: dict[str, str] | None = None, **variables: str) -> str:
    variables = {"CMAKE_BUILD_TYPE": "Release", "CMAKE_CXX_COMPILER_VERSION": "12"} | variables
    return run(KEY, env=env, **variables).stdout.partition("hash: ")[2]


def test_the_same_build_has_the_same_key(run: ScriptRunner) -> None:
    """Two builds of the same thing share a key, with a compiler launcher or without."""
    assert hash_of(run) == hash_of(run, CMAKE_C_COMPILER_LAUNCHER="ccache", CMAKE_CXX_COMPILER_LAUNCHER="ccache")


def test_another_name_of_the_same_compiler_has_the_same_key(
    run: ScriptRunner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each Python on a machine may call its compiler by another name; a launcher under a compiler's name is not a compiler."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("x86-cc-12", "ccache"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    for name, target in (("cc", "x86-cc-12"), ("gcc", "cc"), ("other-cc", "ccache"), ("third-cc", "ccache")):
        (folder / name).symlink_to(target)

    def key(name: str) -> str:
        return hash_of(run, GGML_NATIVE="OFF", **dict.fromkeys(COMPILERS, str(folder / name)))

    assert key("cc") == key("gcc") == key("x86-cc-12")
    assert len({key(name) for name in ("cc", "other-cc", "third-cc")}) == 3


@pytest.mark.parametrize(
    "variables",
    [
        {"GGML_NATIVE": "OFF"},
        {"GGML_CUDA_FA": "OFF"},
        {"CMAKE_BUILD_TYPE": "Debug"},
        {"CMAKE_CXX_FLAGS": "-O1"},
        {"CMAKE_CXX_COMPILER_VERSION": "13"},
        {"PACELINE_SANITIZE_FLAGS": "-fsanitize=address"},
    ],
)
def test_another_build_has_another_key(run: ScriptRunner, variables: dict[str, str]) -> None:
    """Flags, build type, compiler and sanitizers are part of the key."""
    assert hash_of(run) != hash_of(run, **variables)


def test_other_cpu_features_make_another_key(run: ScriptRunner, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With native code two machines that share a home folder share an entry only if their CPUs are alike."""
    text = """
set(CMAKE_C_COMPILER "${cc}")
paceline_machine_fingerprint(machine)
message("machine: ${machine}")
"""

    def fingerprint(feature: str, native: str) -> str:
        compiler = tmp_path_factory.mktemp("cc") / "cc"
        body = f'case "$*" in *native*) echo "#define {feature}";; *) echo plain;; esac'
        compiler.write_text(f"#!/bin/sh\n{body}\n")
        compiler.chmod(0o755)
        return run(text, cc=str(compiler), GGML_NATIVE=native).stdout.partition("machine: ")[2]

    assert fingerprint("__AVX2__", "ON") == fingerprint("__AVX2__", "ON")
    assert fingerprint("__AVX2__", "ON") != fingerprint("__AVX512F__", "ON")
    assert fingerprint("__AVX2__", "OFF") == fingerprint("__AVX512F__", "OFF")


def test_jobs_follow_the_wish_of_the_user(run: ScriptRunner) -> None:
    """CMAKE_BUILD_PARALLEL_LEVEL sets the number of jobs; without it there is at least one."""
    text = 'paceline_num_jobs(jobs)\nmessage("jobs: ${jobs}.")'
    assert "jobs: 7." in run(text, env={"CMAKE_BUILD_PARALLEL_LEVEL": "7"}).stdout
    assert int(run(text).stdout.partition("jobs: ")[2].partition(".")[0]) >= 1
