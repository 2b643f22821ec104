"""The build facts that the core reports, and facts that it must not reveal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import _native
from paceline.runtime import build_info

pytestmark = pytest.mark.native


def test_the_core_names_no_folder_of_its_builder() -> None:
    """A wheel carries neither the builder's home folder nor the place of llama.cpp's source there."""
    if build_info().build_type != "Release":
        pytest.skip("debug information names its sources by their folders")
    core = Path(_native.__file__).read_bytes()
    assert b"src/llama-context.cpp" in core
    assert f"{Path.home()}/".encode() not in core
    assert f"{build_info().llama_cpp_source}/src".encode() not in core


def test_folders_are_shown_below_the_current_home_folder(tmp_path: Path) -> None:
    """A path in the builder's home folder is looked for in the current user's home."""
    code = "from paceline.runtime import build_info; print(build_info().cache_dir)"
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    here = Path(build_info().cache_dir)
    home = Path(os.environ["HOME"])
    expected = tmp_path / here.relative_to(home) if here.is_relative_to(home) else here
    assert done.stdout.strip() == str(expected)
