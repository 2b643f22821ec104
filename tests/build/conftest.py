"""Run the modules in cmake/ as scripts, against small fakes instead of compilers, GPUs and package indexes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ScriptRunner = Callable[..., subprocess.CompletedProcess[str]]


def find_cmake() -> str:
    beside_python = Path(sys.executable).with_name("cmake")
    return str(beside_python) if beside_python.exists() else shutil.which("cmake") or "cmake"


def environment_of(home: Path) -> dict[str, str]:
    """Nothing of this machine but the folders of its programs, with Python's Ninja if there is no other."""
    path = f"{os.environ['PATH']}{os.pathsep}{Path(sys.executable).parent}"
    return {"PATH": path, "HOME": str(home), "CMAKE_GENERATOR": "Ninja"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a user who has nothing yet."""
    (tmp_path / "home").mkdir()
    return environment_of(tmp_path / "home")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """Write a script that includes the modules, and return the command that runs it."""

    def write(text: str, **variables: str) -> list[str]:
        path = tmp_path / "script.cmake"
        modules = ["report", "settings", "cache", "backend", "source", "forward", "llama_cpp"]
        includes = "".join(f'include("{ROOT}/cmake/{name}.cmake")\n' for name in modules)
        path.write_text("cmake_minimum_required(VERSION 3.25)\n" + includes + text, encoding="utf-8")
        defines = {"Python_EXECUTABLE": sys.executable} | variables
        return [find_cmake(), *(f"-D{name}={value}" for name, value in defines.items()), "-P", str(path)]

    return write


@pytest.fixture
def run(tmp_path: Path, script: Callable[..., list[str]], environment: dict[str, str]) -> ScriptRunner:
    """Run a script that must succeed, or with `fails=True` must not; its output is in `stdout` as a whole."""

    def run_script(
        text: str, *, fails: bool = False, env: dict[str, str] | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            script(text, **variables),
            cwd=tmp_path,
            env=environment | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) == fails, done.stdout
        return done

    return run_script


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


@pytest.fixture
def program(bin_dir: Path) -> Callable[[str, str], Path]:
    """Put a shell script of that name and body into `bin_dir`."""

    def write(name: str, body: str = "") -> Path:
        path = bin_dir / name
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    return write
