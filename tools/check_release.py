"""Check a release from a clean clone: version, changelog, wheels, licences, documentation site and metadata.

python -m tools.check_release [--wheels FOLDER] [--publish]

It clones the last commit into a new folder and works there, in an environment of its own. Of this checkout only this program takes
part, and tools/build_wheels.py with the limits of a wheel. It needs git and a package index. Without --wheels it builds the wheels of both targets, as tools/build_wheels.py does.
A release candidate may lack a date in the changelog, project URLs and a tag, and may have notes under "Unreleased": these are
reported as open, and with --publish as errors.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from email.parser import Parser
from pathlib import Path

from tools.build_wheels import GLIBC, LICENSES, TARGETS, check

ROOT = Path(__file__).parents[1]
URLS = ("Homepage", "Documentation", "Changelog", "Issues", "Source")
_WHEEL = re.compile(r"paceline-(?P<version>[^-]+)-(?:cp311-cp311|cp312-abi3)-(?P<platform>[^-]+)\.whl")
_HEADING = re.compile(r"^## (?P<version>\S+)(?:, (?P<date>\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)


class Problem(Exception):
    """Something that a release must not have."""


class Open(Exception):
    """Something that a candidate may lack."""


# ---- texts of the repository


def check_version(root: Path) -> str:
    """Return the version, which pyproject.toml, CITATION.cff and the changelog agree on. Raises `Problem`."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE))
    headings = [match["version"] for match in _HEADING.finditer(_changelog(root)) if match["version"] != "Unreleased"]
    found = {"CITATION.cff": citation.get("version"), "CHANGELOG.md": headings[0] if headings else None}
    if others := {file: other for file, other in found.items() if other != version}:
        raise Problem(f"pyproject.toml has version {version}, and {others}")
    return version


