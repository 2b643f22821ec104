"""CI's checks of a wheel's web page."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest
from tools import check_web_page

PAGE = b'<script type="module" src="./assets/a.js"></script><link rel="stylesheet" href="./assets/a.css">'
GOOD = {"index.html": PAGE, "assets/a.js": b"let a;", "trace.html": b"<style></style><script></script>"}


def wheel(folder: Path, files: dict[str, bytes]) -> str:
    path = folder / "paceline-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("paceline/__init__.py", "")
        for name, data in files.items():
            archive.writestr(f"paceline/webui/{name}", data)
    return str(path)


def checked(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, bytes]) -> int:
    monkeypatch.setattr("sys.argv", ["check_web_page.py", wheel(folder, files)])
    return check_web_page.main()


def test_a_page_that_is_whole_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its size is told; the viewer of traces is no part of it."""
    assert checked(monkeypatch, tmp_path, GOOD) == 0
    assert "in 3 files" in capsys.readouterr().out


def test_a_library_that_is_loaded_later_is_no_part_of_the_first_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size counts for all files alone."""
    later = {"assets/b.js": random.Random(1).randbytes(500 * 1024)}
    assert checked(monkeypatch, tmp_path, GOOD | later) == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"index.html": None}, "PACELINE_WEBUI"),
        ({"trace.html": None}, "trace.html"),
        ({"assets/a.js": None}, "no script"),
        ({"index.html": PAGE + b"<script>alert(1)</script>"}, "inline"),
        ({"index.html": PAGE + b'<p style="color:red">'}, "inline"),
        ({"index.html": PAGE + b'<img onerror="x()">'}, "inline"),
        ({"index.html": PAGE + b'<script src="https://cdn.example/x.js"></script>'}, "elsewhere"),
        ({"assets/a.js": random.Random(1).randbytes(310 * 1024)}, "its first view has"),
        ({"assets/b.js": random.Random(1).randbytes(1030 * 1024)}, "it has"),
    ],
)
def test_a_page_with_a_fault_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, bytes | None],
    problem: str,
) -> None:
    """With a line that says which."""
    files = {name: data for name, data in (GOOD | changes).items() if data is not None}
    assert checked(monkeypatch, tmp_path, files) == 1
    assert problem in capsys.readouterr().err
