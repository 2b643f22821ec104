"""The check of a release: texts that disagree, and wheels that lack something, are errors; open ends are named."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import pytest
from tools.build_wheels import LICENSE_FILES, LICENSES, TARGETS, with_licenses
from tools.check_release import Open, Problem, check_changelog, check_urls, check_version, check_wheel

TODAY = date(2026, 12, 1)
CHANGELOG = "# Changelog\n\n## 0.1.0, 2026-11-30\n\nThe first release.\nIt is good.\n\n## 0.0.9, 2025-01-01\n\nOld.\n"
PYPROJECT = '[project]\nname = "paceline"\nversion = "0.1.0"\n'
URLS = "[project.urls]\n" + "".join(
    f'{name} = "https://example.org/{name}"\n'
    for name in ("Homepage", "Documentation", "Changelog", "Issues", "Source")
)
CITATION = "version: 0.1.0\ndate-released: 2026-11-30\n"
INFO = "paceline-0.1.0.dist-info/"
NAME = "paceline-0.1.0-cp312-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
METADATA = (
    "Metadata-Version: 2.4\nName: paceline\nVersion: 0.1.0\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT + URLS)
    (tmp_path / "CITATION.cff").write_text(CITATION)
    return tmp_path


def test_a_release_with_all_its_texts_is_fine(root: Path) -> None:
    """The facts are the version, the first line of the notes, and the project's page."""
    assert check_version(root) == "0.1.0"
    assert check_changelog(root, TODAY) == "The first release."
    assert check_urls(root) == "https://example.org/Homepage"


@pytest.mark.parametrize("file", ["pyproject.toml", "CITATION.cff", "CHANGELOG.md"])
def test_versions_that_disagree_are_an_error(root: Path, file: str) -> None:
    """In any of the files."""
    path = root / file
    path.write_text(path.read_text().replace("0.1.0", "0.2.0"))
    with pytest.raises(Problem, match=r"0\.2\.0"):
        check_version(root)


def test_notes_of_a_version_are_complete_when_it_is_published(root: Path) -> None:
    """No date, a date to come, and notes that belong to no version are open; no notes, and two dates, are errors."""

    def changed(before: str, after: str) -> None:
        (root / "CHANGELOG.md").write_text(CHANGELOG.replace(before, after))

    changed(", 2026-11-30", "")
    with pytest.raises(Open, match="no date"):
        check_changelog(root, TODAY)
    with pytest.raises(Open, match="to come"):
        changed("", "")
        check_changelog(root, date(2026, 11, 29))
    changed("## 0.1.0", "## Unreleased\n\n- New.\n\n## 0.1.0")
    with pytest.raises(Open, match="Unreleased"):
        check_changelog(root, TODAY)
    changed("## 0.1.0", "## Unreleased\n\n## 0.1.0")
    assert check_changelog(root, TODAY) == "The first release."
    changed("The first release.\nIt is good.\n", "")
    with pytest.raises(Problem, match="no notes"):
        check_changelog(root, TODAY)
    changed("2026-11-30", "2026-11-29")
    with pytest.raises(Problem, match="another date"):
        check_changelog(root, TODAY)
    changed("2026-11-30", "2026-13-40")
    with pytest.raises(Problem, match="has the date 2026-13-40"):
        check_changelog(root, TODAY)


def test_missing_addresses_are_open(root: Path) -> None:
    """They are named."""
    (root / "pyproject.toml").write_text(PYPROJECT + '[project.urls]\nHomepage = "https://example.org"\n')
    with pytest.raises(Open, match="Documentation, Changelog, Issues, Source"):
        check_urls(root)


def contents() -> dict[str, str]:
    """The files of a complete wheel."""
    names = (
        "_native_v2.so",
        "_native_v3.so",
        "_native_v4.so",
        "_processor.so",
        "webui/index.html",
        "demo/paceline-demo.gguf",
        "py.typed",
    )
    licenses = {f"{INFO}licenses/{name}": "text" for name in LICENSE_FILES}
    metadata = with_licenses(METADATA + "\nThe description.\n", LICENSE_FILES)
    return {**{f"paceline/{name}": "" for name in names}, **licenses, INFO + "METADATA": metadata}


