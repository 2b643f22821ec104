"""Settings from -D and the environment, the cache folder, and error messages."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.build.conftest import ROOT, ScriptRunner, find_cmake

PROJECT = f"""
cmake_minimum_required(VERSION 3.25)
project(fake LANGUAGES NONE)
include("{ROOT}/cmake/settings.cmake")
paceline_setting(PACELINE_THING plain "A thing")
message(STATUS "thing: ${{PACELINE_THING}}")
"""


@pytest.fixture
def configure(tmp_path: Path, environment: dict[str, str]) -> Callable[..., str]:
    """Configure one build folder, again and again, and return the value of the setting."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project/CMakeLists.txt").write_text(PROJECT)

    def run(*arguments: str, thing: str | None = None) -> str:
        command = [find_cmake(), "-S", tmp_path / "project", "-B", tmp_path / "build", *arguments]
        env = environment | ({} if thing is None else {"PACELINE_THING": thing})
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout.partition("thing: ")[2].partition("\n")[0]

    return run


def test_a_setting_has_a_default(configure: Callable[..., str]) -> None:
    """Nothing said: the default."""
    assert configure() == "plain"


def test_a_setting_from_the_environment_is_kept(configure: Callable[..., str]) -> None:
    """A value from the environment holds for later configurations without the variable."""
    assert configure(thing="blue") == "blue"
    assert configure() == "blue"


def test_a_changed_environment_changes_the_setting(configure: Callable[..., str]) -> None:
    """Another value in the environment is noticed."""
    assert configure(thing="blue") == "blue"
    assert configure(thing="red") == "red"


def test_a_definition_wins_over_the_environment(configure: Callable[..., str]) -> None:
    """-D decides, then and later."""
    assert configure("-DPACELINE_THING=green", thing="blue") == "green"
    assert configure(thing="blue") == "green"
    assert configure("-DPACELINE_THING=white", thing="blue") == "white"


DEFAULT_DIR = 'paceline_default_cache_dir(folder)\nmessage(STATUS "folder: [${folder}]")'


@pytest.mark.parametrize(
    ("system", "env", "folder"),
    [
        ("Linux", {"HOME": "/h"}, "/h/.cache/paceline"),
        ("Darwin", {"HOME": "/h"}, "/h/Library/Caches/paceline"),
        ("Linux", {"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/paceline"),
        ("Linux", {"HOME": ""}, ""),
    ],
)
def test_the_cache_folder_follows_the_customs_of_the_system(
    run: ScriptRunner, system: str, env: dict[str, str], folder: str
) -> None:
    """XDG_CACHE_HOME, else the system's cache folder in HOME, else nothing."""
    text = f"set(CMAKE_HOST_SYSTEM_NAME {system})\n{DEFAULT_DIR}"
    assert f"folder: [{folder}]" in run(text, env=env).stdout


@pytest.mark.parametrize(
    ("folder", "words"), [("", "neither HOME nor XDG_CACHE_HOME"), ("a/b", "relative path"), ("{file}/x", "written")]
)
def test_a_cache_folder_that_cannot_be_used_is_refused(
    run: ScriptRunner, tmp_path: Path, folder: str, words: str
) -> None:
    """No folder, a relative one and one that cannot be created end in a message that names PACELINE_CACHE_DIR."""
    (tmp_path / "file").touch()
    path = folder.format(file=tmp_path / "file")
    output = run('paceline_prepare_cache_dir("${folder}")', fails=True, folder=path).stdout
    assert words in output
    assert "PACELINE_CACHE_DIR" in output


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("a.o: No space left on device", "the disk is full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "CMAKE_BUILD_PARALLEL_LEVEL=1"),
        ("error: expected ';' in a[1]; note: [", "read the lines above"),
    ],
)
def test_a_failed_command_gets_the_advice_that_fits(run: ScriptRunner, output: str, words: str) -> None:
    """The end of a failed command's output is shown, with advice for known errors in it."""
    text = 'paceline_fail_command("it does not compile" "line\n${output}\nstop." "read the lines above")'
    printed = run(text, fails=True, output=output).stdout
    assert words in printed
    assert f"| {output}\n      | stop." in printed


def test_only_the_end_of_a_long_output_is_shown(run: ScriptRunner) -> None:
    """Of a long output the last lines are shown."""
    text = """
foreach(i RANGE 1 100)
    string(APPEND output "[line ${i};\\n")
endforeach()
paceline_tail(tail "${output}" 3)
message(STATUS "${tail}")
"""
    assert run(text).stdout.split() == ["--", "|", "[line", "98;", "|", "[line", "99;", "|", "[line", "100;"]
