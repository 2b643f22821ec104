"""Builds the peers: llama-server from paceline's own llama.cpp source, Python packages in environments of their own.

llama-server gets the source, flags and compiler that the installed core of paceline was built with. All is kept in paceline's
cache folder. An interrupted build is continued.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.model import cache_folder

PROJECT = Path(__file__).with_name("llama_server")
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "llama-cpp-python": ("llama-cpp-python[server]==0.3.36",),
    "xllamacpp": ("xllamacpp==2026.10.11549",),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """Allowed differences from paceline's own build: instruction sets (True: this CPU's) and threads."""

    is_native: bool = True
    has_openmp: bool = False

    @property
    def name(self) -> str:
        """The variant in words, for files."""
        return ("native" if self.is_native else "portable") + ("-openmp" if self.has_openmp else "")


def peers_folder() -> Path:
    """Return the folder that all builds are kept in."""
    return cache_folder() / "benchmarks" / "peers"


def build_info(interpreter: Path) -> dict[str, Any]:
    """Return the source, flags and compiler of the core of paceline in an environment."""
    code = (
        "import json; from paceline import _native as n; "
        "print(json.dumps(n.build_info() | {'features': n.backend_features()}))"
    )
    done = subprocess.run([interpreter, "-c", code], check=True, capture_output=True, text=True)  # noqa: S603
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cmake_flags(info: Mapping[str, Any], variant: Variant) -> list[str]:
    """Return the flags of paceline's core, with the variant's changes."""
    flags = dict(flag.split("=", 1) for flag in info["flags"])
    flags |= {
        "CMAKE_BUILD_TYPE": info["build_type"],
        "GGML_NATIVE": "ON" if variant.is_native else "OFF",
        "GGML_OPENMP": "ON" if variant.has_openmp else "OFF",
        "LLAMA_CPP_TREE": str(Path(info["llama_cpp_source"]).expanduser()),
    }
    return [f"-D{name}={value}" for name, value in sorted(flags.items())]


def build_key(info: Mapping[str, Any], variant: Variant) -> str:
    """Return a text that is the same only for builds that are: source, flags, compiler, and our recipe."""
    recipe = hashlib.sha256((PROJECT / "CMakeLists.txt").read_bytes()).hexdigest()
    lines = [f"commit {info['llama_cpp_commit']}", f"compiler {info['compiler']}", f"target {info['target']}"]
    return "\n".join([*lines, f"recipe {recipe}", *cmake_flags(info, variant)]) + "\n"


def llama_server_path(info: Mapping[str, Any], variant: Variant) -> Path:
    """Return the path of the llama-server of this key, built or not."""
    short = hashlib.sha256(build_key(info, variant).encode()).hexdigest()[:12]
    return peers_folder() / f"llama-server-{variant.name}-{short}"


def build_folder(info: Mapping[str, Any], variant: Variant) -> Path:
    """Return the folder that llama-server is compiled in."""
    shared = build_key(info, Variant(is_native=variant.is_native))
    return peers_folder() / f"build-{hashlib.sha256(shared.encode()).hexdigest()[:12]}"


def check_instruction_sets(info: Mapping[str, Any], variant: Variant) -> None:
    """Fail if only one of paceline's core and the variant is native: their figures would not compare."""
    if ("GGML_NATIVE=OFF" in info["flags"]) == variant.is_native:
        own, option = ("portable", "with") if variant.is_native else ("native", "without")
        raise SystemExit(
            f"paceline's core is a {own} build: run this {option} --portable, or name another environment by --paceline"
        )


def find_llama_server(info: Mapping[str, Any], variant: Variant) -> Path | None:
    """Return llama-server if it has been built."""
    path = llama_server_path(info, variant)
    return path if path.is_file() else None


def build_llama_server(info: Mapping[str, Any], variant: Variant, jobs: int) -> Path:
    """Build llama-server if it is missing.

    Variants of the same instruction sets share a build folder. Others do not: CMake keeps the sets of a folder's first
    configuration, and a portable build in the folder of a native one would have none at all.
    """
    path = llama_server_path(info, variant)
    if path.is_file():
        return path
    folder = build_folder(info, variant)
    folder.mkdir(parents=True, exist_ok=True)
    _run(["cmake", "-G", "Ninja", "-S", str(PROJECT), "-B", str(folder), *cmake_flags(info, variant)])
    check_compiler(folder, info["compiler"])
    _run(["cmake", "--build", str(folder), "--parallel", str(jobs)])
    shutil.copy2(folder / "bin" / "llama-server", path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    path.with_suffix(".key").write_text(build_key(info, variant))
    return path


def check_compiler(folder: Path, expected: str) -> None:
    """Fail if CMake found another compiler than the compiler of paceline's core (CC and CXX name it)."""
    for file in folder.glob("CMakeFiles/*/CMakeCXXCompiler.cmake"):
        text = file.read_text()
        found = [text.split(f'set(CMAKE_CXX_COMPILER_{part} "')[1].split('"')[0] for part in ("ID", "VERSION")]
        if " ".join(found) != expected:
            raise SystemExit(
                f"the compiler is {' '.join(found)}, paceline's core was built with {expected}: set CC and CXX"
            )


def package_interpreter(name: str) -> Path:
    """Return the interpreter of a package's environment, there or not."""
    return peers_folder() / f"venv-{name}" / "bin" / "python"


def build_package(name: str, info: Mapping[str, Any]) -> Path:
    """Install a package in an environment of its own, compiled with the flags of paceline's core."""
    python = package_interpreter(name)
    if not python.is_file():
        venv.create(python.parent.parent, with_pip=True)
    flags = [flag for flag in cmake_flags(info, Variant()) if flag.startswith(("-DGGML_", "-DCMAKE_BUILD_TYPE"))]
    environment = os.environ | {"CMAKE_ARGS": " ".join(flags)}
    _run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES[name]], environment)
    return python


def package_version(name: str) -> str | None:
    """Return the version of a package in its environment, or None."""
    python = package_interpreter(name)
    if not python.is_file():
        return None
    code = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True)  # noqa: S603
    return done.stdout.strip() or None


def compile_bytecode(interpreter: Path) -> None:
    """Compile paceline as an installation does: a source tree in which Python writes no bytecode is compiled at each start."""
    code = "import compileall, paceline, sys; sys.exit(not compileall.compile_dir(paceline.__path__[0], quiet=1))"
    _run([str(interpreter), "-c", code])


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, check=False, env=environment)  # noqa: S603 - commands of this module
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}: {' '.join(command[:6])} ...")
