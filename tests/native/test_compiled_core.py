"""The choice among the cores of a wheel, by the processor and by PACELINE_CORE."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.errors import InvalidParams, Unsupported
from paceline.runtime import loaded_core
from paceline.runtime.compiled_core import choose

pytestmark = pytest.mark.native

SERVER = {"v4": "", "v3": "", "v2": ""}
LAPTOP = {"v4": "avx512f, avx512vnni", "v3": "", "v2": ""}
OLD = {"v4": "avx2, avx512f, avx512vnni", "v3": "avx2", "v2": ""}
TOO_OLD = {"v4": "popcnt, avx2, avx512f", "v3": "popcnt, avx2", "v2": "popcnt"}


@pytest.mark.parametrize(
    ("lacks", "name", "reason"),
    [(SERVER, "v4", "the best"), (LAPTOP, "v3", "no avx512f, avx512vnni"), (OLD, "v2", "no avx2")],
)
def test_the_best_core_that_the_processor_runs_is_chosen(lacks: dict[str, str], name: str, reason: str) -> None:
    """The reason names the features that the next better core needs."""
    core = choose("", lacks)
    assert core.name == name
    assert reason in core.reason
    assert core.all_names == ("v4", "v3", "v2")


def test_the_variable_forces_a_lesser_core() -> None:
    """PACELINE_CORE wins over a better core."""
    core = choose("v2", SERVER)
    assert (core.name, core.reason) == ("v2", "PACELINE_CORE")


def test_a_core_that_the_processor_cannot_run_is_refused() -> None:
    """The error names the missing features and the cores that run."""
    with pytest.raises(Unsupported, match="PACELINE_CORE is 'v4'.*no avx512f, avx512vnni; it runs v3, v2"):
        choose("v4", LAPTOP)


def test_an_unknown_core_is_refused() -> None:
    """The error names the cores of the installation."""
    with pytest.raises(InvalidParams, match="PACELINE_CORE must be one of 'v4', 'v3', 'v2', not 'v5'"):
        choose("v5", SERVER)


def test_a_processor_that_runs_no_core_is_an_error() -> None:
    """The error names the feature that the least core needs, and that a build from source has none of these needs."""
    with pytest.raises(Unsupported, match="no popcnt, which the core v2 needs.*--no-binary"):
        choose("", TOO_OLD)


def test_a_build_from_source_has_one_core_and_refuses_the_variable() -> None:
    """There is nothing to choose, and a variable without effect would mislead."""
    assert choose("", {}).name == ""
    with pytest.raises(InvalidParams, match="PACELINE_CORE is 'v3'.*built from source; unset PACELINE_CORE"):
        choose("v3", {})


def test_a_wrong_variable_ends_a_command_with_a_message() -> None:
    """`paceline info` reports it as every other error, in one line."""
    command = [sys.executable, "-m", "paceline", "info"]
    env = {**os.environ, "PACELINE_CORE": "v9"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in {1, 2}
    assert "PACELINE_CORE" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_loaded_core_is_one_of_the_installation() -> None:
    """It is loaded once, and reported with the reason."""
    core = loaded_core()
    assert core.reason
    assert core.name in core.all_names or not core.all_names