def check_changelog(root: Path, today: date) -> str:
    """Return the first line of the version's notes. Raises `Problem` if there are none, `Open` for an unfinished entry."""
    text = _changelog(root)
    parts = list(_HEADING.finditer(text))
    ends = [*(match.start() for match in parts[1:]), len(text)]
    bodies = {match["version"]: text[match.end() : end].strip() for match, end in zip(parts, ends, strict=True)}
    newest = next((match for match in parts if match["version"] != "Unreleased"), None)
    if newest is None or not bodies[newest["version"]]:
        raise Problem("CHANGELOG.md has no notes on a version")
    try:
        is_dated = newest["date"] is not None and date.fromisoformat(newest["date"]) <= today
    except ValueError as error:
        raise Problem(f"CHANGELOG.md has the date {newest['date']}: {error}") from None
    if not is_dated:
        raise Open(f"CHANGELOG.md has no date for {newest['version']}, or one that is to come")
    released = re.search(r"^date-released: (.+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    if released is None or released[1] != newest["date"]:
        raise Problem(f"CITATION.cff has another date than CHANGELOG.md, which has {newest['date']}")
    if bodies.get("Unreleased"):
        raise Open("CHANGELOG.md has notes under Unreleased; move them to the version")
    return bodies[newest["version"]].partition("\n")[0]


def _changelog(root: Path) -> str:
    return (root / "CHANGELOG.md").read_text(encoding="utf-8")


def check_urls(root: Path) -> str:
    """Return the project's page. Raises `Open` if pyproject.toml lacks an address."""
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    if missing := [name for name in URLS if not urls.get(name, "").startswith("https://")]:
        raise Open(f"pyproject.toml has no [project.urls] for {', '.join(missing)}")
    return str(urls["Homepage"])


def check_tag(root: Path, version: str) -> str:
    """Return the tag of the last commit. Raises `Open` if it is not the version's."""
    tags = _output("git", "-C", root, "tag", "--points-at", "HEAD").split()
    if f"v{version}" not in tags:
        raise Open(f"the last commit has no tag v{version}")
    return f"v{version}"


# ---- wheels


def check_wheel(path: Path, version: str) -> str:
    """Return the facts of a wheel. Raises `Problem` for a wrong name, version, licence, size or content."""
    named = _WHEEL.fullmatch(path.name)
    if named is None:
        raise Problem(f"{path.name} is not the name of a wheel of paceline for CPython 3.11 or abi3")
    target = next((target for target in TARGETS if named["platform"].endswith(target)), None)
    glibc = [tuple(map(int, pair)) for pair in re.findall(r"manylinux_(\d+)_(\d+)_", named["platform"])]
    if target is None or not glibc or min(glibc) > tuple(map(int, GLIBC.split("."))):
        raise Problem(f"{path.name} is not for Linux with glibc {GLIBC} on {' or '.join(TARGETS)}")
    info = f"paceline-{named['version']}.dist-info/"
    try:
        with zipfile.ZipFile(path) as wheel:
            names = set(wheel.namelist())
            metadata = Parser().parsestr(wheel.read(info + "METADATA").decode("utf-8"))
    except zipfile.BadZipFile as error:
        raise Problem(f"{path.name} cannot be read: {error}") from None
    except KeyError:
        raise Problem(f"{path.name} has no {info}METADATA") from None
    if metadata["Name"] != "paceline":
        raise Problem(f"{path.name} has the metadata of {metadata['Name']}")
    if {named["version"], metadata["Version"]} != {version}:
        raise Problem(f"{path.name} has version {metadata['Version']}, and the release {version}")
    if metadata["License-Expression"] != LICENSES:
        raise Problem(f"{path.name} has the licence {metadata['License-Expression']}, and not {LICENSES}")
    if strangers := sorted(name for name in names if not name.startswith(("paceline/", info))):
        raise Problem(f"{path.name} has files of other packages: {', '.join(strangers)}")
    try:
        return check(path, target)
    except SystemExit as error:
        raise Problem(str(error)) from None


# ---- the run


def check_all(root: Path, folder: Path, wheels: Path | None) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each check and the check, which returns facts and raises `Problem` or `Open`.

    Args:
        root: The clone.
        folder: An empty folder, for the environment and the wheels.
        wheels: The folder of the wheels; None: they are built.
    """
    version: str = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    yield "version", lambda: check_version(root)
    yield "changelog", lambda: check_changelog(root, datetime.now(UTC).date())
    yield "project URLs", lambda: check_urls(root)
    yield "tag", lambda: check_tag(root, version)
    if wheels is None:
        wheels = folder / "dist"
        build = (sys.executable, "tools/build_wheels.py", "--out", wheels, "--work", folder / "build")
        yield "build of the wheels", lambda: _output(*build, cwd=root).splitlines()[-1]
    found = sorted(wheels.glob("*.whl"))
    yield "wheels", lambda: _targets_of(found)
    for path in found:
        yield path.name, lambda path=path: check_wheel(path, version)  # type: ignore[misc]
    programs = folder / "environment/bin"
    yield "installation", lambda: _install(found, programs.parent)
    yield (
        "paceline --version",
        lambda: _same(f"paceline {version}", _output(programs / "paceline", "--version", cwd=folder)),
    )
    yield "twine check", lambda: _output(programs / "twine", "check", "--strict", *found).splitlines()[-1]
    yield (
        "documentation",
        lambda: _output(programs / "zensical", "build", "--strict", "--clean", cwd=root).splitlines()[-1],
    )
    yield "its pages", lambda: _output(sys.executable, "tools/check_site.py", "build/site", cwd=root).strip()


def _targets_of(wheels: Sequence[Path]) -> str:
    """Return the number of wheels. Raises `Problem` if a target or one of the two interfaces of Python has none."""
    kinds = {(target, abi) for target in TARGETS for abi in ("cp311-cp311", "cp312-abi3")}
    if missing := sorted(kind for kind in kinds if not any(all(part in path.name for part in kind) for path in wheels)):
        raise Problem(f"there are no wheels for {', '.join(' '.join(kind) for kind in missing)}")
    return f"{len(wheels)} wheels"


def _install(wheels: Sequence[Path], environment: Path) -> str:
    """Install this machine's wheel and the tools of the later checks into a new environment. Returns the wheel's name."""
    abi = "cp311-cp311" if sys.version_info[:2] == (3, 11) else "cp312-abi3"
    fitting = [path for path in wheels if abi in path.name and path.stem.endswith(platform.machine())]
    if not fitting:
        raise Problem(f"there is no wheel for this machine ({abi}, {platform.machine()})")
    _output(sys.executable, "-m", "venv", environment)
    _output(environment / "bin/python", "-m", "pip", "install", "--quiet", f"{fitting[0]}[docs]", "twine")
    return fitting[0].name


def _same(wanted: str, printed: str) -> str:
    if printed.strip() != wanted:
        raise Problem(f"it prints {printed.strip()!r}, and not {wanted!r}")
    return wanted


def _output(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return its output. Raises `Problem` with the output if it fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise Problem(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise Problem(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Run all checks, print a line for each, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheels", type=Path, help="a folder with the wheels; default: they are built")
    parser.add_argument("--publish", action="store_true", help="fail for what is open, too")
    options = parser.parse_args(arguments)
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="paceline-release-") as scratch:
        folder = Path(scratch)
        _output("git", "clone", "--quiet", ROOT, folder / "clone")
        wheels = None if options.wheels is None else options.wheels.absolute()
        for name, work in check_all(folder / "clone", folder, wheels):
            try:
                word, facts = "ok", work()
            except (Open, Problem) as error:
                is_open = isinstance(error, Open) and not options.publish
                word, facts = "open" if is_open else "FAILED", str(error)
                num_failed += not is_open
            print(f"{word:7} {name}: {facts}", flush=True)
    if num_failed:
        print(f"{num_failed} checks failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
