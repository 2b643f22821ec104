"""The web page in the build: the place of its build, its omission, and a failing npm."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.build.conftest import ROOT, ScriptRunner

Program = Callable[..., Path]

CHOOSE = f"""
include("{ROOT}/cmake/web_page.cmake")
paceline_choose_web_page(chosen "${{asked}}" "${{state}}" "${{source}}")
message(STATUS "chosen: ${{chosen}}")
"""
NODE = "echo v20.19.0"
BUILDS = 'mkdir -p ../src/paceline/webui && echo page > ../src/paceline/webui/index.html; echo "$@" >> ../calls'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Sources of a page, with files that the build does not need."""
    folder = tmp_path / "web"
    for name in ("src", "tests", "node_modules"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file.ts").write_text("")
    for name in ("package.json", "package-lock.json", "index.html"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def choose(run: ScriptRunner, bin_dir: Path, source: Path) -> Callable[..., str]:
    """Choose with the programs of `bin_dir` alone, and return the message, in one line."""

    def chosen(asked: str, state: str = "wheel", *, fails: bool = False, source: Path = source) -> str:
        env = {"PATH": str(bin_dir)}
        done = run(CHOOSE, fails=fails, env=env, asked=asked, state=state, source=str(source))
        return " ".join(done.stdout.split())

    return chosen


def test_a_wheel_gets_the_page_where_node_is(choose: Callable[..., str], program: Program) -> None:
    """A build of the core alone, or for a checkout, does not."""
    program("node", NODE)
    program("npm")
    assert "chosen: auto" in choose("auto")
    for state in ("editable", ""):
        assert 'left out: this is no wheel; "npm run build"' in choose("auto", state)
    assert "chosen: ON" in choose("on", "")
    assert "chosen: OFF" in choose("OFF")


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (None, "node or npm was not found"),
        ("echo v18.1.0", "Node.js is 18.1.0, older than 20.19"),
        ("exit 1", "does not run"),
    ],
)
def test_without_a_fitting_node_the_page_is_left_out(
    choose: Callable[..., str], program: Program, node: str | None, why: str
) -> None:
    """The warning has the reason; with ON the build fails with it."""
    program("npm")
    if node is not None:
        program("node", node)
    said = choose("auto")
    assert "left out: " in said
    assert why in said
    assert "chosen: OFF" in said
    failure = choose("ON", fails=True)
    assert why in failure
    assert "PACELINE_WEBUI=OFF" in failure


def test_sources_that_are_not_there_and_words_that_mean_nothing(
    choose: Callable[..., str], program: Program, tmp_path: Path
) -> None:
    """A tree without web/ is built without the page; another word than the three is an error."""
    program("node", NODE)
    program("npm")
    assert "its sources (web/) are not there" in choose("auto", source=tmp_path / "nothing")
    assert "set it to auto, ON or OFF" in choose("maybe", fails=True)


@pytest.fixture
def build(run: ScriptRunner, source: Path, tmp_path: Path) -> Callable[..., str]:
    """Build with this npm, and return the message."""

    def built(npm: Path, choice: str = "ON", *, fails: bool = False) -> str:
        text = f'include("{ROOT}/cmake/build_web_page.cmake")'
        work = str(tmp_path / "work")
        return run(text, fails=fails, SOURCE=str(source), WORK=work, NPM=str(npm), CHOICE=choice).stdout

    return built


def test_the_page_is_built_from_a_copy(
    build: Callable[..., str], program: Program, source: Path, tmp_path: Path
) -> None:
    """Packages are installed once, and again when the lock file changes; nothing is written into the sources."""
    before = sorted(source.rglob("*"))
    npm = program("npm", BUILDS)
    build(npm)
    assert (tmp_path / "work/src/paceline/webui/index.html").read_text() == "page\n"
    assert not (tmp_path / "work/web/node_modules").exists()
    build(npm)
    calls = (tmp_path / "work/calls").read_text().splitlines()
    assert [call.partition(" ")[0] for call in calls] == ["ci", "run", "run"]
    (source / "package-lock.json").write_text('{"other": 1}')
    build(npm)
    assert (tmp_path / "work/calls").read_text().splitlines()[3].startswith("ci ")
    assert sorted(source.rglob("*")) == before


LOCK = """{"packages": {
    "": {"name": "page"},
    "node_modules/one": {"license": "MIT"},
    "node_modules/@two/core": {"license": "ISC"},
    "node_modules/one/node_modules/inner": {"license": "MIT"},
    "node_modules/@types/one": {"license": "MIT"},
    "node_modules/tool": {"dev": true}
}}"""


def test_licences_of_bundled_packages_are_collected(
    build: Callable[..., str], program: Program, source: Path, tmp_path: Path
) -> None:
    """Of all but tools and types. A package without a licence ends the build."""
    (source / "package-lock.json").write_text(LOCK)
    installs = "for name in one @two/core one/node_modules/inner; do mkdir -p node_modules/$name; done; "
    installs += "echo MIT > node_modules/one/LICENSE; echo ISC > node_modules/@two/core/license.md; "
    npm = program("npm", installs + BUILDS)
    assert "the package one/inner of the web page has no licence" in build(npm, fails=True)
    build(program("npm", installs + "echo MIT > node_modules/one/node_modules/inner/LICENCE; " + BUILDS))
    folder = tmp_path / "work/licenses"
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert found == ["@two/core/license.md", "one/LICENSE", "one/inner/LICENCE"]


def test_a_failing_npm_leaves_the_page_out_or_ends_the_build(
    build: Callable[..., str], program: Program, tmp_path: Path
) -> None:
    """The error has npm's own words; the result of an earlier build is not taken for the page."""
    build(program("npm", BUILDS))
    shutil.rmtree(tmp_path / "work/web")
    failing = program("npm", "echo no network; exit 1")
    said = build(failing, "auto")
    assert "no network" in said
    assert "left out" in said
    assert not (tmp_path / "work/src/paceline/webui").exists()
    failure = build(failing, fails=True)
    assert "no network" in failure
    assert "installing the packages of the web page failed" in failure
    assert "left no" in build(program("npm", "true"), fails=True)
