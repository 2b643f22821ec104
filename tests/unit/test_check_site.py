"""The check of the built site finds URLs that a browser would load from another host, and pages that llms.txt leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.check_site import main

LOADS = [
    '<script src="https://cdn.example.org/a.js"></script>',
    '<link rel="stylesheet" href="//fonts.example.org/css">',
    '<img src="http://example.org/logo.png">',
    '<pre class="mermaid"><code>graph TD</code></pre>',
]
FINE = '<link rel="canonical" href="https://example.org/"><a href="https://example.org/">x</a><img src="../logo.png">'
INDEX = (
    "# paceline\n\n- [Home](<https://example.org/docs/index.md>)\n- [Chat](<https://example.org/docs/chat/index.md>)\n"
)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site of two pages without errors."""
    (tmp_path / "chat").mkdir()
    for folder in (tmp_path, tmp_path / "chat"):
        (folder / "index.html").write_text(FINE)
        (folder / "index.md").write_text("# Page\n")
    (tmp_path / "llms.txt").write_text(INDEX)
    return tmp_path


@pytest.mark.parametrize("tag", LOADS)
def test_what_is_loaded_from_elsewhere_is_an_error(tag: str, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page is named, and the exit status is 1."""
    (site / "page.html").write_text(f"<p>{FINE}{tag}</p>")
    assert main(site) == 1
    assert capsys.readouterr().out.startswith("page.html: ")


def test_links_and_own_files_are_fine(site: Path) -> None:
    """A link is followed by a click and not by itself."""
    assert main(site) == 0


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    """A site that was not built is not a good one."""
    assert main(tmp_path) == 1


def test_the_index_for_language_models_has_each_page(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page that it leaves out and a link that leads nowhere are named; so is a site without the index."""
    (site / "chat/index.md").rename(site / "other.md")
    assert main(site) == 1
    assert capsys.readouterr().out.splitlines() == [
        "llms.txt leaves out other.md",
        "llms.txt links chat/index.md, which is not there",
    ]
    (site / "llms.txt").unlink()
    assert main(site) == 1
    assert capsys.readouterr().out == "llms.txt is missing\n"