def write_wheel(folder: Path, files: Mapping[str, str], name: str = NAME) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as wheel:
        for inner, text in files.items():
            wheel.writestr(inner, text)
    return path


def test_metadata_names_every_licence() -> None:
    """The others of its lines, and the description, stay as they are."""
    changed = with_licenses(METADATA + "\nLicense-File: not a header\n", ["b/LICENSE", "LICENSE"])
    head = METADATA.partition("License-Expression")[0]
    assert changed == (
        f"{head}License-Expression: {LICENSES}\nLicense-File: LICENSE\nLicense-File: b/LICENSE\n\nLicense-File: not a header\n"
    )


def test_a_complete_wheel_is_fine(tmp_path: Path) -> None:
    """The facts are its size, libraries and licences."""
    assert (
        check_wheel(write_wheel(tmp_path, contents()), "0.1.0")
        == f"0.0 MiB, 4 libraries, {len(LICENSE_FILES)} licences"
    )


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("paceline-0.1.0-py3-none-any.whl", "0.1.0", "not the name"),
        (NAME.replace("cp312", "cp311"), "0.1.0", "not the name"),
        (NAME.replace("abi3", "cp311"), "0.1.0", "not the name"),
        ("paceline-0.1.0-cp312-abi3-linux_x86_64.whl", "0.1.0", "not for Linux with glibc"),
        ("paceline-0.1.0-cp312-abi3-manylinux_2_39_x86_64.whl", "0.1.0", "not for Linux with glibc"),
        ("paceline-0.1.0-cp312-abi3-manylinux_2_28_riscv64.whl", "0.1.0", "not for Linux with glibc"),
        (NAME, "0.2.0", r"version 0\.1\.0, and the release 0\.2\.0"),
    ],
)
def test_a_wheel_for_something_else_is_an_error(tmp_path: Path, name: str, version: str, words: str) -> None:
    """Another interface, C library, processor or version."""
    with pytest.raises(Problem, match=words):
        check_wheel(write_wheel(tmp_path, contents(), name), version)


def test_a_wheel_without_one_of_its_files_is_an_error(tmp_path: Path) -> None:
    """A core, the page, a licence that the metadata name, and a licence that they do not name; and files of others."""
    complete = contents()
    for left_out in (
        "paceline/_native_v4.so",
        f"{INFO}METADATA",
        "paceline/webui/index.html",
        f"{INFO}licenses/stb/LICENSE",
    ):
        files = {name: text for name, text in complete.items() if name != left_out}
        with pytest.raises(Problem, match=left_out):
            check_wheel(write_wheel(tmp_path, files), "0.1.0")
    with pytest.raises(Problem, match="does not name its licences other/LICENSE"):
        check_wheel(write_wheel(tmp_path, {**complete, f"{INFO}licenses/other/LICENSE": ""}), "0.1.0")
    with pytest.raises(Problem, match="other packages: tests/a.py"):
        check_wheel(write_wheel(tmp_path, {**complete, "tests/a.py": ""}), "0.1.0")
    old = complete[INFO + "METADATA"].replace(LICENSES, "Apache-2.0")
    with pytest.raises(Problem, match="has the licence Apache-2.0"):
        check_wheel(write_wheel(tmp_path, {**complete, INFO + "METADATA": old}), "0.1.0")
    other = complete[INFO + "METADATA"].replace("Name: paceline", "Name: other")
    with pytest.raises(Problem, match="has the metadata of other"):
        check_wheel(write_wheel(tmp_path, {**complete, INFO + "METADATA": other}), "0.1.0")
    (tmp_path / NAME).write_bytes(b"cut off")
    with pytest.raises(Problem, match="cannot be read"):
        check_wheel(tmp_path / NAME, "0.1.0")


def test_wheels_have_the_cores_of_the_build() -> None:
    """Each processor family has all of its cores."""
    text = (Path(__file__).parents[2] / "cmake/cores.cmake").read_text(encoding="utf-8")
    cores = {family: tuple(names.split()) for family, names in re.findall(r"set\(PACELINE_CORES_OF_(\w+) (.+)\)", text)}
    assert {"X86": TARGETS["x86_64"], "ARM": TARGETS["aarch64"]} == cores
